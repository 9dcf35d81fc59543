"""A plan is untrusted data: whatever its bytes, :func:`decode` gives a valid plan or raises PlanError."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from mkb_env.plan import (
    HEADER_BYTES,
    MAX_SHARED_BYTES,
    Buffer,
    Copy,
    Fill,
    Image,
    Launch,
    LaunchPlan,
    OutputTree,
    Param,
    PlanError,
    Pointer,
    TensorMap,
    TensorView,
    Upload,
    decode,
    encode,
    is_contiguous,
    seal,
)

OUT = TensorView(1, 0, (4, 8), (8, 1), "float32")
LAUNCH = Launch(
    0, "kernel", (4, 1, 1), (128, 1, 1), (Param(bytes(8), (Pointer(0, 0, 0),)), Param(bytes(8), (Pointer(0, 1, 64),)))
)
PLAN = LaunchPlan(
    version=1,
    dsl="cute",
    target="sm_90a",
    buffers=(Buffer(128, 0), Buffer(128), Buffer(64)),
    images=(Image(".version 8.0", b"\x7fELF"),),
    steps=(
        Fill(OUT, 0.5),
        Upload(TensorView(2, 0, (8,), (1,), "int64"), bytes(64)),
        Copy(OUT, TensorView(0, 0, (4, 8), (8, 1), "float32")),
        LAUNCH,
    ),
    outputs=(OUT,),
    output_tree=OutputTree("tensor"),
)
MAP = TensorMap(0, 7, 0, 0, (8, 4), (32,), (8, 4), (1, 1), 0, 0, 0, 0)


def launched(**changes: Any) -> LaunchPlan:
    """The plan with another launch."""
    return replace(PLAN, steps=(replace(LAUNCH, **changes),))


def written(view: TensorView) -> LaunchPlan:
    """The plan with another fill."""
    return replace(PLAN, steps=(Fill(view, 0),))


BROKEN: dict[str, tuple[Callable[[], LaunchPlan], str]] = {
    "version": (lambda: replace(PLAN, version=2), "version 1"),
    "target": (lambda: replace(PLAN, target="sm_90a; rm"), "target"),
    "input twice": (lambda: replace(PLAN, buffers=(Buffer(128, 0), Buffer(128, 0), Buffer(64))), "same input"),
    "negative size": (lambda: replace(PLAN, buffers=(Buffer(-1, 0), Buffer(128), Buffer(64))), ">= 0"),
    "workspace": (lambda: replace(PLAN, buffers=(Buffer(128, 0), Buffer(128), Buffer(65 << 30))), "are allowed"),
    "empty image": (lambda: replace(PLAN, images=(Image("", b""),)), "neither PTX nor a cubin"),
    "no such image": (lambda: launched(image=1), "image 1 does not exist"),
    "grid": (lambda: launched(grid=(1, 65536, 1)), "65535"),
    "block": (lambda: launched(block=(32, 33, 1)), "1056 threads"),
    "block z": (lambda: launched(block=(1, 1, 65)), "exceeds"),
    "zero block": (lambda: launched(block=(0, 1, 1)), ">= 1"),
    "cluster": (lambda: launched(cluster=(3, 1, 1)), "must divide grid"),
    "shared memory": (lambda: launched(shared_bytes=MAX_SHARED_BYTES + 1), str(MAX_SHARED_BYTES)),
    "parameter bytes": (lambda: launched(params=(Param(bytes(20000)), Param(bytes(20000)))), "bytes of parameters"),
    "pointer outside": (lambda: launched(params=(Param(bytes(8), (Pointer(4, 0, 0),)),)), "lies outside"),
    "pointer to nothing": (lambda: launched(params=(Param(bytes(8), (Pointer(0, 3, 0),)),)), "buffer 3 does not exist"),
    "pointer beyond": (lambda: launched(params=(Param(bytes(8), (Pointer(0, 0, 129),)),)), "129 bytes into buffer 0"),
    "map outside": (lambda: launched(params=(Param(bytes(64), (), (MAP,)),)), "tensor map lies outside"),
    "map ranks": (
        lambda: launched(params=(Param(bytes(128), (), (replace(MAP, strides=()),)),)),
        "ranks differ",
    ),
    "view beyond": (lambda: written(replace(OUT, offset=4)), "reaches byte 132 of buffer 1"),
    "view stride": (lambda: written(replace(OUT, strides=(9, 1))), "reaches byte"),
    "negative stride": (lambda: written(replace(OUT, strides=(8, -1))), ">= 0"),
    "view rank": (lambda: written(replace(OUT, strides=(8,))), "do not fit together"),
    "view alignment": (lambda: written(replace(OUT, offset=2, shape=(1, 1))), "not a multiple"),
    "view dtype": (lambda: written(replace(OUT, dtype="complex64")), "unknown dtype"),
    "view buffer": (lambda: written(replace(OUT, buffer=9)), "buffer 9 does not exist"),
    "input written": (lambda: written(replace(OUT, buffer=0)), "inputs are read-only"),
    "copy shapes": (
        lambda: replace(PLAN, steps=(Copy(OUT, TensorView(0, 0, (8, 4), (4, 1), "float32")),)),
        "copies shape",
    ),
    "upload size": (lambda: replace(PLAN, steps=(Upload(OUT, bytes(4)),)), "uploads 4 bytes"),
    "upload layout": (
        lambda: replace(PLAN, steps=(Upload(TensorView(1, 0, (4, 8), (1, 4), "float32"), bytes(128)),)),
        "must be contiguous",
    ),
    "tree": (lambda: replace(PLAN, output_tree=OutputTree("tuple")), "structure has 0 tensors"),
    "output": (lambda: replace(PLAN, outputs=(replace(OUT, shape=(5, 8)),)), "reaches byte"),
}


def test_round_trip() -> None:
    assert decode(encode(PLAN)) == PLAN
    assert decode(encode(PLAN)).digest() == PLAN.digest()
    assert PLAN.launches == (LAUNCH,)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plans_are_refused(name: str) -> None:
    make, words = BROKEN[name]
    with pytest.raises(PlanError, match=words):
        decode(encode(make()))


def test_unknown_fields_and_steps_are_refused() -> None:
    fields = msgspec.msgpack.decode(encode(PLAN)[HEADER_BYTES:])
    for change in ({"extra": 1}, {"steps": [{"type": "shell", "command": "true"}]}, {"buffers": "many"}):
        with pytest.raises(PlanError):
            decode(seal(msgspec.msgpack.encode({**fields, **change})))


def test_any_bytes_give_a_valid_plan_or_an_error() -> None:
    rng = random.Random(1)
    whole = encode(PLAN)[HEADER_BYTES:]
    refused = 0
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        data = data[: rng.randint(1, len(data))] if rng.random() < 0.3 else data
        try:
            decode(seal(bytes(data)))
        except PlanError:
            refused += 1
    assert refused > 1000


def test_damage_is_told_from_nonsense() -> None:
    whole = encode(PLAN)
    for at in (len(whole) // 2, len(whole) - 1, HEADER_BYTES - 1):
        with pytest.raises(PlanError, match="damaged"):
            decode(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(PlanError, match="damaged"):
        decode(whole[:-10])
    for nonsense in (b"", b"{}", b"\x7fELF" * 100):
        with pytest.raises(PlanError, match="does not begin as one"):
            decode(nonsense)


def test_contiguity() -> None:
    assert is_contiguous(OUT)
    assert is_contiguous(replace(OUT, shape=(1, 8), strides=(99, 1)))
    assert is_contiguous(replace(OUT, shape=(0, 8), strides=(1, 1)))
    assert not is_contiguous(replace(OUT, strides=(16, 1)))
