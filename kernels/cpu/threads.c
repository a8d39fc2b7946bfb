/* threads.c -- the threads of a context and their jobs.
 *
 * Invariants
 *  1. If the process may use a core for each thread, a waiting thread first spins for a moment,
 *     because the next job usually comes at once. After that, or with fewer cores, it sleeps in the
 *     kernel: ranks may outnumber cores.
 *  2. A job is published by `job`, and changed only after every worker has left it.
 */
#define _GNU_SOURCE
#include "cpu.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LOOKS = 1000 }; /* polls of a word; 25 us on a Zen 5 */

typedef struct worker {
    zk *k;
    int thread; /* 1 .. threads - 1 */
    pthread_t id;
} worker;

struct zk_pool {
    void (*f)(void *arg, int64_t task, int thread);
    void *arg;
    int64_t tasks;
    _Atomic uint32_t job; /* number of the job; workers wait on it */
    int started;          /* workers started */
    int looks;            /* polls of a word before its waiter sleeps */
    /* on cache lines of their own, because other threads poll the words above */
    _Alignas(64) _Atomic int64_t next;  /* first task not taken yet */
    _Alignas(64) _Atomic uint32_t busy; /* workers in the job; zk_for waits on it */
    worker workers[];                   /* [threads - 1] */
};

static void sleep_while(const struct zk_pool *pool, _Atomic uint32_t *word, uint32_t value)
{
    for (int i = 0; i < pool->looks; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != value) return;
        _mm_pause();
    }
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
        if (task >= pool->tasks) return;
        pool->f(pool->arg, task, thread);
    }
}

/* Run jobs; a job without a function ends the thread. */
static void *work(void *arg)
{
    worker *me = arg;
    struct zk_pool *pool = me->k->pool;
    _mm_setcsr(ZK_MXCSR);
    for (uint32_t job = 0;; job++) {
        sleep_while(pool, &pool->job, job);
        int last = !pool->f;
        if (!last) take_tasks(pool, me->thread);
        if (atomic_fetch_sub(&pool->busy, 1) == 1) wake(&pool->busy, 1);
        if (last) return NULL;
    }
}

static void run(struct zk_pool *pool, int64_t tasks, void (*f)(void *arg, int64_t task, int thread),
                void *arg)
{
    pool->f = f;
    pool->arg = arg;
    pool->tasks = tasks;
    atomic_store(&pool->next, 0);
    atomic_store(&pool->busy, (uint32_t)pool->started);
    atomic_fetch_add(&pool->job, 1);
    wake(&pool->job, pool->started);
    if (f) take_tasks(pool, 0);
    for (uint32_t busy; (busy = atomic_load(&pool->busy)) != 0;)
        sleep_while(pool, &pool->busy, busy);
}

void zk_for(zk *k, int64_t tasks, void (*f)(void *arg, int64_t task, int thread), void *arg)
{
    if (k->pool && tasks > 1) {
        run(k->pool, tasks, f, arg);
        return;
    }
    for (int64_t task = 0; task < tasks; task++) f(arg, task, 0);
}

/* Return whether this process may use a core for each thread. */
static int has_cores(int threads)
{
    cpu_set_t cores;
    return !sched_getaffinity(0, sizeof cores, &cores) && CPU_COUNT(&cores) >= threads;
}

int zk_pool_start(zk *k)
{
    pthread_attr_t attr;
    k->pool->looks = has_cores(k->threads) ? LOOKS : 0;
    if (pthread_attr_init(&attr)) return 0;
    int ok = !pthread_attr_setstacksize(&attr, ZK_STACK);
    for (int t = 1; ok && t < k->threads; t++) {
        worker *w = &k->pool->workers[k->pool->started];
        *w = (worker){.k = k, .thread = t};
        ok = !pthread_create(&w->id, &attr, work, w);
        k->pool->started += ok;
    }
    pthread_attr_destroy(&attr);
    return ok;
}

void zk_pool_stop(zk *k)
{
    run(k->pool, 0, NULL, NULL);
    for (int i = 0; i < k->pool->started; i++) pthread_join(k->pool->workers[i].id, NULL);
}

int64_t zk_pool_bytes(int threads)
{
    return (int64_t)sizeof(struct zk_pool) + threads * (int64_t)sizeof(worker);
}
