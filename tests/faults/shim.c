// Preloaded: fails reads of expert shards, or large allocations, when it is told to.
// It is independent of moeinf. The process itself arms it, by ctypes.
//
//   shim_reads(kind, first, count)   kind 0 none, 1 EIO, 2 short, 3 slow, 4 flipped bit
//   shim_memory(first)               the first-th large allocation from now on fails; 0 none
//   shim_seen()                      reads or allocations since it was armed
//
// Atomics only: reads come from several threads.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static atomic_int kind, first, count, seen, memory_first;
enum { EIO_, SHORT_ = 2, SLOW_ = 3, FLIP_ = 4, LARGE = 1 << 12 };

void shim_reads(int k, int f, int c) {
    kind = 0;
    seen = 0;
    first = f;
    count = c;
    memory_first = 0;
    kind = k;
}
void shim_memory(int f) {
    kind = 0;
    seen = 0;
    memory_first = f;
}
int shim_seen(void) { return seen; }

static int is_shard(int file) {
    char link[64], path[512];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    const ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return strstr(path, "/experts/") != NULL;
}

typedef ssize_t (*Pread)(int, void*, size_t, off_t);

static ssize_t faulty(Pread real, int file, void* to, size_t bytes, off_t offset) {
    if (kind == 0 || !is_shard(file)) return real(file, to, bytes, offset);
    const int number = ++seen;
    if (number < first || number >= first + count) return real(file, to, bytes, offset);
    switch (kind) {
        case 1: errno = EIO; return -1;
        case SHORT_: return real(file, to, bytes > 512 ? 512 : (bytes + 1) / 2, offset);
        case SLOW_: usleep(5000); return real(file, to, bytes, offset);
        case FLIP_: {
            const ssize_t got = real(file, to, bytes, offset);
            if (got > 0) ((char*)to)[got / 2] ^= 4;
            return got;
        }
    }
    return real(file, to, bytes, offset);
}

ssize_t pread(int file, void* to, size_t bytes, off_t offset) {
    static Pread real;
    if (!real) real = (Pread)dlsym(RTLD_NEXT, "pread");
    return faulty(real, file, to, bytes, offset);
}
ssize_t pread64(int file, void* to, size_t bytes, off_t offset) {
    static Pread real;
    if (!real) real = (Pread)dlsym(RTLD_NEXT, "pread64");
    return faulty(real, file, to, bytes, offset);
}

static int fails(size_t bytes) {
    return memory_first && bytes >= LARGE && ++seen == memory_first;
}
int posix_memalign(void** to, size_t alignment, size_t bytes) {
    static int (*real)(void**, size_t, size_t);
    if (!real) real = (int (*)(void**, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
    return fails(bytes) ? ENOMEM : real(to, alignment, bytes);
}
extern void* __libc_malloc(size_t);
void* malloc(size_t bytes) {
    if (!fails(bytes)) return __libc_malloc(bytes);
    errno = ENOMEM;
    return NULL;
}
