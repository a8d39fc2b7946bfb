/* ranks.c -- the ranks of one host: starting, watching and stopping them; their arenas.
 *
 * The program forks a process for every rank and stays behind as the parent, which owns no arena,
 * touches no token and only waits for children and signals. All arenas lie in one memory file that
 * has no name, so that nothing is left behind however a run ends.
 *
 * Invariants
 *  1. A rank never outlives the parent; the parent returns only when every rank is gone.
 *  2. The first failure is the one that is told, and its exit code is the program's.
 *  3. A file registered with zr_temp is removed unless the run got past it or another run has it.
 */
#define _GNU_SOURCE
#include "../zr_int.h"
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LINE = 1024, GRACE_MS = 300 };     /* how long ranks have to leave by themselves */

double zr_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- failing */

static void say(const char *line, int n)
{
    ssize_t written = write(STDERR_FILENO, line, (size_t)(n < LINE ? n : LINE - 1));
    (void)written;                        /* nobody is left to tell */
}

/* Tells every rank to leave; the first code stays. Returns 1 for the first. */
static int stop(zr *z, int code)
{
    int32_t none = 0;
    int first = atomic_compare_exchange_strong(&z->shared->code, &none, code);
    atomic_store(&z->shared->stop, 1);
    zr_wake(&z->shared->stop);
    for (int r = 0; r < z->ranks; r++)
        for (int q = 0; q <= ZR_QUEUES; q++) {
            zr_wake(&z->shared->seat[r].turn[q].arrived);
            zr_wake(&z->shared->seat[r].turn[q].read);
        }
    return first;
}

void zr_fail(zr *z, int code, const char *format, ...)
{
    char line[LINE];
    int n = z->rank < 0 ? snprintf(line, LINE, "%s: ", z->p->name)
                        : snprintf(line, LINE, "%srank %d: ", z->log.live ? "\n" : "", z->rank);
    va_list args;
    va_start(args, format);
    n += vsnprintf(line + n, (size_t)(LINE - n - 1), format, args);
    va_end(args);
    if (n > LINE - 2) n = LINE - 2;
    line[n++] = '\n';
    if (!z->shared || stop(z, code)) say(line, n);
    _exit(code);
}

void zr_leave_if_stopped(zr *z)
{
    if (atomic_load_explicit(&z->shared->stop, memory_order_relaxed)) _exit(ZR_DIED);
}

void zr_temp(zr *z, const char *path)
{
    snprintf(z->shared->temp, ZR_FILE, "%s", path ? path : "");
}

/* ---- is there room, and who started us */

/* The number behind `key` in a file of lines "key number"; key "": the first word of the file.
 * -1 where there is none ("max", too). */
static int64_t look_up(const char *path, const char *key)
{
    FILE *f = fopen(path, "re");
    char line[256];
    int64_t value = -1, found;
    size_t n = strlen(key);
    while (f && value < 0 && fgets(line, sizeof line, f))
        if (!strncmp(line, key, n) && sscanf(line + n, " %" SCNd64, &found) == 1) value = found;
    if (f) fclose(f);
    return value;
}

/* Bytes that the memory group at `path` still allows; -1: no limit. Pages of files that were not
 * used for a while can be had back. */
static int64_t left_in_group(const char *path, int version)
{
    char file[ZR_FILE + 64];
    const char *names[2][4] = {
        {"memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file "},
        {"memory.max", "memory.current", "memory.stat", "inactive_file "},
    };
    const char *const *name = names[version - 1];
    int64_t value[3];
    for (int i = 0; i < 3; i++) {
        snprintf(file, sizeof file, "%s/%s", path, name[i]);
        value[i] = look_up(file, i == 2 ? name[3] : "");
    }
    if (value[0] < 0 || value[1] < 0) return -1;
    int64_t left = value[0] - value[1] + (value[2] > 0 ? value[2] : 0);
    return left > 0 ? left : 0;
}

static int64_t less(int64_t a, int64_t b) { return a < 0 || (b >= 0 && b < a) ? b : a; }

/* The least that our memory group and those above it allow; -1: no limit. */
static int64_t left_in_groups(void)
{
    FILE *f = fopen("/proc/self/cgroup", "re");
    char line[ZR_FILE], path[ZR_FILE + 32];
    int64_t left = -1;
    while (f && fgets(line, sizeof line, f)) {
        int version = !strncmp(line, "0::", 3) ? 2 : 1;
        char *group = version == 2 ? line + 3 : strstr(line, ":memory:");
        if (!group) continue;
        group += version == 2 ? 0 : 8;
        group[strcspn(group, "\n")] = 0;
        snprintf(path, sizeof path, "/sys/fs/cgroup%s%s", version == 2 ? "" : "/memory", group);
        for (char *end; strlen(path) >= strlen("/sys/fs/cgroup"); *end = 0) {
            left = less(left, left_in_group(path, version));
            end = strrchr(path, '/');
        }
    }
    if (f) fclose(f);
    return left;
}

static double gib(int64_t bytes) { return (double)bytes / (1 << 30); }

void zr_check_memory(zr *z)
{
    int64_t each = z->room + z->p->overhead((int)z->o->threads) + z->p->overhead(1);
    int64_t available = look_up("/proc/meminfo", "MemAvailable:"), group = left_in_groups();
    if (each > INT64_MAX / z->ranks)
        zr_fail(z, ZR_ENVIRONMENT, "%d ranks of %" PRId64 " bytes: more than a file can hold",
                z->ranks, each);
    if (available >= 0 && z->ranks * each > available * 1024)
        zr_fail(z, ZR_ENVIRONMENT,
                "needs %.3f GiB of memory (%d ranks x %" PRId64 " bytes); this host has %.3f GiB "
                "available; end other programs, or generate with fewer ranks, a smaller "
                "micro_batch or a smaller model",
                gib(z->ranks * each), z->ranks, each, gib(available * 1024));
    if (group >= 0 && z->ranks * each > group)
        zr_fail(z, ZR_ENVIRONMENT,
                "needs %.3f GiB of memory (%d ranks x %" PRId64 " bytes); the memory group "
                "(cgroup) of this process allows %.3f GiB more; raise its limit",
                gib(z->ranks * each), z->ranks, each, gib(group));
}

void zr_check_launcher(zr *z)
{
    static const char *const names[] = {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
                                        "SLURM_STEP_NUM_TASKS"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *text = getenv(names[i]);
        if (!text || !*text) continue;
        long size = strtol(text, NULL, 10);
        if (size == 1) continue;          /* one task: as if there were none */
        if (size != z->ranks)
            zr_fail(z, ZR_DISAGREE,
                    "the launcher has %s ranks (%s), this program is made for %d; generate it with "
                    "cluster.ranks=%s, or unset %s to start all ranks on this host",
                    text, names[i], z->ranks, text, names[i]);
        zr_fail(z, ZR_DISAGREE,
                "%s=%s: this program starts its %d ranks itself; start it once, "
                "without a launcher",
                names[i], text, z->ranks);
    }
}

/* ---- a rank's beginnings */

void zr_handshake(zr *z)
{
    zr_seat *mine = &z->shared->seat[z->rank], *first = &z->shared->seat[0];
    mine->abi = z->p->abi;
    snprintf(mine->plan, sizeof mine->plan, "%s", z->p->plan);
    snprintf(mine->object, sizeof mine->object, "%s", z->p->object());
    zr_barrier(z);
    if (strcmp(mine->plan, first->plan) || mine->abi != first->abi)
        zr_fail(z, ZR_DISAGREE,
                "runs plan %s, rank 0 runs plan %s; start the same binary everywhere", mine->plan,
                first->plan);
    if (strcmp(mine->object, first->object))
        zr_fail(z, ZR_DISAGREE,
                "has kernels for %s, rank 0 for %s; set ZK_ISA to the lesser one on all ranks",
                mine->object, first->object);
}

/* Takes the pages now, so that a lack of memory shows here and not in a step. */
static int populate(char *at, int64_t bytes)
{
    if (!madvise(at, (size_t)bytes, MADV_POPULATE_WRITE)) return 0;
    if (errno != EINVAL) return -1;
    for (int64_t i = 0; i < bytes; i += 4096) ((volatile char *)at)[i] = 0; /* Linux before 5.14 */
    return 0;
}

static char *mapped(zr *z, void *at, int64_t bytes)
{
    if (at == MAP_FAILED)
        zr_fail(z, ZR_ENVIRONMENT, "mapping %" PRId64 " bytes of an arena: %s", bytes,
                strerror(errno));
    return at;
}

/* What peers read of a rank's arena, at `at` (NULL: anywhere). */
static char *map_common(zr *z, int rank, char *at, int protection)
{
    if (!z->common) return at;
    return mapped(z, mmap(at, (size_t)z->common, protection, MAP_SHARED | (at ? MAP_FIXED : 0),
                          z->memory, rank * z->common), z->common);
}

/* One range: the common part from the memory file, the rest private, in huge pages where the
 * system has them: they are quicker to take and to reach. */
static char *map_arena(zr *z)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *at = mmap(NULL, (size_t)z->room, PROT_READ | PROT_WRITE, flags, -1, 0);
    mapped(z, at, z->room);
    madvise(at, (size_t)z->room, MADV_HUGEPAGE);
    return map_common(z, z->rank, at, PROT_READ | PROT_WRITE);
}

void zr_arena(zr *z)
{
    z->peer = calloc((size_t)z->ranks, sizeof *z->peer);
    if (!z->peer) zr_fail(z, ZR_ENVIRONMENT, "out of memory");
    z->arena = map_arena(z);
    if (populate(z->arena, z->room))
        zr_fail(z, ZR_ENVIRONMENT, "taking %" PRId64 " bytes of memory: %s", z->room,
                strerror(errno));
    for (int r = 0; r < z->ranks; r++)
        z->peer[r] = r == z->rank ? z->arena
                                  : map_common(z, r, NULL, z->unmap ? PROT_NONE : PROT_READ);
    z->ready = zr_now();
}

/* ---- the parent */

/* A rank's whole life. */
static void live(zr *z, int rank, pid_t parent, const sigset_t *before, void (*body)(zr *z))
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(ZR_DIED);
    /* Such a signal often goes to the whole group; the parent decides for all. */
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    sigprocmask(SIG_SETMASK, before, NULL);
    z->rank = rank;
    body(z);
    fflush(NULL);
    _exit(ZR_OK);
}

static void share(zr *z)
{
    size_t bytes = sizeof *z->shared + (size_t)z->ranks * sizeof *z->shared->seat;
    z->memory = memfd_create("arenas", MFD_CLOEXEC);
    if (z->memory < 0 || ftruncate(z->memory, z->ranks * z->common))
        zr_fail(z, ZR_ENVIRONMENT, "a memory file of %" PRId64 " bytes: %s", z->ranks * z->common,
                strerror(errno));
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        zr_fail(z, ZR_ENVIRONMENT, "mapping %zu bytes: %s", bytes, strerror(errno));
    z->shared = at;
}

/* Rank `rank` has ended: what that means for the rest. */
static void judge(zr *z, int rank, int status)
{
    char line[LINE];
    int n = 0;
    if (WIFSIGNALED(status))
        n = snprintf(line, LINE,
                     "%s: rank %d was ended by signal %d (%s)%s; all ranks are stopped\n",
                     z->p->name, rank, WTERMSIG(status), strsignal(WTERMSIG(status)),
                     WTERMSIG(status) == SIGKILL ? ", perhaps for want of memory" : "");
    else if (WEXITSTATUS(status))
        n = snprintf(line, LINE, "%s: rank %d ended with exit code %d; all ranks are stopped\n",
                     z->p->name, rank, WEXITSTATUS(status));
    if (n && stop(z, ZR_DIED)) say(line, n);
}

/* Takes in every rank that has ended. Returns how many are left. */
static int reap(zr *z, pid_t *pid)
{
    int status, left = 0;
    pid_t gone;
    while ((gone = waitpid(-1, &status, WNOHANG)) > 0)
        for (int r = 0; r < z->ranks; r++)
            if (pid[r] == gone) {
                pid[r] = 0;
                judge(z, r, status);
            }
    for (int r = 0; r < z->ranks; r++) left += pid[r] > 0;
    return left;
}

static void interrupted(zr *z, int signal)
{
    char line[LINE];
    int n = snprintf(line, LINE, "\n%s: stopped by signal %d (%s) in step %" PRId64 "\n",
                     z->p->name, signal, strsignal(signal), atomic_load(&z->shared->step));
    if (stop(z, 128 + signal)) say(line, n);
}

/* Waits until all ranks have ended; those that do not leave in time after a stop are killed. */
static int watch(zr *z, pid_t *pid, const sigset_t *signals)
{
    char why[ZR_WHY];
    double deadline = 0;
    struct timespec slice = {0, 50000000};
    while (reap(z, pid) > 0) {
        int signal = sigtimedwait(signals, NULL, &slice);
        if (signal > 0 && signal != SIGCHLD) interrupted(z, signal);
        if (!atomic_load(&z->shared->stop)) continue;
        if (deadline == 0) deadline = zr_now() + 1e-3 * GRACE_MS;
        for (int r = 0; zr_now() > deadline && r < z->ranks; r++)
            if (pid[r] > 0) kill(pid[r], SIGKILL);
    }
    /* All ranks are gone, and their locks: a file that is locked is another run's. */
    if (z->shared->temp[0]) zr_save_clear(z->shared->temp, why);
    return atomic_load(&z->shared->code);
}

int zr_ranks(zr *z, void (*body)(zr *z))
{
    sigset_t signals, before;
    pid_t *pid = calloc((size_t)z->ranks, sizeof *pid), parent = getpid();
    if (!pid) zr_fail(z, ZR_ENVIRONMENT, "out of memory");
    sigemptyset(&signals);
    for (size_t i = 0; i < 4; i++)
        sigaddset(&signals, (const int[]){SIGCHLD, SIGINT, SIGTERM, SIGHUP}[i]);
    sigprocmask(SIG_BLOCK, &signals, &before);
    signal(SIGXFSZ, SIG_IGN);             /* then a file too large is an error of write */
    share(z);
    fflush(NULL);
    for (int r = 0; r < z->ranks; r++) {
        pid[r] = fork();
        if (pid[r] == 0) live(z, r, parent, &before, body);
        if (pid[r] < 0) {
            char line[LINE];
            int n = snprintf(line, LINE, "%s: starting rank %d: %s\n", z->p->name, r,
                             strerror(errno));
            say(line, n);
            stop(z, ZR_ENVIRONMENT);
            break;
        }
    }
    int code = watch(z, pid, &signals);
    free(pid);
    return code;
}
