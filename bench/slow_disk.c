/* slow_disk.c -- a library to preload: a disk that serves one request after the other, at
 * ZR_DISK_RATE bytes a second, and a kernel without io_uring. Moves below a page stay as they are.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double rate, idle; /* bytes a second; when the disk has served all */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Returns when a disk that was asked at `asked` has served n bytes more. */
static void serve(double asked, ssize_t n)
{
    pthread_mutex_lock(&lock);
    if (!rate) rate = atof(getenv("ZR_DISK_RATE"));
    idle = (idle > asked ? idle : asked) + (double)n / rate;
    double end = idle;
    pthread_mutex_unlock(&lock);
    const struct timespec t = {(time_t)end, (long)(1e9 * (end - (double)(time_t)end))};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
}

ssize_t pread(int fd, void *to, size_t n, off_t at)
{
    ssize_t (*real)(int, void *, size_t, off_t) =
        (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    double asked = now();
    ssize_t done = real(fd, to, n, at);
    if (done >= PAGE) serve(asked, done);
    return done;
}

ssize_t pwrite(int fd, const void *from, size_t n, off_t at)
{
    ssize_t (*real)(int, const void *, size_t, off_t) =
        (ssize_t (*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite");
    double asked = now();
    ssize_t done = real(fd, from, n, at);
    if (done >= PAGE) serve(asked, done);
    return done;
}

long syscall(long number, ...)
{
    long (*real)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall"), a[6];
    va_list args;
    va_start(args, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(args, long);
    va_end(args);
    if (number == SYS_io_uring_setup) {
        errno = ENOSYS;
        return -1;
    }
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
