/* advice.c -- loaded before libc: prints each madvise of a program as a line on stderr, `advice
 * process-thread at bytes`, and does it. */
#define _GNU_SOURCE
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

int madvise(void *at, size_t bytes, int advice)
{
    char line[128];
    int n = snprintf(line, sizeof line, "%d %d-%ld %zu %zu\n", advice, getpid(),
                     syscall(SYS_gettid), (size_t)at, bytes);
    if (write(STDERR_FILENO, line, (size_t)n) < n) return -1;
    return (int)syscall(SYS_madvise, at, bytes, advice);
}
