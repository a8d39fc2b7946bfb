/* zr_range.c -- what a command may touch: places within its arenas, numbers that there are.
 *
 * A program that was changed by hand, or made by a generator that errs, ends here, naming the
 * command, and not with a fault of memory or with wrong weights.
 *
 * Invariants
 *  1. A command is looked at before it is issued, an operand of a function before it is used.
 *  2. Both targets look at the same: each begins every function of zr.h with one of these.
 */
#include "zr_int.h"
#include <inttypes.h>
#include <stdio.h>

enum { ARENA, SHARED, HOSTED, FILED };

static const char *const names[] = {"the arena", "the part of the arena that peers read",
                                    "the host arena", "the file arena"};

typedef struct place {                    /* `count` pieces of `bytes`, one every `step` */
    const char *name;
    int arena;
    int64_t at, bytes, count, step;
} place;

static int64_t size_of(const zr *z, int arena)
{
    const zr_program *p = z->p;
    return (const int64_t[]){p->columns[z->column].arena, p->shared, p->hosted, p->filed}[arena];
}

/* No sum or product here can overflow: each factor is compared with a size first. */
static int lies_within(const place *p, int64_t size)
{
    int64_t last = p->count - 1;
    if (p->at < 0 || p->at > size || p->bytes < 0 || p->bytes > size || p->step < 0) return 0;
    if (last > 0 && p->step > size / last) return 0;
    return p->at + last * p->step <= size - p->bytes;
}

static void check(zr *z, const char *what, int queue, place p)
{
    char pieces[64] = "";
    int64_t size = size_of(z, p.arena);
    if (lies_within(&p, size)) return;
    if (p.count > 1)
        snprintf(pieces, sizeof pieces, " in each of %" PRId64 " pieces, one every %" PRId64,
                 p.count, p.step);
    zr_fail(z, ZR_DISAGREE,
            "step %" PRId64 ": %s on queue %s: `%s` is at %" PRId64 ", %" PRId64 " bytes%s; %s has "
            "%" PRId64 "; generate the program anew", z->step + 1, what, zr_queue_name(queue),
            p.name, p.at, p.bytes, pieces, names[p.arena], size);
}

static void check_number(zr *z, const char *what, int queue, const char *name, int64_t n,
                         int64_t limit)
{
    if (n >= 0 && n < limit) return;
    zr_fail(z, ZR_DISAGREE,
            "step %" PRId64 ": %s on queue %s: %s %" PRId64 "; there are %" PRId64
            "; generate the program anew", z->step + 1, what, zr_queue_name(queue), name, n, limit);
}

void zr_check_queue(zr *z, const char *what, int queue)
{
    if (queue >= 0 && queue < ZR_QUEUES && zr_uses(z, queue)) return;
    zr_fail(z, ZR_DISAGREE,
            "step %" PRId64 ": %s on queue %d, which the program has not; generate it anew",
            z->step + 1, what, queue);
}

void zr_check_event(zr *z, const char *what, int queue, int event)
{
    zr_check_queue(z, what, queue);
    check_number(z, what, queue, "event", event, z->p->events);
}

void zr_check_call(zr *z, const char *name, int queue, int n)
{
    zr_check_queue(z, name, queue);
    if (n > ZR_OPERANDS)
        zr_fail(z, ZR_DISAGREE, "%s with %d operands; at most %d", name, n, ZR_OPERANDS);
}

void zr_check_drop(zr *z, int queue, int64_t at, int64_t bytes)
{
    zr_check_queue(z, "drop", queue);
    check(z, "drop", queue, (place){"at", queue == ZR_HOST ? HOSTED : ARENA, at, bytes, 1, 0});
}

void zr_check_copy(zr *z, int queue, int64_t from, int64_t to, int64_t bytes)
{
    static const struct { int copies, from, to; } ways[ZR_QUEUES] = {
        [ZR_UP] = {1, HOSTED, ARENA},   [ZR_DOWN] = {1, ARENA, HOSTED},
        [ZR_LOAD] = {1, FILED, HOSTED}, [ZR_FETCH] = {1, FILED, HOSTED},
        [ZR_STORE] = {1, HOSTED, FILED},
    };
    zr_check_queue(z, "copy", queue);
    if (!ways[queue].copies)
        zr_fail(z, ZR_DISAGREE, "step %" PRId64 ": copy on queue %s, which copies nothing; "
                "generate the program anew", z->step + 1, zr_queue_name(queue));
    check(z, "copy", queue, (place){"from", ways[queue].from, from, bytes, 1, 0});
    check(z, "copy", queue, (place){"to", ways[queue].to, to, bytes, 1, 0});
}

/* What peers read; a rank alone has none, and its pieces may lie anywhere. */
static int given(const zr *z) { return z->ranks > 1 ? SHARED : ARENA; }

void zr_check_gather(zr *z, int queue, int64_t from, int64_t from_step, int64_t to,
                     int64_t to_step, int64_t bytes)
{
    zr_check_queue(z, "gather", queue);
    check(z, "gather", queue, (place){"from", given(z), from, bytes, z->ranks, from_step});
    check(z, "gather", queue, (place){"to", ARENA, to, bytes, z->ranks, to_step});
}

void zr_check_alltoall(zr *z, int queue, int64_t at, int64_t step, int64_t to, int64_t bytes)
{
    zr_check_queue(z, "alltoall", queue);
    check(z, "alltoall", queue, (place){"at", given(z), at, bytes, z->ranks, step});
    if (zr_is_gpu && z->ranks > 1)
        check(z, "alltoall", queue, (place){"to", ARENA, to, bytes, z->ranks, bytes});
}

void zr_check_reducescatter(zr *z, int queue, int64_t at, int64_t step, int64_t to,
                            int64_t bytes, int type)
{
    zr_check_queue(z, "reducescatter", queue);
    check_number(z, "reducescatter", queue, "type", type, ZR_F16 + 1);
    check(z, "reducescatter", queue, (place){"at", given(z), at, bytes, z->ranks, step});
    check(z, "reducescatter", queue, (place){"to", ARENA, to, bytes, 1, 0});
}

void zr_check_allreduce(zr *z, int queue, int64_t from, int64_t to, int64_t n)
{
    int64_t bytes = n < 0 || n > INT64_MAX / 8 ? INT64_MAX : 8 * n;
    zr_check_queue(z, "allreduce", queue);
    check(z, "allreduce", queue, (place){"from", given(z), from, bytes, 1, 0});
    check(z, "allreduce", queue, (place){"to", ARENA, to, bytes, 1, 0});
}

void zr_check_batch(zr *z, int64_t grain, int64_t at)
{
    const zr_program *p = z->p;
    int64_t bytes = p->batch * p->sequence * (int64_t)sizeof(int32_t);
    check_number(z, "batch", ZR_MAIN, "grain", grain, p->grains * z->ranks);
    check(z, "batch", ZR_MAIN, (place){"at", ARENA, at, bytes, 1, 0});
    check(z, "batch", ZR_MAIN, (place){"tokens", ARENA, p->tokens + at, bytes, 1, 0});
    check(z, "batch", ZR_MAIN, (place){"targets", ARENA, p->targets + at, bytes, 1, 0});
}

/* ---- operands of functions */

static int queue_of(const zr *z, const void *k)
{
    int queue = ZR_HOST;
    while (queue != ZR_MAIN && z->queue[queue].k != k) queue--;
    return queue;
}

void *zr_at(zr *z, void *k, void *a, const int64_t *i, int n, const char *name)
{
    int queue = queue_of(z, k), arena = queue == ZR_HOST ? HOSTED : ARENA;
    int64_t size = size_of(z, arena);
    if (i[n] >= 0 && i[n] < size) return (char *)a + i[n];
    zr_fail(z, ZR_DISAGREE,
            "step %" PRId64 ": call of %s on queue %s: operand %d is %" PRId64 "; %s has %" PRId64
            " bytes; generate the program anew", z->step + 1, name, zr_queue_name(queue), n, i[n],
            names[arena], size);
}
