/* collective.c -- the collectives of ranks on one host: reading peers' arenas where they lie.
 *
 * Every collective on a queue has a number, the same on all ranks, counted by each rank for itself.
 * seat[r].turn[q].arrived = n says: rank r's pieces of collective n can be read. read = n says:
 * rank r has read all it needs of collective n. Counters only grow, and wrap together.
 *
 * Invariants
 *  1. A rank writes only its own seat and its own arena.
 *  2. Who waits sleeps in the kernel: ranks may outnumber cores. A sleeper looks at the stop flag
 *     several times a second.
 */
#define _GNU_SOURCE
#include "../zr_int.h"
#include <limits.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PART = 512 };                      /* int64 of an allreduce that are summed at a time */

/* ---- waiting */

void zr_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void set(_Atomic uint32_t *word, uint32_t n)
{
    atomic_store(word, n);
    zr_wake(word);
}

/* Until *word has reached n. */
static void until(zr *z, _Atomic uint32_t *word, uint32_t n)
{
    const struct timespec slice = {0, 100000000};
    for (;;) {
        uint32_t seen = atomic_load(word);
        if ((int32_t)(seen - n) >= 0) return;
        zr_leave_if_stopped(z);
        syscall(SYS_futex, word, FUTEX_WAIT, seen, &slice, NULL, 0);
    }
}

static void all_arrived(zr *z, int queue, uint32_t n)
{
    for (int r = 0; r < z->ranks; r++) until(z, &z->shared->seat[r].turn[queue].arrived, n);
}

/* This rank has read what it needs; until every peer has, too. */
static void all_read(zr *z, int queue, uint32_t n)
{
    set(&z->shared->seat[z->rank].turn[queue].read, n);
    for (int r = 0; r < z->ranks; r++) until(z, &z->shared->seat[r].turn[queue].read, n);
}

static uint32_t arrive(zr *z, int queue, uint32_t *turn)
{
    set(&z->shared->seat[z->rank].turn[queue].arrived, ++*turn);
    return *turn;
}

void zr_barrier(zr *z)
{
    all_arrived(z, ZR_QUEUES, arrive(z, ZR_QUEUES, &z->barriers));
}

/* ---- ZR_UNMAP_PEERS: peers' arenas can be read only while a collective is in progress */

static void protect(zr *z, int protection)
{
    for (int r = 0; r < z->ranks; r++)
        if (r != z->rank && mprotect(z->peer[r], (size_t)z->common, protection))
            zr_fail(z, ZR_ENVIRONMENT, "changing the protection of rank %d's arena", r);
}

/* by: +1 at a collective's begin, -1 at its end; queues overlap. */
static void readable(zr *z, int by)
{
    if (!z->unmap) return;
    pthread_mutex_lock(&z->lock);
    int before = z->readable;
    z->readable += by;
    if (!before || !z->readable) protect(z, z->readable ? PROT_READ : PROT_NONE);
    pthread_mutex_unlock(&z->lock);
}

/* ---- gather */

static void run_gather(zr *z, int queue, const zr_command *c)
{
    int64_t from = c->i[0], from_step = c->i[1], to = c->i[2], to_step = c->i[3], bytes = c->i[4];
    zr_queue *q = &z->queue[queue];
    const struct timespec delay = {z->delay / 1000000, z->delay % 1000000 * 1000};
    if (z->delay) nanosleep(&delay, NULL);
    uint32_t n = arrive(z, queue, &q->turn);
    readable(z, +1);
    for (int i = 0; i < z->ranks; i++) {
        int r = (z->rank + i) % z->ranks;     /* not all at the same peer at once */
        char *there = z->peer[r] + from + r * from_step, *here = z->arena + to + r * to_step;
        until(z, &z->shared->seat[r].turn[queue].arrived, n);
        if (here != there) memcpy(here, there, (size_t)bytes);
        if (r != z->rank) q->bytes += bytes;
    }
    readable(z, -1);
    q->messages++;
    all_read(z, queue, n);
}

void zr_gather(zr *z, int queue, int64_t from, int64_t from_step, int64_t to, int64_t to_step,
               int64_t bytes)
{
    zr_push(z, queue, &(zr_command){run_gather, NULL, {from, from_step, to, to_step, bytes}});
}

/* ---- all to all, read in place */

static void run_alltoall(zr *z, int queue, const zr_command *c)
{
    int64_t at = c->i[0], step = c->i[1], bytes = c->i[2];
    zr_queue *q = &z->queue[queue];
    all_arrived(z, queue, arrive(z, queue, &q->turn));
    readable(z, +1);
    for (int r = 0; r < z->ranks; r++) q->sources[r] = z->peer[r] + at + z->rank * step;
    q->bytes += (z->ranks - 1) * bytes;
    q->messages++;
}

void zr_alltoall(zr *z, int queue, int64_t at, int64_t step, int64_t bytes)
{
    zr_push(z, queue, &(zr_command){run_alltoall, NULL, {at, step, bytes}});
}

const void *const *zr_sources(zr *z, int queue) { return z->queue[queue].sources; }

static void run_done(zr *z, int queue, const zr_command *c)
{
    (void)c;
    readable(z, -1);
    for (int r = 0; r < z->ranks; r++) z->queue[queue].sources[r] = NULL;
    all_read(z, queue, z->queue[queue].turn);
}

void zr_done(zr *z, int queue) { zr_push(z, queue, &(zr_command){.run = run_done}); }

/* ---- allreduce */

/* to[n] = sum over ranks of from[n], n <= PART; all have read before anything is written, so
 * that `to` may be `from`. */
static void reduce_part(zr *z, int queue, int64_t from, int64_t to, int64_t n)
{
    uint64_t sum[PART] = {0};
    uint32_t turn = arrive(z, queue, &z->queue[queue].turn);
    readable(z, +1);
    for (int r = 0; r < z->ranks; r++) {
        const uint64_t *there = (const uint64_t *)(z->peer[r] + from);
        until(z, &z->shared->seat[r].turn[queue].arrived, turn);
        for (int64_t i = 0; i < n; i++) sum[i] += there[i];
    }
    readable(z, -1);
    all_read(z, queue, turn);
    memcpy(z->arena + to, sum, (size_t)n * sizeof *sum);
}

static void run_allreduce(zr *z, int queue, const zr_command *c)
{
    int64_t from = c->i[0], to = c->i[1], n = c->i[2];
    for (int64_t i = 0; i < n; i += PART)
        reduce_part(z, queue, from + 8 * i, to + 8 * i, n - i < PART ? n - i : PART);
    z->queue[queue].bytes += (z->ranks - 1) * n * 8;
    z->queue[queue].messages++;
}

void zr_allreduce(zr *z, int queue, int64_t from, int64_t to, int64_t n)
{
    zr_push(z, queue, &(zr_command){run_allreduce, NULL, {from, to, n}});
}
