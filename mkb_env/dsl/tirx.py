"""TIRx (``apache-tvm``, ``tvm.tirx``): emits CUDA C, compiled by NVRTC; TVM's runtime calls the CUDA driver."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkb_env.dsl.base import installed
from mkb_env.dsl.nvrtc_preamble import lighter

if TYPE_CHECKING:
    from mkb_env.recorder.tape import Tape

NAME = "tirx"
TITLE = "TIRx"
PACKAGES = ("apache-tvm", "apache-tvm-ffi", "nvidia-cuda-nvrtc", "nvidia-cuda-cccl", "cuda-bindings")
IMPORTS = ("tvm",)
CONTRACT = (Path(__file__).parent / "contract_tirx.txt").read_text(encoding="utf-8")
HINTS = (
    (
        r"Cannot resolve ScopeIdDef for target=llvm",
        'pass target=tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) to tvm.compile',
    ),
    (
        r"variables .* are used, but are not passed in as API arguments",
        "T.cta_id and T.thread_id have no values: begin the function with T.device_entry() before them, and compile "
        'with tvm.compile(module, target=..., tir_pipeline="tirx")',
    ),
    (r"Unknown pre-built pipeline", 'compile with tvm.compile(module, target=..., tir_pipeline="tirx")'),
    (
        r"Undefined variable",
        "names in a T.prim_func are looked up when it is parsed: define constants above it, at module level or in the "
        "enclosing function",
    ),
    (
        r"must be (real number|Tensor), not (?!None)[A-Z]",
        "torch and Python's math run on the host; in a kernel use T.sqrt, T.exp and the like",
    ),
    (
        r"(?s)(Mismatched \S+\.strides|Invalid \S+\.shape).* when calling",
        "the tensor is not as T.match_buffer declares it (shown in the signature): usually the width is written into "
        "the kernel for another shape, or the tensor is a view that is not contiguous",
    ),
)
CALL_ERRORS = r"when calling:\s"

RUNTIME = "libtvm_runtime_cuda.so"

_tape: Tape | None = None
_libraries: list[ctypes.CDLL] = []


def cuda_headers() -> Path:
    """The CUDA folder whose headers NVRTC reads: that of the wheels, else an installed toolkit's.

    Raises:
        FileNotFoundError: if there is none.
    """
    candidates = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        candidates.insert(0, str(importlib.metadata.distribution("nvidia-cuda-cccl").locate_file("nvidia/cu13")))
    for candidate in candidates:
        if candidate and (Path(candidate) / "include" / "cccl" / "cuda" / "std" / "cstdint").exists():
            return Path(candidate)
    raise FileNotFoundError(
        "TIRx needs the CUDA 13 headers: pip install 'nvidia-cuda-cccl>=13' 'nvidia-cuda-runtime>=13', or set CUDA_PATH"
    )


def preload() -> None:
    """Import TVM over the stand-in CUDA libraries and take over its CUDA compilation."""
    from mkb_env.recorder.libraries import TVM_LIBRARIES, redirect
    from mkb_env.recorder.target import ARCH

    toolkit = cuda_headers()
    os.environ["CUDA_PATH"] = str(toolkit)
    os.environ["TVM_CUDA_NVRTC_EXTRA_OPTS"] = f"-I{toolkit / 'include' / 'cccl'}"
    # loaded before TVM, under the SONAMEs it links: a machine without CUDA has no other libraries of these names
    _libraries.extend(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in TVM_LIBRARIES)
    import tvm_ffi
    from cuda.bindings import nvrtc
    from tvm.script import tirx  # noqa: F401
    from tvm.support import nvcc

    redirect(RUNTIME, _libraries)
    # An NVRTC program compiled for a real architecture holds PTX beside the cubin: one compilation gives both.
    get_cubin = nvrtc.nvrtcGetCUBIN
    texts: list[str] = []

    def get_both(program: Any, cubin: Any) -> Any:
        _, size = nvrtc.nvrtcGetPTXSize(program)
        text = bytearray(size)
        nvrtc.nvrtcGetPTX(program, text)
        texts.append(bytes(text).rstrip(b"\0").decode())
        return get_cubin(program, cubin)

    nvrtc.nvrtcGetCUBIN = get_both

    create = nvrtc.nvrtcCreateProgram
    light = False

    def create_light(code: bytes, *rest: Any) -> Any:
        return create(lighter(code) if light else code, *rest)

    nvrtc.nvrtcCreateProgram = create_light

    def compile_cuda(code: str, *_: Any) -> bytes:
        nonlocal light
        texts.clear()
        light = True
        try:
            cubin = bytes(nvcc.compile_cuda(code, target_format="cubin", arch=ARCH, compiler="nvrtc"))
        except RuntimeError:
            light = False  # whatever is wrong with it is then told of the source that TVM itself would compile
            cubin = bytes(nvcc.compile_cuda(code, target_format="cubin", arch=ARCH, compiler="nvrtc"))
        if _tape is not None:
            _tape.add_module(texts[-1], cubin)
        return cubin

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_cuda, override=True)


def attach(tape: Tape, scratch: str) -> list[ctypes.CDLL]:
    """Send compiled modules to ``tape``; returns the libraries whose calls it must receive."""
    global _tape
    import tvm_ffi

    from mkb_env.recorder.tensors import RecordedTensor

    _tape = tape
    RecordedTensor.__tvm_ffi_object__ = lambda self: tvm_ffi.from_dlpack(_Exchange(self))  # type: ignore[attr-defined]
    return _libraries


class _Exchange:
    """Hands a recorded tensor to tvm_ffi by its DLPack methods alone (torch's faster path would say CPU)."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)


def is_compiler_frame(filename: str) -> bool:
    """Whether a traceback's frame belongs to TVM."""
    return "/tvm/" in filename or "/tvm_ffi/" in filename


def versions() -> dict[str, str]:
    """Versions of the installed distributions."""
    return installed(PACKAGES)
