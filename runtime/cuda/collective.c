/* collective.c -- the collectives of GPUs: NCCL moves whole pieces, and adds integers.
 *
 * Every queue has a communicator of its own, so that queues may overlap.
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

/* ---- NCCL's answers */

static void must(zr *z, int queue, ncclResult_t result, const char *what)
{
    ncclComm_t comm = z->t->comm[queue];
    while (result == ncclInProgress) {
        zr_leave_if_stopped(z);
        sched_yield();
        ncclResult_t asked = ncclCommGetAsyncError(comm, &result);
        if (asked != ncclSuccess) result = asked;
    }
    if (result != ncclSuccess)
        zr_fail(z, ZR_ENVIRONMENT, "step %" PRId64 ": %s: NCCL: %s (%s)", z->step + 1, what,
                ncclGetErrorString(result), ncclGetLastError(comm));
}

/* The watchdog asks no questions from here on, and again from there on. */
static void enter(zr *z) { pthread_mutex_lock(&z->t->watch.nccl); }

static void leave(zr *z) { pthread_mutex_unlock(&z->t->watch.nccl); }

/* ---- begin and end */

void zr_communicators(zr *z)
{
    zr_target *t = z->t;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;
    _Static_assert(sizeof id <= ZR_TOLD, "what zr_tell can tell");
    config.blocking = 0;
    /* ZR_MAIN adds some hundred bytes: one block, and no buffers of switches, will do */
    ncclConfig_t small = config;
    small.maxCTAs = small.nvlsCTAs = 1;
    zr_expect(z);
    if (z->rank == 0) must(z, ZR_MAIN, ncclGetUniqueId(&id), "meeting the other ranks");
    zr_tell(z, &id, sizeof id);
    must(z, ZR_MAIN, ncclCommInitRankConfig(&t->comm[ZR_MAIN], z->ranks, id, z->rank, &small),
         "meeting the other ranks");
    for (int queue = 0; queue <= ZR_REDUCE; queue++)
        if (queue != ZR_MAIN) {
            ncclResult_t result = ncclCommSplit(t->comm[ZR_MAIN], 0, z->rank, &t->comm[queue],
                                                &config);
            must(z, ZR_MAIN, result, "making a communicator");
            must(z, queue, ncclInProgress, "making a communicator");
        }
    zr_met(z);
    pthread_mutex_lock(&t->watch.lock);
    t->watch.communicators = 1;
    pthread_mutex_unlock(&t->watch.lock);
}

void zr_part(zr *z)
{
    for (int queue = ZR_REDUCE; queue >= 0; queue--) {
        must(z, queue, ncclCommFinalize(z->t->comm[queue]), "parting");
        ncclCommDestroy(z->t->comm[queue]);
    }
}

/* ---- pieces */

/* A piece of the rank's own, from one place of the arena to another. */
static void keep(zr *z, cudaStream_t stream, int64_t to, int64_t from, int64_t bytes)
{
    if (to == from) return;
    zr_cuda(z, cudaMemcpyAsync(z->t->arena + to, z->t->arena + from, (size_t)bytes,
                               cudaMemcpyDeviceToDevice, stream), "copying a piece");
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
        must(z, queue, ncclBroadcast(a + mine, a + to + r * to_step, (size_t)bytes, ncclUint8, r,
                                     comm, stream), what);
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
        must(z, queue, ncclSend(a + from + p * step, (size_t)bytes, ncclUint8, p, comm,
                                stream), what);
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

void zr_gather(zr *z, int queue, int64_t from, int64_t from_step, int64_t to, int64_t to_step,
               int64_t bytes)
{
    zr_check_gather(z, queue, from, from_step, to, to_step, bytes);
    cudaStream_t stream = zr_on(z, queue, "a gather");
    zr_note *note = zr_note_begin(z, queue, "gather", ZR_MOVES);
    int64_t mine = from + z->rank * from_step;
    char *a = z->t->arena;
    if (z->ranks == 1) {
        keep(z, stream, to, mine, bytes);
    } else if (to_step == bytes) {
        enter(z);
        must(z, queue, ncclAllGather(a + mine, a + to, (size_t)bytes, ncclUint8,
                                     z->t->comm[queue], stream), "a gather");
        leave(z);
    } else {
        broadcast(z, queue, stream, mine, to, to_step, bytes);
    }
    counted(z, queue, bytes);
    zr_note_end(z, note);
}

void zr_alltoall(zr *z, int queue, int64_t at, int64_t step, int64_t to, int64_t bytes)
{
    zr_check_alltoall(z, queue, at, step, to, bytes);
    cudaStream_t stream = zr_on(z, queue, "an all-to-all");
    zr_note *note = zr_note_begin(z, queue, "alltoall", ZR_MOVES);
    int64_t mine = at + z->rank * step;
    if (z->ranks == 1) to = mine;         /* where it lies */
    exchange(z, queue, stream, at, step, to, bytes);
    keep(z, stream, to + z->rank * bytes, mine, bytes);
    for (int r = 0; r < z->ranks; r++) z->t->sources[queue][r] = z->t->arena + to + r * bytes;
    counted(z, queue, bytes);
    zr_note_end(z, note);
}

/* A whole shard is a reduce-scatter. Pieces of it do not lie side by side: each rank's is reduced
 * to its owner. */
void zr_reducescatter(zr *z, int queue, int64_t at, int64_t step, int64_t to, int64_t bytes,
                      int type)
{
    zr_check_reducescatter(z, queue, at, step, to, bytes, type);
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
    z->t->sources[queue][0] = a + to;
    counted(z, queue, bytes);
    zr_note_end(z, note);
}

const void *const *zr_sources(zr *z, int queue) { return z->t->sources[queue]; }

/* The exchange was complete on the stream when every peer had this rank's pieces. */
void zr_done(zr *z, int queue) { zr_check_queue(z, "done", queue); }

void zr_allreduce(zr *z, int queue, int64_t from, int64_t to, int64_t n)
{
    zr_check_allreduce(z, queue, from, to, n);
    cudaStream_t stream = zr_on(z, queue, "an all-reduce");
    zr_note *note = zr_note_begin(z, queue, "allreduce", ZR_MOVES);
    char *a = z->t->arena;
    if (z->ranks == 1) {
        keep(z, stream, to, from, 8 * n);
    } else {
        enter(z);
        must(z, queue, ncclAllReduce(a + from, a + to, (size_t)n, ncclInt64, ncclSum,
                                     z->t->comm[queue], stream), "an all-reduce");
        leave(z);
    }
    counted(z, queue, 8 * n);
    zr_note_end(z, note);
}
