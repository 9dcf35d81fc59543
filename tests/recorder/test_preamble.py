"""The lighter preamble of TIRx's CUDA sources compiles to the same code, in a fraction of the time."""

from __future__ import annotations

import time

import pytest
from cuda.bindings import nvrtc
from sources import TIRX, plan_of

from mkb_env.dsl.nvrtc_preamble import NAMES, REPLACED, lighter
from mkb_env.dsl.tirx import cuda_headers

INFINITE = "#include <cuda/std/cstdint>\n" + "".join(heavy for heavy, _ in REPLACED)
KERNEL = """
template <class A> __device__ typename std::enable_if<std::is_floating_point<A>::value, A>::type largest() {
    return INFINITY;
}
extern "C" __global__ void kernel(float *x, unsigned *y) {
    x[threadIdx.x] = std::is_same_v<float, float> ? largest<float>() - x[threadIdx.x] : 0.0f;
    y[threadIdx.x] = std::is_signed<int>::value + 2 * std::is_unsigned<unsigned>::value
        + 4 * std::is_signed<unsigned long long>::value + 8 * std::is_integral<bool>::value
        + 16 * std::is_signed<float>::value + 64 * std::is_unsigned<double>::value
        + 32 * std::is_same<std::conditional<false, int, char>::type, char>::value;
}
"""


def ptx(source: str) -> str:
    root = cuda_headers() / "include"
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    options = [b"-arch=sm_90a", f"-I{root}".encode(), f"-I{root / 'cccl'}".encode()]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if error:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, log)
        pytest.fail(log.decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = bytearray(size)
    nvrtc.nvrtcGetPTX(program, text)
    return text.decode().partition(".visible .entry")[2]  # before it, the headers' own constants are listed


def test_same_code() -> None:
    light = lighter((INFINITE + KERNEL).encode()).decode()
    assert "limits" not in light and "type_traits" not in light
    assert "st.global" in ptx(light) and ptx(light) == ptx(INFINITE + KERNEL)


def test_what_is_not_expected_stays() -> None:
    source = INFINITE.replace(NAMES[0], "is_class")
    assert "type_traits" in lighter(source.encode()).decode()


def test_it_is_what_tvm_writes() -> None:
    """If TVM changes its preamble, compilation is slow again, and this says so."""
    plan_of(TIRX, "tirx")
    started = time.monotonic()
    plan_of(TIRX, "tirx")
    assert time.monotonic() - started < 3
