/* hazard.h -- which threads of one launch touch the same memory with nothing between them.
 *
 * Invariants
 *  1. Two accesses of one launch, one of them a write, by different threads are ordered by a barrier
 *     between them, in one warp by __syncwarp, too; threads of two blocks by nothing.
 *  2. Shared memory is every block's own. Atomics do not conflict with each other.
 *  3. Every 2 bytes remember the last write and, since then, the first and the last reader.
 */
#ifndef SHIM_HAZARD_H
#define SHIM_HAZARD_H
#include <cstddef>
#include <cstdint>

/* The thread of a kernel that runs now; running 0: none does. */
struct hazard_thread {
    int running;
    uint32_t launch, block, thread, barriers, meetings;
};
extern hazard_thread hazard_now;

void hazard_check(const void *p, size_t n, bool write, bool atomic);
/* Device and pinned memory, n bytes from p; what the program holds itself is found alone. */
void hazard_region(const void *p, size_t n);

#endif
