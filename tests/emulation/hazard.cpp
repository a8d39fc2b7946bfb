/* hazard.cpp -- the last accesses of every two bytes that kernels can share. */
#include "hazard.h"
#include "shim.h"

#include <link.h>
#include <sys/mman.h>

hazard_thread hazard_now;

namespace {

enum { GRAIN = 2, THREAD_BITS = 10, MEETING_BITS = 10, BARRIER_BITS = 12, BLOCK_BITS = 16 };

/* launch : 15, atomic : 1, block, barriers, meetings, thread; launch is never 0 */
typedef uint64_t touch;

struct cell {
    touch write, first, last;             /* first, last: readers */
};

struct region {
    const char *at;
    size_t bytes;
    cell *cells;
    bool shared;                          /* every block has its own */
};

region regions[2];                        /* the program's own data; device and pinned memory */

uint64_t low(uint64_t x, int bits) { return x & (((uint64_t)1 << bits) - 1); }

touch present(bool atomic)
{
    const hazard_thread &t = hazard_now;
    uint64_t x = t.launch % 0x7fff + 1;
    x = x << 1 | atomic;
    x = x << BLOCK_BITS | low(t.block, BLOCK_BITS);
    x = x << BARRIER_BITS | low(t.barriers, BARRIER_BITS);
    x = x << MEETING_BITS | low(t.meetings, MEETING_BITS);
    return x << THREAD_BITS | t.thread;
}

uint64_t thread_of(touch t) { return low(t, THREAD_BITS); }
uint64_t meeting_of(touch t) { return low(t >> THREAD_BITS, MEETING_BITS); }
uint64_t barrier_of(touch t) { return low(t >> (THREAD_BITS + MEETING_BITS), BARRIER_BITS); }
uint64_t block_of(touch t)
{
    return low(t >> (THREAD_BITS + MEETING_BITS + BARRIER_BITS), BLOCK_BITS);
}
bool atomic_of(touch t) { return t >> 48 & 1; }
uint64_t launch_of(touch t) { return t >> 49; }

bool ordered(touch before, touch now, bool shared)
{
    if (launch_of(before) != launch_of(now) || (atomic_of(before) && atomic_of(now)))
        return true;
    if (block_of(before) != block_of(now))
        return shared;
    if (thread_of(before) == thread_of(now) || barrier_of(before) != barrier_of(now))
        return true;
    return thread_of(before) / SHIM_WARP == thread_of(now) / SHIM_WARP &&
           meeting_of(before) != meeting_of(now);
}

[[noreturn]] void report(const region &r, const char *p, touch before, const char *was, touch now,
                         const char *is)
{
    shim_fail("kernel %s: hazard at byte %zu of %s memory: %s by thread %llu of block %llu and %s "
              "by thread %llu of block %llu, with no barrier between", shim_kernel(),
              (size_t)(p - r.at), r.shared ? "shared" : "device", was,
              (unsigned long long)thread_of(before), (unsigned long long)block_of(before), is,
              (unsigned long long)thread_of(now), (unsigned long long)block_of(now));
}

void check_cell(const region &r, const char *p, cell *c, touch now, bool write)
{
    const char *is = atomic_of(now) ? "an atomic" : write ? "a write" : "a read";
    if (!ordered(c->write, now, r.shared))
        report(r, p, c->write, atomic_of(c->write) ? "an atomic" : "a write", now, is);
    if (!write) {
        (ordered(c->first, now, r.shared) ? c->first : c->last) = now;
        return;
    }
    if (!ordered(c->first, now, r.shared))
        report(r, p, c->first, "a read", now, is);
    if (!ordered(c->last, now, r.shared))
        report(r, p, c->last, "a read", now, is);
    c->write = now;
}

void add(region *to, const void *p, size_t n, bool shared)
{
    void *cells = mmap(nullptr, n / GRAIN * sizeof(cell), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (cells == MAP_FAILED)
        shim_fail("no address space to watch kernels");
    *to = {(const char *)p, n, (cell *)cells, shared};
}

/* The writable segment that holds this file's data holds all that is __shared__. */
int find(struct dl_phdr_info *info, size_t, void *)
{
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) &h = info->dlpi_phdr[i];
        const char *at = (const char *)info->dlpi_addr + h.p_vaddr;
        if (h.p_type != PT_LOAD || !(h.p_flags & PF_W) || (const char *)regions < at ||
            (const char *)regions >= at + h.p_memsz)
            continue;
        add(&regions[0], (const void *)((uintptr_t)at & ~(uintptr_t)7), h.p_memsz + 8, true);
        return 1;
    }
    return 0;
}

}

void hazard_region(const void *p, size_t n) { add(&regions[1], p, n, false); }

void hazard_check(const void *p, size_t n, bool write, bool atomic)
{
    if (!hazard_now.running || !n)
        return;
    if (!regions[0].at)
        dl_iterate_phdr(find, nullptr);
    for (const region &r : regions) {
        size_t at = (size_t)((const char *)p - r.at);
        if (at >= r.bytes)
            continue;
        touch now = present(atomic);
        for (size_t i = at / GRAIN; i <= (at + n - 1) / GRAIN; i++)
            check_cell(r, r.at + i * GRAIN, &r.cells[i], now, write);
    }
}
