/* host.c -- a context on the host's processor: its memory and the object in use; the kernels
 * zk_host_* of every target.
 *
 * Invariants
 *  1. A context is one mapping: zk, the pool, thread handles, then threads * ZK_SCRATCH. Nothing is
 *     mapped or paged in after zk_host_open.
 *  2. The object is chosen once per process, by cpuid and ZK_ISA; zk_host_open fails if this
 *     processor cannot run it.
 */
#include "cpu.h"

#include <cpuid.h>
#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, MOST_THREADS = 1024 };

/* ---- zk_host_*: each jumps through a pointer that choose_object() sets */
#define HOST_POINTER(name) ZK_POINTER(zk_host_##name, zk_##name)
ZK_HOST_KERNELS(HOST_POINTER)

static const char *object; /* NULL: there is none, for `reason` */
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

static int runs_avx512bf16(void) { return runs_avx512() && __builtin_cpu_supports("avx512bf16"); }

/* On AMD's Zen vdpbf16ps computes terms at twice the rate of an FMA; on Intel's processors it is
 * slower, and object avx512 is faster (docs/decisions.md). */
static int favors_avx512bf16(void) { return runs_avx512bf16() && __builtin_cpu_is("amd"); }

/* Return whether this process may use AMX. Only programs of the CPU
 * target contain the AMX object. */
int zk_tiles_amx(void) __attribute__((weak));
static int runs_amx(void) { return runs_avx512bf16() && zk_tiles_amx && zk_tiles_amx(); }

/* Kernel objects, slowest first. */
static const struct {
    const char *name, *lacking;
    int (*runs)(void), (*favored)(void); /* can it run here; is it chosen by default */
} objects[] = {
    {"avx2", "AVX2, FMA, BMI2 or F16C", runs_avx2, runs_avx2},
    {"avx512", "AVX-512 (F, BW, CD, DQ, VL)", runs_avx512, runs_avx512},
    {"avx512bf16", "AVX512_BF16", runs_avx512bf16, favors_avx512bf16},
    {"amx", "AMX (TILE, BF16)", runs_amx, runs_amx},
};

static void choose_object(void)
{
    static char text[128];
    const char *wanted = getenv("ZK_ISA");
    int count = sizeof objects / sizeof *objects, take = count - 1;
    if (wanted && !*wanted) wanted = NULL;
    if (wanted)
        while (take >= 0 && strcmp(wanted, objects[take].name)) take--;
    else
        while (take > 0 && !objects[take].favored()) take--;
    if (take < 0) {
        reason = "ZK_ISA names no kernel object; allowed: avx2, avx512, avx512bf16, amx";
        return;
    }
    if (!objects[take].runs()) {
        snprintf(text, sizeof text,
                 "the kernel object %s needs %s, which this processor, system or program lacks",
                 objects[take].name, objects[take].lacking);
        reason = text;
        return;
    }
    object = objects[take].name;
    int narrow = take == 0;
#define SET(name) jump_zk_host_##name = narrow ? zk_##name##_avx2 : zk_##name##_avx512;
    ZK_HOST_KERNELS(SET)
}

static void choose_once(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, choose_object);
}

const char *zk_host_object(void)
{
    choose_once();
    return object ? object : "none";
}

/* Return the faster order on this processor, whatever object is chosen. Emulating tiles by FMAs
 * takes two more steps per 32 elements. */
int zk_host_products(void) { return runs_amx() ? ZK_TILES : ZK_PAIRS; }

/* ---- the context */
static int64_t head_bytes(int threads)
{
    int64_t bytes = 64 + zk_pool_bytes(threads);
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static int64_t mapped(int threads) { return head_bytes(threads) + (int64_t)threads * ZK_SCRATCH; }

int64_t zk_host_overhead(int threads)
{
    return mapped(threads) + (int64_t)(threads - 1) * ZK_STACK;
}

zk *zk_host_open(int dtype, int column, int threads, const char **why)
{
    *why = NULL;
    choose_once();
    if (!object) *why = reason;
    else if (dtype < ZK_F32 || dtype > ZK_F16) *why = "the kernels on a CPU store f32, bf16 or f16";
    else if (threads < 1 || threads > MOST_THREADS) *why = "threads must be 1 to 1024";
    if (*why) return NULL;
    /* Page in everything now, so that a rank's memory does not grow in its first steps. */
    char *p = mmap(NULL, (size_t)mapped(threads), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (p == MAP_FAILED) {
        *why = "no memory for the kernels' scratch space";
        return NULL;
    }
    zk *k = (zk *)p;
    _Static_assert(sizeof(zk) <= 64, "the pool starts on the second cache line");
    *k = (zk){
        .dtype = dtype, .column = column, .threads = threads, .scratch = p + head_bytes(threads)};
    _mm_setcsr(ZK_MXCSR);
    if (threads == 1) return k;
    k->pool = (struct zk_pool *)(p + 64);
    if (!zk_pool_start(k)) {
        zk_host_close(k);
        *why = "the kernels' threads could not be started";
        return NULL;
    }
    return k;
}

void zk_host_close(zk *k)
{
    if (k->pool) zk_pool_stop(k);
    munmap(k, (size_t)mapped(k->threads));
}
