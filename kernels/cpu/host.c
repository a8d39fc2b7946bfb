/* host.c -- a context on the host's processor: its memory, its threads, the object in use; and the
 * kernels zk_host_* of any target.
 *
 * Invariants
 *  1. A context is one mapping: zk, pool, threads' handles, then threads * ZK_SCRATCH. Nothing is
 *     mapped, and no page of it taken, after zk_host_open.
 *  2. The object is chosen once in a process, by cpuid and ZK_ISA; zk_host_open refuses what this
 *     processor cannot run.
 *  3. Nobody spins: threads without work wait in the kernel, for ranks may outnumber cores.
 *  4. A job is published by `job`, and taken apart only after every worker has left it.
 */
#include "cpu.h"

#include <cpuid.h>
#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, STACK = 1 << 20, MOST_THREADS = 1024, PLAIN_MXCSR = 0x1f80 };

/* ---- zk_host_*: each jumps through a pointer that choose() sets */
#define HOST_POINTER(name) ZK_POINTER(zk_host_##name, zk_##name)
ZK_HOST_KERNELS(HOST_POINTER)

static const char *object;          /* NULL: refused, `reason` says why */
static const char *reason;

static int runs_avx2(void)
{
    unsigned a, b, c = 0, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi2") && __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}

static int runs_avx512(void)
{
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

static void choose(void)
{
    const char *wanted = getenv("ZK_ISA");
    int best = runs_avx512() ? 512 : runs_avx2() ? 2 : 0, take = best;
    if (!best)
        reason = "this processor lacks AVX2, FMA, BMI2 or F16C, which every kernel object needs";
    if (wanted && !strcmp(wanted, "avx2"))
        take = 2;
    else if (wanted && !strcmp(wanted, "avx512"))
        take = 512;
    else if (wanted && *wanted)
        reason = "ZK_ISA names no kernel object; allowed: avx2, avx512";
    if (take > best && !reason)
        reason = "ZK_ISA=avx512, but this processor lacks AVX-512 (F, BW, CD, DQ, VL)";
    if (reason)
        return;
#define SET(name) jump_zk_host_##name = take == 512 ? zk_##name##_avx512 : zk_##name##_avx2;
    ZK_HOST_KERNELS(SET)
    object = take == 512 ? "avx512" : "avx2";
}

static void choose_once(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, choose);
}

const char *zk_host_object(void)
{
    choose_once();
    return object ? object : "none";
}

/* ---- threads */
typedef struct worker {
    zk *k;
    int thread;                     /* 1 .. threads - 1 */
    pthread_t id;
} worker;

struct zk_pool {
    void (*f)(void *arg, int64_t task, int thread);
    void *arg;
    int64_t tasks;
    _Atomic int64_t next;           /* first task that nobody has taken */
    _Atomic uint32_t job;           /* number of the job; waited on by workers */
    _Atomic uint32_t busy;          /* workers that have not left the job; waited on by zk_for */
    int started;                    /* workers that exist */
    worker workers[];               /* [threads - 1] */
};

static void sleep_while(_Atomic uint32_t *word, uint32_t value)
{
    while (atomic_load(word) == value)
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word, int sleepers)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, sleepers, NULL, NULL, 0);
}

static void take_tasks(struct zk_pool *pool, int thread)
{
    for (;;) {
        int64_t task = atomic_fetch_add(&pool->next, 1);
        if (task >= pool->tasks)
            return;
        pool->f(pool->arg, task, thread);
    }
}

/* A job without a function ends the thread. */
static void *work(void *arg)
{
    worker *me = arg;
    struct zk_pool *pool = me->k->pool;
    _mm_setcsr(PLAIN_MXCSR);
    for (uint32_t job = 0;; job++) {
        sleep_while(&pool->job, job);
        int last = !pool->f;
        if (!last)
            take_tasks(pool, me->thread);
        if (atomic_fetch_sub(&pool->busy, 1) == 1)
            wake(&pool->busy, 1);
        if (last)
            return NULL;
    }
}

static void run(struct zk_pool *pool, int64_t tasks,
                void (*f)(void *arg, int64_t task, int thread), void *arg)
{
    pool->f = f;
    pool->arg = arg;
    pool->tasks = tasks;
    atomic_store(&pool->next, 0);
    atomic_store(&pool->busy, (uint32_t)pool->started);
    atomic_fetch_add(&pool->job, 1);
    wake(&pool->job, pool->started);
    if (f)
        take_tasks(pool, 0);
    for (uint32_t busy; (busy = atomic_load(&pool->busy)) != 0;)
        sleep_while(&pool->busy, busy);
}

void zk_for(zk *k, int64_t tasks, void (*f)(void *arg, int64_t task, int thread), void *arg)
{
    if (k->pool && tasks > 1) {
        run(k->pool, tasks, f, arg);
        return;
    }
    for (int64_t task = 0; task < tasks; task++)
        f(arg, task, 0);
}

static int start(zk *k)
{
    pthread_attr_t attr;
    if (pthread_attr_init(&attr))
        return 0;
    int ok = !pthread_attr_setstacksize(&attr, STACK);
    for (int t = 1; ok && t < k->threads; t++) {
        worker *w = &k->pool->workers[k->pool->started];
        *w = (worker){.k = k, .thread = t};
        ok = !pthread_create(&w->id, &attr, work, w);
        k->pool->started += ok;
    }
    pthread_attr_destroy(&attr);
    return ok;
}

/* ---- the context */
static int64_t head_bytes(int threads)
{
    int64_t bytes = (int64_t)(64 + sizeof(struct zk_pool)) + threads * (int64_t)sizeof(worker);
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static int64_t mapped(int threads) { return head_bytes(threads) + (int64_t)threads * ZK_SCRATCH; }

int64_t zk_host_overhead(int threads)
{
    return mapped(threads) + (int64_t)(threads - 1) * STACK;
}

zk *zk_host_open(int dtype, int column, int threads, const char **why)
{
    *why = NULL;
    choose_once();
    if (!object)
        *why = reason;
    else if (dtype < ZK_F32 || dtype > ZK_F16)
        *why = "the kernels on a CPU store f32, bf16 or f16";
    else if (threads < 1 || threads > MOST_THREADS)
        *why = "threads must be 1 to 1024";
    if (*why)
        return NULL;
    /* Taken whole now: a rank's memory does not grow with its model, nor in its first steps. */
    char *p = mmap(NULL, (size_t)mapped(threads), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (p == MAP_FAILED) {
        *why = "no memory for the kernels' scratch space";
        return NULL;
    }
    zk *k = (zk *)p;
    _Static_assert(sizeof(zk) <= 64, "the pool starts on the second cache line");
    *k = (zk){.dtype = dtype, .column = column, .threads = threads,
              .scratch = p + head_bytes(threads)};
    _mm_setcsr(PLAIN_MXCSR);
    if (threads == 1)
        return k;
    k->pool = (struct zk_pool *)(p + 64);
    if (!start(k)) {
        zk_host_close(k);
        *why = "the kernels' threads could not be started";
        return NULL;
    }
    return k;
}

void zk_host_close(zk *k)
{
    if (k->pool) {
        run(k->pool, 0, NULL, NULL);
        for (int i = 0; i < k->pool->started; i++)
            pthread_join(k->pool->workers[i].id, NULL);
    }
    munmap(k, (size_t)mapped(k->threads));
}
