// Preloaded: every read of a file at an offset takes MOEINF_FAKE_READ_US microseconds longer, as
// on a slow drive, and the kernel is not told to read ahead.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

static void wait_a_little(void) {
    const char *text = getenv("MOEINF_FAKE_READ_US");
    if (text != NULL) usleep((useconds_t)atoi(text));
}

ssize_t pread64(int file, void *to, size_t count, off64_t at) {
    static ssize_t (*real)(int, void *, size_t, off64_t);
    if (real == NULL) real = dlsym(RTLD_NEXT, "pread64");
    wait_a_little();
    return real(file, to, count, at);
}

ssize_t pread(int file, void *to, size_t count, off_t at) { return pread64(file, to, count, at); }

int posix_fadvise64(int file, off64_t from, off64_t length, int advice) {
    (void)file, (void)from, (void)length, (void)advice;
    return 0;
}

int posix_fadvise(int file, off_t from, off_t length, int advice) {
    return posix_fadvise64(file, from, length, advice);
}
