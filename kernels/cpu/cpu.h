/* cpu.h -- what the CPU kernels share: the context, work split over threads, an object per ISA.
 *
 * Every file here but context.c, host.c and threads.c is compiled once for each ISA with ZK_SUFFIX
 * (_avx2, _avx512; _avx512bf16 and _amx for what multiplies matrices alone) set: define a kernel
 * as `void ZK(zk_add)(zk *k, ...)`. context.c holds the plain names and host.c those that begin
 * with zk_host_; they jump to the object that cpuid allows (environment ZK_ISA names a lower one).
 */
#ifndef ZK_CPU_H
#define ZK_CPU_H
#include "../zk.h"

#define ZK_PASTE_(a, b) a##b
#define ZK_PASTE(a, b) ZK_PASTE_(a, b)
#define ZK(name) ZK_PASTE(name, ZK_SUFFIX)

enum { ZK_SCRATCH = 5 << 19 }; /* bytes of packing space for each thread, 4096-byte aligned */

/* Every kernel's plain name once: X(zk_add) ... */
#include "kernels.def"

/* An object's kernels have the types of the plain ones: the compiler compares them. */
#ifdef ZK_SUFFIX
#define ZK_SAME_TYPE(name) __typeof__(name) ZK(name);
ZK_KERNELS(ZK_SAME_TYPE)
#endif

const char *zk_host_object(void); /* as zk_object and zk_overhead */
int zk_host_products(void);       /* the order that is faster here */
int64_t zk_host_overhead(int threads);

/* `name` jumps through a pointer, jump_NAME, to `kernel` of one of the objects. */
#define ZK_POINTER(name, kernel)                                                                   \
    void kernel##_avx2(void);                                                                      \
    void kernel##_avx512(void);                                                                    \
    __attribute__((used)) static void (*jump_##name)(void);                                        \
    __asm__(".pushsection .text\n.globl " #name "\n.type " #name ",@function\n" #name              \
            ":\njmp *jump_" #name "(%rip)\n.size " #name ",.-" #name "\n.popsection\n");

struct zk {
    int dtype, column, threads, products;
    struct zk_pool *pool; /* NULL when threads == 1 */
    char *scratch;        /* threads * ZK_SCRATCH */
};

static inline void *zk_scratch(const zk *k, int thread)
{
    return k->scratch + (int64_t)thread * ZK_SCRATCH;
}

/* Runs f(arg, task, thread) for task = 0 .. tasks-1 on the context's threads; returns when all are
 * done. Which thread runs which task is not fixed, so f's result must not depend on `thread`. */
void zk_for(zk *k, int64_t tasks, void (*f)(void *arg, int64_t task, int thread), void *arg);

/* The threads of a context, whose k->pool has its room: 1, or 0 and some may have started. */
enum { ZK_STACK = 1 << 20, ZK_MXCSR = 0x1f80 };
int zk_pool_start(zk *k);
void zk_pool_stop(zk *k);
int64_t zk_pool_bytes(int threads);

#endif
