/* hazard.cpp -- records the last accesses of every two bytes that kernels can share. */
#include "hazard.h"
#include "shim.h"

#include <link.h>
#include <set>
#include <sys/mman.h>

/* A touch has, from the top: launch (never 0), atomic, block, barriers, meetings, thread. */
typedef uint64_t touch;
struct hazard_cell {
    touch write, first, last; /* first, last: readers */
};

uint64_t hazard_thread;
hazard_cells hazard_regions[HAZARD_REGIONS];
int hazard_count = HAZARD_SPANS;

namespace {

enum { CELL_BYTES = 2, THREAD = 10, MEETING = 10, BARRIER = 12, BLOCK = 16, LAUNCH = 15 };
enum { LAUNCHES = (1 << LAUNCH) - 1 };

enum {
    AT_MEETING = THREAD,
    AT_BARRIER = AT_MEETING + MEETING,
    AT_BLOCK = AT_BARRIER + BARRIER,
    AT_ATOMIC = AT_BLOCK + BLOCK,
    AT_LAUNCH = AT_ATOMIC + 1
};

std::set<std::pair<const void *, uint64_t>> seen; /* kernels, with shapes of launches */
uint64_t launches;
bool watched;

uint64_t part(touch t, int at, int bits) { return t >> at & (((uint64_t)1 << bits) - 1); }
uint64_t thread_of(touch t) { return part(t, 0, THREAD); }
uint64_t block_of(touch t) { return part(t, AT_BLOCK, BLOCK); }
bool atomic_of(touch t) { return part(t, AT_ATOMIC, 1); }

inline bool ordered(touch before, touch now, bool shared)
{
    touch differs = before ^ now;
    if (differs >> AT_LAUNCH || (before & now) >> AT_ATOMIC & 1) return true;
    if (part(differs, AT_BLOCK, BLOCK)) return shared;
    if (part(differs, AT_BARRIER, BARRIER) || !part(differs, 0, THREAD)) return true;
    return part(differs, AT_MEETING, MEETING) && thread_of(differs) < SHIM_WARP;
}

[[noreturn]] void report(const hazard_cells &r, const char *p, touch before, const char *was,
                         touch now, const char *is)
{
    shim_fail("kernel %s: hazard at byte %zu of %s memory: %s by thread %llu of block %llu and %s "
              "by thread %llu of block %llu, with no barrier between",
              shim_kernel(), (size_t)(p - r.at), r.shared ? "shared" : "device", was,
              (unsigned long long)thread_of(before), (unsigned long long)block_of(before), is,
              (unsigned long long)thread_of(now), (unsigned long long)block_of(now));
}

inline void check_cell(const hazard_cells &r, const char *p, hazard_cell *c, touch now, bool write)
{
    const char *is = atomic_of(now) ? "an atomic" : write ? "a write" : "a read";
    if (!ordered(c->write, now, r.shared))
        report(r, p, c->write, atomic_of(c->write) ? "an atomic" : "a write", now, is);
    if (!write) {
        (ordered(c->first, now, r.shared) ? c->first : c->last) = now;
        return;
    }
    if (!ordered(c->first, now, r.shared)) report(r, p, c->first, "a read", now, is);
    if (!ordered(c->last, now, r.shared)) report(r, p, c->last, "a read", now, is);
    c->write = now;
}

size_t cells_of(size_t n) { return (n / CELL_BYTES + 1) * sizeof(hazard_cell); }

hazard_cell *make_cells(size_t n)
{
    void *cells = mmap(nullptr, cells_of(n), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (cells == MAP_FAILED) shim_fail("no address space to watch kernels");
    return (hazard_cell *)cells;
}

void add(hazard_cells *to, const void *p, size_t n, bool shared)
{
    if ((uintptr_t)p % CELL_BYTES) shim_fail("memory to watch begins at an odd byte");
    *to = {(const char *)p, n, make_cells(n), shared};
}

/* All __shared__ data is in the writable segment with this file's data. */
int find(struct dl_phdr_info *info, size_t, void *)
{
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) &h = info->dlpi_phdr[i];
        const char *at = (const char *)info->dlpi_addr + h.p_vaddr;
        if (h.p_type != PT_LOAD || !(h.p_flags & PF_W) || (const char *)hazard_regions < at ||
            (const char *)hazard_regions >= at + h.p_memsz)
            continue;
        add(&hazard_regions[0], (const void *)((uintptr_t)at & ~(uintptr_t)7), h.p_memsz + 8, true);
        return 1;
    }
    return 0;
}

}

void hazard_region(const void *p, size_t n) { add(&hazard_regions[1], p, n, false); }

/* Cells begin anew: they know bytes only by their place in a span. */
void hazard_spans(int n, const uint64_t *spans)
{
    for (int i = HAZARD_SPANS; i < hazard_count; i++)
        munmap(hazard_regions[i].cells, cells_of(hazard_regions[i].bytes));
    hazard_count = HAZARD_SPANS + n;
    seen.clear();
    if (hazard_count > HAZARD_REGIONS) shim_fail("%d spans of the host's memory", n);
    for (int i = 0; i < n; i++)
        add(&hazard_regions[HAZARD_SPANS + i], (const void *)spans[2 * i], spans[2 * i + 1], false);
}

/* The number of a launch in touches is used again after 2^15 - 1: cells forget all older touches. */
void hazard_launch(const void *kernel, uint64_t shape)
{
    if (!hazard_regions[0].at) dl_iterate_phdr(find, nullptr);
    watched = seen.insert({kernel, shape}).second;
    if (++launches % LAUNCHES) return;
    for (const hazard_cells *r = hazard_regions; r < hazard_regions + hazard_count; r++)
        if (r->at) madvise(r->cells, cells_of(r->bytes), MADV_DONTNEED);
}

void hazard_enter(uint64_t block, uint32_t thread, uint32_t barriers, uint32_t meetings)
{
    if (!watched) return;
    uint64_t launch = launches % LAUNCHES + 1;
    hazard_thread = launch << AT_LAUNCH | part(block, 0, BLOCK) << AT_BLOCK |
                    part(barriers, 0, BARRIER) << AT_BARRIER |
                    part(meetings, 0, MEETING) << AT_MEETING | thread;
}

void hazard_leave(void) { hazard_thread = 0; }

void hazard_look(const hazard_cells &r, const void *p, size_t n, bool write, bool atomic)
{
    size_t at = (size_t)((const char *)p - r.at), step = n < 4 ? 1 : 2;
    touch now = hazard_thread | (touch)atomic << AT_ATOMIC;
    for (size_t i = at / CELL_BYTES; i <= (at + n - 1) / CELL_BYTES; i += step)
        check_cell(r, r.at + i * CELL_BYTES, &r.cells[i], now, write);
}
