/* host.c -- a context on the host's processor: its memory and the object in use; the kernels
 * zk_host_* of every target.
 *
 * Invariants
 *  1. A context is one mapping: zk, the pool, thread handles, then threads * ZK_SCRATCH. Another
 *     one holds the panels of products by AMX. Nothing is mapped or paged in after zk_host_open
 *     and zk_host_panels.
 *  2. The object is chosen once per process, by cpuid and ZK_ISA; zk_host_open fails if this
 *     processor cannot run it.
 */
#include "../quantized.h"
#include "cpu.h"

#include <cpuid.h>
#include <immintrin.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, HUGE = 2 << 20, MOST_THREADS = 1024 };

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
    int64_t panels = runs_amx() ? ZK_PANELS : 0;
    return mapped(threads) + panels + (int64_t)(threads - 1) * ZK_STACK;
}

/* Map the panels in huge pages where the system has them, since a product reads across many pages,
 * and page them in. */
int zk_host_panels(zk *k)
{
    if (k->panels || k->dtype != ZK_BF16 || k->products != ZK_TILES || !runs_amx()) return 1;
    int64_t bytes = ZK_PANELS;
    char *at = mmap(NULL, (size_t)(bytes + HUGE), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return 0;
    int64_t before = (int64_t)(-(uintptr_t)at % HUGE);
    if (before) munmap(at, (size_t)before);
    munmap(at + before + bytes, (size_t)(HUGE - before));
    k->panels = at + before;
    madvise(k->panels, (size_t)bytes, MADV_HUGEPAGE);
    for (int64_t i = 0; i < bytes; i += PAGE) k->panels[i] = 0;
    return 1;
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
    if (k->panels) munmap(k->panels, ZK_PANELS);
    munmap(k, (size_t)mapped(k->threads));
}

/* ---- weights as they are loaded. NF4 follows bitsandbytes 0.50: a weight times the reciprocal of
 * its block's largest magnitude goes to the nearest level, a tie to the lower one; the largest
 * magnitudes less their mean are quantized in the same way to the dynamic 8-bit type. The mean is
 * summed in doubles, in order. */
enum { MOST = ZK_NF4_CHUNK / ZK_NF4_BLOCK };

int64_t zk_quantized(int format, int64_t n) { return zk_quantized_bytes(format, n); }

static float largest_of(const float *x, int64_t n)
{
    float most = 0;
    for (int64_t i = 0; i < n; i++) {
        float size = x[i] < 0 ? -x[i] : x[i];
        most = size > most ? size : most;
    }
    return most;
}

/* Return 1 / x, or 0 where it is not finite: such weights become 0. */
static float reciprocal(float x)
{
    float y = x > 0 ? 1 / x : 0;
    return y - y == 0 ? y : 0;
}

static void put_float(uint8_t *to, float x) { memcpy(to, &x, sizeof x); }

static void quantize_int8(uint8_t *to, const float *from, int64_t n)
{
    float scale = largest_of(from, n) / 127, factor = reciprocal(scale);
    memset(to, 0, ZK_INT8_CHUNK);
    for (int64_t i = 0; i < n; i++) {
        float x = from[i] * factor + 0x1.8p23f; /* rounds to nearest even */
        to[i] = (uint8_t)(int8_t)(x - 0x1.8p23f);
    }
    put_float(to + ZK_INT8_CHUNK, scale);
}

/* Return the number of the nearest level. */
static int nearest_level(float x)
{
    int at = 0;
    for (uint32_t i = 0; i < 15; i++) at += x > (zk_nf4_level(i) + zk_nf4_level(i + 1)) / 2;
    return at;
}

/* Return the number of the nearest value of the dynamic type. */
static int nearest_dynamic(float x)
{
    int low = 0, high = 255;
    while (low < high) { /* the first value whose upper neighbour is not nearer */
        int mid = (low + high) / 2;
        if (x > (zk_dynamic(mid) + zk_dynamic(mid + 1)) / 2) low = mid + 1;
        else high = mid;
    }
    return low;
}

static void quantize_nf4(uint8_t *to, const float *from, int64_t n)
{
    int64_t blocks = zk_nf4_blocks(n);
    uint8_t *codes = to + ZK_NF4_BLOCK / 2 * blocks, *floats = to + zk_nf4_scale(blocks);
    float most[MOST] = {0};
    double sum = 0;
    memset(to, 0, (size_t)zk_nf4_scale(blocks));
    for (int64_t b = 0; b < blocks; b++) {
        int64_t first = ZK_NF4_BLOCK * b, some = zk_least(n - first, ZK_NF4_BLOCK);
        most[b] = largest_of(from + first, some);
        sum += most[b];
        float factor = reciprocal(most[b]);
        for (int64_t i = 0; i < ZK_NF4_BLOCK; i++) {
            int level = nearest_level(i < some ? from[first + i] * factor : 0);
            to[(first + i) / 2] |= (uint8_t)(level << (i % 2 ? 0 : 4));
        }
    }
    float mean = (float)(sum / (double)blocks);
    for (int64_t b = 0; b < blocks; b++) most[b] -= mean;
    float scale = largest_of(most, blocks), factor = reciprocal(scale);
    for (int64_t b = 0; b < blocks; b++) codes[b] = (uint8_t)nearest_dynamic(most[b] * factor);
    put_float(floats, scale);
    put_float(floats + 4, mean);
}

int zk_host_keeps(int format, int64_t block, int64_t nested)
{
    if (format == ZK_INT8) return !nested && block % ZK_INT8_CHUNK == 0;
    return block == ZK_NF4_BLOCK && nested == MOST;
}

static void keep_int8(uint8_t *to, const uint8_t *codes, const float *scale, int64_t n)
{
    memset(to, 0, ZK_INT8_CHUNK);
    memcpy(to, codes, (size_t)n);
    put_float(to + ZK_INT8_CHUNK, *scale);
}

/* Elements after the last one are 0, which is level 7. */
static void keep_nf4(uint8_t *to, const uint8_t *codes, const uint8_t *factors, const float *scale,
                     int64_t n)
{
    int64_t blocks = zk_nf4_blocks(n), at = ZK_NF4_BLOCK / 2 * blocks, end = zk_nf4_scale(blocks);
    memset(to, 0x77, (size_t)at);
    memset(to + at, 0, (size_t)(end - at));
    memcpy(to, codes, (size_t)(n + 1) / 2);
    if (n % 2) to[n / 2] = (uint8_t)((to[n / 2] & 0xf0) | 7);
    memcpy(to + at, factors, (size_t)blocks);
    put_float(to + end, scale[0]);
    put_float(to + end + 4, scale[1]);
}

int64_t zk_host_keep(uint8_t *to, const uint8_t *codes, const uint8_t *factors, const float *scale,
                     int64_t n, int format)
{
    int64_t each = zk_chunk(format), at = 0;
    for (int64_t i = 0; i < n; i += each) {
        int64_t some = zk_least(n - i, each);
        if (format == ZK_NF4)
            keep_nf4(to + at, codes + i / 2, factors + i / ZK_NF4_BLOCK, scale, some);
        else keep_int8(to + at, codes + i, scale, some);
        at += zk_chunk_bytes(format, some);
    }
    return at;
}

int64_t zk_host_quantize(uint8_t *to, const float *from, int64_t n, int format)
{
    int64_t each = zk_chunk(format), at = 0;
    for (int64_t i = 0; i < n; i += each) {
        int64_t some = zk_least(n - i, each);
        if (format == ZK_NF4) quantize_nf4(to + at, from + i, some);
        else quantize_int8(to + at, from + i, some);
        at += zk_chunk_bytes(format, some);
    }
    return at;
}
