/* cpu.h -- the parts that CPU kernels share: the context, work split over threads, one object per
 * ISA.
 *
 * Every file here except context.c, host.c and threads.c is compiled once per ISA with ZK_SUFFIX
 * set (_avx2, _avx512; linear.c also _avx512bf16 and _amx, attention.c also _amx). Define a kernel
 * as `void ZK(zk_add)(zk *k, ...)`. context.c defines the plain names and host.c those that begin
 * with zk_host_; both jump to the best object that cpuid allows. The environment variable ZK_ISA
 * selects a lower one.
 */
#ifndef ZK_CPU_H
#define ZK_CPU_H
#include "../zk.h"

#define ZK_PASTE_(a, b) a##b
#define ZK_PASTE(a, b) ZK_PASTE_(a, b)
#define ZK(name) ZK_PASTE(name, ZK_SUFFIX)

/* Bytes: of packing space for each thread, aligned to 4096; of the panels that all threads pack for
 * a product by AMX, whole huge pages. */
enum { ZK_SCRATCH = 5 << 19, ZK_PANELS = 1 << 24 };

/* The list of kernels by plain name: X(zk_add) ... */
#include "kernels.def"

/* Let the compiler check that an object's kernels have the types of the plain ones. */
#ifdef ZK_SUFFIX
#define ZK_SAME_TYPE(name) __typeof__(name) ZK(name);
ZK_KERNELS(ZK_SAME_TYPE)
#endif

const char *zk_host_object(void); /* zk_object and zk_overhead of the host's processor */
int zk_host_products(void);       /* order of bf16 products that is faster here */
int zk_host_panels(zk *k);        /* make the panels that k needs; 0: there is no memory */
int64_t zk_host_overhead(int threads);

/* Define `name` as a jump through the pointer jump_NAME, which is set to
 * `kernel` of one of the objects. */
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
    char *panels;         /* ZK_PANELS; NULL: the context has no products by AMX */
};

static inline void *zk_scratch(const zk *k, int thread)
{
    return k->scratch + (int64_t)thread * ZK_SCRATCH;
}

/* Run f(arg, task, thread) for task = 0 .. tasks-1 on the context's threads, and
 * return when all are done. Which thread runs a task is not fixed, so the result of f
 * must not depend on `thread`. */
void zk_for(zk *k, int64_t tasks, void (*f)(void *arg, int64_t task, int thread), void *arg);

/* Start and stop the threads of a context; k->pool already has its memory. zk_pool_start returns 1,
 * or 0 after an error, when some threads may be running. zk_pool_bytes: size of the pool. */
enum { ZK_STACK = 1 << 20, ZK_MXCSR = 0x1f80 };
int zk_pool_start(zk *k);
void zk_pool_stop(zk *k);
int64_t zk_pool_bytes(int threads);

#endif
