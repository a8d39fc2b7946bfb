/* memory.c -- a rank's arenas: whether its host has room for them, allocating their pages, copies
 * in and out.
 *
 * The parts that peers read are in memory files without a name, so that nothing is left behind
 * however a run ends.
 *
 * Invariants
 *  1. Memory is allocated in full at the start, so that a shortage shows here and not in a step.
 */
#define _GNU_SOURCE
#include "cpu.h"
#include "../zr_cores.h"
#include "../zr_disk.h"
#include "../zr_fail.h"
#include "../zr_file.h"
#include "../zr_log.h"
#include "../zr_memory.h"
#include "../zr_probe.h"
#include "../zr_profile.h"
#include "../zr_progress.h"
#include "../zr_rank.h"
#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, HUGE = 2 << 20 }; /* a huge page */

/* ---- room */

/* Lower *left (-1: no limit) to the bytes that the memory group at `path` still allows. Pages of
 * files not used for a while count as free. */
static void look_at_limit(const char *path, int version, int64_t *left)
{
    char file[2 * ZR_FILE];
    const char *names[2][4] = {
        {"memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file "},
        {"memory.max", "memory.current", "memory.stat", "inactive_file "},
    };
    const char *const *name = names[version - 1];
    int64_t value[3];
    for (int i = 0; i < 3; i++) {
        snprintf(file, sizeof file, "%.*s/%s", ZR_FILE, path, name[i]);
        value[i] = zr_number_in(file, i == 2 ? name[3] : "");
    }
    if (value[0] < 0 || value[1] < 0) return;
    int64_t here = value[0] - value[1] + (value[2] > 0 ? value[2] : 0);
    if (here < 0) here = 0;
    if (*left < 0 || here < *left) *left = here;
}

void zr_check_memory(zr *z, int ranks)
{
    int64_t each = z->t->room + z->p->hosted + z->p->overhead(z->threads) + z->p->overhead(1) +
                   zr_profile_bytes(z);
    if (zr_uses(z, ZR_HOST)) each += z->p->overhead(z->threads);
    int64_t available = zr_number_in("/proc/meminfo", "MemAvailable:"), group = -1;
    zr_groups("", "memory", look_at_limit, &group);
    if (each > INT64_MAX / ranks)
        zr_fail(z, ZR_ENVIRONMENT,
                "%d ranks of %" PRId64 " bytes: more than a memory file can hold", ranks, each);
    if (available >= 0 && ranks * each > available * 1024)
        zr_fail(z, ZR_ENVIRONMENT,
                "needs %.3f GiB of memory (%d ranks x %" PRId64 " bytes); this host has %.3f GiB "
                "available; end other programs, or generate with fewer ranks, a smaller "
                "train.micro_batch or a smaller model",
                zr_gib(ranks * each), ranks, each, zr_gib(available * 1024));
    if (group >= 0 && ranks * each > group)
        zr_fail(z, ZR_ENVIRONMENT,
                "needs %.3f GiB of memory (%d ranks x %" PRId64 " bytes); the memory group "
                "(cgroup) of this process allows %.3f GiB more; raise its limit",
                zr_gib(ranks * each), ranks, each, zr_gib(group));
}

/* ---- keeping ranks near their memory */

/* Pin one of `ranks` that share the allowed cores to its part of them, if these share no cache. Its
 * arena is then close to it. */
void zr_keep_apart(int rank, int ranks)
{
    zr_cpus allowed, mine;
    if (zr_cpus_allowed(&allowed) || !zr_cpus_of("", &allowed, rank, ranks, &mine)) return;
    sched_setaffinity(0, sizeof mine, (cpu_set_t *)&mine);
}

/* ---- mapping */

int64_t zr_pages(int64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

/* Allocate the pages now, so that a shortage of memory shows here and not in a step. */
static int populate(char *at, int64_t bytes)
{
    if (!madvise(at, (size_t)bytes, MADV_POPULATE_WRITE)) return 0;
    if (errno != EINVAL) return -1;
    for (int64_t i = 0; i < bytes; i += PAGE) ((volatile char *)at)[i] = 0; /* Linux before 5.14 */
    return 0;
}

/* Check a mapping. Huge pages, where the system has them, are faster to allocate and to access.
 * Core dumps leave arenas out, to stay small. */
static char *mapped(zr *z, void *at, int64_t bytes)
{
    if (at == MAP_FAILED)
        zr_fail(z, ZR_ENVIRONMENT,
                "cannot map %" PRId64 " bytes of an arena: %s; raise the limit of address space "
                "(ulimit -v)",
                bytes, strerror(errno));
    madvise(at, (size_t)bytes, MADV_HUGEPAGE);
    madvise(at, (size_t)bytes, MADV_DONTDUMP);
    return at;
}

char *zr_private(zr *z, int64_t bytes)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (!bytes) return NULL;
    return mapped(z, mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, flags, -1, 0), bytes);
}

int zr_memory(zr *z, int64_t bytes)
{
    int file = memfd_create("arenas", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, bytes))
        zr_fail(z, ZR_ENVIRONMENT,
                "cannot make a memory file of %" PRId64 " bytes: %s; raise the limit of file sizes "
                "(ulimit -f)",
                bytes, strerror(errno));
    return file;
}

char *zr_common(zr *z, int file, int64_t offset, char *at, int protection)
{
    int flags = MAP_SHARED | (at ? MAP_FIXED : 0);
    if (!z->t->common) return at;
    return mapped(z, mmap(at, (size_t)z->t->common, protection, flags, file, offset), z->t->common);
}

typedef struct slice { /* a part of an arena for one thread to allocate */
    char *at;
    int64_t bytes;
    int started, error;
    pthread_t thread;
} slice;

static void *take_slice(void *arg)
{
    slice *s = arg;
    s->error = populate(s->at, s->bytes) ? errno : 0;
    return NULL;
}

/* Allocate pages with all of the rank's threads; this thread does the parts for
 * which none can be started. */
void zr_take_pages(zr *z, char *at, int64_t bytes)
{
    int64_t each = (bytes / z->threads + HUGE) / HUGE * HUGE, n = (bytes + each - 1) / each;
    slice *s = zr_get(z, n, sizeof *s);
    int error = 0;
    for (int64_t i = n - 1; i >= 0; i--) {
        s[i].at = at + i * each;
        s[i].bytes = i < n - 1 ? each : bytes - i * each;
        s[i].started = i > 0 && !pthread_create(&s[i].thread, NULL, take_slice, &s[i]);
        if (!s[i].started) take_slice(&s[i]);
    }
    for (int64_t i = 0; i < n; i++) {
        if (s[i].started) pthread_join(s[i].thread, NULL);
        if (s[i].error) error = s[i].error;
    }
    free(s);
    if (error)
        zr_fail(z, ZR_ENVIRONMENT,
                "cannot allocate %" PRId64 " bytes of memory: %s; end other programs, or generate "
                "with fewer ranks or a smaller train.micro_batch",
                bytes, strerror(error));
}

/* ---- copies */

char *zr_arena_of(const zr *z, int queue) { return queue == ZR_HOST ? z->t->host : z->t->arena; }

void zr_read(zr *z, int queue, void *to, int64_t at, int64_t bytes)
{
    if (queue == ZR_STORE) zr_disk_move(z, ZR_LOAD, to, at, bytes);
    else memcpy(to, zr_arena_of(z, queue) + at, (size_t)bytes);
}

void zr_write(zr *z, int queue, int64_t at, const void *from, int64_t bytes)
{
    if (queue == ZR_STORE) zr_disk_move(z, ZR_STORE, (void *)from, at, bytes);
    else memcpy(zr_arena_of(z, queue) + at, from, (size_t)bytes);
}

char *zr_reach(const zr *z, int queue, int64_t at)
{
    return queue == ZR_STORE ? NULL : zr_arena_of(z, queue) + at;
}

zr_arrays zr_batch_place(zr *z, int64_t at)
{
    char *arena = z->t->arena + at;
    return (zr_arrays){.tokens = (int32_t *)(arena + z->p->tokens),
                       .targets = (int32_t *)(arena + z->p->targets),
                       .positions = (int32_t *)(arena + z->p->positions),
                       .documents = (int32_t *)(arena + z->p->documents),
                       .sample_targets = (int32_t *)(arena + z->p->sample_targets)};
}

void zr_batch_filled(zr *z, int64_t at, int64_t first)
{
    char *arena = z->t->arena + at;
    zr_arrays to = zr_batch_place(z, at);
    if (z->p->positions && zr_blocks(z->p) == 1) zr_positions(z->p, z->p->batch, &to);
    if (z->p->keys) zr_keys(z->p, first, (int64_t *)(arena + z->p->keys));
    if (z->p->sample_keys)
        zr_keys(z->p, zr_sample_of(z->p, first), (int64_t *)(arena + z->p->sample_keys));
    zr_progress_next(z);
}

/* ---- functions that this target does not need */

void zr_epilogue(zr *z) { (void)z; }

double zr_probe(zr *z, int what)
{
    (void)z, (void)what;
    return 0;
}
