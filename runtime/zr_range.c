/* zr_range.c -- checks of commands: offsets within arenas, valid numbers; names of queues; states
 * of a run; dead slots.
 *
 * A program changed by hand, or made by a faulty generator, ends here with a message that names the
 * command, instead of a memory fault or wrong weights.
 *
 * Invariants
 *  1. A command is checked before it is issued, an operand of a function before it is used.
 *  2. Both targets make the same checks: each begins every function of zr.h with one of these.
 */
#include "zr_memory.h"
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_groups.h"
#include "zr_options.h"
#include "zr_quantized.h"
#include "zr_queue.h"
#include "zr_range.h"
#include "zr_rank.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- numbers and their names */

void zr_find_column(zr *z)
{
    const zr_program *p = z->p;
    const char *here = p->target();
    char names[ZR_WHY] = "";
    for (z->column = 0; z->column < p->ncolumns; z->column++) {
        const char *name = p->columns[z->column].name;
        size_t n = strlen(names);
        if (!strcmp(name, here)) return;
        snprintf(names + n, sizeof names - n, "%s%s", n ? ", " : "", name);
    }
    zr_fail(
        z, ZR_ENVIRONMENT,
        "this is %s, but the program is made for %s; add %s to `targets` in the spec and generate "
        "it again",
        here, names, here);
}

#define ROW(queue, name, from, to, kernels, drained) {name, "waits for " name, from, to, kernels},
const zr_queue_row zr_queues[ZR_QUEUES] = {ZR_EACH_QUEUE(ROW)};
#undef ROW

const char *zr_queue_name(int queue) { return zr_queues[queue].name; }

/* ---- ranges */

enum { ARENA = ZR_ARENA, HOSTED = ZR_HOSTED, FILED = ZR_FILED, SHARED };

static const char *const names[] = {"the arena", "the host arena", "the file arena",
                                    "the part of the arena that peers read"};

typedef struct place { /* `count` pieces of `bytes`, `step` apart */
    const char *name;
    int arena;
    int64_t at, bytes, count, step;
} place;

static int64_t size_of(const zr *z, int arena)
{
    const zr_program *p = z->p;
    return (const int64_t[]){p->columns[z->column].arena, p->hosted, p->filed, p->shared}[arena];
}

/* Return whether all pieces are within `size`. No sum or product can overflow, because each factor
 * is compared with a size first. */
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
            "%" PRId64 "; regenerate the program",
            z->step + 1, what, zr_queue_name(queue), p.name, p.at, p.bytes, pieces, names[p.arena],
            size);
}

static void check_number(zr *z, const char *what, int queue, const char *name, int64_t n,
                         int64_t limit)
{
    if (n >= 0 && n < limit) return;
    zr_fail(z, ZR_DISAGREE,
            "step %" PRId64 ": %s on queue %s: %s %" PRId64 "; there are %" PRId64
            "; regenerate the program",
            z->step + 1, what, zr_queue_name(queue), name, n, limit);
}

void zr_check_queue(zr *z, const char *what, int queue)
{
    if (queue >= 0 && queue < ZR_QUEUES && zr_uses(z, queue)) return;
    zr_fail(z, ZR_DISAGREE,
            "step %" PRId64 ": %s on queue %d, which the program does not have; regenerate it",
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

void zr_check_copy(zr *z, int queue, int64_t from, int64_t to, int64_t bytes)
{
    zr_check_queue(z, "copy", queue);
    if (queue != ZR_MAIN && zr_queues[queue].from == zr_queues[queue].to)
        zr_fail(z, ZR_DISAGREE,
                "step %" PRId64 ": copy on queue %s, which does not copy; "
                "regenerate the program",
                z->step + 1, zr_queue_name(queue));
    check(z, "copy", queue, (place){"from", zr_queues[queue].from, from, bytes, 1, 0});
    check(z, "copy", queue, (place){"to", zr_queues[queue].to, to, bytes, 1, 0});
}

/* Check queue and group of a collective, which only the first `queues` queues may have. */
static void check_group(zr *z, const char *what, int queue, int queues, int group)
{
    zr_check_queue(z, what, queue);
    check_number(z, what, queue, "queue", queue, queues);
    check_number(z, what, queue, "group", group, z->p->ngroups);
}

/* Return the range that peers read. With one rank there are no peers,
 * and pieces may be anywhere. */
static int given(const zr *z) { return z->ranks > 1 ? SHARED : ARENA; }

static void check_pieces(zr *z, const char *what, int queue, int group, int64_t from,
                         int64_t from_step, int64_t to, int64_t to_step, int64_t bytes)
{
    check_group(z, what, queue, ZR_COLLECTIVES, group);
    check(z, what, queue, (place){"from", given(z), from, bytes, z->group[group].ranks, from_step});
    check(z, what, queue, (place){"to", ARENA, to, bytes, z->group[group].ranks, to_step});
}

void zr_check_gather(zr *z, int queue, int group, int64_t from, int64_t from_step, int64_t to,
                     int64_t to_step, int64_t bytes)
{
    check_pieces(z, "gather", queue, group, from, from_step, to, to_step, bytes);
}

void zr_check_exchange(zr *z, int queue, int group, int64_t from, int64_t from_step, int64_t to,
                       int64_t to_step, int64_t bytes)
{
    check_pieces(z, "exchange", queue, group, from, from_step, to, to_step, bytes);
}

int zr_inbox(zr *z, const char *what, int64_t to)
{
    const zr_program *p = z->p;
    for (int slot = 0; slot < p->inboxes; slot++)
        if (to == p->inbox + slot * p->inbox_step) return slot;
    zr_fail(z, ZR_DISAGREE,
            "step %" PRId64 ": %s: no slot of the inbox is at %" PRId64 "; regenerate the program",
            z->step + 1, what, to);
}

/* Check that received pieces do not reach into the next slot. */
static void check_slot(zr *z, const char *what, int queue, int64_t count, int64_t bytes)
{
    int64_t room = z->p->inbox_step;
    if (bytes <= room / count) return;
    zr_fail(z, ZR_DISAGREE,
            "step %" PRId64 ": %s on queue %s: %" PRId64 " x %" PRId64 " bytes come; a slot of the "
            "inbox has %" PRId64 "; regenerate the program",
            z->step + 1, what, zr_queue_name(queue), count, bytes, room);
}

void zr_check_alltoall(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to,
                       int64_t bytes)
{
    check_group(z, "alltoall", queue, ZR_COLLECTIVES, group);
    check(z, "alltoall", queue, (place){"at", given(z), at, bytes, z->group[group].ranks, step});
    if (z->reads_peers || z->ranks == 1) return; /* pieces are read in place */
    check(z, "alltoall", queue, (place){"to", ARENA, to, bytes, z->group[group].ranks, bytes});
    check_slot(z, "alltoall", queue, z->group[group].ranks, bytes);
}

void zr_check_reducescatter(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to,
                            int64_t bytes, int type)
{
    check_group(z, "reducescatter", queue, ZR_COLLECTIVES, group);
    check_number(z, "reducescatter", queue, "type", type, ZR_F16 + 1);
    check(z, "reducescatter", queue,
          (place){"at", given(z), at, bytes, z->group[group].ranks, step});
    check(z, "reducescatter", queue, (place){"to", ARENA, to, bytes, 1, 0});
    check_slot(z, "reducescatter", queue, 1, bytes);
}

void zr_check_done(zr *z, int queue, int group, int64_t at)
{
    check_group(z, "done", queue, ZR_SUM + 1, group);
    check(z, "done", queue, (place){"at", given(z), at, 1, 1, 0});
}

void zr_check_allreduce(zr *z, int queue, int group, int64_t from, int64_t to, int64_t n)
{
    int64_t bytes = n < 0 || n > INT64_MAX / 8 ? INT64_MAX : 8 * n;
    check_group(z, "allreduce", queue, ZR_COLLECTIVES, group);
    /* a CPU adds the terms of all ranks, as no program needs another group */
    check_number(z, "allreduce", queue, "group of all", group, 1);
    check(z, "allreduce", queue, (place){"from", given(z), from, bytes, 1, 0});
    check(z, "allreduce", queue, (place){"to", ARENA, to, bytes, 1, 0});
}

void zr_check_batch(zr *z, int64_t micro_batch, int64_t at)
{
    const zr_program *p = z->p;
    int64_t bytes = zr_batch_tokens(p) * (int64_t)sizeof(int32_t), all = bytes * zr_blocks(p);
    check_number(z, "batch", ZR_MAIN, "micro_batch", micro_batch, p->micro_batches * z->ranks);
    check(z, "batch", ZR_MAIN, (place){"at", ARENA, at, bytes, 1, 0});
    check(z, "batch", ZR_MAIN, (place){"tokens", ARENA, p->tokens + at, bytes, 1, 0});
    check(z, "batch", ZR_MAIN, (place){"targets", ARENA, p->targets + at, bytes, 1, 0});
    if (p->positions)
        check(z, "batch", ZR_MAIN, (place){"positions", ARENA, p->positions + at, bytes, 1, 0});
    if (p->documents)
        check(z, "batch", ZR_MAIN, (place){"documents", ARENA, p->documents + at, all, 1, 0});
    if (p->sample_targets)
        check(z, "batch", ZR_MAIN,
              (place){"sample_targets", ARENA, p->sample_targets + at, all, 1, 0});
    if (p->keys)
        check(z, "batch", ZR_MAIN, (place){"keys", ARENA, p->keys + at, 8 * p->batch, 1, 0});
    if (p->sample_keys)
        check(z, "batch", ZR_MAIN,
              (place){"sample_keys", ARENA, p->sample_keys + at, 8 * p->batch, 1, 0});
}

/* ---- states */

/* Return whether the rows of a tensor's masters cover every element of a shard once, in order, for
 * all instances. Elements without a row would be saved as zeros and not hashed. */
static int has_masters(const zr *z, const zr_tensor *t)
{
    const zr_program *p = z->p;
    int64_t slices = t->flat_step > 1 ? t->flat_step : 1, shard = 0, end = 0;
    int64_t instances = (int64_t)(t->count - 1) * t->flat_step + slices;
    for (const zr_state *s = p->states; s < p->states + p->nstates; s++) {
        if (s->flat != t->flat || strcmp(s->what, "master")) continue;
        if (!end) shard = s->shard;
        if (s->shard != shard || s->first != end || s->n <= 0 || s->n > shard - end ||
            s->count < instances || !s->hash)
            return 0;
        end += s->n;
    }
    int64_t n = zr_stored_elements(p, t);
    place own = {.at = t->offset, .bytes = n, .count = t->count, .step = t->offset_step};
    return end > 0 && end == shard && lies_within(&own, slices * p->ranks * shard);
}

void zr_check_states(zr *z)
{
    static const int arenas[ZR_QUEUES] = {[ZR_HOST] = HOSTED, [ZR_STORE] = FILED};
    const zr_program *p = z->p;
    for (const zr_state *s = p->states; s < p->states + p->nstates; s++) {
        int64_t n = s->n + (zr_parts(p, s) - 1) * s->shard;
        zr_check_queue(z, "state", s->queue);
        check_number(z, "state", s->queue, "type", s->type, ZR_F64 + 1);
        check(z, "state", s->queue,
              (place){s->what, arenas[s->queue], s->at, zr_width(s) * n, s->count, s->stride});
    }
    for (const zr_tensor *t = p->tensors; t < p->tensors + p->ntensors; t++)
        if (!has_masters(z, t))
            zr_fail(z, ZR_DISAGREE,
                    "step %" PRId64 ": tensor %s: the rows of its masters do not "
                    "have each of its elements once; regenerate the program",
                    z->step + 1, t->name);
}

/* ---- dead slots */

/* Return the slot around an offset. */
static void slot_of(zr *z, const char *what, int queue, int64_t *at, int64_t *bytes)
{
    for (int k = 0; k < z->p->nslots; k++) {
        const int64_t *s = z->p->slots[k], within = *at - s[0];
        if (within < 0 || within >= s[1] * s[2]) continue;
        *at -= within % s[1];
        *bytes = s[1];
        return;
    }
    zr_fail(z, ZR_DISAGREE,
            "step %" PRId64 ": %s on queue %s: no slot whose contents die is at %" PRId64
            "; regenerate the program",
            z->step + 1, what, zr_queue_name(queue), *at);
}

uint32_t zr_unmark(zr *z, const char *what, int queue, int64_t *i, int n)
{
    uint32_t last = 0;
    for (int k = 0; k < n; k++) {
        if (i[k] < ZR_LAST) continue;
        i[k] -= ZR_LAST;
        last |= 1u << k;
        int64_t at = i[k], bytes;
        zr_check_queue(z, what, queue);
        slot_of(z, what, queue, &at, &bytes);
        if (zr_queues[queue].from == ARENA) continue;
        zr_fail(z, ZR_DISAGREE,
                "step %" PRId64 ": %s on queue %s: operand %d is marked as a last "
                "use, but lies in no slot of the arena; regenerate the program",
                z->step + 1, what, zr_queue_name(queue), k);
    }
    return last;
}

void zr_dead(zr *z, const char *what, int queue, const int64_t *i, uint32_t last,
             zr_poisoner *poison)
{
    if (z->o->mode == ZR_EAGER) return;
    for (int k = 0; last >> k; k++) {
        int64_t at = i[k], bytes;
        if (!(last >> k & 1)) continue;
        slot_of(z, what, queue, &at, &bytes);
        poison(z, queue, at, bytes);
    }
}

/* ---- operands of functions */

static int queue_of(const zr *z, const void *k)
{
    int queue = ZR_QUEUES - 1;
    while (queue != ZR_MAIN && !(zr_queues[queue].kernels && z->queue[queue].k == k)) queue--;
    return queue;
}

void *zr_at(zr *z, void *k, void *a, const int64_t *i, int n, const char *name)
{
    int queue = queue_of(z, k), arena = zr_queues[queue].to;
    int64_t size = size_of(z, arena);
    if (i[n] >= 0 && i[n] < size) return (char *)a + i[n];
    zr_fail(z, ZR_DISAGREE,
            "step %" PRId64 ": call of %s on queue %s: operand %d is %" PRId64 "; %s has %" PRId64
            " bytes; regenerate the program",
            z->step + 1, name, zr_queue_name(queue), n, i[n], names[arena], size);
}
