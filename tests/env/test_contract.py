"""The contracts that agents read: the same rules for both DSLs, and examples that do what they say."""

from __future__ import annotations

import re

import pytest

from mkb_env.dsl import NAMES, get
from mkb_env.legality import check
from mkb_env.plan import decode
from mkb_env.recorder.client import RecorderClient
from mkb_env.recorder.protocol import Call, OutputSpec, RecordRequest, TensorInput


def example(dsl: str) -> str:
    """The one code block of a contract."""
    (code,) = re.findall(r"^```python\n(.*?)^```", get(dsl).CONTRACT, re.MULTILINE | re.DOTALL)
    return code


def test_rules_are_the_same_but_for_the_dsls_name() -> None:
    rules = {get(dsl).CONTRACT.split("\nImport `")[0].replace(get(dsl).TITLE, "DSL") for dsl in NAMES}
    assert len({re.sub(r"DSL.*", "DSL", text) for text in rules}) == 1


@pytest.mark.parametrize("dsl", NAMES)
def test_example_is_legal_and_records(dsl: str) -> None:
    source = example(dsl)
    assert check(source, dsl, ("x",)) is None
    shape = (4, 1024)
    call = Call((TensorInput(shape, "bfloat16"),), (OutputSpec(shape, "bfloat16"),), returns_tuple=False)
    recording = RecorderClient().record(RecordRequest(source, dsl, (call,)))
    assert recording.failure is None
    (launch,) = decode(recording.plans[0]).launches
    assert (launch.grid, launch.block) == ((4, 1, 1), (128, 1, 1))
