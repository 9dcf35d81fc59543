"""Small CUDA C kernels for the device's tests, compiled on the machine that runs them."""

import ctypes
import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = r"""
extern "C" __global__ void add(const float* a, const float* b, float* c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

// One block reverses n floats through dynamic shared memory.
extern "C" __global__ void reverse(const float* in, float* out, int n) {
    extern __shared__ float tile[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) tile[i] = in[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = tile[n - 1 - i];
}

extern "C" __global__ void __launch_bounds__(64) at_most_64_threads(float* out) { out[threadIdx.x] = 1.0f; }

extern "C" __global__ void static_shared(float* out) {
    __shared__ volatile float tile[1024];
    tile[threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

// Every block waits until all have come: ends only if all are resident at once.
extern "C" __global__ void meet(unsigned* counter, unsigned* out) {
    if (threadIdx.x == 0) {
        atomicAdd(counter, 1u);
        while (*(volatile unsigned*)counter < gridDim.x) {}
        out[blockIdx.x] = blockIdx.x + 1;
    }
}

extern "C" __global__ void out_of_bounds(float* out) { out[(1ll << 40) + threadIdx.x] = 1.0f; }
extern "C" __global__ void misaligned(float* out) { *(float*)((char*)out + 1) = 1.0f; }
extern "C" __global__ void forever(float* out) { while (*(volatile float*)out != 1.0f) {} }

#if __CUDA_ARCH__ >= 900
// Each block stores 100 x its index + the cluster's size, and reports what its neighbour in the cluster stored.
extern "C" __global__ void exchange(unsigned* out) {
    __shared__ unsigned value;
    unsigned rank, count, remote, got;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
    if (threadIdx.x == 0) value = blockIdx.x * 100 + count;
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    unsigned local = (unsigned)__cvta_generic_to_shared(&value);
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank ^ 1));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(got) : "r"(remote) : "memory");
    if (threadIdx.x == 0) out[blockIdx.x] = got;
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

struct alignas(64) TensorMap { unsigned long long words[16]; };

// Loads the 8 x 32 float box at column x, row y by TMA and writes it out in order.
extern "C" __global__ void load_box(const __grid_constant__ TensorMap map, float* out, int x, int y) {
    __shared__ alignas(128) float tile[256];
    __shared__ alignas(8) unsigned long long barrier;
    unsigned bar = (unsigned)__cvta_generic_to_shared(&barrier), dst = (unsigned)__cvta_generic_to_shared(tile);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bar) : "memory");
        asm volatile("fence.proxy.async;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 1024;" ::"r"(bar) : "memory");
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
            ::"r"(dst), "l"(&map), "r"(x), "r"(y), "r"(bar) : "memory");
    }
    __syncthreads();
    unsigned done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(bar) : "memory");
    out[threadIdx.x] = tile[threadIdx.x];
}
#endif
"""


class NoCompiler(Exception):
    """Neither NVRTC nor nvcc is here."""


def _nvrtc() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in spec.submodule_search_locations or ()] if spec else []
    found = [str(path) for root in roots for path in sorted(root.glob("*/lib/libnvrtc.so.*[0-9]"))]
    for name in (*found, "libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def compile_cuda(arch: str, ptx: bool = False, source: str = SOURCE) -> tuple[bytes, tuple[int, int]]:
    """``source`` as a cubin or PTX for ``arch`` (``sm_90a``), and the CUDA version of the compiler.

    Raises:
        NoCompiler: if there is neither NVRTC nor nvcc.
        RuntimeError: with the compiler's log, if the source does not compile.
    """
    nvrtc = _nvrtc()
    if nvrtc is not None:
        return _compile_nvrtc(nvrtc, arch, ptx, source)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise NoCompiler("neither NVRTC (package nvidia-cuda-nvrtc) nor nvcc is installed")
    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder, "kernels.cu"), Path(folder, "image")
        path.write_text(source)
        command = [nvcc, "-ptx" if ptx else "-cubin", f"-arch={arch}", "-o", str(output), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        listing = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        major, minor = listing.split("release ")[1].split(",")[0].split(".")
        return output.read_bytes(), (int(major), int(minor))


def _compile_nvrtc(nvrtc: ctypes.CDLL, arch: str, ptx: bool, source: str) -> tuple[bytes, tuple[int, int]]:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None):
        raise RuntimeError("nvrtcCreateProgram failed")
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={arch}".encode())
    failed = nvrtc.nvrtcCompileProgram(program, 1, options)
    kind = "ProgramLog" if failed else "PTX" if ptx else "CUBIN"
    getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{kind}")(program, data)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise RuntimeError(data.value.decode(errors="replace"))
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return data.value if ptx else data.raw, (major.value, minor.value)
