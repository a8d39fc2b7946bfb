/* kill.c -- a library to preload: KILL=PLACE:N kills the process at its Nth call there. PLACE is
 * collective (a rank comes to a turn, or waits for a peer), write (to a file of tensors), sync, or
 * rename (before and after: two calls). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void come(const char *place)
{
    static _Atomic long calls;
    const char *kill_at = getenv("KILL");
    size_t n = strlen(place);
    if (!kill_at || strncmp(kill_at, place, n) || kill_at[n] != ':') return;
    if (atomic_fetch_add(&calls, 1) + 1 == atol(kill_at + n + 1)) raise(SIGKILL);
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
    if (number == SYS_futex) come("collective");
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

ssize_t pwrite(int fd, const void *from, size_t n, off_t at)
{
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (!real) real = (ssize_t (*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite");
    come("write");
    return real(fd, from, n, at);
}

int fsync(int fd)
{
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    come("sync");
    return real(fd);
}

int rename(const char *from, const char *to)
{
    static int (*real)(const char *, const char *);
    if (!real) real = (int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename");
    come("rename");
    int done = real(from, to);
    come("rename");
    return done;
}
