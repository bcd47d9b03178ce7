// Preloaded: a slow drive. Every read of a file at an offset takes MOEINF_FAKE_READ_US microseconds
// longer. All reads together get MOEINF_FAKE_BYTES_PER_S, in the order of their calls. The kernel
// is not told to read ahead.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void wait_for(size_t count) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static double free_at;  // when the drive has delivered all that was asked for before
    const char *text = getenv("MOEINF_FAKE_BYTES_PER_S");
    if (text == NULL) return;
    pthread_mutex_lock(&lock);
    double now = now_s();
    free_at = (free_at < now ? now : free_at) + (double)count / atof(text);
    double end = free_at;
    pthread_mutex_unlock(&lock);
    if (end > now) usleep((useconds_t)(1e6 * (end - now)));
}

static void wait_a_little(void) {
    const char *text = getenv("MOEINF_FAKE_READ_US");
    if (text != NULL) usleep((useconds_t)atoi(text));
}

ssize_t pread64(int file, void *to, size_t count, off64_t at) {
    static ssize_t (*real)(int, void *, size_t, off64_t);
    if (real == NULL) real = dlsym(RTLD_NEXT, "pread64");
    wait_a_little();
    wait_for(count);
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
