/* zr_seats.c -- how ranks that see each other's memory wait for each other: by counters in it.
 *
 * seat[r].turn[q].arrived = n: rank r has arrived at turn n of queue q; read = n: it is done with
 * that turn. Every rank counts turns itself, the same on all ranks. Counters only grow, and wrap
 * together.
 *
 * Invariants
 *  1. A rank writes only its own seat.
 *  2. A waiting rank sleeps in the kernel, as ranks may outnumber cores. It checks the stop flag
 *     several times a second.
 */
#define _GNU_SOURCE
#include "zr_fail.h"
#include "zr_net.h"
#include "zr_queue.h"
#include "zr_rank.h"
#include "zr_seats.h"
#include "zr_shared.h"
#include <linux/futex.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

void zr_set(_Atomic uint32_t *word, uint32_t n)
{
    atomic_store(word, n);
    zr_wake(word);
}

void zr_awaits(zr *z, int group, int rank)
{
    int64_t both = rank < 0 ? 0 : (int64_t)group << 32 | (rank + 1);
    atomic_store_explicit(&z->shared->seat[z->rank].awaits, both, memory_order_relaxed);
}

void zr_until(zr *z, int queue, int rank, _Atomic uint32_t *word, uint32_t n)
{
    const struct timespec slice = {0, 100000000};
    uint32_t seen;
    int waited = 0;
    while ((int32_t)((seen = atomic_load(word)) - n) < 0) {
        zr_leave_if_stopped(z);
        zr_count_wait(z, queue);
        waited = 1;
        zr_awaits(z, queue < ZR_QUEUES ? z->queue[queue].group : 0, rank);
        syscall(SYS_futex, word, FUTEX_WAIT, seen, &slice, NULL, 0);
    }
    if (waited) zr_awaits(z, 0, -1);
}

void zr_all_arrived(zr *z, int queue, uint32_t turn)
{
    for (int r = 0; r < z->ranks; r++)
        if (z->seat[r]) zr_until(z, queue, r, &z->seat[r]->turn[queue].arrived, turn);
}

uint32_t zr_arrive(zr *z, int queue, uint32_t *turn)
{
    zr_set(&z->seat[z->rank]->turn[queue].arrived, ++*turn);
    return *turn;
}

void zr_lives(zr *z, int life)
{
    zr_seat *seat = &z->shared->seat[z->rank];
    atomic_store_explicit(&seat->life, life, memory_order_relaxed);
    atomic_fetch_add_explicit(&seat->pulse[ZR_QUEUES].ended, 1, memory_order_relaxed);
}

void zr_barrier(zr *z)
{
    char nothing = 0;
    if (z->far) z->far->tell(z, &nothing, 1);
    else zr_all_arrived(z, ZR_QUEUES, zr_arrive(z, ZR_QUEUES, &z->barriers));
}

void zr_tell(zr *z, void *what, size_t n)
{
    if (z->far) {
        z->far->tell(z, what, n);
        return;
    }
    if (z->rank == 0) memcpy(z->shared->told, what, n);
    zr_barrier(z);
    memcpy(what, z->shared->told, n);
    zr_barrier(z);
}

void zr_total(zr *z, uint64_t sum[2])
{
    if (z->far) {
        z->far->total(z, sum);
        return;
    }
    memcpy(z->shared->seat[z->rank].part, sum, 2 * sizeof *sum);
    zr_barrier(z);
    memset(sum, 0, 2 * sizeof *sum);
    for (int r = 0; r < z->ranks; r++)
        for (int i = 0; i < 2; i++) sum[i] += z->shared->seat[r].part[i];
    zr_barrier(z);
}
