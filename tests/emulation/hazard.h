/* hazard.h -- finds threads of one launch that touch the same memory without synchronisation.
 *
 * Invariants
 *  1. Two accesses of one launch by different threads, one of them a write, must be ordered: within
 *     a block by a barrier, within a warp also by __syncwarp. Threads of two blocks are not
 *     ordered.
 *  2. Shared memory belongs to its block. Atomics do not conflict with each other.
 *  3. Every 2 bytes record the last write and, since then, the first and the last reader. An access
 *     of 4 bytes or more is recorded at the first half of each 4.
 *  4. Memory of the host that hazard_spans names is watched as the device's is.
 *  5. Of launches of a kernel with the same grid, the same integers and the same pattern of equal
 *     pointers only the first since hazard_spans is watched: threads of the others touch the same
 *     places, except those that find them by tokens (embed.cu), whose tests call hazard_spans anew.
 */
#ifndef SHIM_HAZARD_H
#define SHIM_HAZARD_H
#include <cstddef>
#include <cstdint>

/* The running thread of a kernel; 0: no thread runs, or its launch is not watched. */
extern uint64_t hazard_thread;

/* Begins a launch; shape: see invariant 5, as a number */
void hazard_launch(const void *kernel, uint64_t shape);
/* Selects the thread that goes on, with the barriers of its block and the warp collectives that it
 * has passed. */
void hazard_enter(uint64_t block, uint32_t thread, uint32_t barriers, uint32_t meetings);
void hazard_leave(void);

struct hazard_cell;
struct hazard_cells {
    const char *at;
    size_t bytes;
    hazard_cell *cells;
    bool shared; /* each block has a copy */
};
/* The program's own data; device and pinned memory; then the host's memory that kernels may touch */
enum { HAZARD_SPANS = 2, HAZARD_REGIONS = 32 };
extern hazard_cells hazard_regions[HAZARD_REGIONS];
extern int hazard_count; /* of regions */

void hazard_look(const hazard_cells &r, const void *p, size_t n, bool write, bool atomic);
inline void hazard_check(const void *p, size_t n, bool write, bool atomic)
{
    if (!hazard_thread) return;
    for (const hazard_cells *r = hazard_regions; r < hazard_regions + hazard_count; r++)
        if ((size_t)((const char *)p - r->at) < r->bytes) hazard_look(*r, p, n, write, atomic);
}
/* Registers device or pinned memory, n bytes from p. The program's own data is found without it. */
void hazard_region(const void *p, size_t n);
/* Names the host's memory that kernels may touch, until the next call: n pairs of first byte and
 * number of bytes, without overlaps. */
extern "C" void hazard_spans(int n, const uint64_t *spans);

#endif
