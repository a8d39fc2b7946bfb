/* collective.c -- the collectives of ranks on one host: reading peers' arenas where they lie.
 *
 * A collective is a turn of its queue (zr_seats.c): rank r has arrived at it when its pieces can be
 * read, and is done with it when it has read all it needs. The end of an all-to-all is a turn of
 * its own, maybe of another queue: rank r has arrived at it when it has read.
 *
 * Invariants
 *  1. A rank writes only its own arena.
 */
#define _GNU_SOURCE
#include "cpu.h"
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { PART = 512 }; /* int64 of an allreduce that are summed at a time */

/* This rank has read what it needs; until every peer has, too. */
static void all_read(zr *z, int queue, uint32_t n)
{
    zr_set(&z->shared->seat[z->rank].turn[queue].read, n);
    for (int r = 0; r < z->ranks; r++) zr_until(z, queue, &z->shared->seat[r].turn[queue].read, n);
}

/* ---- ZR_UNMAP_PEERS: peers' arenas can be read only while a collective is in progress */

static void protect(zr *z, int protection)
{
    for (int r = 0; r < z->ranks; r++)
        if (r != z->rank && mprotect(z->t->peer[r], (size_t)z->t->common, protection))
            zr_fail(z, ZR_ENVIRONMENT, "changing the protection of rank %d's arena", r);
}

/* by: +1 at a collective's begin, -1 at its end; queues overlap. */
static void readable(zr *z, int by)
{
    if (!z->t->unmap) return;
    pthread_mutex_lock(&z->t->lock);
    int before = z->t->readable;
    z->t->readable += by;
    if (!before || !z->t->readable) protect(z, z->t->readable ? PROT_READ : PROT_NONE);
    pthread_mutex_unlock(&z->t->lock);
}

/* ---- gather */

static void run_gather(zr *z, int queue, const zr_command *c)
{
    int64_t from = c->i[0], from_step = c->i[1], to = c->i[2], to_step = c->i[3], bytes = c->i[4];
    zr_queue *q = &z->queue[queue];
    const struct timespec delay = {z->t->delay / 1000000, z->t->delay % 1000000 * 1000};
    if (z->t->delay) nanosleep(&delay, NULL);
    uint32_t n = zr_arrive(z, queue, &z->t->lane[queue].turn);
    readable(z, +1);
    for (int i = 0; i < z->ranks; i++) {
        int r = (z->rank + i) % z->ranks; /* not all at the same peer at once */
        char *there = z->t->peer[r] + from + r * from_step, *here = z->t->arena + to + r * to_step;
        zr_until(z, queue, &z->shared->seat[r].turn[queue].arrived, n);
        if (here != there) memcpy(here, there, (size_t)bytes);
        if (r != z->rank) q->bytes += bytes;
    }
    readable(z, -1);
    q->messages++;
    all_read(z, queue, n);
}

void zr_gather(zr *z, int queue, int group, int64_t from, int64_t from_step, int64_t to,
               int64_t to_step, int64_t bytes)
{
    zr_check_gather(z, queue, group, from, from_step, to, to_step, bytes);
    zr_push(z, queue,
            &(zr_command){run_gather, "gather", NULL, {from, from_step, to, to_step, bytes}});
}

/* ---- all to all, read in place */

static void run_alltoall(zr *z, int queue, const zr_command *c)
{
    int64_t at = c->i[0], step = c->i[1], bytes = c->i[2];
    const void **sources = z->t->sources + c->i[3] * z->ranks;
    zr_queue *q = &z->queue[queue];
    zr_all_arrived(z, queue, zr_arrive(z, queue, &z->t->lane[queue].turn));
    readable(z, +1);
    for (int r = 0; r < z->ranks; r++) sources[r] = z->t->peer[r] + at + z->rank * step;
    q->bytes += (z->ranks - 1) * bytes;
    q->messages++;
}

void zr_alltoall(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to, int64_t bytes)
{
    zr_check_alltoall(z, queue, group, at, step, to, bytes);
    zr_push(z, queue,
            &(zr_command){
                run_alltoall, "alltoall", NULL, {at, step, bytes, zr_inbox(z, "alltoall", to)}});
}

/* A program that has these is not made for a CPU. */
void zr_reducescatter(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to,
                      int64_t bytes, int type)
{
    (void)queue, (void)group, (void)at, (void)step, (void)to, (void)bytes, (void)type;
    zr_fail(z, ZR_ENVIRONMENT, "train.reduction is fast, which a CPU has not; generate with exact");
}

const void *const *zr_sources(zr *z, int64_t to)
{
    return z->t->sources + (int64_t)zr_inbox(z, "sources", to) * z->ranks;
}

static void run_done(zr *z, int queue, const zr_command *c)
{
    readable(z, -1);
    for (int r = 0; r < z->ranks; r++) z->t->sources[c->i[0] * z->ranks + r] = NULL;
    zr_all_arrived(z, queue, zr_arrive(z, queue, &z->t->lane[queue].turn));
}

void zr_done(zr *z, int queue, int group, int64_t to, int64_t at)
{
    uint32_t last = zr_unmark(z, "done", queue, &at, 1);
    zr_check_done(z, queue, group, at);
    zr_push(z, queue, &(zr_command){run_done, "done", NULL, {zr_inbox(z, "done", to)}});
    zr_dead(z, "done", queue, &at, last);
}

/* ---- allreduce */

/* to[n] = sum over ranks of from[n], n <= PART; all have read before anything is written, so
 * that `to` may be `from`. */
static void reduce_part(zr *z, int queue, int64_t from, int64_t to, int64_t n)
{
    uint64_t sum[PART] = {0};
    uint32_t turn = zr_arrive(z, queue, &z->t->lane[queue].turn);
    readable(z, +1);
    for (int r = 0; r < z->ranks; r++) {
        const uint64_t *there = (const uint64_t *)(z->t->peer[r] + from);
        zr_until(z, queue, &z->shared->seat[r].turn[queue].arrived, turn);
        for (int64_t i = 0; i < n; i++) sum[i] += there[i];
    }
    readable(z, -1);
    all_read(z, queue, turn);
    memcpy(z->t->arena + to, sum, (size_t)n * sizeof *sum);
}

static void run_allreduce(zr *z, int queue, const zr_command *c)
{
    int64_t from = c->i[0], to = c->i[1], n = c->i[2];
    for (int64_t i = 0; i < n; i += PART)
        reduce_part(z, queue, from + 8 * i, to + 8 * i, n - i < PART ? n - i : PART);
    z->queue[queue].bytes += (z->ranks - 1) * n * 8;
    z->queue[queue].messages++;
}

static void run_apart(zr *z, int queue, const zr_command *c)
{
    (void)queue;
    memmove(z->t->arena + c->i[1], z->t->arena + c->i[0], 8 * (size_t)c->i[2]);
}

void zr_allreduce(zr *z, int queue, int group, int64_t from, int64_t to, int64_t n)
{
    zr_check_allreduce(z, queue, group, from, to, n);
    zr_push(z, queue,
            &(zr_command){z->apart ? run_apart : run_allreduce, "allreduce", NULL, {from, to, n}});
}
