"""Each hint comes with the compiler's own message for the mistake it explains."""

from __future__ import annotations

import pytest
from sources import BY_DSL, failure_of

from mkb_env.dsl import get

LOAD = "x[row, column].to(cutlass.Float32)"
WRITE = "    y[row, column] = (x"
CALL = "a, b = from_dlpack(x), from_dlpack(y)\n    cute.compile(run, a, b)(a, b)"
ON_HOST = "c = from_dlpack(torch.empty(4, 128, dtype=torch.bfloat16), 16)\n    cute.compile(run, c, c)(c, c)"
COPY = """
    atom = cute.make_copy_atom(cute.nvgpu.cpasync.CopyG2SOp(), cutlass.BFloat16, num_bits_per_copy=128)
    shared = cutlass.utils.SmemAllocator().allocate_tensor(cutlass.BFloat16, cute.make_layout(8), 16)
    cute.copy(atom, cute.local_tile(x[(row, None)], (8,), (0,)), shared)
"""
DECLARED = '(rows, 128), "bfloat16")'
MISTAKES = {
    "cute math": ("cute", (("* 2.0", "* __import__('math').sqrt(row)"),), "cute.math"),
    "cute loop": ("cute", (("* 2.0", "* len([i for i in range(row)])"),), "cutlass.range"),
    "cute torch": ("cute", ((f"{LOAD} * 2.0", f"torch.rsqrt({LOAD})"),), "torch runs on the host"),
    "cute branch": (
        "cute",
        (("@cute.kernel", "def clip(r):\n    return r if r < 2 else 2\n\n@cute.kernel"), ("* 2.0", "* clip(row)")),
        "steers Python control flow",
    ),
    "cute return": ("cute", ((WRITE, "    if row > 2:\n        return\n" + WRITE),), "opposite condition"),
    "cute space": ("cute", ((WRITE, COPY + WRITE), (CALL, ON_HOST)), "pointers are global"),
    "cute source": (
        "cute",
        (("@cute.kernel", 'exec("""\n@cute.kernel'), ("def launch", '""")\n\ndef launch')),
        "not through exec",
    ),
    "tirx target": ("tirx", (("target=target, ", ""),), "pass target=tvm.target.Target"),
    "tirx entry": ("tirx", (("        T.device_entry()\n", ""),), "begin the function with T.device_entry()"),
    "tirx no pipeline": ("tirx", ((', tir_pipeline="tirx"', ""),), 'tir_pipeline="tirx"'),
    "tirx pipeline": ("tirx", (('="tirx"', '="tirex"'),), 'tir_pipeline="tirx"'),
    "tirx name": ("tirx", (("y[row, column]", "y[row, nowhere]"),), "looked up when it is parsed"),
    "tirx math": ("tirx", (("T.float32(2)", "__import__('math').sqrt(row)"),), "T.sqrt"),
    "tirx torch": ("tirx", (("T.float32(2)", "torch.sqrt(x[row, column])"),), "T.sqrt"),
    "tirx width": ("tirx", ((DECLARED, DECLARED.replace("128", "256")),), "written into the kernel for another shape"),
    "tirx rows": ("tirx", (("build(x.shape[0])", "build(7)"),), "written into the kernel for another shape"),
    "tirx view": ("tirx", (("(x, y)\n\n", "(x, torch.empty(4, 256, dtype=x.dtype).cuda()[:, :128])\n\n"),), "a view"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_the_mistake_has_its_hint(name: str) -> None:
    dsl, changes, words = MISTAKES[name]
    source = BY_DSL[dsl]
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    failure = failure_of(source, dsl)
    assert words in failure.hint, failure


@pytest.mark.parametrize("dsl", BY_DSL)
def test_no_hint_is_without_its_mistake(dsl: str) -> None:
    shown = [words for name, _, words in MISTAKES.values() if name == dsl]
    assert all(any(words in hint for words in shown) for _, hint in get(dsl).HINTS)


@pytest.mark.parametrize("dsl", BY_DSL)
def test_a_hint_is_for_the_compilers_messages_alone(dsl: str) -> None:
    failure = failure_of(BY_DSL[dsl].replace("launch(x, y)\n    return", "launch(x, nope)\n    return"), dsl)
    assert "'nope' is not defined" in failure.message and failure.hint == ""
