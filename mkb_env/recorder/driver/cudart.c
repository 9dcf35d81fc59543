/* Stands in for libcudart.so.13 towards TVM's CUDA runtime: loaded first under the same SONAME and symbol version. */
#include "sink.h"

static _Thread_local int last_error;
static int keep(int status) { if (status) last_error = status; return status; }

int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return device == 0 ? 0 : keep(101); }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { (void)device; return keep(mkb_attribute(value, attribute)); }
int cudaMemGetInfo(size_t *free_bytes, size_t *total) { *free_bytes = 140ull << 30; *total = 141ull << 30; return 0; }
int cudaGetLastError(void) { int status = last_error; last_error = 0; return status; }
int cudaPeekAtLastError(void) { return last_error; }
static const char *text(int status) {
    return status == 0 ? "no error" : status == MKB_NOT_SUPPORTED ? "not available while recording" : "error while recording";
}
const char *cudaGetErrorString(int status) { return text(status); }
const char *cudaGetErrorName(int status) { return status ? "cudaErrorNotSupported" : "cudaSuccess"; }

int cudaMalloc(void **address, size_t nbytes) { return keep(mkb_allocate(address, nbytes)); }
HARMLESS(cudaFree)
int cudaMemcpyAsync(void *target, const void *source, size_t nbytes, int kind, void *stream) {
    (void)kind; (void)stream;
    return keep(mkb_copy(target, source, nbytes));
}
int cudaMallocHost(void **address, size_t nbytes) { *address = malloc(nbytes); return *address ? 0 : keep(2); }
int cudaFreeHost(void *address) { free(address); return 0; }

int cudaStreamCreate(void **stream) { return mkb_new_handle(stream); }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { (void)flags; return mkb_new_handle(stream); }
int cudaEventCreate(void **event) { return mkb_new_handle(event); }
HARMLESS(cudaStreamDestroy)
HARMLESS(cudaStreamSynchronize)
HARMLESS(cudaStreamWaitEvent)
HARMLESS(cudaEventDestroy)
HARMLESS(cudaEventRecord)
HARMLESS(cudaEventSynchronize)

REFUSED(cudaEventElapsedTime)
REFUSED(cudaGetDeviceProperties)
REFUSED(cudaGraphDestroy)
REFUSED(cudaGraphExecDestroy)
REFUSED(cudaGraphInstantiate)
REFUSED(cudaGraphLaunch)
REFUSED(cudaMemcpyPeerAsync)
REFUSED(cudaStreamBeginCapture)
REFUSED(cudaStreamEndCapture)
