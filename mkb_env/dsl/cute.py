"""CuTe DSL (``nvidia-cutlass-dsl``): compiled through MLIR and NVVM; its JIT host code calls the CUDA runtime."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkb_env.dsl.base import installed

if TYPE_CHECKING:
    from mkb_env.recorder.tape import Tape

NAME = "cute"
TITLE = "CuTe DSL"
PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "cuda-bindings")
IMPORTS = ("cutlass",)
CONTRACT = (Path(__file__).parent / "contract_cute.txt").read_text(encoding="utf-8")
HINTS = (
    (
        r"PHASE_DYNAMIC_INDEX",
        "use cute.math.* on run-time values instead of Python's math or float(), and cutlass.range for run-time loops",
    ),
    (r"must be Tensor, not (?!None)[A-Z]", "torch runs on the host; in a kernel use cute.math"),
    (
        r"PHASE_DYNAMIC_TO_STATIC_BOOL",
        "a value known only at run time steers Python control flow: put the if into a @cute.jit or @cute.kernel "
        "function, or decide it at compile time under cutlass.const_expr",
    ),
    (
        r"UNSUP_EARLY_EXIT",
        "a run-time if cannot leave the kernel: put what follows under the opposite condition instead",
    ),
    (
        r"expects global based memref, but\s+got generic",
        "compile with the tensors that solve was given (from_dlpack of a CUDA tensor), so that pointers are global",
    ),
    (
        r"UNSUP_NO_SOURCE",
        "define @cute.kernel and @cute.jit functions at module level in the submitted file, not through exec",
    ),
)
CALL_ERRORS = r"^error\[CALL_"

_tape: Tape | None = None


def preload() -> None:
    """Import the DSL with its launches intercepted."""
    from mkb_env.recorder.libraries import CUTE_LIBRARY
    from mkb_env.recorder.target import ARCH

    libraries = importlib.metadata.distribution("nvidia-cutlass-dsl-libs-cu13")
    runtime = libraries.locate_file("nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so")
    os.environ.update(
        CUTE_DSL_ARCH=ARCH,
        CUTE_DSL_KEEP="ptx,cubin",
        CUTE_DSL_LIBS=f"{CUTE_LIBRARY}:{runtime}",
        CUTE_DSL_DISABLE_FILE_CACHING="1",
    )
    from cutlass.base_dsl.jit_executor import JitFunctionArtifacts

    original = JitFunctionArtifacts.__post_init__

    def keep(self: Any) -> None:
        original(self)
        if _tape is not None and isinstance(self.PTX, str) and isinstance(self.CUBIN, bytes):
            _tape.add_module(self.PTX, self.CUBIN)

    setattr(JitFunctionArtifacts, "__post_init__", keep)  # noqa: B010 (a method may not be assigned to)


def attach(tape: Tape, scratch: str) -> list[ctypes.CDLL]:
    """Send compiled modules to ``tape``; returns the libraries whose calls it must receive."""
    global _tape
    from cutlass.cutlass_dsl import CuTeDSL

    from mkb_env.recorder.libraries import CUTE_LIBRARY

    _tape = tape
    CuTeDSL._get_dsl().envar.dump_dir = scratch  # read from the environment once, at import, which was in the parent
    return [ctypes.CDLL(str(CUTE_LIBRARY), mode=ctypes.RTLD_GLOBAL)]


def is_compiler_frame(filename: str) -> bool:
    """Whether a traceback's frame belongs to CuTe DSL."""
    return "/nvidia_cutlass_dsl/" in filename


def versions() -> dict[str, str]:
    """Versions of the installed distributions."""
    return installed(PACKAGES)
