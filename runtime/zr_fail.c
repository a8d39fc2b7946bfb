/* zr_fail.c -- how a run ends early: one process reports the reason, and every rank exits.
 *
 * Invariants
 *  1. The first failure is the one reported, and its exit code is the program's.
 *  2. All other files may call this one; it calls none of them.
 */
#define _GNU_SOURCE
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_net.h"
#include "zr_rank.h"
#include "zr_shared.h"
#include "zr_text.h"
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

double zr_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void zr_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Write to stderr, without waiting for a reader that is asleep. */
static void say(const char *line, int n)
{
    struct pollfd ready = {STDERR_FILENO, POLLOUT, 0};
    if (poll(&ready, 1, ZR_SAY_MS) == 0) return;
    ssize_t written = write(STDERR_FILENO, line, (size_t)n);
    (void)written; /* there is nobody left to tell */
}

/* Make every rank exit. */
static void stop(zr *z)
{
    atomic_store(&z->shared->stop, 1);
    zr_wake(&z->shared->stop);
    for (int r = 0; r < z->ranks; r++)
        for (int q = 0; q <= ZR_QUEUES; q++) {
            zr_wake(&z->shared->seat[r].turn[q].arrived);
            zr_wake(&z->shared->seat[r].turn[q].read);
        }
}

void zr_end(zr *z, int code, const char *line, int n)
{
    int32_t none = 0;
    char text[ZR_LINE + 1];
    if (z->shared && !atomic_compare_exchange_strong(&z->shared->code, &none, code)) return;
    int live = z->shared && *line != '\n' && atomic_load(&z->shared->live);
    n = snprintf(text, sizeof text, "%s%.*s", live ? "\n" : "", n, line);
    zr_printable(text, "\n");
    say(text, n);
    if (z->shared) stop(z);
}

static const char *with_host(char who[ZR_HOST_NAME], int n)
{
    n += snprintf(who + n, (size_t)(ZR_HOST_NAME - n), " on host ");
    gethostname(who + n, (size_t)(ZR_HOST_NAME - n - 1));
    who[ZR_HOST_NAME - 1] = 0;
    return who;
}

const char *zr_who(const zr *z, int rank, char who[ZR_HOST_NAME])
{
    int n = snprintf(who, ZR_HOST_NAME, "rank %d", rank);
    return z->far ? with_host(who, n) : who;
}

const char *zr_speaker(const zr *z, char who[ZR_HOST_NAME])
{
    if (z->rank >= 0) return zr_who(z, z->rank, who);
    if (!z->net->rank) return z->p->name;
    return with_host(who, snprintf(who, ZR_HOST_NAME, "rank %.9s", z->net->rank));
}

/* Block all threads but the first that exits. Its exit ends the others, but it may still have to
 * print its message. */
static void leave_alone(void)
{
    static atomic_flag leaving = ATOMIC_FLAG_INIT;
    while (atomic_flag_test_and_set(&leaving)) pause();
}

void zr_fail(zr *z, int code, const char *format, ...)
{
    char line[ZR_LINE], who[ZR_HOST_NAME];
    leave_alone();
    int n = snprintf(line, ZR_LINE, "%s: ", zr_speaker(z, who));
    va_list args;
    va_start(args, format);
    n += vsnprintf(line + n, (size_t)(ZR_LINE - n - 1), format, args);
    va_end(args);
    if (n > ZR_LINE - 2) n = ZR_LINE - 2;
    zr_printable(line, "");
    line[n++] = '\n';
    zr_end(z, code, line, n);
    _exit(code);
}

void zr_leave_if_stopped(zr *z)
{
    if (!atomic_load_explicit(&z->shared->stop, memory_order_relaxed)) return;
    leave_alone();
    _exit(ZR_DIED);
}

int zr_code_of(int error)
{
    static const int host[] = {EDQUOT, EFBIG, EIO, EMFILE, ENFILE, ENOMEM, ENOSPC, EROFS, ESTALE};
    for (size_t i = 0; i < sizeof host / sizeof *host; i++)
        if (error == host[i]) return ZR_ENVIRONMENT;
    return ZR_USER;
}

void *zr_get(zr *z, int64_t n, size_t size)
{
    void *at = calloc(n > 0 ? (size_t)n : 1, size);
    if (!at) zr_fail(z, ZR_ENVIRONMENT, "out of memory");
    return at;
}

void zr_temp(zr *z, int of, const char *path)
{
    snprintf(z->shared->temp[of], ZR_FILE, "%s", path ? path : "");
}
