/* Stands in for libcuda.so.1 towards TVM's CUDA runtime: loaded first under the same SONAME. */
#include "sink.h"

typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    const void *attributes;
    unsigned attribute_count;
} launch_config;

int cuGetErrorName(int status, const char **name) { *name = status ? "CUDA_ERROR_NOT_SUPPORTED" : "CUDA_SUCCESS"; return 0; }
int cuGetErrorString(int status, const char **name) { *name = status ? "not available while recording" : "no error"; return 0; }
int cuDeviceGetName(char *name, int length, int device) {
    (void)device;
    strncpy(name, "NVIDIA H200", (size_t)length);
    return 0;
}
int cuModuleLoadData(void **module, const void *image) { *module = (void *)image; return 0; }
HARMLESS(cuModuleUnload)
int cuModuleGetFunction(void **function, void *module, const char *name) { return mkb_kernel_handle(function, module, name); }
HARMLESS(cuFuncSetAttribute)
int cuLaunchKernelEx(const launch_config *config, mkb_kernel *kernel, void **params, void **extra) {
    if (extra) return mkb_refuse("cuLaunchKernelEx with packed parameters");
    return mkb_launch(kernel, config->grid, config->block, config->shared_bytes, config->attribute_count, config->attributes, params);
}
int cuTensorMapEncodeTiled(void *map, int dtype, unsigned rank, void *address, const uint64_t *dims, const uint64_t *strides,
                           const unsigned *box, const unsigned *element_strides, int interleave, int swizzle, int l2, int oob) {
    return mkb_tensor_map(map, dtype, rank, address, dims, strides, box, element_strides, interleave, swizzle, l2, oob);
}
