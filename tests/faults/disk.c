/* disk.c -- a library to preload: a disk that fails, is full, short or slow, a kernel without
 * io_uring, or a slow terminal, as FAULT says. Transfers of less than a page, such as tokens, are
 * not changed. */
#define _GNU_SOURCE
#include "syscall.h"
#include <errno.h>
#include <linux/io_uring.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, GOOD = 40 }; /* transfers before the first that fails */

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

/* ---- rings, by their descriptors: requests to the kernel are cut to a page */
enum { RINGS = 256 };
static struct {
    char *sq;
    struct io_uring_sqe *sqe;
    struct io_sqring_offsets at;
} rings[RINGS];

void *mmap(void *to, size_t bytes, int protection, int flags, int fd, off_t at)
{
    static void *(*real)(void *, size_t, int, int, int, off_t);
    if (!real) real = (void *(*)(void *, size_t, int, int, int, off_t))dlsym(RTLD_NEXT, "mmap");
    void *made = real(to, bytes, protection, flags, fd, at);
    if (fd >= 0 && fd < RINGS && at == (off_t)IORING_OFF_SQES) rings[fd].sqe = made;
    if (fd >= 0 && fd < RINGS && rings[fd].at.array && at == 0) rings[fd].sq = made;
    return made;
}

static void cut(int fd, unsigned n)
{
    char *sq = rings[fd].sq;
    unsigned tail = *(unsigned *)(sq + rings[fd].at.tail);
    unsigned mask = *(unsigned *)(sq + rings[fd].at.ring_mask);
    unsigned *array = (unsigned *)(sq + rings[fd].at.array);
    for (unsigned i = tail - n; i != tail; i++) {
        struct io_uring_sqe *e = &rings[fd].sqe[array[i & mask]];
        if (e->len > PAGE) e->len = PAGE;
    }
}

long syscall(long number, ...)
{
    long a[OPERANDS];
    va_list args;
    va_start(args, number);
    take_operands(args, a);
    va_end(args);
    if (number == SYS_io_uring_setup && has("ringless")) {
        errno = ENOSYS;
        return -1;
    }
    if (number == SYS_io_uring_enter && fails("enter", EIO)) return -1;
    if (number == SYS_io_uring_enter && has("short")) cut((int)a[0], (unsigned)a[1]);
    long done = real_syscall(number, a);
    if (number == SYS_io_uring_setup && done >= 0 && done < RINGS)
        rings[done].at = ((struct io_uring_params *)a[1])->sq_off;
    return done;
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

ssize_t write(int fd, const void *from, size_t n)
{
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    if (has("late") && fd == STDERR_FILENO) usleep(100000);
    return real(fd, from, n);
}

int fallocate(int fd, int mode, off_t at, off_t n)
{
    static int (*real)(int, int, off_t, off_t);
    if (!real) real = (int (*)(int, int, off_t, off_t))dlsym(RTLD_NEXT, "fallocate");
    errno = ENOSPC;
    return has("full") ? -1 : real(fd, mode, at, n);
}
