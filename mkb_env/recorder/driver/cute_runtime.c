/* Stands in for the CUDA entry points of CuTe DSL's runtime library (underscored names, cudart signatures).
 * CUTE_DSL_LIBS lists this library first, so JIT-compiled host code resolves these symbols here. */
#include "sink.h"

typedef struct { unsigned x, y, z; } dim3;
typedef struct { dim3 grid, block; size_t shared_bytes; void *stream; const void *attributes; unsigned attribute_count; } launch_config;

int _cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int _cudaGetDevice(int *device) { *device = 0; return 0; }
int _cudaSetDevice(int device) { return device == 0 ? 0 : 101; }
int _cuDeviceGet(int *device, int ordinal) { *device = 0; return ordinal == 0 ? 0 : 101; }
int _cudaDeviceGetAttribute(int *value, int attribute, int device) { (void)device; return mkb_attribute(value, attribute); }

int _cudaLibraryLoadData(void **library, const void *image, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    (void)a; (void)b; (void)c; (void)d; (void)e; (void)f;
    *library = (void *)image;
    return 0;
}
int _cuLibraryLoadData(void **library, const void *image, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    return _cudaLibraryLoadData(library, image, a, b, c, d, e, f);
}
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) { return mkb_kernel_handle(kernel, library, name); }
int _cuLibraryGetKernel(void **kernel, void *library, const char *name) { return mkb_kernel_handle(kernel, library, name); }
HARMLESS(_cudaLibraryUnload)
HARMLESS(_cuLibraryUnload)
/* CUfunction_attribute 0 is the largest block; the others CuTe asks about (static shared memory, ...) are zero: its
 * kernels use dynamic shared memory only. */
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
    (void)kernel; (void)device;
    *value = attribute == 0 ? 1024 : 0;
    return 0;
}
HARMLESS(_cudaFuncSetAttribute)
HARMLESS(_cudaKernelSetAttributeForDevice)

int _cudaLaunchKernelEx(const launch_config *config, mkb_kernel *kernel, void **params) {
    return mkb_launch(kernel, &config->grid.x, &config->block.x, config->shared_bytes, config->attribute_count, config->attributes, params);
}
int _cudaLaunchKernel(mkb_kernel *kernel, dim3 grid, dim3 block, void **params, size_t shared_bytes, void *stream) {
    (void)stream;
    return mkb_launch(kernel, &grid.x, &block.x, shared_bytes, 0, NULL, params);
}
int _cuTensorMapEncodeTiled(void *map, int dtype, unsigned rank, void *address, const uint64_t *dims, const uint64_t *strides,
                            const unsigned *box, const unsigned *element_strides, int interleave, int swizzle, int l2, int oob) {
    return mkb_tensor_map(map, dtype, rank, address, dims, strides, box, element_strides, interleave, swizzle, l2, oob);
}

int _cudaMalloc(void **address, size_t nbytes) { return mkb_allocate(address, nbytes); }
int _cudaMallocAsync(void **address, size_t nbytes, void *stream) { (void)stream; return mkb_allocate(address, nbytes); }
HARMLESS(_cudaFree)
HARMLESS(_cudaFreeAsync)
int _cudaMemset(void *address, int value, size_t nbytes) { return mkb_set(address, value, nbytes); }
int _cudaMemsetAsync(void *address, int value, size_t nbytes, void *stream) { (void)stream; return mkb_set(address, value, nbytes); }
int _cudaMemcpy(void *target, const void *source, size_t nbytes, int kind) { (void)kind; return mkb_copy(target, source, nbytes); }
int _cudaMemcpyAsync(void *target, const void *source, size_t nbytes, int kind, void *stream) {
    (void)kind; (void)stream;
    return mkb_copy(target, source, nbytes);
}

int _cudaStreamCreate(void **stream) { return mkb_new_handle(stream); }
int _cudaEventCreate(void **event) { return mkb_new_handle(event); }
HARMLESS(_cudaStreamDestroy)
HARMLESS(_cudaStreamSynchronize)
HARMLESS(_cudaStreamWaitEvent)
HARMLESS(_cudaDeviceSynchronize)
HARMLESS(_cudaEventDestroy)
HARMLESS(_cudaEventRecord)
HARMLESS(_cudaProfilerStart)
HARMLESS(_cudaProfilerStop)

REFUSED(_cuLibraryGetGlobal)
REFUSED(_cuLibraryGetKernelCount)
REFUSED(_cuLibraryGetManaged)
REFUSED(_cuLibraryGetModule)
REFUSED(_cuLibraryGetUnifiedFunction)
REFUSED(_cuLibraryLoadFromFile)
REFUSED(_cudaEventElapsedTime)
REFUSED(_cudaFreeHost)
REFUSED(_cudaGetDeviceProperties)
REFUSED(_cudaGraphDestroy)
REFUSED(_cudaGraphExecDestroy)
REFUSED(_cudaGraphInstantiate)
REFUSED(_cudaGraphLaunch)
REFUSED(_cudaLibraryGetGlobal)
REFUSED(_cudaLibraryGetKernelCount)
REFUSED(_cudaLibraryGetManaged)
REFUSED(_cudaLibraryGetUnifiedFunction)
REFUSED(_cudaLibraryLoadFromFile)
REFUSED(_cudaMallocHost)
REFUSED(_cudaMallocManaged)
REFUSED(_cudaOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSED(_cudaStreamAddCallback)
REFUSED(_cudaStreamBeginCapture)
REFUSED(_cudaStreamEndCapture)
