"""What a source may not name: dotted names (a module, or something in one) by rule. Extend the tables, not the code."""

from __future__ import annotations

OTHER_COMPILERS = (
    "torch.compile",
    "torch.jit",
    "torch.fx",
    "torch._dynamo",
    "torch._inductor",
    "torch.cuda._compile_kernel",
    "torch.cuda.jiterator",
    "triton",
    "triton_kernels",
    "numba",
    "cupy",
    "pycuda",
    "jax",
    "tensorflow",
    "tilelang",
    "tinygrad",
    "warp",
    "taichi",
    "mojo",
    "helion",
)
"""Compilers and array libraries other than the two DSLs."""

RAW_SOURCES = (
    "torch.utils.cpp_extension",
    "torch.ops.load_library",
    "torch.classes.load_library",
    "tvm_ffi.cpp",
    "tvm_ffi.load_module",
    "tvm.runtime.load_module",
    "tvm.support.nvcc",
    "tvm.contrib",
    "cuda.core",
    "cuda.nvrtc",
    "cuda.bindings.nvrtc",
    "cuda.bindings.nvjitlink",
    "cuda.bindings.driver.cuModuleLoad",
    "cuda.bindings.driver.cuModuleLoadData",
    "cuda.bindings.driver.cuModuleLoadDataEx",
    "cuda.bindings.driver.cuModuleLoadFatBinary",
    "cuda.bindings.driver.cuLibraryLoadData",
    "cuda.bindings.driver.cuLibraryLoadFromFile",
    "cuda.bindings.driver.cuLinkCreate",
    "ctypes",
    "_ctypes",
    "cffi",
    "pybind11",
    "nanobind",
    "Cython",
    "pyximport",
)
"""Ways to bring CUDA, PTX, C++ or a binary past the DSL."""

KERNEL_LIBRARIES = (
    "cublas",
    "cudnn",
    "nvmath",
    "cuda.bindings.cublas",
    "flash_attn",
    "flash_attn_interface",
    "flashinfer",
    "xformers",
    "vllm",
    "sglang",
    "sgl_kernel",
    "transformer_engine",
    "apex",
    "bitsandbytes",
    "deep_gemm",
    "deep_ep",
    "cuequivariance",
    "quack",
    "torchao",
    "liger_kernel",
    "fla",
    "causal_conv1d",
    "mamba_ssm",
    "aiter",
    "kernels",
    "cutlass_library",
    "cutlass_cppgen",
)
"""Libraries of ready kernels. Torch's own are refused by the recorder, operator by operator."""

PROCESSES = (
    "subprocess",
    "multiprocessing",
    "threading",
    "_thread",
    "concurrent",
    "asyncio",
    "signal",
    "pty",
    "torch.multiprocessing",
    "torch.distributed",
    "os.system",
    "os.popen",
    "os.fork",
    "os.forkpty",
    "os.kill",
    "os.killpg",
    "os._exit",
    "os.abort",
    "os.posix_spawn",
    "os.posix_spawnp",
    *(f"os.exec{kind}" for kind in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
    *(f"os.spawn{kind}" for kind in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
)
"""Processes, threads and signals."""

FILES_AND_NETWORK = (
    "socket",
    "ssl",
    "http",
    "urllib",
    "ftplib",
    "smtplib",
    "requests",
    "httpx",
    "aiohttp",
    "shutil",
    "tempfile",
    "mmap",
    "io.open",
    "os.open",
    "os.remove",
    "os.unlink",
    "os.rename",
    "os.replace",
    "os.mkdir",
    "os.makedirs",
    "os.listdir",
    "os.scandir",
    "os.walk",
    "torch.load",
    "torch.save",
    "torch.hub",
    "torch.from_file",
    "numpy.load",
    "numpy.save",
    "numpy.fromfile",
    "numpy.memmap",
    "huggingface_hub",
)
"""Files and network."""

DYNAMIC_CODE = (
    "importlib",
    "builtins",
    "runpy",
    "code",
    "codeop",
    "marshal",
    "pickle",
    "dill",
    "cloudpickle",
    "sys.modules",
    "sys._getframe",
    "sys.settrace",
    "sys.setprofile",
    "gc.get_objects",
    "gc.get_referrers",
    "inspect.currentframe",
    "inspect.stack",
)
"""Code made from strings, imports by name, and other modules' state."""

DYNAMIC_BUILTINS = frozenset({"exec", "eval", "compile", "__import__", "breakpoint", "input"})
"""Built-in functions that make code from strings, or wait for a person."""

FILE_BUILTINS = frozenset({"open"})

HIDDEN_ATTRIBUTES = frozenset(
    {"__subclasses__", "__globals__", "__builtins__", "__loader__", "__code__", "__closure__", "f_globals", "f_back"}
)
"""Attributes that lead from an object to the interpreter's insides."""
