/* optimizer.cu -- the constants of a step, the update (formulas in update.h), initial values, and
 * the hash of the weights.
 *
 * Invariants
 *  1. The result for an element depends on the element alone, so any sharding of a flat buffer
 *     gives the same bits. Gaps between tensors are 0 from the start and are not read or written
 *     again.
 *  2. The bits are those of a CPU: the constants of a step are computed in f64 and the update in
 *     f32, by the same functions.
 *  3. A warp works on one block of a tensor at a time.
 */
#include "part.h"

#include "../digest.h"
#include "../step.h"
#include "philox.h"

/* ---- one element at a time, for update.h */
typedef float lanes;
#define ZK_LANES static __device__ inline
ZK_LANES float lanes_set(float x) { return x; }
ZK_LANES float lanes_fma(float a, float b, float c) { return fmaf(a, b, c); }
ZK_LANES float lanes_sqrt(float x) { return sqrtf(x); }
ZK_LANES float lanes_sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f; }
#include "../update.h"

enum { PACK = 4, ROW = PACK * ZK_WARP }; /* elements of a thread and of a warp at a time */

/* ---- constants of a step */
void zk_clear(zk *k, int64_t *sums)
{
    zk_must(cudaMemsetAsync(sums, 0, ZK_SUMS * sizeof *sums, k->stream), "zk_clear");
}

static __global__ void begin(zk_ctl *ctl, int64_t *sums, zk_recipe r)
{
    for (int i = (int)threadIdx.x; i < ZK_SUMS; i += (int)blockDim.x) sums[i] = 0;
    if (threadIdx.x == 0) step_begin(ctl, &r);
}

void zk_begin(zk *k, const zk_launch *L, zk_ctl *ctl, int64_t *sums, const zk_recipe *r)
{
    ZK_LAUNCH(k, L, 0, begin, ctl, sums, *r);
}

static __global__ void factor(zk_ctl *ctl, const int64_t *sums, zk_recipe r)
{
    if (threadIdx.x == 0) step_factor(ctl, sums, &r);
}

void zk_factor(zk *k, const zk_launch *L, zk_ctl *ctl, const int64_t *sums, const zk_recipe *r)
{
    ZK_LAUNCH(k, L, 0, factor, ctl, sums, *r);
}

/* ---- stochastic rounding */
/* lanes_dither of kernels/cpu/lanes.h for one element. */
static __device__ float dither(float x, uint32_t chance)
{
    uint32_t u = __float_as_uint(x);
    return (u & 0x7f800000) == 0x7f800000 ? x : __uint_as_float((u + chance) & 0xffff0000);
}

/* ---- the update */
struct flat_update {
    float *p;      /* [n]; NULL: w is updated itself */
    void *m, *v;   /* [n]; NULL if the rule has none */
    const void *g; /* [n] */
    zk_recipe r;
    int full; /* g is float, else T */
};

/* Update elements i .. i + 3, of which `left` exist. key, elem: of the first one. S: type of the
 * states; P: type of the masters, float, or T without masters. */
template <class T, class S, class P>
static __device__ void update_pack(const flat_update &a, T *w, const step &s, const pull &own,
                                   uint64_t seed, int64_t key, int64_t elem, int64_t i, int left)
{
    float p[PACK], m[PACK] = {}, v[PACK] = {}, g[PACK];
    if constexpr (sizeof(P) == sizeof(float)) fetch(p, a.p + i, left);
    else fetch(p, w + i, left);
    if (a.m) fetch(m, (const S *)a.m + i, left);
    if (a.v) fetch(v, (const S *)a.v + i, left);
    if (a.full) fetch(g, (const float *)a.g + i, left);
    else fetch(g, (const T *)a.g + i, left);
    for (int j = 0; j < PACK; j++) p[j] = update(&s, &own, p[j], m + j, v + j, g[j]);
    if constexpr (sizeof(S) < sizeof(float)) {
        uint32_t word[PACK];
        words(word, seed, (uint64_t)key, (uint64_t)elem / PACK);
        for (int j = 0; j < PACK; j++) {
            m[j] = dither(m[j], word[j] & 0xffff);
            v[j] = dither(v[j], word[j] >> 16);
        }
    }
    if constexpr (sizeof(P) < sizeof(float)) {
        uint32_t word[PACK];
        words(word, seed, (uint64_t)key, (uint64_t)elem / PACK | ZK_SECOND);
        for (int j = 0; j < PACK; j++) p[j] = dither(p[j], word[j] & 0xffff);
    }
    if (a.m) stow((S *)a.m + i, m, left);
    if (a.v) stow((S *)a.v + i, v, left);
    if constexpr (sizeof(P) == sizeof(float)) stow(a.p + i, p, left);
    if (w) stow(w + i, p, left);
}

template <class T, class S, class P>
static __global__ void __launch_bounds__(256, sizeof(S) + sizeof(P) == 8 ? 4 : 3)
    updates(flat_update a, T *w, const zk_ctl *ctl, span_list spans, int64_t first, int64_t n)
{
    zk_span own = spans.span[lane_here()];
    zk_ctl c = *ctl;
    step s = step_of(&c, &a.r);
    pull mine = pull_of(&c, &own);
    if (c.skipped) return;
    for (int64_t at = warp_here() * ZK_BLOCK; at < n; at += warps_here() * ZK_BLOCK) {
        block_part part;
        if (!find_part(&part, own, first + at)) continue;
        pull of_part = {__shfl_sync((unsigned)ZK_ALL, mine.lr, part.lane),
                        __shfl_sync((unsigned)ZK_ALL, mine.decay, part.lane),
                        __shfl_sync((unsigned)ZK_ALL, mine.shrink, part.lane)};
        int have = (int)zk_least(part.n, n - at);
        for (int i = PACK * lane_here(); i < have; i += ROW)
            update_pack<T, S, P>(a, w, s, of_part, update_seed(&c, &a.r), part.key, part.elem + i,
                                 at + i, have - i);
    }
}

template <class T, class S, class P>
static void update_all(zk *k, const zk_launch *L, const zk_ctl *ctl, const flat_update &a, T *w,
                       const zk_span *spans, int64_t nspans, int64_t first, int64_t n)
{
    for (int64_t i = 0; i < nspans; i += ZK_WARP)
        ZK_LAUNCH(k, L, 0, (updates<T, S, P>), a, w, ctl, some_spans(spans + i, nspans - i), first,
                  n);
}

void zk_update(zk *k, const zk_launch *L, const zk_ctl *ctl, const zk_recipe *r, real *w, float *p,
               void *m, void *v, const void *g, const zk_span *spans, int64_t nspans, int64_t first,
               int64_t n, int full)
{
    flat_update a = {p, m, v, g, *r, full};
    int narrow = r->moments == ZK_BF16;
    if (!p)
        (narrow ? update_all<bf16, bf16, bf16>
                : update_all<bf16, float, bf16>)(k, L, ctl, a, (bf16 *)w, spans, nspans, first, n);
    else
        ZK_REAL(k, T,
                (narrow
                     ? update_all<T, bf16, float>
                     : update_all<T, float, float>)(k, L, ctl, a, (T *)w, spans, nspans, first, n));
}

/* ---- initial values: counter 16*(element/64) + lane gives elements 64*(element/64) + lane + 0,
 * 16, 32, 48 of a tensor */
enum { GROUP = 64, LANES = 16 };

/* log of a normal number, computed as lanes_log of kernels/cpu/lanes.h, which explains it */
static __device__ float log_one(float x)
{
    int bits = __float_as_int(x) - 0x3f3504f3;
    float e = (float)(bits >> 23), f = __int_as_float((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
    float s = f / (f + 2.0f), z = s * s, r = 2.0f / 11;
    r = fmaf(r, z, 2.0f / 9);
    r = fmaf(r, z, 2.0f / 7);
    r = fmaf(r, z, 2.0f / 5);
    r = fmaf(r, z, 2.0f / 3);
    float tail = fmaf(e, -0x1.05c610p-29f, s * fmaf(r, z, -f));
    return fmaf(e, 0x1.62e430p-1f, f + tail);
}

/* Compute two normals from two words, as normals() of kernels/cpu/optimizer.c does. */
static __device__ void normals(float z[2], uint32_t a, uint32_t b)
{
    const float turn = 6.28318530717958647692f;
    uint32_t quarter = (b + (1u << 29)) >> 30;
    float u = fmaf((float)(int)(a >> 1), 0x1p-31f, 0x1p-32f);
    float x = (float)(int)(b - (quarter << 30)) * (turn * 0x1p-32f);
    float xx = x * x, radius = sqrtf(-2 * log_one(u));
    float s = fmaf(xx, 2.75573192e-6f, -1.98412698e-4f);
    s = fmaf(xx, fmaf(xx, s, 8.33333333e-3f), -0.166666667f);
    float c = fmaf(xx, -2.75573192e-7f, 2.48015873e-5f);
    c = fmaf(xx, fmaf(xx, c, -1.38888889e-3f), 4.16666667e-2f);
    c = radius * fmaf(xx, fmaf(xx, c, -0.5f), 1);
    s = radius * fmaf(xx * x, s, x);
    int odd = (int)(quarter & 1);
    z[0] = __uint_as_float(__float_as_uint(odd ? s : c) ^ ((quarter + 1) & 2) << 30);
    z[1] = __uint_as_float(__float_as_uint(odd ? c : s) ^ (quarter & 2) << 30);
}

/* Draw words 0 .. 3 of counter `counter` as four normals, or as numbers in [-1, 1]. */
static __device__ void draw_four(float z[4], uint64_t seed, uint64_t key, uint64_t counter,
                                 bool uniform)
{
    uint32_t c[4];
    words(c, seed, key, counter);
    normals(z, c[0], c[1]);
    normals(z + 2, c[2], c[3]);
    for (int j = 0; j < 4 && uniform; j++) z[j] = (float)(int)c[j] * 0x1p-31f;
}

template <class T>
static __global__ void __launch_bounds__(256)
    initial(T *p, span_list spans, int64_t first, int64_t n, uint64_t seed)
{
    int lane = lane_here();
    zk_span own = spans.span[lane];
    for (int64_t at = warp_here() * ZK_BLOCK; at < n; at += warps_here() * ZK_BLOCK) {
        block_part part;
        if (!find_part(&part, own, first + at)) continue;
        float mean = __shfl_sync((unsigned)ZK_ALL, own.mean, part.lane);
        float std = __shfl_sync((unsigned)ZK_ALL, own.std, part.lane);
        int have = (int)zk_least(part.n, n - at);
        for (int group = lane / LANES * GROUP; group < have; group += ZK_WARP / LANES * GROUP) {
            float z[4] = {0, 0, 0, 0};
            uint64_t counter = (uint64_t)(part.elem + group) / GROUP * LANES + lane % LANES;
            if (std != 0) draw_four(z, seed, (uint64_t)part.key, counter, std < 0);
            for (int j = 0, i = group + lane % LANES; j < 4 && i < have; j++, i += LANES)
                put(p + at + i, fmaf(std, z[j], mean));
        }
    }
}

template <class T>
static void init_all(zk *k, const zk_launch *L, T *p, const zk_span *spans, int64_t nspans,
                     int64_t first, int64_t n, uint64_t seed)
{
    /* set the gaps between tensors to 0: units are gathered whole, and kernels read
     * rows that pad a vocabulary */
    zk_must(cudaMemsetAsync(p, 0, (size_t)n * sizeof *p, k->stream), "zk_init");
    for (int64_t i = 0; i < nspans; i += ZK_WARP)
        ZK_LAUNCH(k, L, 0, initial<T>, p, some_spans(spans + i, nspans - i), first, n, seed);
}

void zk_init(zk *k, const zk_launch *L, void *p, const zk_span *spans, int64_t nspans,
             int64_t first, int64_t n, uint64_t seed, int full)
{
    if (full) init_all(k, L, (float *)p, spans, nspans, first, n, seed);
    else ZK_REAL(k, T, init_all(k, L, (T *)p, spans, nspans, first, n, seed));
}

/* ---- the hash: a warp looks up 32 blocks, and each lane hashes one */
static __global__ void __launch_bounds__(128)
    digest(unsigned long long *sum, const void *p, int dtype, span_list spans, int64_t first,
           int64_t n)
{
    int lane = lane_here();
    zk_span own = spans.span[lane];
    uint64_t mine[2] = {0, 0};
    int64_t step = (int64_t)ZK_WARP * ZK_BLOCK;
    for (int64_t at = warp_here() * step; at < n; at += warps_here() * step) {
        block_part part, found = {0, 0, 0, 0};
        for (int i = 0; i < ZK_WARP && at + i * ZK_BLOCK < n; i++)
            if (find_part(&part, own, first + at + i * ZK_BLOCK) && i == lane) found = part;
        int64_t start = at + lane * ZK_BLOCK, have = zk_least(found.n, n - start);
        if (have > 0)
            digest_block(mine, (uint64_t)found.key, (uint64_t)found.elem / ZK_BLOCK, p, start, have,
                         dtype);
    }
    for (int i = 0; i < 2; i++) {
        uint64_t all = warp_sum(mine[i]);
        if (lane == 0 && all) atomicAdd(sum + i, (unsigned long long)all);
    }
}

void zk_hash(zk *k, const zk_launch *L, uint64_t *sum, const void *p, const zk_span *spans,
             int64_t nspans, int64_t first, int64_t n, int full)
{
    unsigned long long *all = (unsigned long long *)k->device;
    unsigned long long *found = (unsigned long long *)k->host;
    zk_must(cudaMemsetAsync(all, 0, 2 * sizeof *all, k->stream), "zk_hash");
    for (int64_t i = 0; i < nspans; i += ZK_WARP)
        ZK_LAUNCH(k, L, 0, digest, all, p, full ? ZK_F32 : k->dtype,
                  some_spans(spans + i, nspans - i), first, n);
    zk_to_host(k, found, all, 2 * sizeof *all);
    for (int i = 0; i < 2; i++) /* kernels of the host may add at the same time */
        __atomic_fetch_add(&sum[i], (uint64_t)found[i], __ATOMIC_RELAXED);
}
