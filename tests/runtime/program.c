/* program.c -- a small handwritten program for the runtime. It does the work of train.c with
 * integers.
 *
 * UNITS units of N uint64 masters are split over the ranks. A step does for every micro-batch and
 * unit: gather the unit into a ring of two slots, make a gradient of it (`use`), send its pieces by
 * all-to-alls to two slots of the inbox, and sum them (`add`); then `update`. Integer sums wrap and
 * commute, so the masters after a step do not depend on ranks, queues or modes, and test_runtime.py
 * computes them again in numpy.
 *
 * Environment
 *   RANKS     1, 2, 3, 4, 6, 8 (divides MICRO_BATCHES)
 *   AHEAD     1: a unit is gathered while the one before is used
 *   OVERLAP   1: ZR_GATHER, ZR_REDUCE and ZR_SUM are used; else everything runs on ZR_MAIN
 *   SKIP      full, free, made, gone, brought or added: this kind of wait is left out
 *   PAD_MIB   the arena is larger by so much
 *   WORK_US   every `use` and every `eval` takes longer by so much
 *   FAULT     a fault (see `fault`, and unequal: fewer gathers) of rank 1 (0 if alone) in step 2
 *   EVENTS    1, 2: the step tests the meaning of events instead, eager or late; 3: it tests that
 *             the input of a finished collective may be overwritten; 4: it tests that a late step
 *             leaves work that only the next one waits for, and the last step none
 */
#define _GNU_SOURCE
#include "zr.h"
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef UNIT
#define UNIT 3072
#endif
enum { UNITS = 3, N = UNIT, MICRO_BATCHES = 24, PIECES = 4, INBOX = 64 };
#ifndef SEQUENCE
#define SEQUENCE 5
#endif
#ifndef SHUFFLE
#define SHUFFLE 0
#endif
enum { BATCH = 2, ROWS = BATCH * SEQUENCE, VOCAB = 100, IGNORE = 99 };
/* by slot, except the last */
enum { FULL = 0, FREE = 2, MADE = 4, GONE = 6, BROUGHT = 8, ADDED = 10, SUMMED = 12, EVENTS };

const char zr_digest[] = "89ab", zr_release[] = "1.2.3";

static struct {
    int ranks, ahead, overlap, work, events, step;
    const char *skip, *fault;
    int contexts; /* kernel contexts that this rank has opened */
    int *asked;   /* how often all ranks together called `second`; shared */
    char plan[5];
    int64_t shard; /* bytes of a unit on one rank */
    int64_t master, sum, ring, grad, stats, tokens, targets, weights, arena;
} c;

/* ---- faults */
static void sleep_us(long us)
{
    const struct timespec t = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&t, NULL);
}

#ifdef COUNT
/* Counts every allocation of the process. */
static int counting, allocations;
void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *at, size_t n);
void *malloc(size_t n) { return allocations += counting, __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return allocations += counting, __libc_calloc(n, size); }
void *realloc(void *at, size_t n) { return allocations += counting, __libc_realloc(at, n); }

/* From here on a call of mmap or brk ends the process, on every thread. malloc keeps enough memory
 * for the output after the last step. */
static void forbid_memory(void)
{
    void *volatile room = malloc(120000);
    free(room);
    struct sock_filter f[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_brk, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog p = {sizeof f / sizeof *f, f};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &p))
        perror("seccomp"), _exit(1);
}
#endif

/* Works for some seconds of its own processor time. */
static void busy(time_t seconds)
{
    struct timespec t = {0, 0};
    time_t until = -1;
    while (until < 0 || t.tv_sec < until) {
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
        if (until < 0) until = t.tv_sec + seconds;
    }
}

static int faulty(const char *name) { return c.fault && !strcmp(c.fault, name); }

static void fault(zr *z)
{
    if (c.step != 2 || zr_rank(z) != (c.ranks > 1)) return;
    if (faulty("kill")) raise(SIGKILL);
    if (faulty("crash")) raise(SIGSEGV);
    if (c.fault && !strncmp(c.fault, "exit", 4)) _exit(atoi(c.fault + 4));
    if (faulty("hang")) sleep_us(1000000000);
    static int worked;
    if (faulty("busy") && !worked++) busy(2);
#ifdef COUNT
    /* Otherwise the compiler removes the pair */
    void *volatile at = faulty("malloc") ? malloc(10) : NULL;
    free(at);
    if (faulty("mmap")) mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
#endif
}

/* ---- work */
static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    return x ^ x >> 27;
}

/* grad[slot][N] = mix(whole unit + micro-batch's tokens) */
static void use(zr *z, void *k, void *a, const int64_t *i)
{
    (void)k;
    const uint64_t *whole = (const uint64_t *)(a + i[0]);
    uint64_t *grad = (uint64_t *)(a + i[1]), tokens = 0;
    for (int j = 0; j < ROWS; j++) {
        int32_t target = ((const int32_t *)(a + c.targets))[j];
        tokens = tokens * 31 + (uint64_t)((const int32_t *)(a + c.tokens))[j] * 7 +
                 (uint64_t)(int64_t)target;
    }
    fault(z);
    if (c.work) sleep_us(c.work);
    for (int j = 0; j < N; j++) grad[j] = mix(whole[j] + tokens);
}

static const volatile uint64_t *peek;

/* a piece of sum[unit][N / ranks] += the pieces of the peers for this rank */
static void add(zr *z, void *k, void *a, const int64_t *i)
{
    (void)k;
    const uint64_t *const *from = (const uint64_t *const *)zr_sources(z, i[1]);
    uint64_t *sum = (uint64_t *)(a + i[0]);
    for (int r = 0; r < c.ranks; r++)
        for (int64_t j = 0; j < c.shard / PIECES / 8; j++) sum[j] += from[r][j];
    if (faulty("peek")) peek = from[c.ranks - 1 - zr_rank(z)];
}

/* Reads a peer's arena after zr_done. */
static void look(zr *z, void *k, void *a, const int64_t *i)
{
    (void)z, (void)k, (void)a, (void)i;
    if (peek) (void)*peek;
}

/* masters += 3 * sum, sum = 0; stats[0..1] = steps, and the sum of this rank's masters */
static void update(zr *z, void *k, void *a, const int64_t *i)
{
    (void)z, (void)k, (void)i;
    uint64_t *master = (uint64_t *)(a + c.master), *sum = (uint64_t *)(a + c.sum);
    uint64_t *stats = (uint64_t *)(a + c.stats);
    stats[0]++;
    stats[1] = 0;
    for (int64_t j = 0; j < UNITS * c.shard / 8; j++) {
        master[j] += 3 * sum[j];
        sum[j] = 0;
        stats[1] += master[j] & 0xff;
    }
}

/* ---- a step */
static int gather_queue(void) { return c.overlap ? ZR_GATHER : ZR_MAIN; }
static int reduce_queue(void) { return c.overlap ? ZR_REDUCE : ZR_MAIN; }
static int sum_queue(void) { return c.overlap ? ZR_SUM : ZR_MAIN; }

static void wait(zr *z, int queue, int event, const char *kind)
{
    if (!c.skip || strcmp(c.skip, kind)) zr_wait(z, queue, event);
}

static void bring(zr *z, int unit, int slot)
{
    int64_t to = c.ring + slot * 8 * N;
    if (faulty("unequal") && c.step == 2 && unit == 0 && zr_rank(z) == 1) return;
    wait(z, gather_queue(), FREE + slot, "free");
    zr_gather(z, gather_queue(), 0, c.master + unit * c.shard, 0, to, c.shard, c.shard);
    zr_record(z, gather_queue(), FULL + slot);
}

static void work(zr *z, int slot)
{
    int64_t whole = c.ring + slot * 8 * N, grad = c.grad + slot * 8 * N;
    wait(z, ZR_MAIN, FULL + slot, "full");
    wait(z, ZR_MAIN, GONE + slot, "gone");
    if (faulty("unit")) zr_call(z, ZR_MAIN, look, zr_last(whole)); /* read after its last use */
    zr_call(z, ZR_MAIN, use, zr_last(whole), grad);
    zr_record(z, ZR_MAIN, MADE + slot);
    zr_record(z, ZR_MAIN, FREE + slot);
}

/* n: counts reduced units */
static void reduce(zr *z, int n, int unit, int slot)
{
    int64_t grad = c.grad + slot * 8 * N, bytes = c.shard / PIECES;
    wait(z, reduce_queue(), MADE + slot, "made");
    if (faulty("grad")) zr_call(z, reduce_queue(), look, zr_last(grad));
    for (int p = 0; p < PIECES; p++) {
        int box = (n * PIECES + p) % 2;
        wait(z, reduce_queue(), ADDED + box, "added");
        zr_alltoall(z, reduce_queue(), 0, grad + p * bytes, c.shard, box * INBOX, bytes);
        zr_record(z, reduce_queue(), BROUGHT + box);
        wait(z, sum_queue(), BROUGHT + box, "brought");
        zr_call(z, sum_queue(), add, c.sum + unit * c.shard + p * bytes, box * INBOX);
        zr_done(z, sum_queue(), 0, box * INBOX, p < PIECES - 1 ? grad : zr_last(grad));
        zr_record(z, sum_queue(), ADDED + box);
    }
    zr_record(z, sum_queue(), GONE + slot);
    zr_record(z, sum_queue(), SUMMED);
}

static void train_step(zr *z)
{
    int total = MICRO_BATCHES / c.ranks * UNITS;
    c.step++;
#ifdef COUNT
    if (c.step == 1) {
        forbid_memory();
        counting = 1;
    }
#endif
    for (int i = 0; i < total; i++) {
        if (i == 0 || !c.ahead) bring(z, i % UNITS, i % 2);
        if (c.ahead && i + 1 < total) bring(z, (i + 1) % UNITS, (i + 1) % 2);
        if (i % UNITS == 0) zr_batch(z, (int64_t)(i / UNITS) * c.ranks + zr_rank(z));
        work(z, i % 2);
        reduce(z, i, i % UNITS, i % 2);
    }
    zr_wait(z, ZR_MAIN, SUMMED);
    zr_call(z, ZR_MAIN, look, 0);
    zr_call(z, ZR_MAIN, update, 0);
    zr_allreduce(z, ZR_MAIN, 0, c.stats, c.stats + 64, 2);
    zr_allreduce(z, ZR_MAIN, 0, c.stats + 64, c.stats + 64, 1); /* in place: ranks^2 * steps */
}

/* ---- the meaning of events */
static _Atomic int slow, fast, seen;

static void expect(int yes, const char *what)
{
    if (yes) return;
    fprintf(stderr, "expected: %s\n", what);
    _exit(1);
}

static void set_slow(zr *z, void *k, void *a, const int64_t *i)
{
    (void)z, (void)k, (void)a;
    sleep_us(30000);
    slow = (int)i[0];
}

static void set_fast(zr *z, void *k, void *a, const int64_t *i)
{
    (void)z, (void)k, (void)a;
    fast = (int)i[0];
}

static void see_slow(zr *z, void *k, void *a, const int64_t *i)
{
    (void)z, (void)k, (void)a, (void)i;
    seen = slow;
}

static void eager_events(zr *z)
{
    expect(c.contexts == 2, "kernel contexts for the two queues that run kernels");
    slow = fast = seen = 0;
    zr_wait(z, ZR_MAIN, FULL); /* never recorded: no wait */
    zr_call(z, ZR_GATHER, set_slow, 1);
    zr_record(z, ZR_GATHER, MADE);
    zr_wait(z, ZR_MAIN, MADE);
    expect(slow == 1, "a wait lasts until what was recorded is done");
    zr_record(z, ZR_GATHER, MADE);
    zr_call(z, ZR_GATHER, set_slow, 2);
    zr_wait(z, ZR_MAIN, MADE);
    expect(slow == 1, "a wait does not last for what came behind the record");
    zr_record(z, ZR_GATHER, MADE); /* behind slow = 2 */
    zr_wait(z, ZR_REDUCE, MADE);
    zr_record(z, ZR_MAIN, MADE); /* newer than the wait, already true */
    zr_call(z, ZR_REDUCE, see_slow, 0);
    zr_record(z, ZR_REDUCE, GONE);
    zr_wait(z, ZR_MAIN, MADE);
    expect(seen != 2, "the newest record counts");
    zr_wait(z, ZR_MAIN, GONE);
    expect(seen == 2, "a later record of an event does not end an older wait");
    zr_call(z, ZR_GATHER, set_fast, 1);
    sleep_us(30000);
    expect(fast == 1, "eager runs what nobody waits for");
}

static void late_events(zr *z)
{
    fast = 0;
    zr_call(z, ZR_GATHER, set_fast, 1);
    zr_record(z, ZR_GATHER, MADE);
    zr_call(z, ZR_GATHER, set_fast, 2);
    zr_record(z, ZR_GATHER, GONE);
    sleep_us(30000);
    expect(fast == 0, "late runs nothing that is not demanded");
    zr_wait(z, ZR_MAIN, MADE);
    zr_call(z, ZR_MAIN, see_slow, 0);
    for (int i = 0; i < 5000; i++)
        zr_call(z, ZR_REDUCE, set_fast, 3 + i); /* more than a ring has */
    zr_wait(z, ZR_REDUCE, GONE);
}

/* Step n + 1 waits for the work that step n gives to ZR_GATHER. */
static void left_step(zr *z)
{
    expect(fast == (c.step > 2 ? c.step - 2 : 0), "a step's end waits for ZR_MAIN alone");
    zr_wait(z, ZR_MAIN, MADE);
    zr_call(z, ZR_GATHER, set_fast, c.step);
    zr_record(z, ZR_GATHER, MADE);
}

/* ---- the end of a collective means that peers have read, too. The last rank is always late. */
#ifndef TURNS
#define TURNS 200
#endif

static void late(zr *z)
{
    if (zr_rank(z) == c.ranks - 1) sleep_us(100);
}

/* grad[N] = i[0] */
static void give(zr *z, void *k, void *a, const int64_t *i)
{
    (void)k;
    for (int j = 0; j < N; j++) ((int64_t *)(a + c.grad))[j] = i[0];
    late(z);
}

/* The whole unit belongs to turn i[0]: rank r's part has number i[0] + r. */
static void check_whole(zr *z, void *k, void *a, const int64_t *i)
{
    (void)z, (void)k;
    for (int r = 0; r < c.ranks; r++)
        for (int64_t j = 0; j < c.shard / 8; j++)
            expect(((int64_t *)(a + c.ring + r * c.shard))[j] == i[0] + r, "a gather of its turn");
}

static void check_sources(zr *z, void *k, void *a, const int64_t *i)
{
    (void)k, (void)a;
    late(z);
    for (int r = 0; r < c.ranks; r++) {
        const int64_t *from = zr_sources(z, 0)[r];
        for (int64_t j = 0; j < c.shard / 8; j++) expect(from[j] == i[0] + r, "sources until done");
    }
}

static void check_sum(zr *z, void *k, void *a, const int64_t *i)
{
    (void)z, (void)k;
    int64_t sum = c.ranks * i[0] + c.ranks * (c.ranks - 1) / 2;
    for (int j = 0; j < N; j++) expect(((int64_t *)(a + c.ring))[j] == sum, "a sum of its turn");
}

static void turn_step(zr *z)
{
    for (int64_t turn = 0; turn < TURNS * c.ranks; turn += c.ranks) {
        zr_call(z, ZR_MAIN, give, turn + zr_rank(z));
        zr_gather(z, ZR_MAIN, 0, c.grad, 0, c.ring, c.shard, c.shard);
        zr_call(z, ZR_MAIN, give, -turn + zr_rank(z));
        zr_call(z, ZR_MAIN, check_whole, turn);
        zr_alltoall(z, ZR_MAIN, 0, c.grad, c.shard, 0, c.shard);
        zr_call(z, ZR_MAIN, check_sources, -turn);
        zr_done(z, ZR_MAIN, 0, 0, c.grad);
        zr_call(z, ZR_MAIN, give, turn + zr_rank(z));
        zr_allreduce(z, ZR_MAIN, 0, c.grad, c.ring, N);
        zr_call(z, ZR_MAIN, give, -turn);
        zr_call(z, ZR_MAIN, check_sum, turn);
    }
}

static void event_step(zr *z)
{
    c.step++;
    if (c.events == 1) eager_events(z);
    else if (c.events == 2) late_events(z);
    else if (c.events == 4) left_step(z);
    else turn_step(z);
}

/* ---- the rest of a program */
static int number(const char *name)
{
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

/* Returns whether this is the second rank that asks. */
static int second(void) { return __atomic_fetch_add(c.asked, 1, __ATOMIC_SEQ_CST); }

/* Counts a rank that begins. */
static void begun(void)
{
    if (faulty("plan") && second()) strcpy(c.plan, "0124");
}

static void *open_kernel(int queue, void *stream, void *device, void *host, int column, int threads,
                         const char **why)
{
    (void)queue, (void)stream, (void)device, (void)host, (void)column, (void)threads;
    c.contexts++;
    *why = "this processor has no AVX2";
    return faulty("kernel") ? NULL : &c;
}

static void close_kernel(int queue, void *k) { (void)queue, (void)k; }
/* PRODUCTS: the ranks whose processor has tiles, `all` or `some` */
static int products(void *k, int order)
{
    const char *have = getenv("PRODUCTS");
    (void)k, (void)order;
    return !strcmp(have, "all") || !second() ? ZR_TILES : ZR_PAIRS;
}

static int64_t overhead(int threads) { return (int64_t)threads << 20; }

static const char *target(void) { return faulty("target") ? "sm_90" : "cpu"; }

/* OBJECT: the kernel object; avx512 without it */
static const char *object(void)
{
    const char *own = getenv("OBJECT") ? getenv("OBJECT") : "avx512";
    return faulty("object") && second() ? "avx2" : own;
}

static void init(zr *z) { (void)z; }

static char *arena_of;
static void remember(zr *z, void *k, void *a, const int64_t *i)
{
    (void)z, (void)k, (void)i;
    arena_of = a;
}

/* Fills masters and the file's weights by their places; loaded weights are doubled. */
static void publish(zr *z)
{
    zr_call(z, ZR_MAIN, remember, 0);
    int64_t each = N / c.ranks;
    float *w = (float *)(arena_of + c.weights);
    for (int u = 0; u < UNITS; u++)
        for (int64_t j = 0; j < each; j++)
            ((uint64_t *)(arena_of + c.master + u * c.shard))[j] =
                mix((uint64_t)(u * N + zr_rank(z) * each + j + 1));
    for (int64_t j = 0; j < each; j++)
        if (w[j] == 0) w[j] = (float)(zr_rank(z) * each + j + 1);
        else w[j] *= 2;
}

static void report(zr *z, void *k, void *a, const int64_t *i)
{
    (void)z, (void)k, (void)a;
    const uint64_t *stats = (const uint64_t *)(arena_of + c.stats + 64);
    expect(c.events != 4 || fast == (c.step < 3 ? c.step - 1 : 3), "the last of three leaves none");
    double loss = faulty("nan") ? __builtin_nan("") : (double)stats[1];
    int none = faulty("untargeted") && c.step % 2 == 0;
    const double values[] = {c.step,
                             none ? 0 : loss,
                             (double)stats[0],
                             0.5,
                             none ? 0 : MICRO_BATCHES * ROWS,
                             none || faulty("skip"),
                             0};
    memcpy((double *)(intptr_t)i[0], values, sizeof values);
#ifdef COUNT
    if (allocations) {
        fprintf(stderr, "expected: no allocation in or between steps\n");
        _exit(1);
    }
#endif
}

static void clear(zr *z, void *k, void *a, const int64_t *i)
{
    (void)z, (void)k, (void)i;
    memset((char *)a + c.stats + 128, 0, 32);
}

static void eval(zr *z)
{
    (void)z;
    int64_t *stats = (int64_t *)(arena_of + c.stats + 128);
    const int32_t *tokens = (const int32_t *)(arena_of + c.tokens);
    const int32_t *targets = (const int32_t *)(arena_of + c.targets);
    if (c.work) sleep_us(c.work);
    for (int i = 0; i < ROWS; i++)
        if (targets[i] >= 0) {
            stats[0] += tokens[i] + 1000 * targets[i];
            stats[1]++;
        }
}

static void total(zr *z) { zr_allreduce(z, ZR_MAIN, 0, c.stats + 128, c.stats + 144, 2); }

static void mean(zr *z, void *k, void *a, const int64_t *i)
{
    (void)z, (void)k;
    const int64_t *sum = (const int64_t *)((char *)a + c.stats + 144);
    *(double *)(intptr_t)i[1] = (double)sum[1];
    *(double *)(intptr_t)i[0] = (double)sum[0] / (double)sum[1];
}

static void sample(zr *z, void *k, void *a, const int64_t *i)
{
    (void)z, (void)k;
    zr_draw *d = (zr_draw *)(intptr_t)i[0];
    const int32_t *tokens = (const int32_t *)((char *)a + c.tokens);
    const int32_t *targets = (const int32_t *)((char *)a + c.targets);
    int row = ROWS - 1;
    while (row > 0 && targets[row] < 0) row--;
    d->token = (tokens[row] * 5 + 1 + row) % (VOCAB - 1);
}

static void hash(zr *z, void *k, void *a, const int64_t *i)
{
    (void)k, (void)a;
    uint64_t *sum = (uint64_t *)(intptr_t)i[2];
    int64_t each = N / c.ranks;
    for (int u = 0; u < UNITS; u++)
        for (int64_t j = 0; j < each; j++) {
            uint64_t x = ((const uint64_t *)(arena_of + c.master + u * c.shard))[j];
            sum[0] += mix(x + (uint64_t)(u * N + zr_rank(z) * each + j));
            sum[1] += x;
        }
}

static void place(void)
{
    int64_t *at[] = {&c.master, &c.sum,     &c.ring,    &c.grad, &c.stats,
                     &c.tokens, &c.targets, &c.weights, &c.arena};
    int64_t bytes[] = {UNITS * c.shard, UNITS * c.shard, 2 * 8 * N,      2 * 8 * N, 4096,
                       4 * ROWS,        4 * ROWS,        4 * N / c.ranks};
    for (int i = 0; i < 8; i++) *at[i + 1] = *at[i] + (bytes[i] + 63) / 64 * 64;
    if (faulty("huge")) c.arena = (int64_t)1 << 45;
    c.arena += (int64_t)number("PAD_MIB") << 20;
}

int main(int argc, char **argv)
{
    c.ranks = number("RANKS") ? number("RANKS") : 1;
    c.ahead = number("AHEAD");
    c.overlap = number("OVERLAP");
    c.work = number("WORK_US");
    c.events = number("EVENTS");
    c.skip = getenv("SKIP");
    c.fault = getenv("FAULT");
    c.asked = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    c.shard = 8 * N / c.ranks;
    strcpy(c.plan, "0123");
    pthread_atfork(NULL, NULL, begun);
    place();
    int64_t micro_batches = MICRO_BATCHES / c.ranks, peers = c.ranks - 1;
    const zr_state states[] = {
        {"master", c.weights, 0, N / c.ranks, 0, N / c.ranks, 0, 1, 0, ZR_MAIN, ZR_F32, hash},
        {"exp_avg", c.weights, 0, N / c.ranks, 0, N / c.ranks, 0, 1, 0, ZR_MAIN, ZR_F32, NULL}};
    const zr_tensor tensor = {.name = "w", .shape = {N / 8, 8}, .ndim = 2, .count = 1};
    const zr_group group = {"all", c.ranks};
    const zr_column column = {"cpu", c.arena, 0, getenv("PREDICTED") ? 0.25 : 0};
    const int64_t slots[][3] = {{c.ring, 8 * N, 2}, {c.grad, 8 * N, 2}};
    const zr_program p = {
        .abi = faulty("abi") ? ZR_ABI + 1 : ZR_ABI,
        .name = "program",
        .summary = "by hand",
        .plan = c.plan,
        .layout = "4567",
        .memory = "some",
        .type = getenv("PRODUCTS") ? ZR_BF16 : ZR_F32,
        .columns = &column,
        .ncolumns = 1,
        .shared = c.arena,
        .queues = 1 << ZR_MAIN | 1 << ZR_GATHER | 1 << ZR_REDUCE | 1 << ZR_SUM,
        .inbox_step = INBOX,
        .inboxes = 2,
        .ranks = c.ranks,
        .events = EVENTS,
        .micro_batches = micro_batches,
        .batch = BATCH,
        .sequence = SEQUENCE,
        .vocab = VOCAB,
        .ignore = IGNORE,
        .shuffle = SHUFFLE,
        .seed = 7,
        .skips = 20,
        .tokens = c.tokens,
        .targets = c.targets,
        .flops = 1e6,
        .wire = c.events == 3 ? TURNS * peers * (2 * c.shard + 8 * N)
                : c.events    ? 0
                              : peers * (micro_batches * UNITS * 2 * c.shard + 24),
        .messages = c.events == 3 ? 3 * TURNS
                    : c.events    ? 0
                                  : micro_batches * UNITS * (1 + PIECES) + 2,
        .groups = &group,
        .ngroups = 1,
        ZR_TABLE(slots),
        ZR_TABLE(states),
        .tensors = &tensor,
        .ntensors = 1,
        .open = open_kernel,
        .close = close_kernel,
        .target = target,
        .object = object,
        .products = getenv("PRODUCTS") ? products : NULL,
        .order = -1,
        .overhead = overhead,
        .init = init,
        .publish = publish,
        .step = c.events ? event_step : train_step,
        .report = report,
        .clear = clear,
        .eval = eval,
        .total = total,
        .mean = mean,
        .sample = sample,
    };
    return zr_main(argc, argv, &p);
}
