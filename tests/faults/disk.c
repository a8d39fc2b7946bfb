/* disk.c -- a library to preload: a disk that fails, is full, short or slow, a kernel without
 * io_uring. FAULT names what; moves of less than a page, of tokens and the like, stay as they are. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, GOOD = 40 };          /* moves before the first that fails */

static int has(const char *what)
{
    const char *fault = getenv("FAULT");
    return fault && strstr(fault, what);
}

static int fails(const char *what, int error)
{
    static _Atomic int moves;
    if (!has(what) || atomic_fetch_add(&moves, 1) < GOOD) return 0;
    errno = error;
    return 1;
}

static size_t some(size_t n)
{
    if (has("slow") && n >= PAGE) usleep(2000);
    return has("short") && n > PAGE ? PAGE : n;
}

long syscall(long number, ...)
{
    static long (*real)(long, ...);
    long a[6];
    va_list args;
    if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    va_start(args, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(args, long);
    va_end(args);
    if (number == SYS_io_uring_setup && has("ringless")) {
        errno = ENOSYS;
        return -1;
    }
    if (number == SYS_io_uring_enter && fails("enter", EIO)) return -1;
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

ssize_t pread(int fd, void *to, size_t n, off_t at)
{
    static ssize_t (*real)(int, void *, size_t, off_t);
    if (!real) real = (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    return n >= PAGE && fails("read", EIO) ? -1 : real(fd, to, some(n), at);
}

ssize_t pwrite(int fd, const void *from, size_t n, off_t at)
{
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (!real) real = (ssize_t (*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite");
    return n >= PAGE && fails("write", ENOSPC) ? -1 : real(fd, from, some(n), at);
}

int fallocate(int fd, int mode, off_t at, off_t n)
{
    static int (*real)(int, int, off_t, off_t);
    if (!real) real = (int (*)(int, int, off_t, off_t))dlsym(RTLD_NEXT, "fallocate");
    errno = ENOSPC;
    return has("full") ? -1 : real(fd, mode, at, n);
}
