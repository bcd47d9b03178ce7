// Preloaded: a slow drive. Every read of a file at an offset takes MOEINF_FAKE_READ_US microseconds
// longer. All reads together get MOEINF_FAKE_BYTES_PER_S, in the order of their calls. Folders of
// MOEINF_FAKE_DRIVES (A:B) are drives of their own, each with that speed. The kernel is not told to
// read ahead.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

enum { MOST_DRIVES = 8 };

// Returns the place of the folder that holds the file in MOEINF_FAKE_DRIVES, or how many there are.
static int drive_of(int file) {
    char link[64], path[PATH_MAX] = "";
    const char *folder = getenv("MOEINF_FAKE_DRIVES");
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (folder == NULL || readlink(link, path, sizeof path - 1) < 0) return 0;
    int number = 0;
    for (; *folder != 0 && number < MOST_DRIVES - 1; ++number) {
        size_t length = strcspn(folder, ":");
        if (strncmp(path, folder, length) == 0 && path[length] == '/') break;
        folder += length + (folder[length] == ':');
    }
    return number;
}

static void wait_for(int file, size_t count) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static double free_at[MOST_DRIVES];  // when a drive has delivered all it was asked for before
    const char *text = getenv("MOEINF_FAKE_BYTES_PER_S");
    if (text == NULL) return;
    int drive = drive_of(file);
    pthread_mutex_lock(&lock);
    double now = now_s();
    free_at[drive] = (free_at[drive] < now ? now : free_at[drive]) + (double)count / atof(text);
    double end = free_at[drive];
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
    wait_for(file, count);
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
