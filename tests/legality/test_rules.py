"""Each rule refuses what it names, and leaves alone what honest sources do."""

from __future__ import annotations

from pathlib import Path

import pytest

import mkb_env
from mkb_env.legality import RULES, check, refuse_baseline
from mkb_env.legality.rules import CANARY, MAX_SOURCE_BYTES
from mkb_env.problems import catalog

ROOT = Path(mkb_env.__file__).parents[1]
HONEST = """\
import os
import re
import torch
import torch.nn.functional as F
import cutlass
import cutlass.cute as cute
import cuda.bindings.driver as cuda
from cutlass.cute.runtime import from_dlpack

def solve(x, weight, scale=1.0):
    y = torch.empty_like(x)
    re.compile("a")
    return cute.compile(y)
"""


def broken(line: str, dsl: str = "cute") -> str | None:
    """Id of the rule that an honest source breaks with ``line`` put after its imports."""
    source = HONEST.replace("\ndef solve", f"\n{line}\n\ndef solve")
    failure = check(source if dsl == "cute" else source.replace("import cutlass\n", "import tvm\n"), dsl)
    return failure.error_class if failure else None


def test_honest_source_passes() -> None:
    assert check(HONEST, "cute") is None
    assert check(HONEST, "cute", ("x", "weight")) is None
    assert check(HONEST.replace("\n", "\r\n"), "cute") is None
    assert check("\ufeff" + HONEST, "cute") is None


@pytest.mark.parametrize("dsl", ["cute", "tirx"])
def test_our_own_kernels_pass(dsl: str) -> None:
    files = [file for ref in catalog().values() if (file := ref.baseline(dsl))]
    files += (ROOT / "agents" / "demo").glob(f"*_{dsl}.py")
    assert len(files) >= 5
    for file in files:
        assert check(file.read_text(), dsl) is None, file


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("import tvm", "other-dsl"),
        ("from tvm.script import tirx as T", "other-dsl"),
        ("import triton", "compiler"),
        ("import triton.language as tl", "compiler"),
        ("fast = torch.compile(F)", "compiler"),
        ("from torch import compile as fast", "compiler"),
        ("@torch.jit.script\ndef f(x): return x", "compiler"),
        ("from torch.utils.cpp_extension import load_inline", "raw-source"),
        ("torch.utils.cpp_extension.load_inline('x')", "raw-source"),
        ("import ctypes", "raw-source"),
        ("from cuda.bindings import nvrtc", "raw-source"),
        ("cuda.cuModuleLoadData(b'')", "raw-source"),
        ("import flash_attn", "kernel-library"),
        ("import cudnn", "kernel-library"),
        ("import subprocess", "process"),
        ("import threading as t", "process"),
        ("def f():\n    from concurrent.futures import ThreadPoolExecutor", "process"),
        ("os.system('ls')", "process"),
        ("from os import fork", "process"),
        ("import socket", "files-network"),
        ("open('/etc/passwd')", "files-network"),
        ("torch.load('x')", "files-network"),
        ("exec('x = 1')", "dynamic-code"),
        ("eval('1')", "dynamic-code"),
        ("compile('1', '', 'eval')", "dynamic-code"),
        ("__import__('os')", "dynamic-code"),
        ("import importlib", "dynamic-code"),
        ("import sys\nsys.modules", "dynamic-code"),
        ("().__class__.__base__.__subclasses__()", "dynamic-code"),
    ],
)
def test_forbidden_names(line: str, rule: str) -> None:
    assert broken(line) == rule


@pytest.mark.parametrize(
    "line",
    [
        "model = F; model.eval",
        "kernel = cute.compile(F)",
        "from cutlass.cute import compile\ncompile(F)",
        "def open(x): return x\nopen(1)",
        "os.environ['CUTE_DSL_ARCH']",
        "class A:\n    def exec(self): ...\nA().exec()",
        "import tvm_ffi",
        "import functools, math, dataclasses, typing, itertools",
        "warp = threading = subprocess = 1",
        "stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)",
        "import sys\nsys.setrecursionlimit",
        "# exec(open('x').read()) and triton are not used",
        "text = 'import triton; torch.compile'",
    ],
)
def test_harmless_lines(line: str) -> None:
    assert broken(line) is None


def test_other_dsl_is_the_one_not_asked_for() -> None:
    source = "import tvm\ndef solve(x): return x\n"
    assert check(source, "tirx") is None
    assert check(source + "import cutlass\n", "tirx").error_class == "other-dsl"
    assert check(source, "cute").error_class == "dsl"


@pytest.mark.parametrize(
    ("solve", "rule"),
    [
        ("def solve(x, weight): ...", None),
        ("def solve(*inputs): ...", None),
        ("def solve(x, *rest): ...", None),
        ("def solve(x, weight, more=1, *, also=2): ...", None),
        ("def solve(x, /, weight): ...", None),
        ("solve = make()", None),
        ("solve: object = make()", None),
        ("if True:\n    def solve(x, weight): ...\n", None),
        ("try:\n    pass\nexcept ValueError:\n    def solve(x, weight): ...\n", None),
        ("@decorator\ndef solve(x): ...", None),
        ("def solve(x): ...", "arguments"),
        ("def solve(x, weight, more): ...", "arguments"),
        ("def solve(x, weight, *, more): ...", "arguments"),
        ("def solve(): ...", "arguments"),
        ("def solution(x, weight): ...", "solve"),
        ("class A:\n    def solve(x, weight): ...", "solve"),
        ("def outer():\n    def solve(x, weight): ...", "solve"),
        ("async def solve(x, weight): ...", "solve"),
    ],
)
def test_solve_and_its_arguments(solve: str, rule: str | None) -> None:
    failure = check(f"import cutlass\n{solve}\n", "cute", ("x", "weight"))
    assert (failure.error_class if failure else None) == rule


def test_size_counts_bytes() -> None:
    filling = "# " + "→" * ((MAX_SOURCE_BYTES - len(HONEST) - 3) // 3)
    assert check(HONEST + filling + "\n", "cute") is None
    failure = check(HONEST + filling + "\n→→", "cute")
    assert failure is not None
    assert failure.error_class == "size"
    assert "300,0" in failure.message


@pytest.mark.parametrize(("character", "name"), [("\0", "U+0000"), ("\udc80", "U+DC80")])
def test_what_is_no_text(character: str, name: str) -> None:
    failure = check(f"import cutlass\nx = '{character}'\n", "cute")
    assert failure is not None
    assert failure.error_class == "text"
    assert name in failure.message
    assert failure.location is not None
    assert (failure.location.line, failure.location.column) == (2, 6)
    failure.location.text.encode()


def test_syntax_error_has_line_and_caret() -> None:
    failure = check("import cutlass\n\ndef solve(x:\n    return x\n", "cute")
    assert failure is not None
    assert failure.kind == "rejected"
    assert failure.error_class == "SyntaxError"
    assert failure.location is not None
    assert failure.location.line == 3
    assert failure.location.text == "def solve(x:"
    lines = failure.message.splitlines()
    assert lines[1].endswith("def solve(x:")
    assert lines[2].index("^") - 4 == failure.location.column - 1


@pytest.mark.parametrize("source", ["x = " + "-" * 200_000 + "1", "x = " + "(" * 50_000, "x = 1" + "+1" * 100_000, ""])
def test_monsters_are_refused_not_raised(source: str) -> None:
    failure = check(source, "cute")
    assert failure is not None
    assert failure.kind == "rejected"


def test_message_names_rule_sentence_line_and_evidence() -> None:
    failure = check(HONEST.replace("import re\n", "import triton\n"), "cute")
    assert failure is not None
    assert failure.message == "[compiler] No other compiler or array library may be used. Found: line 2, `triton`."
    assert failure.location is not None
    assert failure.location.text == "import triton"


def test_ids_are_unique_and_documented() -> None:
    ids = [rule.id for rule in RULES]
    assert len(set(ids)) == len(ids)
    page = (ROOT / "docs" / "legality.md").read_text()
    for rule in RULES:
        assert f"| `{rule.id}` | {rule.sentence}" in page


def test_baselines_carry_the_mark_and_are_refused_as_submissions() -> None:
    files = [file for ref in catalog().values() for dsl in ("cute", "tirx") if (file := ref.baseline(dsl))]
    assert len(files) >= 6
    for file in files:
        assert refuse_baseline(file.read_text()) is not None
    assert refuse_baseline(HONEST) is None
    failure = refuse_baseline(f"x = 1\n# {CANARY}\n")
    assert failure is not None
    assert failure.location is not None
    assert failure.location.line == 2


def test_unknown_dsl_raises() -> None:
    with pytest.raises(ValueError, match="dsl must be one of"):
        check(HONEST, "cuda")
