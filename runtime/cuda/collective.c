/* collective.c -- the collectives of GPUs: NCCL moves whole pieces, and adds integers.
 *
 * Every queue that has collectives has a communicator of its own, so that queues may overlap.
 *
 * Invariants
 *  1. What is moved is bytes; what is summed is int64: no result depends on NCCL's algorithm, but
 *     that of zr_reducescatter (train.reduction: fast), whose algorithm is fixed (device.c).
 *  2. No call blocks: whoever waits can be stopped, and the watchdog can speak.
 *  3. A rank's piece of its own does not go through NCCL.
 */
#define _GNU_SOURCE
#include "cuda.h"
#include <inttypes.h>
#include <sched.h>
#include <time.h>

/* ---- NCCL's answers */

/* A peer's end is an error of NCCL, too. */
static void ask_for_deaths(zr *z)
{
    zr_plane_grace(z);
    zr_plane_look(z);
}

static void must(zr *z, int queue, ncclResult_t result, const char *what)
{
    ncclComm_t comm = z->t->comm[queue];
    while (result == ncclInProgress) {
        zr_leave_if_stopped(z);
        sched_yield();
        ncclResult_t asked = ncclCommGetAsyncError(comm, &result);
        if (asked != ncclSuccess) result = asked;
    }
    if (result == ncclSuccess) return;
    ask_for_deaths(z);
    zr_fail(z, z->t->connected ? ZR_STUCK : ZR_ENVIRONMENT, "step %" PRId64 ": %s: NCCL: %s (%s)",
            z->step + 1, what, ncclGetErrorString(result), ncclGetLastError(comm));
}

/* The watchdog asks no questions from here on, and again from there on. */
static void enter(zr *z) { pthread_mutex_lock(&z->t->within); }

static void leave(zr *z) { pthread_mutex_unlock(&z->t->within); }

/* What the watchdog asks. A question ends a call that went on by itself, which two threads must not
 * do at once: while the rank's own thread is within NCCL, it asks. */
static void look(zr *z)
{
    if (pthread_mutex_trylock(&z->t->within)) return;
    for (int queue = 0; queue <= ZR_REDUCE; queue++) {
        ncclResult_t state = ncclSuccess;
        if (!z->t->comm[queue]) continue;
        ncclResult_t asked = ncclCommGetAsyncError(z->t->comm[queue], &state);
        if (asked == ncclSuccess && (state == ncclSuccess || state == ncclInProgress)) continue;
        ask_for_deaths(z);
        zr_fail(z, ZR_STUCK,
                "step %" PRId64 ", queue %s: NCCL: %s; look for a rank or a network that is gone",
                z->step + 1, zr_queue_name(queue),
                ncclGetErrorString(asked == ncclSuccess ? state : asked));
    }
    leave(z);
}

/* ---- begin and end */

void zr_communicators(zr *z)
{
    zr_target *t = z->t;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;
    _Static_assert(sizeof id <= ZR_TOLD, "what zr_tell can tell");
    config.blocking = 0;
    if (z->p->blocks) config.maxCTAs = config.nvlsCTAs = z->p->blocks;
    /* beside other queues ZR_MAIN adds some hundred bytes: one block, and no buffers of switches */
    ncclConfig_t small = config;
    if (zr_uses(z, ZR_GATHER) || zr_uses(z, ZR_REDUCE)) small.maxCTAs = small.nvlsCTAs = 1;
    zr_issued(z, ZR_MAIN, "NCCL's start");
    zr_expect(z);
    if (z->rank == 0) must(z, ZR_MAIN, ncclGetUniqueId(&id), "meeting the other ranks");
    zr_tell(z, &id, sizeof id);
    must(z, ZR_MAIN, ncclCommInitRankConfig(&t->comm[ZR_MAIN], z->ranks, id, z->rank, &small),
         "meeting the other ranks");
    for (int queue = 0; queue <= ZR_REDUCE; queue++)
        if (queue != ZR_MAIN && zr_uses(z, queue)) {
            ncclResult_t result =
                ncclCommSplit(t->comm[ZR_MAIN], 0, z->rank, &t->comm[queue], &config);
            must(z, ZR_MAIN, result, "making a communicator");
            must(z, queue, ncclInProgress, "making a communicator");
        }
    zr_met(z);
    t->connected = 1;
    pthread_mutex_init(&t->within, NULL);
    zr_watch_also(z, look);
}

void zr_part(zr *z)
{
    for (int queue = ZR_REDUCE; queue >= 0; queue--) {
        if (!z->t->comm[queue]) continue;
        must(z, queue, ncclCommFinalize(z->t->comm[queue]), "parting");
        ncclCommDestroy(z->t->comm[queue]);
    }
}

/* ---- pieces */

/* A piece of the rank's own, from one place of the arena to another. */
static void keep(zr *z, cudaStream_t stream, int64_t to, int64_t from, int64_t bytes)
{
    if (to == from) return;
    zr_cuda(z,
            cudaMemcpyAsync(z->t->arena + to, z->t->arena + from, (size_t)bytes,
                            cudaMemcpyDeviceToDevice, stream),
            "copying a piece");
}

/* Every rank's piece, this rank's from `mine`, to to + its number * to_step: a ring each,
 * issued as one group. Sends to every peer would pass a node's wire once for each. */
static void broadcast(zr *z, int queue, cudaStream_t stream, int64_t mine, int64_t to,
                      int64_t to_step, int64_t bytes)
{
    static const char what[] = "a gather of pieces";
    ncclComm_t comm = z->t->comm[queue];
    char *a = z->t->arena;
    enter(z);
    must(z, queue, ncclGroupStart(), what);
    for (int r = 0; r < z->ranks; r++)
        must(z, queue,
             ncclBroadcast(a + mine, a + to + r * to_step, (size_t)bytes, ncclUint8, r, comm,
                           stream),
             what);
    must(z, queue, ncclGroupEnd(), what);
    leave(z);
}

/* To every peer p the piece at from + p*step; from it the piece for to + p*bytes. */
static void exchange(zr *z, int queue, cudaStream_t stream, int64_t from, int64_t step, int64_t to,
                     int64_t bytes)
{
    static const char what[] = "an exchange of pieces";
    ncclComm_t comm = z->t->comm[queue];
    char *a = z->t->arena;
    if (z->ranks == 1) return;
    enter(z);
    must(z, queue, ncclGroupStart(), what);
    for (int i = 1; i < z->ranks; i++) {
        int p = (z->rank + i) % z->ranks, q = (z->rank + z->ranks - i) % z->ranks;
        must(z, queue, ncclSend(a + from + p * step, (size_t)bytes, ncclUint8, p, comm, stream),
             what);
        must(z, queue, ncclRecv(a + to + q * bytes, (size_t)bytes, ncclUint8, q, comm, stream),
             what);
    }
    must(z, queue, ncclGroupEnd(), what);
    leave(z);
}

static void counted(zr *z, int queue, int64_t bytes)
{
    z->queue[queue].bytes += (z->ranks - 1) * bytes;
    z->queue[queue].messages++;
}

/* ---- collectives */

void zr_gather(zr *z, int queue, int group, int64_t from, int64_t from_step, int64_t to,
               int64_t to_step, int64_t bytes)
{
    zr_check_gather(z, queue, group, from, from_step, to, to_step, bytes);
    cudaStream_t stream = zr_on(z, queue, "a gather");
    zr_note *note = zr_note_begin(z, queue, "gather", ZR_MOVES);
    int64_t mine = from + z->rank * from_step;
    char *a = z->t->arena;
    if (z->ranks == 1) {
        keep(z, stream, to, mine, bytes);
    } else if (to_step == bytes) {
        enter(z);
        must(z, queue,
             ncclAllGather(a + mine, a + to, (size_t)bytes, ncclUint8, z->t->comm[queue], stream),
             "a gather");
        leave(z);
    } else {
        broadcast(z, queue, stream, mine, to, to_step, bytes);
    }
    counted(z, queue, bytes);
    zr_note_end(z, note);
}

/* What a slot of the inbox has of each rank. */
static const void **sources_of(zr *z, const char *what, int64_t to)
{
    return z->t->sources + (int64_t)zr_inbox(z, what, to) * z->ranks;
}

void zr_alltoall(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to, int64_t bytes)
{
    zr_check_alltoall(z, queue, group, at, step, to, bytes);
    cudaStream_t stream = zr_on(z, queue, "an all-to-all");
    zr_note *note = zr_note_begin(z, queue, "alltoall", ZR_MOVES);
    int64_t mine = at + z->rank * step;
    const void **sources = sources_of(z, "alltoall", to);
    if (z->ranks == 1) to = mine; /* where it lies */
    exchange(z, queue, stream, at, step, to, bytes);
    keep(z, stream, to + z->rank * bytes, mine, bytes);
    for (int r = 0; r < z->ranks; r++) sources[r] = z->t->arena + to + r * bytes;
    counted(z, queue, bytes);
    zr_note_end(z, note);
}

/* A whole shard is a reduce-scatter. Pieces of it do not lie side by side: each rank's is reduced
 * to its owner. */
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
    ncclComm_t comm = z->t->comm[queue];
    char *a = z->t->arena;
    enter(z);
    if (step == bytes) {
        must(z, queue, ncclReduceScatter(a + at, a + to, n, kind, ncclSum, comm, stream), what);
    } else {
        must(z, queue, ncclGroupStart(), what);
        for (int p = 0; p < z->ranks; p++)
            must(z, queue, ncclReduce(a + at + p * step, a + to, n, kind, ncclSum, p, comm, stream),
                 what);
        must(z, queue, ncclGroupEnd(), what);
    }
    leave(z);
    sources_of(z, "reducescatter", to)[0] = a + to;
    counted(z, queue, bytes);
    zr_note_end(z, note);
}

const void *const *zr_sources(zr *z, int64_t to) { return sources_of(z, "sources", to); }

/* The exchange was complete on its stream when every peer had this rank's pieces. */
void zr_done(zr *z, int queue, int group, int64_t to, int64_t at)
{
    uint32_t last = zr_unmark(z, "done", queue, &at, 1);
    zr_check_done(z, queue, group, at);
    (void)zr_inbox(z, "done", to);
    zr_dead(z, "done", queue, &at, last);
}

void zr_allreduce(zr *z, int queue, int group, int64_t from, int64_t to, int64_t n)
{
    zr_check_allreduce(z, queue, group, from, to, n);
    cudaStream_t stream = zr_on(z, queue, "an all-reduce");
    zr_note *note = zr_note_begin(z, queue, "allreduce", ZR_MOVES);
    char *a = z->t->arena;
    if (z->ranks == 1 || z->apart) {
        keep(z, stream, to, from, 8 * n);
    } else {
        enter(z);
        must(z, queue,
             ncclAllReduce(a + from, a + to, (size_t)n, ncclInt64, ncclSum, z->t->comm[queue],
                           stream),
             "an all-reduce");
        leave(z);
    }
    counted(z, queue, 8 * n);
    zr_note_end(z, note);
}
