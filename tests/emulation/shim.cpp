/* shim.cpp -- a block's threads as fibres, and their barriers.
 *
 * Invariants
 *  1. One block runs at a time; the next one reuses its fibres and their stacks.
 *  2. The scheduler runs a warp's lanes until none can go on, warp by warp. Then either all threads
 *     have ended, or all wait at one barrier, or it is a mistake.
 *  3. A warp's collectives use two sets of slots in turn: a lane cannot reach the next but one
 *     before all lanes have read this one.
 */
#include "shim.h"
#include "hazard.h"
#include "order.h"

#include <algorithm>
#include <sys/mman.h>

/* Saves the registers that a call preserves on the stack and the stack pointer in *from, and
 * continues where `to` was left. */
extern "C" void shim_switch(void **from, void *to);
asm(".text\n.globl shim_switch\n.type shim_switch,@function\nshim_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n"
    ".size shim_switch,.-shim_switch\n");

shim_place shim_now;

namespace {

enum { THREADS = 1024, SAVED = 6, SHARED = 1 << 18, BEYOND = 1 << 15 };
enum { STACK = (128 << 10) + 576 }; /* so that stacks do not share lines of a cache */
enum state { READY, AT_BARRIER, AT_MEETING, ENDED };
const uint64_t CANARY = 0x5afe57ac5afe57ac;

struct fibre {
    void *sp;
    state at;
    const char *file;
    int line;
};

struct warp {
    int came, turn;
    uint32_t meetings; /* those that order memory */
    alignas(16) char slots[2][SHIM_WARP * SHIM_SLOT];
};

struct block {
    const char *name;
    unsigned threads;
    const std::function<void()> *body;
    void *scheduler;
    unsigned current;
    uint64_t number;   /* of the block in its grid */
    uint32_t barriers; /* number that it has passed */
    fibre fibres[THREADS];
    warp *warps; /* [THREADS / SHIM_WARP], outside the shared data */
};

block now;
char *stacks;
alignas(1024) char shared[SHARED + BEYOND]; /* BEYOND: bytes that no kernel may write */

char *stack_of(unsigned t) { return stacks + (size_t)t * STACK; }

[[noreturn]] void mistake(const char *what, unsigned thread, unsigned other)
{
    const fibre &a = now.fibres[thread], &b = now.fibres[other];
    shim_fail("kernel %s, block (%u,%u,%u): %s: thread %u at %s:%d, thread %u %s %s:%d", now.name,
              shim_now.block.x, shim_now.block.y, shim_now.block.z, what, thread, a.file, a.line,
              other, b.at == ENDED ? "has ended, last at" : "at", b.file, b.line);
}

void leave(state at)
{
    fibre &f = now.fibres[now.current];
    f.at = at;
    shim_switch(&f.sp, now.scheduler);
}

void enter(void)
{
    (*now.body)();
    leave(ENDED);
}

void go_on(unsigned t)
{
    now.current = t;
    shim_now.thread = {t, 0, 0};
    hazard_enter(now.number, t, now.barriers, now.warps[t / SHIM_WARP].meetings);
    shim_switch(&now.scheduler, now.fibres[t].sp);
    hazard_leave();
    if (now.fibres[t].at != AT_MEETING && *(uint64_t *)stack_of(t) != CANARY)
        shim_fail("kernel %s: thread %u needs a stack of more than %d bytes", now.name, t, STACK);
}

/* Prepares a stack as shim_switch leaves it, with `enter` to return to; aligned as after a call. */
void prepare(unsigned t)
{
    *(uint64_t *)stack_of(t) = CANARY;
    void **top = (void **)(stack_of(t) + STACK) - 2;
    top[0] = (void *)enter;
    top[1] = nullptr;
    now.fibres[t] = {top - SAVED, READY, "the start", 0};
}

void run_warp(unsigned w)
{
    unsigned order[SHIM_WARP], first = w * SHIM_WARP;
    unsigned lanes = std::min(now.threads - first, (unsigned)SHIM_WARP);
    order_of(order, lanes);
    for (int again = 1; again;) {
        again = 0;
        for (unsigned i = 0; i < lanes; i++)
            if (now.fibres[first + order[i]].at == READY) {
                go_on(first + order[i]);
                again = 1;
            }
    }
    for (unsigned i = 0; i < lanes; i++)
        if (now.fibres[first + i].at == AT_MEETING)
            for (unsigned j = 0; j < lanes; j++)
                if (now.fibres[first + j].at != AT_MEETING)
                    mistake("not all lanes come to a collective of their warp", first + i,
                            first + j);
}

/* Checks that the bytes after the launch's shared memory are as they were filled. */
void check_beyond(size_t bytes)
{
    for (size_t i = bytes; i < bytes + BEYOND; i++)
        if (shared[i] != (char)0xff)
            shim_fail("kernel %s writes byte %zu of %zu of dynamic shared memory", now.name, i,
                      bytes);
}

/* 1: all were at one barrier and go on; 0: all have ended */
int pass_barrier(void)
{
    unsigned waiting = 0, one = 0;
    for (unsigned t = 0; t < now.threads; t++)
        if (now.fibres[t].at == AT_BARRIER) {
            waiting++;
            one = t;
        }
    if (!waiting) return 0;
    const fibre &f = now.fibres[one];
    for (unsigned t = 0; t < now.threads; t++)
        if (now.fibres[t].at != AT_BARRIER || now.fibres[t].line != f.line ||
            (now.fibres[t].file != f.file && strcmp(now.fibres[t].file, f.file)))
            mistake("divergent barrier", one, t);
    for (unsigned t = 0; t < now.threads; t++) now.fibres[t].at = READY;
    now.barriers++;
    return 1;
}

void run_block(const shim_grid &g)
{
    memset(shared, 0xff, g.shared);
    for (unsigned t = 0; t < now.threads; t++) prepare(t);
    unsigned warps = (now.threads + SHIM_WARP - 1) / SHIM_WARP, order[THREADS / SHIM_WARP];
    for (unsigned w = 0; w < warps; w++) now.warps[w].came = 0;
    order_of(order, warps);
    do {
        for (unsigned w = 0; w < warps; w++) run_warp(order[w]);
    } while (pass_barrier());
}

}

void shim_run(const char *name, const void *kernel, const shim_grid &g,
              const std::function<void()> &thread)
{
    if (!stacks) {
        stacks = (char *)mmap(nullptr, (size_t)THREADS * STACK, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        now.warps = new warp[THREADS / SHIM_WARP]();
    }
    now.name = name;
    now.threads = g.block;
    now.body = &thread;
    memset(shared + g.shared, 0xff, BEYOND);
    hazard_launch(kernel, (((g.grid.x * 65537ull + g.grid.y) * 65537 + g.grid.z) * 2048 + g.block) ^
                              g.given);
    shim_now.block_dim = dim3(g.block, 1, 1);
    shim_now.grid_dim = g.grid;
    uint64_t blocks = (uint64_t)g.grid.x * g.grid.y * g.grid.z, back = order_backwards();
    for (uint64_t i = 0; i < blocks; i++) {
        uint64_t b = back ? blocks - 1 - i : i, row = b / g.grid.x;
        shim_now.block = {(unsigned)(b % g.grid.x), (unsigned)(row % g.grid.y),
                          (unsigned)(row / g.grid.y)};
        now.number = b;
        now.barriers = 0;
        run_block(g);
    }
    check_beyond(g.shared);
}

char *shim_shared(void) { return shared; }

const char *shim_kernel(void) { return now.name; }

void shim_barrier(const char *file, int line)
{
    fibre &f = now.fibres[now.current];
    f.file = file;
    f.line = line;
    leave(AT_BARRIER);
}

int shim_lane(void) { return (int)(now.current % SHIM_WARP); }

char *shim_slots(void)
{
    warp &w = now.warps[now.current / SHIM_WARP];
    return w.slots[w.turn];
}

void shim_meet(unsigned mask, bool orders, const char *file, int line)
{
    unsigned me = now.current, first = me / SHIM_WARP * SHIM_WARP;
    warp &w = now.warps[me / SHIM_WARP];
    now.fibres[me].file = file;
    now.fibres[me].line = line;
    if (mask != ~0u || now.threads % SHIM_WARP)
        shim_fail("kernel %s: %s:%d: a collective of a warp needs all its 32 lanes (mask %#x, "
                  "%u threads)",
                  now.name, file, line, mask, now.threads);
    for (unsigned t = first; t < first + SHIM_WARP; t++) {
        if (now.fibres[t].at != AT_MEETING) continue;
        if (now.fibres[t].line != line ||
            (now.fibres[t].file != file && strcmp(now.fibres[t].file, file)))
            mistake("lanes come to different collectives of their warp", me, t);
        break; /* the others have been compared with it */
    }
    if (++w.came < SHIM_WARP) {
        leave(AT_MEETING);
        return;
    }
    w.came = 0;
    w.turn ^= 1;
    w.meetings += orders;
    hazard_enter(now.number, me, now.barriers, w.meetings);
    for (unsigned t = first; t < first + SHIM_WARP; t++) now.fibres[t].at = READY;
}
