/* Points a loaded library's calls of CUDA functions at the stand-ins, whatever library the loader had bound them to:
 * a CUDA build of torch brings the real libcudart (and a GPU machine the real libcuda) into the process first, and the
 * loader then resolves TVM's imports to those. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct { const char *library; void *const *handles; int handle_count; int redirected; } search;

static void *stand_in(const search *wanted, const char *name) {
    if (name[0] != 'c' || name[1] != 'u') return NULL; /* dlsym would also find what the stand-ins import from libc */
    for (int i = 0; i < wanted->handle_count; i++) {
        void *found = dlsym(wanted->handles[i], name);
        if (found) return found;
    }
    return NULL;
}

static void write_slot(ElfW(Addr) slot, void *value) {
    uintptr_t page = (uintptr_t)slot & ~(uintptr_t)(sysconf(_SC_PAGESIZE) - 1);
    if (mprotect((void *)page, (size_t)sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE) == 0) *(void **)slot = value;
}

static void redirect_table(search *wanted, ElfW(Addr) base, const ElfW(Rela) *table, size_t bytes, const ElfW(Sym) *symbols, const char *strings) {
    for (size_t i = 0; i < bytes / sizeof *table; i++) {
        size_t symbol = ELF64_R_SYM(table[i].r_info);
        if (!symbol || table[i].r_addend) continue; /* only whole function pointers: jump slots and GOT entries */
        void *ours = stand_in(wanted, strings + symbols[symbol].st_name);
        if (ours && symbols[symbol].st_shndx == SHN_UNDEF) {
            write_slot(base + table[i].r_offset, ours);
            wanted->redirected++;
        }
    }
}

static int visit(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    search *wanted = data;
    const char *file = strrchr(info->dlpi_name, '/');
    if (strcmp(file ? file + 1 : info->dlpi_name, wanted->library)) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
        const ElfW(Sym) *symbols = NULL;
        const char *strings = NULL;
        const ElfW(Rela) *jump = NULL, *rela = NULL;
        size_t jump_bytes = 0, rela_bytes = 0;
        /* glibc has relocated the addresses in the dynamic section of a loaded library */
        for (const ElfW(Dyn) *d = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr); d->d_tag != DT_NULL; d++) {
            switch (d->d_tag) {
            case DT_SYMTAB: symbols = (const ElfW(Sym) *)d->d_un.d_ptr; break;
            case DT_STRTAB: strings = (const char *)d->d_un.d_ptr; break;
            case DT_JMPREL: jump = (const ElfW(Rela) *)d->d_un.d_ptr; break;
            case DT_PLTRELSZ: jump_bytes = d->d_un.d_val; break;
            case DT_RELA: rela = (const ElfW(Rela) *)d->d_un.d_ptr; break;
            case DT_RELASZ: rela_bytes = d->d_un.d_val; break;
            }
        }
        if (!symbols || !strings) return 1;
        if (jump) redirect_table(wanted, info->dlpi_addr, jump, jump_bytes, symbols, strings);
        if (rela) redirect_table(wanted, info->dlpi_addr, rela, rela_bytes, symbols, strings);
    }
    return 1;
}

/* Returns how many calls were redirected; 0 if no loaded library has that file name. */
__attribute__((visibility("default"))) int mkb_redirect(const char *library, void *const *handles, int handle_count) {
    search wanted = {library, handles, handle_count, 0};
    dl_iterate_phdr(visit, &wanted);
    return wanted.redirected;
}
