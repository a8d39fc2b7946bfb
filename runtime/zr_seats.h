/* zr_seats.h -- how ranks wait for each other through the memory that they share. */
#ifndef ZR_SEATS_H
#define ZR_SEATS_H
#include "zr_rank.h"
#include "zr_shared.h"

void zr_lives(zr *z, int life); /* set this rank's phase: ZR_BETWEEN ... */
void zr_set(_Atomic uint32_t *word, uint32_t n);
/* Count that a peer was not yet there, for the parent (zr_stall.c). */
static inline void zr_count_wait(zr *z, int queue)
{
    zr_pulse *p = &z->shared->seat[z->rank].pulse[queue];
    atomic_fetch_add_explicit(&p->waited, 1, memory_order_relaxed);
}
/* Note the rank that this one waits for, and in which group, for the parent's report of a run that
 * hangs; rank -1: none. */
void zr_awaits(zr *z, int group, int rank);
/* Return the rank that a seat's rank waits for, and set *group; -1: none. */
static inline int zr_awaited(const zr_seat *seat, int *group)
{
    int64_t both = atomic_load_explicit(&seat->awaits, memory_order_relaxed);
    *group = (int)(both >> 32);
    return (int)(both & INT32_MAX) - 1;
}
/* Wait until *word, which `rank` sets, reaches n. */
void zr_until(zr *z, int queue, int rank, _Atomic uint32_t *word, uint32_t n);
/* Begin the next turn and return its number. */
uint32_t zr_arrive(zr *z, int queue, uint32_t *turn);
void zr_all_arrived(zr *z, int queue, uint32_t turn);
/* Collectives of the ranks' own threads; all ranks call them in the same order. */
void zr_barrier(zr *z);
void zr_tell(zr *z, void *what, size_t n); /* broadcast n <= ZR_TOLD bytes from rank 0 */
void zr_total(zr *z, uint64_t sum[2]);     /* sum over all ranks */

#endif
