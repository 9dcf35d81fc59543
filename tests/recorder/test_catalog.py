"""Every problem's arguments, at small and full size, reach both DSLs: no shape, dtype or scalar stands in the way."""

from __future__ import annotations

import pytest

from mkb_env.judge.describe import describe
from mkb_env.problems import catalog, load
from mkb_env.recorder.client import RecorderClient
from mkb_env.recorder.protocol import RecordRequest

EXCHANGE = {
    "cute": "from cutlass.cute.runtime import from_dlpack as exchange",
    "tirx": "from tvm_ffi import from_dlpack as exchange",
}
SOURCE = """
import torch
{exchange}
NAMES = {names}

def solve(*arguments):
    for name, value in zip(NAMES, arguments, strict=True):
        if isinstance(value, torch.Tensor):
            assert value.is_cuda and value.is_contiguous(), name
            if value.numel():
                exchange(value.view(torch.uint8))
                if value.element_size() > 1:
                    exchange(value)
            if name in {visible}:
                assert len(value.tolist()) == value.shape[0]
    results = tuple(torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in {outputs})
    return results if len(results) > 1 else results[0]
"""
DONE = "solve returned without launching a kernel; every call must launch at least one, whatever the shape"
"""What is left to say of a source that did everything but that."""


@pytest.mark.parametrize("dsl", ["cute", "tirx"])
@pytest.mark.parametrize("slug", list(catalog()))
def test_arguments_reach_the_dsl(slug: str, dsl: str) -> None:
    problem = load(slug)
    for workload in ("small", "full"):
        shape = problem.shapes(workload)[0]
        source = SOURCE.format(
            exchange=EXCHANGE[dsl],
            names=problem.inputs,
            visible=problem.host_visible,
            outputs=list(problem.output_specs(shape)),
        )
        recording = RecorderClient().record(RecordRequest(source, dsl, (describe(problem, shape),)), None)
        assert recording.failure is not None and recording.failure.message == DONE
