/* collective.c -- collectives on CPUs. Data of peers on this host is read in place; data of other
 * hosts comes over a wire, as whole pieces into their final places. Sums are computed here.
 *
 * A collective is a turn of its queue (zr_seats.c): rank r has arrived at it when its pieces can be
 * read, and is done with it when it has read all it needs. The end of an all-to-all is a turn of
 * its own, possibly on another queue: rank r arrives at it after it has read.
 *
 * Invariants
 *  1. A rank writes only its own arena.
 *  2. Only bytes are moved and only integers are summed, so no result depends on where peers are.
 *  3. Data to be sent has been sent when the command ends: its source may be overwritten then.
 */
#define _GNU_SOURCE
#include "cpu.h"
#include "../zr_fail.h"
#include "../zr_file.h"
#include "../zr_groups.h"
#include "../zr_queue.h"
#include "../zr_range.h"
#include "../zr_rank.h"
#include "../zr_seats.h"
#include "../zr_shared.h"
#include <emmintrin.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { SPINS = 200, NAP_NS = 50000 }; /* polls of the wire before it sleeps between them */
enum { STREAMED = 1 << 20 }; /* pieces of at least this many bytes are written past the caches */

static uint32_t arrive(zr *z, int queue) { return zr_arrive(z, queue, &z->t->lane[queue].turn); }

/* Wait until every peer on this host has arrived at turn n. */
static void all_arrived(zr *z, int queue, int group, uint32_t n)
{
    const zr_members *of = z->group + group;
    for (int m = 0; m < of->ranks; m++) {
        int r = of->rank[m];
        if (z->seat[r]) zr_until(z, queue, r, &z->seat[r]->turn[queue].arrived, n);
    }
}

/* Announce that this rank has read its pieces, and wait until every
 * peer on this host has too. */
static void all_read(zr *z, int queue, int group, uint32_t n)
{
    zr_set(&z->seat[z->rank]->turn[queue].read, n);
    const zr_members *of = z->group + group;
    for (int m = 0; m < of->ranks; m++) {
        int r = of->rank[m];
        if (z->seat[r]) zr_until(z, queue, r, &z->seat[r]->turn[queue].read, n);
    }
}

static void count_pieces(zr *z, int queue, int group, int64_t bytes)
{
    z->queue[queue].bytes += (z->group[group].ranks - 1) * bytes;
    z->queue[queue].far += z->group[group].far * bytes;
    z->queue[queue].messages++;
}

/* ---- the wire */

/* For every rank of another host, start to receive the piece for to + place * to_step
 * and to send the piece at from + place * step. Receives come first, so that a piece has
 * its place when it arrives. */
static void begin_exchange(zr *z, int queue, int group, const char *from, int64_t step, char *to,
                           int64_t to_step, int64_t bytes)
{
    const zr_wire *w = z->t->wire;
    const zr_members *of = z->group + group;
    int ranks = of->ranks, mine = of->place;
    z->queue[queue].group = group;
    for (int i = 1; w && i < ranks; i++) {
        int m = (mine + ranks - i) % ranks, r = of->rank[m];
        if (!z->t->peer[r]) w->receive(z, queue, r, to + m * to_step, bytes);
    }
    for (int i = 1; w && i < ranks; i++) {
        /* not all ranks send to the same one at once */
        int m = (mine + i) % ranks, r = of->rank[m];
        if (!z->t->peer[r]) w->send(z, queue, r, from + m * step, bytes);
    }
}

/* Wait until all pieces on the wire have been sent and received. */
static void await(zr *z, int queue)
{
    const struct timespec nap = {0, NAP_NS};
    const zr_wire *w = z->t->wire;
    for (int i = 0; w && !w->test(z, queue); i++) {
        zr_leave_if_stopped(z);
        zr_count_wait(z, queue);
        if (i < SPINS) sched_yield();
        else nanosleep(&nap, NULL);
    }
}

/* ---- ZR_UNMAP_PEERS: peers' arenas can only be read during a collective */

static void protect(zr *z, int protection)
{
    for (int r = 0; r < z->ranks; r++)
        if (r != z->rank && z->t->peer[r] &&
            mprotect(z->t->peer[r], (size_t)z->t->common, protection))
            zr_fail(z, ZR_ENVIRONMENT, "changing the protection of rank %d's arena", r);
}

/* by: +1 when a collective begins, -1 when it ends; queues may overlap. */
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

/* Copy a piece. Large pieces are written with non-temporal stores, which neither fetch lines that
 * are overwritten nor evict others. */
static void copy_piece(char *to, const char *from, int64_t bytes)
{
    enum { LINE = 4 * sizeof(__m128i) };
    int streams = bytes >= STREAMED && (uintptr_t)to % sizeof(__m128i) == 0;
    int64_t whole = streams ? bytes / LINE * LINE : 0;
    for (int64_t at = 0; at < whole; at += LINE) {
        __m128i line[4];
        for (int i = 0; i < 4; i++) line[i] = _mm_loadu_si128((const __m128i_u *)(from + at) + i);
        for (int i = 0; i < 4; i++) _mm_stream_si128((__m128i *)(to + at) + i, line[i]);
    }
    if (streams) _mm_sfence();
    memcpy(to + whole, from + whole, (size_t)(bytes - whole));
}

/* Take a piece from each rank of a group at turn n, after a wire has begun: that at from + m*step
 * in the arena of the rank of place m. */
static void take_pieces(zr *z, int queue, const zr_command *c, uint32_t n, int64_t from,
                        int64_t step)
{
    int64_t to = c->i[2], to_step = c->i[3], bytes = c->i[4];
    int group = (int)c->i[5], ranks = z->group[group].ranks, mine = z->group[group].place;
    readable(z, +1);
    for (int i = 0; i < ranks; i++) {
        int m = (mine + i) % ranks, r = z->group[group].rank[m];
        if (!z->t->peer[r]) continue;
        char *there = z->t->peer[r] + from + m * step, *here = z->t->arena + to + m * to_step;
        zr_until(z, queue, r, &z->seat[r]->turn[queue].arrived, n);
        if (here != there) copy_piece(here, there, bytes);
    }
    readable(z, -1);
    await(z, queue);
    count_pieces(z, queue, group, bytes);
    all_read(z, queue, group, n);
}

static void run_gather(zr *z, int queue, const zr_command *c)
{
    int64_t from = c->i[0], from_step = c->i[1], to = c->i[2], to_step = c->i[3], bytes = c->i[4];
    int group = (int)c->i[5], mine = z->group[group].place;
    const struct timespec delay = {z->t->delay / 1000000, z->t->delay % 1000000 * 1000};
    char *a = z->t->arena;
    if (z->t->delay) nanosleep(&delay, NULL);
    uint32_t n = arrive(z, queue);
    begin_exchange(z, queue, group, a + from + mine * from_step, 0, a + to, to_step, bytes);
    take_pieces(z, queue, c, n, from, from_step);
}

void zr_gather(zr *z, int queue, int group, int64_t from, int64_t from_step, int64_t to,
               int64_t to_step, int64_t bytes)
{
    zr_check_gather(z, queue, group, from, from_step, to, to_step, bytes);
    zr_push(
        z, queue,
        &(zr_command){run_gather, "gather", NULL, {from, from_step, to, to_step, bytes, group}});
}

/* ---- exchange */

static void run_exchange(zr *z, int queue, const zr_command *c)
{
    int64_t from = c->i[0], from_step = c->i[1], to = c->i[2], to_step = c->i[3], bytes = c->i[4];
    int group = (int)c->i[5], mine = z->group[group].place;
    char *a = z->t->arena;
    uint32_t n = arrive(z, queue);
    begin_exchange(z, queue, group, a + from, from_step, a + to, to_step, bytes);
    take_pieces(z, queue, c, n, from + mine * from_step, 0);
}

void zr_exchange(zr *z, int queue, int group, int64_t from, int64_t from_step, int64_t to,
                 int64_t to_step, int64_t bytes)
{
    uint32_t last = zr_unmark(z, "exchange", queue, &from, 1);
    zr_check_exchange(z, queue, group, from, from_step, to, to_step, bytes);
    zr_push(z, queue,
            &(zr_command){
                run_exchange, "exchange", NULL, {from, from_step, to, to_step, bytes, group}});
    zr_dead(z, "exchange", queue, &from, last, zr_poison);
}

/* ---- all-to-all: pieces are read in place, or from the inbox */

static const void **sources_in(zr *z, const char *what, int64_t to)
{
    return z->t->sources + (int64_t)zr_inbox(z, what, to) * z->ranks;
}

static void run_alltoall(zr *z, int queue, const zr_command *c)
{
    int64_t at = c->i[0], step = c->i[1], bytes = c->i[2], to = c->i[3];
    int group = (int)c->i[4], ranks = z->group[group].ranks, mine = z->group[group].place;
    const void **sources = sources_in(z, "alltoall", to);
    char *a = z->t->arena;
    uint32_t n = arrive(z, queue);
    begin_exchange(z, queue, group, a + at, step, a + to, bytes, bytes);
    all_arrived(z, queue, group, n);
    readable(z, +1);
    for (int m = 0; m < ranks; m++) {
        const char *peer = z->t->peer[z->group[group].rank[m]];
        sources[m] = peer ? peer + at + mine * step : a + to + m * bytes;
    }
    await(z, queue);
    count_pieces(z, queue, group, bytes);
}

void zr_alltoall(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to, int64_t bytes)
{
    zr_check_alltoall(z, queue, group, at, step, to, bytes);
    (void)zr_inbox(z, "alltoall", to);
    zr_push(z, queue, &(zr_command){run_alltoall, "alltoall", NULL, {at, step, bytes, to, group}});
}

/* Never reached in a correct program: the generator refuses the CPU target with fast reductions. */
void zr_reducescatter(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to,
                      int64_t bytes, int type)
{
    (void)queue, (void)group, (void)at, (void)step, (void)to, (void)bytes, (void)type;
    zr_fail(z, ZR_ENVIRONMENT, "train.reduction fast needs GPUs; generate the program with exact");
}

const void *const *zr_sources(zr *z, int64_t to) { return sources_in(z, "sources", to); }

static void run_done(zr *z, int queue, const zr_command *c)
{
    const void **sources = sources_in(z, "done", c->i[0]);
    readable(z, -1);
    for (int r = 0; r < z->ranks; r++) sources[r] = NULL;
    z->queue[queue].group = (int)c->i[1];
    all_arrived(z, queue, (int)c->i[1], arrive(z, queue));
}

void zr_done(zr *z, int queue, int group, int64_t to, int64_t at)
{
    uint32_t last = zr_unmark(z, "done", queue, &at, 1);
    zr_check_done(z, queue, group, at);
    (void)zr_inbox(z, "done", to);
    zr_push(z, queue, &(zr_command){run_done, "done", NULL, {to, group}});
    zr_dead(z, "done", queue, &at, last, zr_poison);
}

/* ---- allreduce */

/* Add n integers to sum[n]. */
static void add_ints(uint64_t *sum, const void *there, int64_t n)
{
    const uint64_t *x = there;
    for (int64_t i = 0; i < n; i++) sum[i] += x[i];
}

/* to[n] = the sum of from[n] over the ranks of a group, n <= ZR_SUMMED. All have read before
 * anything is written, so `to` may be `from`. */
static void reduce_part(zr *z, int queue, int group, int64_t from, int64_t to, int64_t n)
{
    const zr_members *of = z->group + group;
    uint64_t sum[ZR_SUMMED] = {0}, *theirs = z->t->theirs[queue];
    int64_t bytes = n * (int64_t)sizeof *sum, step = (int64_t)sizeof sum;
    uint32_t turn = arrive(z, queue);
    begin_exchange(z, queue, group, z->t->arena + from, 0, (char *)theirs, step, bytes);
    readable(z, +1);
    for (int m = 0; m < of->ranks; m++) {
        int r = of->rank[m];
        if (!z->t->peer[r]) continue;
        zr_until(z, queue, r, &z->seat[r]->turn[queue].arrived, turn);
        add_ints(sum, z->t->peer[r] + from, n);
    }
    readable(z, -1);
    await(z, queue);
    for (int m = 0; m < of->ranks; m++)
        if (!z->t->peer[of->rank[m]]) add_ints(sum, theirs + m * ZR_SUMMED, n);
    all_read(z, queue, group, turn);
    memcpy(z->t->arena + to, sum, (size_t)bytes);
}

static void run_allreduce(zr *z, int queue, const zr_command *c)
{
    int64_t from = c->i[0], to = c->i[1], n = c->i[2];
    int group = (int)c->i[3];
    for (int64_t i = 0; i < n; i += ZR_SUMMED)
        reduce_part(z, queue, group, from + 8 * i, to + 8 * i, zr_least(n - i, ZR_SUMMED));
    count_pieces(z, queue, group, 8 * n);
}

static void run_apart(zr *z, int queue, const zr_command *c)
{
    int64_t from = c->i[0], to = c->i[1], n = c->i[2];
    (void)queue;
    memmove(z->t->arena + to, z->t->arena + from, 8 * (size_t)n);
}

void zr_allreduce(zr *z, int queue, int group, int64_t from, int64_t to, int64_t n)
{
    zr_check_allreduce(z, queue, group, from, to, n);
    int of = zr_summed(z, group);
    zr_push(
        z, queue,
        &(zr_command){of < 0 ? run_apart : run_allreduce, "allreduce", NULL, {from, to, n, of}});
}
