"""PTX text to records, and its resolution to instructions, blocks and live registers."""

from __future__ import annotations

import pytest
from simulated import ptx_of

from mkb_env.devices.base import DeviceFault
from mkb_env.devices.simulator.blocks import bits, make_blocks
from mkb_env.devices.simulator.instructions import SHARED_BASE, Program, Symbol
from mkb_env.devices.simulator.operands import Address, Group, Imm, Name, Negated, Pair, Vector, parse_operands
from mkb_env.devices.simulator.parser import PtxError, parse_module
from mkb_env.devices.simulator.program import build

HEADER = ".version 8.0\n.target sm_90a\n.address_size 64\n"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("%r1, 0f3F800000, -3", (Name("%r1"), Imm(0x3F800000, "f32"), Imm(-3))),
        ("0x1F, 0b101, 017, 12U", (Imm(31), Imm(5), Imm(15), Imm(12))),
        ("0d3FF0000000000000", (Imm(0x3FF0000000000000, "f64"),)),
        ("[%rd1+16], [%rd1+-4]", (Address(Name("%rd1"), 16), Address(Name("%rd1"), -4))),
        ("[x], [ %rd2 ]", (Address(Name("x"), 0), Address(Name("%rd2"), 0))),
        ("{%r1, _, %r3}, [4096]", (Vector((Name("%r1"), Name("_"), Name("%r3"))), Address(None, 4096))),
        ("%p1|%p2, !%p3, %tid.x", (Pair(Name("%p1"), Name("%p2")), Negated(Name("%p3")), Name("%tid.x"))),
        ("(r0), f, (a, b)", (Group((Name("r0"),)), Name("f"), Group((Name("a"), Name("b"))))),
        ("[%rd1, {%r1, %r2}], WARP_SZ", (Address(Name("%rd1"), 0, (Vector((Name("%r1"), Name("%r2"))),)), Imm(32))),
        ("", ()),
    ],
)  # fmt: skip
def test_operands(text: str, want: tuple[object, ...]) -> None:
    assert parse_operands(text) == want


def test_declarations() -> None:
    module = parse_module(
        HEADER
        + """
.extern .shared .align 1024 .b8 dyn[];
.visible .global .align 8 .u64 table[2][3] = {1, 2, 3};
.const .f32 c = 0f40000000; // a comment { with a brace
/* .global .u32 hidden; */
.weak .global .attribute(.managed) .align 4 .u32 managed;
.section .debug_info { .b8 1, 2 }
.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
.visible .entry k(.param .u64 .ptr .global .align 16 p, .param .align 8 .b8 s[24]) .maxntid 256, 1, 1 .minnctapersm 2
{ ret; }
"""
    )
    dyn, table = module.variables["dyn"], module.variables["table"]
    assert (dyn.space, dyn.align, dyn.count, dyn.external) == ("shared", 1024, None, True)
    assert (table.count, table.nbytes, table.align, table.initial) == (6, 48, 8, "{1, 2, 3}")
    assert set(module.variables) == {"dyn", "table", "c", "managed"}
    kernel = module.functions["k"]
    assert [(v.name, v.nbytes, v.align) for v in kernel.params] == [("p", 8, 8), ("s", 24, 8)]
    assert kernel.directives.split() == [".maxntid", "256,", "1,", "1", ".minnctapersm", "2"]
    assert module.functions["vprintf"].body is None and [f.name for f in module.entries] == ["k"]


def test_statements_keep_their_lines_guards_and_opcodes() -> None:
    body = '.loc 1 2 3\n.pragma "nounroll";\n$L:\n@!%p1 ld.global.L2::128B.v2.u32\n {%r1, %r2}, [%rd1];\nbra\t$L;\n'
    text = HEADER + ".visible .entry k()\n{\n" + body + "}"
    found = parse_module(text).functions["k"].statements
    assert [(s.kind, s.line) for s in found] == [("label", 8), ("op", 9), ("op", 11)]
    assert (found[1].opcode, found[1].guard, found[1].negated) == ("ld.global.L2::128B.v2.u32", "%p1", True)


@pytest.mark.parametrize(
    ("body", "line"), [("mov.u32 %r1 %%;\n", 6), ("add.s32 %r1, %r2", 6), ("\nadd.u32 %r1, [%r2, 3;", 7)]
)
def test_errors_name_the_line(body: str, line: int) -> None:
    with pytest.raises(PtxError, match=f"line {line}"):
        for statement in parse_module(HEADER + ".entry k()\n{\n" + body + "\n}").functions["k"].statements:
            assert statement.operands is not None


def program_of(body: str, before: str = "") -> Program:
    program = build(
        parse_module(HEADER + before + ".visible .entry k(.param .u32 n, .param .u64 p)\n{" + body + "\n}"),
        "k",
        lambda v: 4096,
    )
    make_blocks(program)
    return program


def test_parameters_and_shared_memory_are_laid_out() -> None:
    program = program_of(
        ".reg .b32 %r<4>; .shared .align 16 .b8 inner[40]; mov.u32 %r1, outer; mov.u32 %r2, inner; mov.u32 %r3, dyn+4;",
        ".shared .align 4 .b8 outer[6]; .shared .b8 unused[99]; .extern .shared .align 128 .b8 dyn[];",
    )
    assert program.param_offsets == (0, 8) and program.param_bytes == 16
    places = [i.operands[1].value for i in program.instructions[:3] if isinstance(i.operands[1], Symbol)]
    assert places == [SHARED_BASE, SHARED_BASE + 16, SHARED_BASE + 128 + 4]
    assert program.static_shared == 128


def test_blocks_and_live_registers() -> None:
    program = program_of(
        """.reg .b32 %a, %b, %c, %d; .reg .pred %p;
        ld.param.u32 %a, [n]; mov.u32 %b, 0;
        LOOP: add.u32 %b, %b, %a; setp.lt.u32 %p, %b, 100; @%p bra LOOP;
        mov.u32 %c, %b; @%p mov.u32 %d, 1; st.shared.u32 [%c], %d;"""
    )
    assert [(b.begin, b.end) for b in program.blocks] == [(0, 2), (2, 5), (5, 9)]
    assert [b.successors for b in program.blocks] == [(1,), (1, 2), ()]
    number = {name: i + 1 for i, name in enumerate("abcdp")}
    # %d is live from the start: its guarded write keeps the lanes whose guard is false.
    assert bits(program.blocks[1].live_in) == [number["a"], number["b"], number["d"]]
    assert bits(program.blocks[2].live_in) == [number["b"], number["d"], number["p"]]
    assert program.blocks[1].dead_list == () and set(program.blocks[2].dead_list) >= {number["b"], number["d"]}


def test_inlined_calls_have_their_own_registers_and_labels() -> None:
    source = """__device__ __noinline__ int f(int a) { int s = 0; for (int i = 0; i < a; i++) s += i * a; return s; }
        extern "C" __global__ void k(int* o, int n) { o[0] = f(n) + f(n + 1); }"""
    module = parse_module(ptx_of(source))
    program = build(module, "k", lambda v: 0)
    assert sum(i.name == "bra" and i.guard is not None for i in program.instructions) >= 2
    assert not any(i.name == "call" for i in program.instructions)
    assert program.local_bytes >= 16


def test_what_cannot_be_resolved_is_refused_with_its_line() -> None:
    with pytest.raises(DeviceFault, match=r"unknown name '%x'.*line 5"):
        program_of("mov.u32 %x, 1;")
    with pytest.raises(DeviceFault, match="unknown label NOWHERE"):
        program_of("bra NOWHERE;")
    with pytest.raises(DeviceFault, match="has no kernel 'other'; it has: k"):
        build(parse_module(HEADER + ".entry k() { ret; }"), "other", lambda v: 0)
