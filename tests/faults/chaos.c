/* chaos.c -- a library to preload that breaks off a run.
 *
 * KILL=PLACE:N kills the process at its Nth call of a place: collective (a rank reaches a turn, or
 * waits for a peer), write (to a file of tensors), sync, or rename (before and after: two calls).
 * FAIL=PLACE:N makes the disk fail there from the Nth call on while a checkpoint is written: write
 * (no space), room (no space to reserve), sync, rename, or folder (both read-only); or while one is
 * read: read. stderr then has STRUCK. SLOW=N: writes of checkpoints take N us longer;
 * SLOW_WEIGHTS=N: writes of --save.
 */
#define _GNU_SOURCE
#include "syscall.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define STRUCK "chaos: struck\n"

/* Returns the number of PLACE:N in a setting; 0: it names another place, or is not set. */
static long turn(const char *setting, const char *place)
{
    const char *text = getenv(setting);
    size_t n = strlen(place);
    return text && !strncmp(text, place, n) && text[n] == ':' ? atol(text + n + 1) : 0;
}

static void come(const char *place)
{
    static _Atomic long calls;
    long at = turn("KILL", place);
    if (at && atomic_fetch_add(&calls, 1) + 1 == at) raise(SIGKILL);
}

static int fails(const char *place, int error)
{
    static _Atomic long calls;
    long at = turn("FAIL", place), call = at ? atomic_fetch_add(&calls, 1) + 1 : 0;
    if (!at || call < at) return 0;
    if (call == at) (void)!write(STDERR_FILENO, STRUCK, sizeof STRUCK - 1);
    errno = error;
    return 1;
}

/* Returns whether a file is being written for a checkpoint ("/.step-") or weights ("/.model."). */
static int is_part(int fd, const char *of)
{
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return readlink(link, path, sizeof path - 1) > 0 && strstr(path, of);
}

long syscall(long number, ...)
{
    long a[OPERANDS];
    va_list args;
    va_start(args, number);
    take_operands(args, a);
    va_end(args);
    if (number == SYS_futex) come("collective");
    return real_syscall(number, a);
}

ssize_t pwrite(int fd, const void *from, size_t n, off_t at)
{
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (!real) real = (ssize_t (*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite");
    come("write");
    if (getenv("SLOW_WEIGHTS") && is_part(fd, "/.model."))
        usleep((useconds_t)atol(getenv("SLOW_WEIGHTS")));
    if ((getenv("FAIL") || getenv("SLOW")) && is_part(fd, "/.step-")) {
        if (fails("write", ENOSPC)) return -1;
        if (getenv("SLOW")) usleep((useconds_t)atol(getenv("SLOW")));
    }
    return real(fd, from, n, at);
}

ssize_t pread(int fd, void *to, size_t n, off_t at)
{
    static ssize_t (*real)(int, void *, size_t, off_t);
    if (!real) real = (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    if (getenv("FAIL") && is_part(fd, "/step-") && fails("read", EIO)) return -1;
    return real(fd, to, n, at);
}

int fallocate(int fd, int mode, off_t at, off_t n)
{
    static int (*real)(int, int, off_t, off_t);
    if (!real) real = (int (*)(int, int, off_t, off_t))dlsym(RTLD_NEXT, "fallocate");
    return fails("room", ENOSPC) ? -1 : real(fd, mode, at, n);
}

int fsync(int fd)
{
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    come("sync");
    return fails("sync", EIO) ? -1 : real(fd);
}

int fdatasync(int fd)
{
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    come("sync");
    return fails("sync", EIO) ? -1 : real(fd);
}

int rename(const char *from, const char *to)
{
    static int (*real)(const char *, const char *);
    if (!real) real = (int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename");
    come("rename");
    if (fails("rename", EROFS)) return -1;
    int done = real(from, to);
    come("rename");
    return done;
}

int mkdir(const char *path, mode_t mode)
{
    static int (*real)(const char *, mode_t);
    if (!real) real = (int (*)(const char *, mode_t))dlsym(RTLD_NEXT, "mkdir");
    return strstr(path, "/.step-") && fails("folder", EROFS) ? -1 : real(path, mode);
}
