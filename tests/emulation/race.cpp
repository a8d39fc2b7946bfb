/* race.cpp -- cells of memory, and the calls that -fsanitize=thread inserts before every access. */
#include "race.h"
#include "hazard.h"
#include "shim.h"

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

clocks race_now[TRACKS];
thread_local int race_self = HOST, race_track = HOST;

namespace {

enum { CELL_BYTES = 16, EPOCH_BITS = 27, GAP = 1 << 16 };
const size_t HUGE_PAGE = (size_t)2 << 20;
const size_t ROOM[2] = {(size_t)8 << 30, (size_t)2 << 30}, ALL = ROOM[DEVICE] + ROOM[PINNED];

/* live: its memory is allocated, and its page was touched. write, read: track << EPOCH_BITS |
 * epoch. A read ordered after the last one stands for both. For reads that are not ordered,
 * `shared` is the index in `reads` of all of them, until a write ordered after them comes; else it
 * is 0. */
struct cell {
    uint32_t live, write, read, shared;
};

char *base;          /* device memory, then pinned */
size_t room_of_both; /* 0: not reserved yet */
cell *cells;
size_t used[2];                          /* of each room, gaps included */
size_t taken;                            /* of the device, in pages, without gaps */
std::map<size_t, size_t> allocated;      /* offset in base -> bytes */
std::vector<const char *> names[TRACKS]; /* by epoch */
std::deque<clocks> reads(1);             /* each track's last */
std::vector<uint32_t> spare;             /* indices of these that no cell has */
std::mutex sharing;                      /* held to take or return an index, and for `allocated` */

const char *track_name(int track)
{
    // clang-format off
    static const char *const all[TRACKS] = {
        "the host", "the host's thread that saves", "the default stream",
        "stream 1", "stream 2", "stream 3", "stream 4", "stream 5", "stream 6", "stream 7",
        "stream 8", "stream 9", "stream 10", "stream 11", "a graph's part of stream 1",
        "a graph's part of stream 2", "a graph's part of stream 3", "a graph's part of stream 4",
        "a graph's part of stream 5", "a graph's part of stream 6", "a graph's part of stream 7",
        "a graph's part of stream 8", "a graph's part of stream 9",
        "a graph's part of stream 10", "a graph's part of stream 11"};
    // clang-format on
    return all[track];
}

bool is_host(int track) { return track < DEFAULT_STREAM; }

const char *work_name(int track, uint32_t epoch)
{
    return is_host(track) ? "host code" : epoch < names[track].size() ? names[track][epoch] : "?";
}

int track_of(uint32_t touch) { return (int)(touch >> EPOCH_BITS); }
uint32_t epoch_of(uint32_t touch) { return touch & ((1u << EPOCH_BITS) - 1); }
/* whether a touch is before this thread's present work */
bool ordered(uint32_t touch) { return epoch_of(touch) <= race_now[race_track][track_of(touch)]; }

struct where {
    size_t byte;
    const char *memory;
};

where place_of(const cell *c)
{
    size_t at = (size_t)(c - cells) * CELL_BYTES;
    return at < ROOM[DEVICE] ? where{at, "device"} : where{at - ROOM[DEVICE], "pinned"};
}

[[noreturn]] void conflict(const cell *c, const char *was, uint32_t before, const char *is)
{
    int me = race_track, track = track_of(before);
    where at = place_of(c);
    shim_fail("race at byte %zu of %s memory: %s by %s on %s and %s by %s on %s, and no event "
              "orders the two",
              at.byte, at.memory, was, work_name(track, epoch_of(before)), track_name(track), is,
              work_name(me, race_now[me][me]), track_name(me));
}

[[noreturn]] void not_allocated(const cell *c)
{
    int me = race_track;
    where at = place_of(c);
    shim_fail("%s on %s touches byte %zu of %s memory, which is not allocated",
              work_name(me, race_now[me][me]), track_name(me), at.byte, at.memory);
}

/* The first touch of a page fills device memory with NaN; untouched memory takes no pages. */
void wake(const cell *c)
{
    std::lock_guard<std::mutex> hold(sharing);
    if (c->live) return; /* another thread was faster */
    const size_t page = 4096;
    size_t at = (size_t)(c - cells) * CELL_BYTES;
    auto next = allocated.upper_bound(at);
    if (next == allocated.begin()) not_allocated(c);
    auto [first, bytes] = *std::prev(next);
    if (at >= first + bytes) not_allocated(c);
    size_t from = at / page * page, end = std::min(from + page, first + bytes);
    if (at < ROOM[DEVICE]) memset(base + from, 0xff, page);
    for (size_t i = from; i < end; i += CELL_BYTES) cells[i / CELL_BYTES].live = 1;
}

/* Records reads that are not ordered. */
void share(cell *c, uint32_t mine)
{
    std::lock_guard<std::mutex> hold(sharing);
    if (!c->shared) {
        if (spare.empty()) {
            spare.push_back((uint32_t)reads.size());
            reads.emplace_back();
        }
        c->shared = spare.back();
        spare.pop_back();
        reads[c->shared] = {};
        reads[c->shared][track_of(c->read)] = epoch_of(c->read);
    }
    reads[c->shared][track_of(mine)] = epoch_of(mine);
}

/* Keeps nothing of the reads before a write that is ordered after them all. */
void forget_reads(cell *c)
{
    if (c->shared) {
        std::lock_guard<std::mutex> hold(sharing);
        spare.push_back(c->shared);
    }
    c->read = c->shared = 0;
}

void check_reads(const cell *c)
{
    if (!c->shared) {
        if (!ordered(c->read)) conflict(c, "a read", c->read, "a write");
        return;
    }
    for (uint32_t t = 0; t < TRACKS; t++) {
        uint32_t touch = t << EPOCH_BITS | reads[c->shared][t];
        if (!ordered(touch)) conflict(c, "a read", touch, "a write");
    }
}

void check_cell(cell *c, bool write)
{
    uint32_t mine = (uint32_t)race_track << EPOCH_BITS | race_now[race_track][race_track];
    if ((write ? c->write : c->read) == mine) return;
    if (!c->live) wake(c);
    if (!ordered(c->write)) conflict(c, "a write", c->write, write ? "a write" : "a read");
    if (!write) {
        if (c->shared || !ordered(c->read)) share(c, mine);
        c->read = mine;
        return;
    }
    check_reads(c);
    forget_reads(c);
    c->write = mine;
}

void check_range(size_t at, size_t n, bool write)
{
    if (is_host(race_track) && at < ROOM[DEVICE])
        shim_fail("host code touches byte %zu of device memory", at);
    for (size_t i = at / CELL_BYTES; i <= (at + n - 1) / CELL_BYTES; i++)
        check_cell(&cells[i], write);
}

void on_fault(int signal, siginfo_t *info, void *)
{
    size_t at = (size_t)((char *)info->si_addr - base);
    if (at < ROOM[DEVICE]) shim_fail("host code touches byte %zu of device memory", at);
    struct sigaction plain = {};
    plain.sa_handler = SIG_DFL;
    sigaction(signal, &plain, nullptr);
}

void reserve(void)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *memory = mmap(nullptr, ALL + HUGE_PAGE, PROT_NONE, flags, -1, 0);
    void *shadow =
        mmap(nullptr, ALL / CELL_BYTES * sizeof(cell), PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED || shadow == MAP_FAILED)
        shim_fail("no address space for the emulated device");
    base = (char *)(((size_t)memory + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    madvise(base, ROOM[DEVICE], MADV_HUGEPAGE); /* race_open changes few pages, and often */
    room_of_both = ALL;
    cells = (cell *)shadow;
    hazard_region(base, ALL);
    mprotect(base + ROOM[DEVICE], ROOM[PINNED], PROT_READ | PROT_WRITE);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
}

size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

size_t first_of(room r) { return r == DEVICE ? 0 : ROOM[DEVICE]; }

}

/* ---- order */
void race_join(clocks &to, const clocks &from)
{
    for (int t = 0; t < TRACKS; t++) to[t] = to[t] > from[t] ? to[t] : from[t];
}

void race_begin(int track, const char *name)
{
    uint32_t epoch = ++race_now[track][track];
    if (epoch >> EPOCH_BITS) shim_fail("too much work for one run");
    if (is_host(track)) return;
    names[track].resize(epoch + 1);
    names[track][epoch] = name;
}

void race_check(const void *p, size_t n, bool write)
{
    size_t at = (size_t)((const char *)p - base);
    if (at < room_of_both && n) check_range(at, n, write);
}

/* ---- memory: addresses are not reused after a free, so a late use is found */
void *race_alloc(room r, size_t bytes)
{
    if (!base) reserve();
    size_t room_for = (bytes + 4095) / 4096 * 4096;
    if (!bytes || used[r] + room_for + GAP > ROOM[r]) return nullptr;
    std::lock_guard<std::mutex> hold(sharing);
    size_t at = first_of(r) + used[r];
    used[r] += room_for + GAP;
    taken += r == DEVICE ? pages(bytes) : 0;
    allocated[at] = bytes;
    if (r == PINNED) memset(base + at, 0xff, bytes);
    return base + at;
}

bool race_free(room r, void *p)
{
    std::lock_guard<std::mutex> hold(sharing);
    auto found = allocated.find((size_t)((char *)p - base));
    if (found == allocated.end() || (found->first >= ROOM[DEVICE]) != (r == PINNED)) return false;
    size_t at = found->first, bytes = found->second;
    for (size_t i = at / CELL_BYTES; i < (at + bytes + CELL_BYTES - 1) / CELL_BYTES; i++)
        if (cells[i].live) cells[i].live = 0;
    taken -= r == DEVICE ? pages(bytes) : 0;
    allocated.erase(found);
    return true;
}

bool race_is(room r, const void *p)
{
    size_t at = (size_t)((const char *)p - base);
    return base && at >= first_of(r) && at < first_of(r) + ROOM[r];
}

const void *race_span(const void *p, size_t *bytes)
{
    std::lock_guard<std::mutex> hold(sharing);
    size_t at = (size_t)((const char *)p - base);
    auto next = allocated.upper_bound(at);
    *bytes = 0;
    if (at >= room_of_both || next == allocated.begin()) return nullptr;
    auto [first, size] = *std::prev(next);
    if (at - first >= size) return nullptr;
    *bytes = size;
    return base + first;
}

void race_free_bytes(size_t *free, size_t *total)
{
    *total = ROOM[DEVICE];
    *free = ROOM[DEVICE] - std::min(taken, ROOM[DEVICE]);
}

void race_open(bool open)
{
    size_t whole = (used[DEVICE] + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    if (whole) mprotect(base, whole, open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

/* ---- calls inserted by -fsanitize=thread and -fsanitize=alignment */
__attribute__((noinline)) static void look(const void *p, size_t n, bool write)
{
    race_check(p, n, write);
    if (!is_host(race_track)) hazard_check(p, n, write, false);
}

/* Nearly all accesses are to neither room, in launches that are not watched: hazard_check does
 * nothing if hazard_thread is 0. */
static inline void touch(const void *p, size_t n, bool write)
{
    if ((size_t)((const char *)p - base) < room_of_both || hazard_thread) look(p, n, write);
}

void shim_atomic(void *p, size_t n)
{
    race_check(p, n, true);
    hazard_check(p, n, true, true);
}

extern "C" {

#define ACCESS(n)                                                                                  \
    void __tsan_read##n(void *p) { touch(p, n, false); }                                           \
    void __tsan_write##n(void *p) { touch(p, n, true); }                                           \
    void __tsan_unaligned_read##n(void *p) { touch(p, n, false); }                                 \
    void __tsan_unaligned_write##n(void *p) { touch(p, n, true); }                                 \
    void __tsan_volatile_read##n(void *p) { touch(p, n, false); }                                  \
    void __tsan_volatile_write##n(void *p) { touch(p, n, true); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

struct place {
    const char *file;
    uint32_t line, column;
};

void __ubsan_handle_type_mismatch_v1(const place *at, void *p)
{
    shim_fail("%s on %s, %s:%u: the address %p is not aligned to its type",
              work_name(race_track, race_now[race_track][race_track]), track_name(race_track),
              at->file, at->line, p);
}

void __tsan_init(void) {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit(void) {}
void __tsan_read_range(void *p, size_t n) { touch(p, n, false); }
void __tsan_write_range(void *p, size_t n) { touch(p, n, true); }
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}

#define ATOMIC_ONE(T, bits, name, expression)                                                      \
    T __tsan_atomic##bits##_##name(volatile T *p, T x, int)                                        \
    {                                                                                              \
        touch((const void *)p, sizeof(T), true);                                                   \
        return expression;                                                                         \
    }
#define ATOMIC(T, bits)                                                                            \
    T __tsan_atomic##bits##_load(const volatile T *p, int)                                         \
    {                                                                                              \
        touch((const void *)p, sizeof(T), false);                                                  \
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                               \
    }                                                                                              \
    void __tsan_atomic##bits##_store(volatile T *p, T x, int)                                      \
    {                                                                                              \
        touch((const void *)p, sizeof(T), true);                                                   \
        __atomic_store_n(p, x, __ATOMIC_SEQ_CST);                                                  \
    }                                                                                              \
    ATOMIC_ONE(T, bits, exchange, __atomic_exchange_n(p, x, __ATOMIC_SEQ_CST))                     \
    ATOMIC_ONE(T, bits, fetch_add, __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST))                     \
    ATOMIC_ONE(T, bits, fetch_sub, __atomic_fetch_sub(p, x, __ATOMIC_SEQ_CST))                     \
    ATOMIC_ONE(T, bits, fetch_and, __atomic_fetch_and(p, x, __ATOMIC_SEQ_CST))                     \
    ATOMIC_ONE(T, bits, fetch_or, __atomic_fetch_or(p, x, __ATOMIC_SEQ_CST))                       \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile T *p, T *was, T x, int, int)        \
    {                                                                                              \
        touch((const void *)p, sizeof(T), true);                                                   \
        return __atomic_compare_exchange_n(p, was, x, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);      \
    }                                                                                              \
    int __tsan_atomic##bits##_compare_exchange_weak(volatile T *p, T *was, T x, int a, int b)      \
    {                                                                                              \
        return __tsan_atomic##bits##_compare_exchange_strong(p, was, x, a, b);                     \
    }                                                                                              \
    T __tsan_atomic##bits##_compare_exchange_val(volatile T *p, T was, T x, int a, int b)          \
    {                                                                                              \
        __tsan_atomic##bits##_compare_exchange_strong(p, &was, x, a, b);                           \
        return was;                                                                                \
    }
ATOMIC(uint8_t, 8)
ATOMIC(uint16_t, 16)
ATOMIC(uint32_t, 32)
ATOMIC(uint64_t, 64)

void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

/* memcpy, memset and memmove of watched code are compiled as calls of these. */
void *shim_memcpy(void *to, const void *from, size_t n)
{
    touch(from, n, false);
    touch(to, n, true);
    return memcpy(to, from, n);
}

void *shim_memmove(void *to, const void *from, size_t n)
{
    touch(from, n, false);
    touch(to, n, true);
    return memmove(to, from, n);
}

void *shim_memset(void *to, int byte, size_t n)
{
    touch(to, n, true);
    return memset(to, byte, n);
}
}
