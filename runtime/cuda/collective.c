/* collective.c -- collectives on GPUs: NCCL moves whole pieces and adds integers.
 *
 * A group has one communicator for each queue on which it has collectives, so that queues may
 * overlap. The first communicator is that of all ranks on ZR_MAIN; the others are split from it. A
 * rank's number in a communicator is its place in the group.
 *
 * Invariants
 *  1. Only bytes are moved and only int64 are summed, so no result depends on NCCL's algorithm,
 *     except that of zr_reducescatter (train.reduction: fast), whose algorithm is fixed (device.c).
 *  2. No call blocks, so that a rank that waits can be stopped, and the watchdog can report.
 *  3. The own piece of an all-to-all, and all pieces of a group of one rank, are copied
 *     without NCCL.
 */
#define _GNU_SOURCE
#include "cuda.h"
#include "../zr_clock.h"
#include "../zr_fail.h"
#include "../zr_groups.h"
#include "../zr_net.h"
#include "../zr_profile.h"
#include "../zr_queue.h"
#include "../zr_range.h"
#include "../zr_rank.h"
#include "../zr_seats.h"
#include "../zr_shared.h"
#include "../zr_watch.h"
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <time.h>

enum { ZR_WHOSE = 80 };

static int communicators(const zr *z) { return ZR_COLLECTIVES * z->p->ngroups; }

static ncclComm_t *comm_of(const zr *z, int queue, int group)
{
    return z->t->comm + queue * z->p->ngroups + group;
}

/* Return the text that a message adds for a group other than all ranks. */
static const char *whose(const zr *z, int group, char text[ZR_WHOSE])
{
    text[0] = 0;
    if (group) snprintf(text, ZR_WHOSE, ", group %s", z->p->groups[group].name);
    return text;
}

/* ---- results of NCCL */

/* Check for ranks that have died, because NCCL reports that as an error too. */
static void ask_for_deaths(zr *z)
{
    zr_plane_grace(z);
    zr_plane_look(z);
}

static void must(zr *z, int queue, int group, ncclResult_t result, const char *what)
{
    char text[ZR_WHOSE];
    ncclComm_t comm = *comm_of(z, queue, group);
    while (result == ncclInProgress) {
        zr_leave_if_stopped(z);
        sched_yield();
        ncclResult_t asked = ncclCommGetAsyncError(comm, &result);
        if (asked != ncclSuccess) result = asked;
    }
    if (result == ncclSuccess) return;
    ask_for_deaths(z);
    zr_fail(z, z->t->connected ? ZR_STUCK : ZR_ENVIRONMENT, "step %" PRId64 ": %s%s: NCCL: %s (%s)",
            z->step + 1, what, whose(z, group, text), ncclGetErrorString(result),
            ncclGetLastError(comm));
}

/* Keep the watchdog from calling NCCL between enter and leave. */
static void enter(zr *z) { pthread_mutex_lock(&z->t->within); }

static void leave(zr *z) { pthread_mutex_unlock(&z->t->within); }

/* The watchdog's check of NCCL. Asking for an error completes a pending call, which two threads
 * must not do at once; while the rank's own thread is inside NCCL, that thread asks instead. */
static void look(zr *z)
{
    if (pthread_mutex_trylock(&z->t->within)) return;
    for (int i = 0; i < communicators(z); i++) {
        char text[ZR_WHOSE];
        ncclResult_t state = ncclSuccess;
        if (!z->t->comm[i]) continue;
        ncclResult_t asked = ncclCommGetAsyncError(z->t->comm[i], &state);
        if (asked == ncclSuccess && (state == ncclSuccess || state == ncclInProgress)) continue;
        ask_for_deaths(z);
        zr_fail(z, ZR_STUCK,
                "step %" PRId64
                ", queue %s%s: NCCL: %s; check for a rank or a network that is down",
                z->step + 1, zr_queue_name(i / z->p->ngroups), whose(z, i % z->p->ngroups, text),
                ncclGetErrorString(asked == ncclSuccess ? state : asked));
    }
    leave(z);
}

/* ---- start and end */

/* Return whether a group has collectives on a queue. */
static int meets(const zr *z, int queue, int group)
{
    if (z->group[group].ranks == 1) return 0;
    return z->p->meets ? (int)(z->p->meets[group] >> queue & 1) : zr_uses(z, queue);
}

/* Split a group's communicator. Each instance of a group has its own color: its first rank. */
static void split(zr *z, int queue, int group, ncclConfig_t *config)
{
    static const char what[] = "creating a communicator";
    const zr_members *of = z->group + group;
    ncclComm_t *first = comm_of(z, ZR_MAIN, 0), *made = comm_of(z, queue, group);
    int ranks = 0, place = -1;
    must(z, ZR_MAIN, 0, ncclCommSplit(*first, of->rank[0], of->place, made, config), what);
    /* It returns ncclSuccess while the split is in progress, up to NCCL 2.30 at least. */
    must(z, ZR_MAIN, 0, ncclInProgress, what);
    must(z, queue, group, ncclInProgress, what);
    must(z, queue, group, ncclCommCount(*made, &ranks), what);
    must(z, queue, group, ncclCommUserRank(*made, &place), what);
    if (ranks != of->ranks || place != of->place)
        zr_fail(
            z, ZR_DISAGREE,
            "queue %s: NCCL counts this rank as number %d of %d in group %s, but it is number %d "
            "of %d",
            zr_queue_name(queue), place, ranks, z->p->groups[group].name, of->place, of->ranks);
}

/* Register the arena with a communicator, so that peers read and write it in place. A capture does
 * this for the collectives of a graph. */
static void register_arena(zr *z, int queue, int group)
{
    static const char what[] = "registering the arena";
    int i = queue * z->p->ngroups + group;
    if (!z->t->registers || !z->t->comm[i]) return;
    must(z, queue, group, ncclInProgress, what);
    must(z, queue, group,
         ncclCommRegister(z->t->comm[i], z->t->arena, (size_t)z->p->columns[z->column].arena,
                          &z->t->handle[i]),
         what);
}

void zr_communicators(zr *z)
{
    zr_target *t = z->t;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;
    _Static_assert(sizeof id <= ZR_TOLD, "what zr_tell can tell");
    config.blocking = 0;
    if (z->p->blocks) config.maxCTAs = config.nvlsCTAs = z->p->blocks;
    /* with other communicators present the first one only adds a few hundred bytes:
     * one block, no NVLS buffers */
    ncclConfig_t small = config;
    t->comm = zr_get(z, communicators(z), sizeof(ncclComm_t));
    t->handle = zr_get(z, communicators(z), sizeof(void *));
    if (zr_uses(z, ZR_GATHER) || zr_uses(z, ZR_REDUCE) || z->p->meets)
        small.maxCTAs = small.nvlsCTAs = 1;
    zr_issued(z, ZR_MAIN, "NCCL's start");
    zr_expect(z);
    if (z->rank == 0) must(z, ZR_MAIN, 0, ncclGetUniqueId(&id), "connecting to the other ranks");
    zr_tell(z, &id, sizeof id);
    must(z, ZR_MAIN, 0,
         ncclCommInitRankConfig(comm_of(z, ZR_MAIN, 0), z->ranks, id, z->rank, &small),
         "connecting to the other ranks");
    for (int i = 1; i < communicators(z); i++) {
        int queue = i / z->p->ngroups, group = i % z->p->ngroups;
        if (meets(z, queue, group)) split(z, queue, group, &config);
    }
    for (int i = 0; i < communicators(z); i++)
        register_arena(z, i / z->p->ngroups, i % z->p->ngroups);
    zr_met(z);
    t->connected = 1;
    pthread_mutex_init(&t->within, NULL);
    zr_watch_also(z, look);
}

void zr_part(zr *z)
{
    for (int i = communicators(z) - 1; i >= 0; i--) {
        int queue = i / z->p->ngroups, group = i % z->p->ngroups;
        if (!z->t->comm[i]) continue;
        if (z->t->handle[i])
            must(z, queue, group, ncclCommDeregister(z->t->comm[i], z->t->handle[i]), "parting");
        must(z, queue, group, ncclCommFinalize(z->t->comm[i]), "parting");
        (void)ncclCommDestroy(z->t->comm[i]); /* nothing is left to lose */
    }
}

/* ---- moving pieces */

/* Return the communicator for a collective; fails if the group has none on this queue. */
static ncclComm_t on(zr *z, int queue, int group, const char *what)
{
    ncclComm_t comm = *comm_of(z, queue, group);
    if (!comm)
        zr_fail(z, ZR_DISAGREE,
                "step %" PRId64
                ": %s: group %s has no collectives on queue %s; regenerate the program",
                z->step + 1, what, z->p->groups[group].name, zr_queue_name(queue));
    return comm;
}

/* Copy the rank's own piece from one place of the arena to another. */
static void keep(zr *z, cudaStream_t stream, int64_t to, int64_t from, int64_t bytes)
{
    if (to == from) return;
    zr_cuda(z,
            cudaMemcpyAsync(z->t->arena + to, z->t->arena + from, (size_t)bytes,
                            cudaMemcpyDeviceToDevice, stream),
            "copying a piece");
}

/* Gather every rank's piece to to + place * to_step, with this rank's at `mine`: one
 * broadcast ring for each piece, issued together. Sends to every peer would cross a node's
 * link once for each of them. */
static void broadcast(zr *z, int queue, int group, cudaStream_t stream, int64_t mine, int64_t to,
                      int64_t to_step, int64_t bytes)
{
    static const char what[] = "a gather of pieces";
    ncclComm_t comm = on(z, queue, group, what);
    char *a = z->t->arena;
    enter(z);
    must(z, queue, group, ncclGroupStart(), what);
    for (int m = 0; m < z->group[group].ranks; m++)
        must(z, queue, group,
             ncclBroadcast(a + mine, a + to + m * to_step, (size_t)bytes, ncclUint8, m, comm,
                           stream),
             what);
    must(z, queue, group, ncclGroupEnd(), what);
    leave(z);
}

/* Send the piece at from + p*step to the peer at every place p, and receive
 * its piece to to + p*to_step. */
static void exchange(zr *z, int queue, int group, cudaStream_t stream, int64_t from, int64_t step,
                     int64_t to, int64_t to_step, int64_t bytes)
{
    static const char what[] = "an exchange of pieces";
    int ranks = z->group[group].ranks, mine = z->group[group].place;
    char *a = z->t->arena;
    if (ranks == 1) return;
    ncclComm_t comm = on(z, queue, group, what);
    enter(z);
    must(z, queue, group, ncclGroupStart(), what);
    for (int i = 1; i < ranks; i++) {
        int p = (mine + i) % ranks, q = (mine + ranks - i) % ranks;
        must(z, queue, group,
             ncclSend(a + from + p * step, (size_t)bytes, ncclUint8, p, comm, stream), what);
        must(z, queue, group,
             ncclRecv(a + to + q * to_step, (size_t)bytes, ncclUint8, q, comm, stream), what);
    }
    must(z, queue, group, ncclGroupEnd(), what);
    leave(z);
}

static void counted(zr *z, int queue, int group, int64_t bytes)
{
    z->queue[queue].bytes += (z->group[group].ranks - 1) * bytes;
    z->queue[queue].far += z->group[group].far * bytes;
    z->queue[queue].messages++;
}

/* Count the bytes of a ring, which leaves a host only once, however many ranks that host has. */
static void counted_ring(zr *z, int queue, int group, int64_t bytes)
{
    const zr_members *of = z->group + group;
    int64_t all = (of->ranks - 1) * bytes;
    z->queue[queue].bytes += all;
    z->queue[queue].far += of->far ? all / (of->ranks - of->far) : 0;
    z->queue[queue].messages++;
}

/* ---- collectives */

void zr_gather(zr *z, int queue, int group, int64_t from, int64_t from_step, int64_t to,
               int64_t to_step, int64_t bytes)
{
    zr_check_gather(z, queue, group, from, from_step, to, to_step, bytes);
    cudaStream_t stream = zr_on(z, queue, "a gather");
    zr_note *note = zr_note_begin(z, queue, "gather", ZR_MOVES);
    int64_t mine = from + z->group[group].place * from_step;
    char *a = z->t->arena;
    if (z->group[group].ranks == 1) {
        keep(z, stream, to, mine, bytes);
    } else if (to_step == bytes) {
        ncclComm_t comm = on(z, queue, group, "a gather");
        enter(z);
        must(z, queue, group,
             ncclAllGather(a + mine, a + to, (size_t)bytes, ncclUint8, comm, stream), "a gather");
        leave(z);
    } else {
        broadcast(z, queue, group, stream, mine, to, to_step, bytes);
    }
    counted(z, queue, group, bytes);
    zr_note_end(z, note);
}

void zr_exchange(zr *z, int queue, int group, int64_t from, int64_t from_step, int64_t to,
                 int64_t to_step, int64_t bytes)
{
    uint32_t last = zr_unmark(z, "exchange", queue, &from, 1);
    zr_check_exchange(z, queue, group, from, from_step, to, to_step, bytes);
    cudaStream_t stream = zr_on(z, queue, "an exchange");
    zr_note *note = zr_note_begin(z, queue, "exchange", ZR_MOVES);
    int64_t place = z->group[group].place;
    exchange(z, queue, group, stream, from, from_step, to, to_step, bytes);
    keep(z, stream, to + place * to_step, from + place * from_step, bytes);
    counted(z, queue, group, bytes);
    zr_note_end(z, note);
    zr_dead(z, "exchange", queue, &from, last, zr_poison);
}

/* Return the sources of an inbox slot, one for each place. */
static const void **sources_of(zr *z, const char *what, int64_t to)
{
    return z->t->sources + (int64_t)zr_inbox(z, what, to) * z->ranks;
}

void zr_alltoall(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to, int64_t bytes)
{
    zr_check_alltoall(z, queue, group, at, step, to, bytes);
    cudaStream_t stream = zr_on(z, queue, "an all-to-all");
    zr_note *note = zr_note_begin(z, queue, "alltoall", ZR_MOVES);
    int ranks = z->group[group].ranks, place = z->group[group].place;
    int64_t mine = at + place * step;
    const void **sources = sources_of(z, "alltoall", to);
    if (ranks == 1) to = mine; /* read it in place */
    exchange(z, queue, group, stream, at, step, to, bytes, bytes);
    keep(z, stream, to + place * bytes, mine, bytes);
    for (int m = 0; m < ranks; m++) sources[m] = z->t->arena + to + m * bytes;
    counted(z, queue, group, bytes);
    zr_note_end(z, note);
}

/* A whole shard is one reduce-scatter. Pieces of shards are not adjacent, so each
 * is reduced to its owner. */
void zr_reducescatter(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to,
                      int64_t bytes, int type)
{
    zr_check_reducescatter(z, queue, group, at, step, to, bytes, type);
    static const char what[] = "a reduce-scatter";
    static const ncclDataType_t kinds[] = {ncclFloat32, ncclBfloat16, ncclFloat16};
    ncclDataType_t kind = kinds[type];
    size_t n = (size_t)bytes / (type == ZR_F32 ? 4 : 2);
    cudaStream_t stream = zr_on(z, queue, what);
    zr_note *note = zr_note_begin(z, queue, "reducescatter", ZR_MOVES);
    ncclComm_t comm = on(z, queue, group, what);
    char *a = z->t->arena;
    enter(z);
    if (step == bytes) {
        must(z, queue, group, ncclReduceScatter(a + at, a + to, n, kind, ncclSum, comm, stream),
             what);
    } else {
        must(z, queue, group, ncclGroupStart(), what);
        for (int p = 0; p < z->group[group].ranks; p++)
            must(z, queue, group,
                 ncclReduce(a + at + p * step, a + to, n, kind, ncclSum, p, comm, stream), what);
        must(z, queue, group, ncclGroupEnd(), what);
    }
    leave(z);
    sources_of(z, "reducescatter", to)[0] = a + to;
    counted_ring(z, queue, group, bytes);
    zr_note_end(z, note);
}

const void *const *zr_sources(zr *z, int64_t to) { return sources_of(z, "sources", to); }

/* Nothing to wait for: the exchange completed on its stream when every
 * peer had this rank's pieces. */
void zr_done(zr *z, int queue, int group, int64_t to, int64_t at)
{
    uint32_t last = zr_unmark(z, "done", queue, &at, 1);
    zr_check_done(z, queue, group, at);
    (void)zr_inbox(z, "done", to);
    zr_dead(z, "done", queue, &at, last, zr_poison);
}

void zr_allreduce(zr *z, int queue, int group, int64_t from, int64_t to, int64_t n)
{
    zr_check_allreduce(z, queue, group, from, to, n);
    cudaStream_t stream = zr_on(z, queue, "an all-reduce");
    zr_note *note = zr_note_begin(z, queue, "allreduce", ZR_MOVES);
    char *a = z->t->arena;
    group = zr_summed(z, group);
    if (group < 0 || z->group[group].ranks == 1) {
        keep(z, stream, to, from, 8 * n);
    } else {
        ncclComm_t comm = on(z, queue, group, "an all-reduce");
        enter(z);
        must(z, queue, group,
             ncclAllReduce(a + from, a + to, (size_t)n, ncclInt64, ncclSum, comm, stream),
             "an all-reduce");
        leave(z);
    }
    if (!z->apart) counted(z, queue, group, 8 * n);
    zr_note_end(z, note);
}
