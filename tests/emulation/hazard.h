/* hazard.h -- which threads of one launch touch the same memory with nothing between them.
 *
 * Invariants
 *  1. Two accesses of one launch, one of them a write, by different threads are ordered by a
 *     barrier between them, in one warp by __syncwarp, too; threads of two blocks by nothing.
 *  2. Shared memory is every block's own. Atomics do not conflict with each other.
 *  3. Every 2 bytes remember the last write and, since then, the first and the last reader; an
 *     access of 4 bytes or more is that of the first half of each 4.
 *  4. Of launches of a kernel with one grid, equal integers and the same pointers equal, the first
 *     is looked at: what its threads touch is the same in the next.
 */
#ifndef SHIM_HAZARD_H
#define SHIM_HAZARD_H
#include <cstddef>
#include <cstdint>

/* The thread of a kernel that runs now; 0: none does, or its launch is not watched. */
extern uint64_t hazard_thread;

void hazard_launch(const void *kernel, uint64_t shape); /* begins; shape: of 4., as a number */
/* Which thread goes on: barriers of its block and its warp's meetings are those behind it. */
void hazard_enter(uint64_t block, uint32_t thread, uint32_t barriers, uint32_t meetings);
void hazard_leave(void);

struct hazard_cell;
struct hazard_cells {
    const char *at;
    size_t bytes;
    hazard_cell *cells;
    bool shared; /* every block has its own */
};
extern hazard_cells hazard_regions[2]; /* the program's own data; device and pinned memory */

void hazard_look(const hazard_cells &r, const void *p, size_t n, bool write, bool atomic);
inline void hazard_check(const void *p, size_t n, bool write, bool atomic)
{
    if (!hazard_thread) return;
    for (const hazard_cells &r : hazard_regions)
        if ((size_t)((const char *)p - r.at) < r.bytes) hazard_look(r, p, n, write, atomic);
}
/* Device and pinned memory, n bytes from p; what the program holds itself is found alone. */
void hazard_region(const void *p, size_t n);

#endif
