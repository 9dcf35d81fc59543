/* What the three stand-in libraries share: a table of callbacks into the recorder, and the recorder's answers.
 * None of these libraries talks to a GPU. Each call either is harmless (answered here), is written down (through the
 * table), or is refused by name, so that nothing a submission asks for is dropped in silence. */
#ifndef MKB_SINK_H
#define MKB_SINK_H
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int (*launch)(const char *kernel, const void *image, const unsigned *grid, const unsigned *block, uint64_t shared_bytes,
                  unsigned attribute_count, const void *attributes, void **params);
    int (*tensor_map)(void *map, const unsigned *numbers, uint64_t address, const uint64_t *dims, const uint64_t *strides,
                      const unsigned *box, const unsigned *element_strides);
    int (*allocate)(uint64_t nbytes, uint64_t *address);
    int (*set)(uint64_t address, int value, uint64_t nbytes);
    int (*copy)(uint64_t target, uint64_t source, uint64_t nbytes);
    int (*attribute)(int attribute);
    int (*refuse)(const char *name);
} mkb_sink;

static const mkb_sink *sink;
__attribute__((visibility("default"))) void mkb_set_sink(const mkb_sink *table) { sink = table; }

/* cudaErrorNotSupported and CUDA_ERROR_NOT_SUPPORTED have the same number. */
enum { MKB_NOT_SUPPORTED = 801, MKB_INVALID_VALUE = 1 };

static inline int mkb_refuse(const char *name) {
    if (sink) sink->refuse(name);
    return MKB_NOT_SUPPORTED;
}
#define REFUSED(name) int name(void) { return mkb_refuse(#name); }
#define HARMLESS(name) int name(void) { return 0; }

/* A kernel handle: the module's image and the kernel's name. Handles live as long as the recording. */
typedef struct { const void *image; char name[4096]; } mkb_kernel;

static inline int mkb_kernel_handle(void **handle, const void *image, const char *name) {
    mkb_kernel *kernel = calloc(1, sizeof *kernel);
    if (!kernel) return 2;
    kernel->image = image;
    strncpy(kernel->name, name, sizeof kernel->name - 1);
    *handle = kernel;
    return 0;
}
static inline int mkb_launch(mkb_kernel *kernel, const unsigned *grid, const unsigned *block, uint64_t shared_bytes,
                             unsigned attribute_count, const void *attributes, void **params) {
    if (!sink || !kernel) return MKB_INVALID_VALUE;
    return sink->launch(kernel->name, kernel->image, grid, block, shared_bytes, attribute_count, attributes, params);
}
static inline int mkb_new_handle(void **handle) { /* a stream or an event: distinct, never dereferenced */
    *handle = calloc(1, 16);
    return *handle ? 0 : 2;
}
static inline int mkb_allocate(void **address, size_t nbytes) {
    uint64_t at = 0;
    int status = sink ? sink->allocate(nbytes, &at) : MKB_NOT_SUPPORTED;
    *address = (void *)at;
    return status;
}
static inline int mkb_set(void *address, int value, size_t nbytes) {
    return sink ? sink->set((uint64_t)address, value, nbytes) : MKB_NOT_SUPPORTED;
}
static inline int mkb_copy(void *target, const void *source, size_t nbytes) {
    return sink ? sink->copy((uint64_t)target, (uint64_t)source, nbytes) : MKB_NOT_SUPPORTED;
}
static inline int mkb_attribute(int *value, int attribute) {
    int answer = sink ? sink->attribute(attribute) : -1;
    if (answer < 0) return MKB_INVALID_VALUE;
    *value = answer;
    return 0;
}
static inline int mkb_tensor_map(void *map, int dtype, unsigned rank, void *address, const uint64_t *dims, const uint64_t *strides,
                                 const unsigned *box, const unsigned *element_strides, int interleave, int swizzle,
                                 int l2_promotion, int oob_fill) {
    unsigned numbers[6] = {(unsigned)dtype, rank, (unsigned)interleave, (unsigned)swizzle, (unsigned)l2_promotion, (unsigned)oob_fill};
    if (!sink) return MKB_NOT_SUPPORTED;
    return sink->tensor_map(map, numbers, (uint64_t)address, dims, strides, box, element_strides);
}
#endif
