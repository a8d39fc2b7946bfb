/* ptx.cpp -- runs kernels of nvcc's PTX, which the host's half, compiled by nvcc, launches.
 *
 * Invariants
 *  1. One thread of a block runs at a time. A warp goes on until it ends or comes to a barrier of
 *     the block; all its lanes must come to the same instruction, or end, together.
 *  2. Registers and shared memory begin as bytes of 0xff: NaN, and addresses of nothing.
 *  3. Global memory is the memory that the emulation has allocated, and the spans of the host that
 *     hazard_spans names. The emulation's cells find races, as they do for kernels compiled as C++.
 *  4. cp.async copies every other 16 bytes at once and the others at the wait, so that a read too
 *     soon, or an overwriting too late, is noticed.
 *  5. The four warps of a warpgroup come to each wgmma instruction together. A product's D is bytes
 *     of 0xff until the wait that covers it, before which the shared memory that it reads must not
 *     be written. Earlier writes there must be behind a fence.proxy.async of their thread.
 *  6. Every 4 bytes of shared memory have a mark: the thread that wrote last, and how many of its
 *     fence.proxy.async came before; or that a copy by cp.async has not arrived.
 */
#include "ptx.h"
#include "hazard.h"
#include "order.h"
#include "race.h"
#include "shim.h"
#include "tensor.h"

#undef blockDim /* names of members here */
#undef gridDim

#include <cstdlib>
#include <cxxabi.h>
#include <deque>
#include <list>
#include <map>
#include <string>
#include <vector>

ptx_place ptx_now;
extern "C" {
extern uint64_t ptx_launches; /* number of launches that have run */
uint64_t ptx_launches;
}

namespace {

enum { THREADS = 1024, SHARED = 1 << 18, RECENT = 4 };
enum { WARPS = 4, GROUP = WARPS * SHIM_WARP, ROWS = 64, TERMS = TENSOR_TERMS }; /* of a product */
enum state : char { READY, AT_BARRIER, AT_GROUP, ENDED };

struct late_copy {
    uint64_t to, from;
    unsigned bytes, some;
    int line;
    bool done;
};

struct span {
    uint64_t first, bytes;
};

/* The D of products that have not been waited for. */
struct sums {
    const ptx_product *of; /* the first of them */
    char *d[GROUP];        /* registers of each thread */
    std::vector<uint32_t> values;
};

/* A or B of a product: TERMS halves of each row of A, or column of B. */
struct operand {
    uint64_t descriptor; /* not of A in registers */
    unsigned rows;
    bool turned, own; /* own: a warp reads its rows alone */
    std::vector<uint16_t> halves;
    std::vector<uint32_t> marks; /* of the memory that it was read from */
};

struct product {
    const ptx_product *of;
    int line;
    bool add;
    sums *to;
    operand a, b;
    char *registers[GROUP]; /* of A, if it is there */
    uint32_t held[GROUP][4];
    uint64_t group; /* number of the commit_group that it is before */
};

struct warpgroup {
    std::list<sums> in_flight;
    std::deque<product> products;
    uint64_t commits;
    bool fenced;
    std::vector<char> before; /* the threads and their registers at the fence */
};

struct block {
    const ptx_kernel *kernel;
    const char *name;
    const char *params;
    unsigned threads, shared; /* bytes */
    unsigned current;         /* thread */
    uint64_t number;          /* of the block in its grid */
    uint32_t barriers;
    uint32_t meetings[THREADS / SHIM_WARP]; /* of each warp, those that order memory */
    state at[THREADS / SHIM_WARP];
};

block now;
alignas(1024) char shared[SHARED];
std::vector<char> room; /* threads, with their registers */
std::vector<late_copy> late[THREADS];
warpgroup groups[THREADS / GROUP];
enum : uint32_t { MARK_THREAD = 10, ON_THE_WAY = ~0u };
uint32_t marks[SHARED / 4], fences[THREADS]; /* fences: 1 + their number */
span recent[RECENT];                         /* spans of the last accesses */
unsigned oldest;

ptx_thread &thread(unsigned t) { return *(ptx_thread *)(room.data() + now.kernel->bytes * t); }

/* ---- kernels by name */
struct launched {
    const char *mangled, *name;
    const ptx_kernel *kernel; /* found at the first launch: files register in any order */
};

std::map<std::string, const ptx_kernel *> &kernels(void)
{
    static std::map<std::string, const ptx_kernel *> all;
    return all;
}

std::map<const void *, launched> &functions(void)
{
    static std::map<const void *, launched> all;
    return all;
}

/* A name without the numbers by which nvcc tells files apart, as ptx.py writes it. */
std::string plain(std::string name)
{
    const char word[] = "_GLOBAL__N__", zeros[] = "00000000";
    for (size_t at = 0; (at = name.find(word, at)) != std::string::npos; at++) {
        size_t first = at + sizeof word - 1, last = name.find("_cu_", first);
        name.replace(first, 8, zeros);
        if (last != std::string::npos) name.replace(last + 4, 8, zeros);
    }
    return name;
}

/* ---- memory */
bool within(const span &s, uint64_t at, unsigned n)
{
    return at - s.first < s.bytes && n <= s.bytes - (at - s.first);
}

bool allocated(uint64_t at, unsigned n)
{
    for (const span &s : recent)
        if (within(s, at, n)) return true;
    span found = {0, 0};
    for (int i = HAZARD_SPANS; i < hazard_count; i++) {
        span s = {(uint64_t)hazard_regions[i].at, hazard_regions[i].bytes};
        if (within(s, at, n)) found = s;
    }
    size_t bytes = 0;
    if (!found.bytes) {
        found.first = (uint64_t)race_span((const void *)at, &bytes);
        found.bytes = bytes;
    }
    if (!within(found, at, n)) return false;
    recent[oldest++ % RECENT] = found;
    return true;
}

[[noreturn]] void wrong(int line, const char *what, uint64_t at, unsigned n, ptx_access how)
{
    static const char *const words[] = {"a read", "a write", "an atomic"};
    char text[160];
    snprintf(text, sizeof text, "%s of %u bytes at %#llx: %s", words[how], n,
             (unsigned long long)at, what);
    ptx_fail(line, text);
}

void check(char *p, unsigned n, ptx_access how)
{
    race_check(p, n, how != ptx_reads);
    hazard_check(p, n, how != ptx_reads, how == ptx_both);
}

uint32_t *mark(uint64_t at) { return &marks[(at - PTX_SHARED_FIRST) / 4]; }

void mark_all(uint64_t at, unsigned n, uint32_t as)
{
    std::fill(mark(at), mark(at + n - 1) + 1, as);
}

uint32_t mark_now(void) { return fences[now.current] << MARK_THREAD | now.current; }

void copy_now(const late_copy &c)
{
    char *to = ptx_shared(c.to, c.bytes, ptx_writes, c.line);
    memset(to, 0, c.bytes);
    if (c.some) memcpy(to, ptx_global(c.from, c.some, ptx_reads, c.line), c.some);
}

/* ---- instructions of the lanes of a warp together; all: its threads, by lane */
typedef ptx_thread *const (&warp)[SHIM_WARP];

void shuffle(warp all, ptx_meeting kind)
{
    for (int lane = 0; lane < SHIM_WARP; lane++) {
        int by = (int)(all[lane]->in[2] & 31), clamp = (int)(all[lane]->in[3] & 31);
        int segment = (int)(all[lane]->in[3] >> 8 & 31);
        int first = lane & segment, last = first | (clamp & ~segment), from;
        if (kind == ptx_meeting::SHFL_UP) from = lane - by;
        else if (kind == ptx_meeting::SHFL_BFLY) from = lane ^ by;
        else from = first | (by & ~segment);
        bool valid = kind == ptx_meeting::SHFL_UP ? from >= last : from <= last;
        all[lane]->out[0] = all[valid ? from : lane]->in[1];
        all[lane]->out[1] = valid;
    }
}

void vote(warp all, ptx_meeting kind)
{
    uint32_t bits = 0;
    for (int lane = 0; lane < SHIM_WARP; lane++) bits |= (all[lane]->in[1] & 1) << lane;
    for (ptx_thread *t : all) t->out[0] = kind == ptx_meeting::VOTE_BALLOT ? bits : bits != 0;
}

/* Lane 8i + r has the address of row r of matrix i; lane 4g + t gets elements 2t and 2t + 1 of row
 * g of each matrix, or of column g if turned. */
void load_matrices(warp all, bool turned, int line)
{
    for (int i = 0; i < 4; i++) {
        uint16_t rows[8][8];
        for (int r = 0; r < 8; r++) {
            ptx_thread *t = all[8 * i + r];
            now.current = t->tid;
            hazard_enter(now.number, t->tid, now.barriers, now.meetings[t->tid / SHIM_WARP]);
            memcpy(rows[r], ptx_shared(t->in[0], 16, ptx_reads, line), 16);
        }
        for (int lane = 0; lane < SHIM_WARP; lane++) {
            int g = lane / 4, t = lane % 4 * 2;
            all[lane]->out[i] =
                turned ? pair(rows[t + 1][g], rows[t][g]) : pair(rows[g][t + 1], rows[g][t]);
        }
    }
    hazard_leave();
}

/* D = A B + C, a lane's registers being the elements that the PTX manual says: A is 16 x 16, B 16 x
 * 8, C 16 x 8. */
void multiply(warp all, bool bf16)
{
    uint16_t rows[16][16], columns[8][16];
    for (int lane = 0; lane < SHIM_WARP; lane++) {
        int g = lane / 4, t = lane % 4 * 2;
        for (int i = 0; i < 8; i++) /* register i / 2, half i % 2 */
            rows[g + i / 2 % 2 * 8][t + i / 4 * 8 + i % 2] =
                (uint16_t)(all[lane]->in[i / 2] >> i % 2 * 16);
        for (int i = 0; i < 4; i++)
            columns[g][t + i / 2 * 8 + i % 2] = (uint16_t)(all[lane]->in[4 + i / 2] >> i % 2 * 16);
    }
    for (int lane = 0; lane < SHIM_WARP; lane++)
        for (int i = 0; i < 4; i++) {
            const uint16_t *a = rows[lane / 4 + i / 2 * 8], *b = columns[lane % 4 * 2 + i % 2];
            uint32_t c = all[lane]->in[6 + i];
            all[lane]->out[i] = bf16 ? tensor_bf16(a, b, c) : tensor_f16(a, b, c);
        }
}

/* ---- products of a warpgroup; all: its threads */
typedef ptx_thread *const (&threads)[GROUP];

uint64_t descriptor(const ptx_thread &t, int i) { return (uint64_t)t.in[i + 1] << 32 | t.in[i]; }

/* Of a thread's first register of D or A */
unsigned row_of(unsigned t) { return t / SHIM_WARP * 16 + t % SHIM_WARP / 4; }
unsigned column_of(unsigned t) { return t % 4 * 2; }

/* The address of 8 halves of an operand: from row i on, of column k, if turned; else of row i, from
 * column k on. */
uint64_t address(uint64_t d, bool turned, unsigned i, unsigned k)
{
    const uint64_t MASK = (1 << 14) - 1;
    uint64_t first = (d & MASK) << 4, leading = (d >> 16 & MASK) << 4,
             stride = (d >> 32 & MASK) << 4;
    uint64_t at = turned ? first + i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2
                         : first + i / 8 * stride + i % 8 * 128 + k * 2;
    return at ^ (at >> 3 & 0x70);
}

/* Finds mistakes in the marks of 16 bytes that a product reads: at its issue writes that it may not
 * see; `again`, at its wait, all writes since its issue. */
void look(operand &o, size_t chunk, uint64_t at, bool again, int line)
{
    for (unsigned i = 0; i < 4; i++) {
        uint32_t m = *mark(at + 4 * i), by = m % THREADS;
        if (again && m != o.marks[4 * chunk + i])
            ptx_fail(line, "memory that a product reads is written before the product's wait");
        if (again) continue;
        if (m == ON_THE_WAY) ptx_fail(line, "a product reads a copy that has not arrived");
        if (m >> MARK_THREAD == fences[by]) {
            std::string text = "a product reads memory that thread " + std::to_string(by) +
                               " wrote, with no fence.proxy.async since";
            ptx_fail(line, text.c_str());
        }
        o.marks.push_back(m);
    }
}

/* Reads an operand from shared memory, for the first and the last thread of those whose warps read
 * it, so that every other thread's write must be ordered. */
void read(threads all, operand &o, int line)
{
    if (o.descriptor >> 62 != 1 || o.descriptor & 0x3fffc000c000c000)
        ptx_fail(line, "a matrix descriptor that is not of 128-byte swizzle alone");
    bool again = o.marks.size();
    size_t chunk = 0;
    o.halves.resize(o.rows * TERMS);
    for (unsigned i = 0; i < o.rows; i += o.turned ? 8 : 1)
        for (unsigned k = 0; k < TERMS; k += o.turned ? 1 : 8, chunk++) {
            uint64_t at = address(o.descriptor, o.turned, i, k);
            const char *from = ptx_shared(at, 16, ptx_reads, line);
            look(o, chunk, at, again, line);
            unsigned first = o.own ? i / 16 * SHIM_WARP : 0;
            unsigned last = o.own ? first + SHIM_WARP - 1 : GROUP - 1;
            for (const ptx_thread *t : {all[first], all[last]}) {
                hazard_enter(now.number, t->tid, now.barriers, now.meetings[t->tid / SHIM_WARP]);
                ptx_shared(at, 16, ptx_reads, line);
            }
            hazard_leave();
            for (unsigned j = 0; j < 8; j++)
                o.halves[o.turned ? (i + j) * TERMS + k : i * TERMS + k + j] =
                    loaded<uint16_t>(from + 2 * j);
        }
}

/* wgmma.fence: products take registers as they are now. */
void fence(warpgroup &g, threads all)
{
    const char *from = (const char *)all[0];
    g.fenced = true;
    g.before.assign(from, from + now.kernel->bytes * GROUP);
}

/* Finds a register of a product that has changed since the fence. */
void check_fenced(const warpgroup &g, threads all, const void *at, int line)
{
    if (memcmp(at, &g.before[(size_t)((const char *)at - (const char *)all[0])], 4))
        ptx_fail(line, "a product with a register that changed after its wgmma.fence");
}

/* Takes a product's A from registers. */
void take(const warpgroup &g, threads all, product &p)
{
    p.a.halves.resize(ROWS * TERMS);
    for (unsigned t = 0; t < GROUP; t++) {
        p.registers[t] = all[t]->a;
        now.current = all[t]->tid;
        for (unsigned i = 0; i < 4; i++)
            check_fenced(g, all, p.registers[t] + 4 * p.of->a[i], p.line);
        memcpy(p.held[t], all[t]->in, sizeof p.held[t]);
        for (unsigned i = 0; i < 8; i++) /* register i / 2, half i % 2 */
            p.a.halves[(row_of(t) + i / 2 % 2 * 8) * TERMS + column_of(t) + i / 4 * 8 + i % 2] =
                (uint16_t)(p.held[t][i / 2] >> i % 2 * 16);
    }
}

/* Return the D of a product: the one in flight with the same registers, or its registers, which
 * become 0xff. */
sums *sums_of(warpgroup &g, threads all, const ptx_product &p, int line)
{
    for (sums &s : g.in_flight) {
        if (s.d[0] != all[0]->d) continue;
        if (s.of->n == p.n && std::equal(p.d, p.d + p.n / 2, s.of->d)) return &s;
        for (const uint16_t *r = p.d; r < p.d + p.n / 2; r++)
            if (std::find(s.of->d, s.of->d + s.of->n / 2, *r) != s.of->d + s.of->n / 2)
                ptx_fail(line, "a product whose D has registers of another D in flight");
    }
    g.in_flight.push_back({&p, {}, {}});
    sums &s = g.in_flight.back();
    for (unsigned t = 0; t < GROUP; t++) {
        s.d[t] = all[t]->d;
        now.current = all[t]->tid;
        for (unsigned i = 0; i < p.n / 2; i++) {
            if (all[0]->in[6]) check_fenced(g, all, s.d[t] + 4 * p.d[i], line);
            s.values.push_back(loaded<uint32_t>(s.d[t] + 4 * p.d[i]));
            store(s.d[t] + 4 * p.d[i], ~0u);
        }
    }
    return &s;
}

void issue(warpgroup &g, threads all, const ptx_site &s)
{
    const ptx_product &p = *s.product;
    now.current = all[0]->tid;
    if (!g.fenced) ptx_fail(s.line, "a product with no wgmma.fence before it");
    for (const ptx_thread *t : all)
        if (memcmp(&t->in[p.a ? 4 : 0], &all[0]->in[p.a ? 4 : 0], p.a ? 12 : 28))
            ptx_fail(s.line, "a product whose threads have different descriptors or scales");
    product made = {};
    made.of = &p, made.line = s.line, made.group = g.commits, made.add = all[0]->in[6];
    made.a.descriptor = descriptor(*all[0], 0), made.b.descriptor = descriptor(*all[0], 4);
    made.a.rows = ROWS, made.a.turned = p.turned_a, made.a.own = true;
    made.b.rows = p.n, made.b.turned = p.turned_b;
    if (p.a) take(g, all, made);
    else read(all, made.a, s.line);
    read(all, made.b, s.line);
    made.to = sums_of(g, all, p, s.line);
    g.products.push_back(std::move(made));
}

/* Adds a product to its D, after its operands have been found unchanged. */
void finish(threads all, product &p)
{
    const ptx_product &of = *p.of;
    read(all, p.b, p.line);
    if (!of.a) read(all, p.a, p.line);
    for (unsigned t = 0; t < GROUP; t++) {
        now.current = all[t]->tid;
        for (unsigned i = 0; of.a && i < 4; i++)
            if (loaded<uint32_t>(p.registers[t] + 4 * of.a[i]) != p.held[t][i])
                ptx_fail(p.line, "a register of a product's A changed before the product's wait");
        for (unsigned i = 0; i < of.n / 2; i++) {
            const uint16_t *a = &p.a.halves[(row_of(t) + i / 2 % 2 * 8) * TERMS];
            const uint16_t *b = &p.b.halves[(i / 4 * 8 + column_of(t) + i % 2) * TERMS];
            uint32_t *d = &p.to->values[t * (of.n / 2) + i], c = p.add ? *d : 0;
            *d = of.bf16 ? tensor_bf16(a, b, c) : tensor_f16(a, b, c);
        }
    }
}

/* Waits for all commit groups but the last `but`. */
void wait_group(warpgroup &g, threads all, uint64_t but)
{
    g.fenced = false;
    for (; g.products.size() && g.products[0].group + but < g.commits; g.products.pop_front()) {
        product &p = g.products[0];
        finish(all, p);
        bool last = true;
        for (size_t i = 1; i < g.products.size(); i++) last &= g.products[i].to != p.to;
        if (!last) continue;
        unsigned n = p.of->n / 2;
        for (unsigned t = 0; t < GROUP; t++)
            for (unsigned i = 0; i < n; i++) {
                char *to = p.to->d[t] + 4 * p.of->d[i];
                now.current = all[t]->tid;
                if (loaded<uint32_t>(to) != ~0u)
                    ptx_fail(p.line, "a register of a product's D changed before its wait");
                store(to, p.to->values[t * n + i]);
            }
        g.in_flight.remove_if([&p](const sums &s) { return &s == p.to; });
    }
}

/* ---- warps and blocks */
const ptx_site &site(const ptx_thread &t)
{
    static const ptx_site ended = {ptx_meeting::START, "its end", 0, nullptr};
    return t.pc == PTX_ENDED ? ended : now.kernel->sites[t.pc];
}

[[noreturn]] void parted(const char *what, const ptx_thread &a, const ptx_thread &b)
{
    shim_fail("kernel %s, block (%u,%u,%u): %s: thread %u is at %s (line %d), thread %u at %s "
              "(line %d)",
              now.name, ptx_now.ctaid.x, ptx_now.ctaid.y, ptx_now.ctaid.z, what, a.tid,
              site(a).spelling, site(a).line, b.tid, site(b).spelling, site(b).line);
}

/* Does the instruction at which all lanes have arrived. Returns the warp's state. */
state meet(warp all, unsigned w)
{
    ptx_site s = site(*all[0]);
    bool masked = s.kind > ptx_meeting::BARRIER && s.kind < ptx_meeting::LOAD_MATRICES;
    for (ptx_thread *t : all)
        if (now.current = t->tid; masked && t->in[0] != ~0u)
            ptx_fail(s.line, "a mask without all lanes");
    switch (s.kind) {
    case ptx_meeting::START: return ENDED;
    case ptx_meeting::BARRIER: return AT_BARRIER;
    case ptx_meeting::WARP: now.meetings[w]++; break;
    case ptx_meeting::SHFL_BFLY:
    case ptx_meeting::SHFL_IDX:
    case ptx_meeting::SHFL_UP: shuffle(all, s.kind); break;
    case ptx_meeting::VOTE_ANY:
    case ptx_meeting::VOTE_BALLOT: vote(all, s.kind); break;
    case ptx_meeting::LOAD_MATRICES:
    case ptx_meeting::LOAD_TURNED:
        load_matrices(all, s.kind == ptx_meeting::LOAD_TURNED, s.line);
        break;
    case ptx_meeting::MULTIPLY_BF16:
    case ptx_meeting::MULTIPLY_F16: multiply(all, s.kind == ptx_meeting::MULTIPLY_BF16); break;
    case ptx_meeting::PRODUCT:
    case ptx_meeting::FENCE:
    case ptx_meeting::COMMIT_GROUP:
    case ptx_meeting::WAIT_GROUP: return AT_GROUP;
    }
    return READY;
}

void run_warp(unsigned w)
{
    ptx_thread *all[SHIM_WARP];
    for (unsigned i = 0; i < SHIM_WARP; i++) all[i] = &thread(w * SHIM_WARP + i);
    while (now.at[w] == READY) {
        unsigned order[SHIM_WARP];
        order_of(order, SHIM_WARP);
        for (unsigned i : order) {
            now.current = w * SHIM_WARP + i;
            hazard_enter(now.number, now.current, now.barriers, now.meetings[w]);
            now.kernel->run(*all[i]);
            hazard_leave();
        }
        for (ptx_thread *t : all)
            if (t->pc != all[0]->pc) parted("lanes part", *all[0], *t);
        now.at[w] = meet(all, w);
    }
}

/* Does the instruction at which the four warps of a group have arrived. Returns whether there is
 * one. */
bool join(unsigned w)
{
    w -= w % WARPS;
    unsigned warps = std::min(now.threads / SHIM_WARP, w + WARPS), at = w;
    while (at < warps && now.at[at] != AT_GROUP) at++;
    if (at == warps) return false;
    for (unsigned i = w; i < warps; i++)
        if (thread(i * SHIM_WARP).pc != thread(at * SHIM_WARP).pc)
            parted("warps of a warpgroup part", thread(at * SHIM_WARP), thread(i * SHIM_WARP));
    const ptx_site &s = site(thread(at * SHIM_WARP));
    now.current = at * SHIM_WARP;
    if (warps < w + WARPS) ptx_fail(s.line, "a warpgroup of fewer than four warps");
    ptx_thread *all[GROUP];
    for (unsigned i = 0; i < GROUP; i++) all[i] = &thread(w * SHIM_WARP + i);
    warpgroup &g = groups[w / WARPS];
    if (s.kind == ptx_meeting::PRODUCT) issue(g, all, s);
    else if (s.kind == ptx_meeting::FENCE) fence(g, all);
    else if (s.kind == ptx_meeting::COMMIT_GROUP) g.commits++;
    else wait_group(g, all, all[0]->in[0]);
    for (unsigned i = 0; i < WARPS; i++) now.at[w + i] = READY;
    return true;
}

/* Runs all warps until they end or come to a barrier. */
void run_warps(unsigned warps, const unsigned *order)
{
    for (unsigned i = 0; i < warps; i++) run_warp(order[i]);
    for (unsigned i = 0; i < warps; i++)
        while (join(order[i]))
            for (unsigned j = 0; j < warps; j++)
                if (order[j] / WARPS == order[i] / WARPS) run_warp(order[j]);
}

/* 1: all warps were at one barrier and go on; 0: all have ended */
int pass_barrier(unsigned warps)
{
    for (unsigned w = 1; w < warps; w++)
        if (thread(w * SHIM_WARP).pc != thread(0).pc)
            parted("divergent barrier", thread(0), thread(w * SHIM_WARP));
    if (thread(0).pc == PTX_ENDED) return 0;
    for (unsigned w = 0; w < warps; w++) now.at[w] = READY;
    now.barriers++;
    return 1;
}

void run_block(void)
{
    memset(shared, 0xff, now.shared);
    memset(marks, 0, now.shared);
    memset(room.data(), 0xff, room.size());
    now.barriers = 0;
    unsigned warps = now.threads / SHIM_WARP, order[THREADS / SHIM_WARP];
    for (unsigned t = 0; t < now.threads; t++) {
        thread(t).pc = 0;
        thread(t).tid = t;
        late[t].clear();
        fences[t] = 1;
    }
    for (unsigned w = 0; w < warps; w++) now.at[w] = READY, now.meetings[w] = 0;
    for (warpgroup &g : groups) g = {};
    order_of(order, warps);
    do run_warps(warps, order);
    while (pass_barrier(warps));
    for (const warpgroup &g : groups)
        if (now.current = (unsigned)(&g - groups) * GROUP; g.products.size())
            ptx_fail(g.products[0].line, "a product that is not waited for");
}

/* ---- launches */
/* A number for a launch's arguments: the integers, and which pointers are equal. */
uint64_t number_of(const ptx_kernel &k, const std::string &params)
{
    std::vector<uint64_t> pointers;
    uint64_t all = 0;
    for (unsigned i = 0; i < k.count; i++)
        for (unsigned at = k.params[i].at; at < k.params[i].at + k.params[i].bytes; at += 8) {
            uint64_t x = 0;
            memcpy(&x, &params[at], std::min(8u, k.params[i].at + k.params[i].bytes - at));
            if (allocated(x, 1)) {
                size_t same =
                    (size_t)(std::find(pointers.begin(), pointers.end(), x) - pointers.begin());
                if (same == pointers.size()) pointers.push_back(x);
                x = same;
            }
            all = (all ^ x) * 0x9e3779b97f4a7c15 + 1;
        }
    return all;
}

void run_grid(const launched &l, const std::string &params, const shim_grid &g)
{
    const ptx_kernel &k = *l.kernel;
    now.kernel = &k;
    now.name = l.name;
    now.params = params.data();
    now.threads = g.block;
    now.shared = k.dynamic + (unsigned)g.shared;
    if (g.block % SHIM_WARP || g.block > k.most || now.shared > SHARED)
        shim_fail("kernel %s: %u threads of %u, %u bytes of shared memory", l.name, g.block, k.most,
                  now.shared);
    for (span &s : recent) s = {0, 0};
    room.resize(k.bytes * g.block);
    hazard_launch(&k, (((g.grid.x * 65537ull + g.grid.y) * 65537 + g.grid.z) * 2048 + g.block) ^
                          number_of(k, params));
    ptx_now.ntid = g.block;
    ptx_now.nctaid = g.grid;
    uint64_t blocks = (uint64_t)g.grid.x * g.grid.y * g.grid.z, back = (uint64_t)order_backwards();
    for (uint64_t i = 0; i < blocks; i++) {
        now.number = back ? blocks - 1 - i : i;
        uint64_t row = now.number / g.grid.x;
        ptx_now.ctaid = {(unsigned)(now.number % g.grid.x), (unsigned)(row % g.grid.y),
                         (unsigned)(row / g.grid.y)};
        run_block();
    }
    ptx_launches++;
}

}

/* ---- called by the translated kernels */
bool ptx_know(const ptx_kernel *table, int n)
{
    for (int i = 0; i < n; i++) kernels()[table[i].name] = &table[i];
    return true;
}

void ptx_fail(int line, const char *what)
{
    shim_fail("kernel %s, line %d of the PTX, block (%u,%u,%u), thread %u: %s", now.name, line,
              ptx_now.ctaid.x, ptx_now.ctaid.y, ptx_now.ctaid.z, now.current, what);
}

char *ptx_global(uint64_t at, unsigned n, ptx_access how, int line)
{
    if (at % n) wrong(line, "not aligned", at, n, how);
    if (!allocated(at, n)) wrong(line, "not allocated in global memory", at, n, how);
    check((char *)at, n, how);
    return (char *)at;
}

/* Whether bytes of shared memory are of one array. */
bool of_an_array(uint64_t at, unsigned n)
{
    const ptx_kernel &k = *now.kernel;
    if (within({PTX_SHARED_FIRST + k.dynamic, now.shared - k.dynamic}, at, n)) return true;
    for (unsigned i = 0; i < k.fixed; i++)
        if (within({PTX_SHARED_FIRST + k.arrays[i].at, k.arrays[i].bytes}, at, n)) return true;
    return false;
}

char *ptx_shared(uint64_t at, unsigned n, ptx_access how, int line)
{
    if (at % n) wrong(line, "not aligned", at, n, how);
    if (!of_an_array(at, n)) wrong(line, "outside of the block's shared memory", at, n, how);
    char *p = shared + (at - PTX_SHARED_FIRST);
    check(p, n, how);
    if (how != ptx_reads) mark_all(at, n, mark_now());
    return p;
}

char *ptx_param(uint64_t at, unsigned n, ptx_access how, int line)
{
    if (how != ptx_reads || at % n || !within({0, now.kernel->param_bytes}, at, n))
        wrong(line, "not within the kernel's parameters", at, n, how);
    return const_cast<char *>(now.params) + at;
}

char *ptx_local(char *depot, size_t bytes, uint64_t at, unsigned n, ptx_access how, int line)
{
    if (at % n || !within({0, bytes}, at, n))
        wrong(line, "not within the thread's local memory", at, n, how);
    return depot + at;
}

void ptx_copy(const ptx_thread &t, uint64_t to, uint64_t from, unsigned n, unsigned some, int line)
{
    if (some > n) ptx_fail(line, "cp.async reads more than it writes");
    late_copy c = {to, from, n, some, line, !(to / 16 % 2)};
    if (c.done) copy_now(c);
    late[t.tid].push_back(c);
    if (within({PTX_SHARED_FIRST, now.shared}, to, n)) mark_all(to, n, ON_THE_WAY);
}

void ptx_arrive(const ptx_thread &t)
{
    for (const late_copy &c : late[t.tid]) {
        if (!c.done) copy_now(c);
        mark_all(c.to, c.bytes, mark_now());
    }
    late[t.tid].clear();
}

void ptx_fence(const ptx_thread &t) { fences[t.tid]++; }

/* ---- called by the emulation's runtime */
void shim_run(const char *, const void *, const shim_grid &, const std::function<void()> &grid)
{
    grid();
}

const char *shim_kernel(void) { return now.name; }

extern "C" {

/* ---- called by code that nvcc compiled for the host */
void **__cudaRegisterFatBinary(void *)
{
    static void *none;
    return &none;
}

void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}

void __cudaRegisterFunction(void **, const char *function, char *, const char *name, int, uint3 *,
                            uint3 *, dim3 *, dim3 *, int *)
{
    int status;
    const char *readable = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    functions()[function] = {name, readable ? readable : name, nullptr};
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *function, void **args)
{
    auto found = functions().find(function);
    if (found == functions().end()) shim_fail("a launch of a function that is no kernel");
    if (!found->second.kernel) found->second.kernel = kernels()[plain(found->second.mangled)];
    const launched l = found->second;
    if (!l.kernel) shim_fail("kernel %s: there is no PTX of it", l.name);
    if (c->blockDim.y != 1 || c->blockDim.z != 1 || c->numAttrs)
        shim_fail("kernel %s: a launch that the emulation does not know", l.name);
    std::string params(l.kernel->param_bytes, '\xff');
    for (unsigned i = 0; i < l.kernel->count; i++)
        memcpy(&params[l.kernel->params[i].at], args[i], l.kernel->params[i].bytes);
    shim_grid g = {c->gridDim, c->blockDim.x, c->dynamicSmemBytes, 0};
    return shim_enqueue(l.name, function, g, c->stream, [l, params, g] { run_grid(l, params, g); });
}

/* Code that nvcc writes for the host calls these where a kernel is called; no launch here does. */
[[noreturn]] static void not_there(const char *name)
{
    shim_fail("%s: the emulation launches by cudaLaunchKernelExC alone", name);
}

cudaError_t __cudaGetKernel(cudaKernel_t *, const void *) { not_there("__cudaGetKernel"); }

cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t)
{
    not_there("__cudaLaunchKernel");
}

cudaError_t __cudaPopCallConfiguration(dim3 *, dim3 *, size_t *, void *)
{
    not_there("__cudaPopCallConfiguration");
}
}
