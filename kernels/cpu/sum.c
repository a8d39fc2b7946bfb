/* sum.c -- sums of gradients: gradients ("leaves") by a binary counter of pending nodes (zk_push in
 * zk.h), squares exactly.
 *
 * Invariants
 *  1. A node of 2^b leaves is older + newer, its two halves in order of their leaves; the sum of
 *     whole blocks is extended likewise. Calls, pieces and threads have no effect on it.
 *  2. An element of a node is written only after that element of every source has been read, so one
 *     source of floats may be the first node buffer.
 *  3. The square of an f32 is exact in f64. The squares of a block are added in 16 lanes, element i
 *     to lane i % 16 ascending, which are folded 8, 4, 2, 1; block sums are added as integers.
 */
#include "../limbs.h"
#include "part.h"

enum { TILE = 1024, DEPTH = 63 }; /* elements at a time; most levels of a tree */
enum { STREAMED = 1 << 18 };      /* larger nodes are written past the caches */
enum { BLOCKS = 64 };             /* blocks of squares of a task by default */

typedef struct push {
    zk *k;
    float *node;            /* [buffers][stride] */
    const void *const *src; /* count pointers to [n] */
    int64_t stride, count, n, lo, mask, block, tile;
    int dtype, ends, streams; /* ends: these are the last leaves; streams: see place */
} push;

/* ---- leaves. A tile is n <= TILE elements from element `at` on. */

/* A term of a sum, for one tile: [n]; p NULL: none. */
typedef struct addend {
    const real *p;
    int dtype;
} addend;

/* Destination of a tile's sum: [n]. */
typedef struct place {
    float *p;
    int streams; /* use non-temporal stores */
} place;

static addend leaf(const push *a, int64_t i, int64_t at)
{
    return (addend){(const char *)a->src[i] + at * (a->dtype == ZK_F32 ? 4 : 2), a->dtype};
}

static addend node(const float *p) { return (addend){p, ZK_F32}; }

ZK_INLINE lanes load_addend(addend x, int64_t i, int64_t n)
{
    return lanes_get(x.p, i, x.dtype, n);
}

ZK_INLINE void store_sum(place to, int64_t i, lanes x)
{
    if (to.streams) lanes_stream(to.p + i, x);
    else lanes_store(to.p + i, x);
}

/* to = older + newer */
static addend join(place to, addend older, addend newer, int64_t n)
{
    int64_t whole = n / LANES * LANES, rest = n - whole;
    for (int64_t i = 0; i < whole; i += LANES)
        store_sum(to, i, load_addend(older, i, LANES) + load_addend(newer, i, LANES));
    lanes last = load_addend(older, whole, rest) + load_addend(newer, whole, rest);
    lanes_put(to.p, whole, ZK_F32, last, rest);
    return node(to.p);
}

/* to = from */
static void keep(place to, addend from, int64_t n)
{
    int64_t whole = n / LANES * LANES, rest = n - whole;
    if (from.p == to.p) return;
    for (int64_t i = 0; i < whole; i += LANES) store_sum(to, i, load_addend(from, i, LANES));
    lanes_put(to.p, whole, ZK_F32, load_addend(from, whole, rest), rest);
}

/* Return the nodes that are pending after so many leaves, a bit each. */
static uint64_t pending(const push *a, int64_t leaves)
{
    return (uint64_t)((leaves & (a->block - 1)) | (leaves < a->block ? 0 : a->block));
}

/* Return the buffer of the pending node of 2^b leaves, or of the sum of whole blocks. */
static float *buffer(const push *a, int b)
{
    return a->node + a->stride * __builtin_popcountll((uint64_t)a->mask & ((1ull << b) - 1));
}

/* Return where the node of level b is stored after the last leaf: in its buffer, or in the first
 * buffer if it is the complete sum. */
static place destination(const push *a, int b, int64_t at)
{
    return (place){(a->ends ? a->node : buffer(a, b)) + at, a->streams};
}

static void push_tile(const push *a, float (*tile)[TILE], int64_t at, int64_t n)
{
    addend level[DEPTH] = {0};
    for (int b = 0; b < DEPTH; b++)
        if (pending(a, a->lo) >> b & 1) level[b] = node(buffer(a, b) + at);
    for (int64_t i = 0; i < a->count; i++) {
        int last = i == a->count - 1;
        int b = __builtin_ctzll(~(a->lo + i) | a->block); /* the level where the carry stops */
        place to = last ? destination(a, b, at) : (place){tile[b], 0};
        addend sum = leaf(a, i, at);
        /* the nodes to carry: all up to that level; after the very last leaf, all nodes */
        uint64_t carry = pending(a, a->lo + i) & (last && a->ends ? ~0ull : (2ull << b) - 1);
        for (; carry; carry &= carry - 1) {
            addend *older = level + __builtin_ctzll(carry);
            sum = join(carry & (carry - 1) ? (place){tile[DEPTH], 0} : to, *older, sum, n);
            older->p = NULL;
        }
        level[b] = sum;
    }
    for (int b = 0; b < DEPTH; b++)
        if (level[b].p) keep(destination(a, b, at), level[b], n);
}

static void push_task(void *arg, int64_t task, int thread)
{
    const push *a = arg;
    float (*tile)[TILE] = zk_scratch(a->k, thread); /* [DEPTH + 1] */
    int64_t end = zk_least((task + 1) * a->tile, a->n);
    for (int64_t at = task * a->tile; at < end; at += TILE)
        push_tile(a, tile, at, zk_least(TILE, end - at));
    if (a->streams) _mm_sfence();
}

void ZK(zk_push)(zk *k, const zk_launch *L, float *node, int64_t stride, const void *const *src,
                 int64_t count, int full, int64_t n, const zk_ctl *ctl, int64_t total, int64_t mask,
                 int64_t block)
{
    int64_t lo = ctl ? ctl->leaves : 0, tile = TILE * zk_tile(k, L, 0, 4);
    int ends = lo + count == total, aligned = (uintptr_t)node % 64 == 0 && stride % 16 == 0;
    // clang-format off
    push a = {k, node, src, stride, count, n, lo, mask, block, tile, full ? ZK_F32 : k->dtype, ends,
              aligned && n >= STREAMED};
    // clang-format on
    _Static_assert((DEPTH + 1) * TILE * sizeof(float) <= ZK_SCRATCH, "the tiles fit");
    zk_for(k, zk_pieces(n, a.tile), push_task, &a);
}

void ZK(zk_count)(zk *k, const zk_launch *L, zk_ctl *ctl, int64_t leaves)
{
    (void)k, (void)L;
    ctl->leaves += leaves;
}

/* ---- squares, in 16 lanes of doubles */
#ifdef __AVX512F__
typedef __m512d doubles;
static inline doubles low_half(lanes x)
{
    return _mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
}
static inline doubles high_half(lanes x)
{
    return _mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1));
}
#else
typedef __m256d doubles;
static inline doubles low_half(lanes x)
{
    return _mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x));
}
static inline doubles high_half(lanes x)
{
    return _mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1));
}
#endif
enum { DOUBLES = sizeof(doubles) / sizeof(double), REGISTERS = 16 / DOUBLES };

typedef struct squares {
    addend g;             /* [n] */
    const zk_span *spans; /* [nspans] */
    int64_t *sums;        /* [ZK_SUMS] */
    int64_t nspans, first, n, piece;
} squares;

typedef struct piece {
    addend g;
    int64_t limb[ZK_LIMBS], bad;
} piece;

/* Add the squares of x[LANES] to lanes from v on. */
ZK_INLINE void add_squares(doubles lane[REGISTERS], int v, lanes x)
{
    doubles low = low_half(x), high = high_half(x);
    lane[v / DOUBLES] += low * low;
    lane[v / DOUBLES + 1] += high * high;
}

/* Bytes to prefetch ahead: a thread reads one stream, which the processor prefetches too late. */
enum { AHEAD = 2048 };

/* Return the sum of the squares of a block of g from `at` on, of n <= ZK_BLOCK elements. */
ZK_INLINE double square_block(const real *g, int64_t at, int64_t n, const int dtype)
{
    doubles lane[REGISTERS] = {0};
    double sum[16];
    int64_t whole = n / 16 * 16, width = dtype == ZK_F32 ? 4 : 2;
    for (int64_t i = 0; i < whole; i += 16) {
        __builtin_prefetch((const char *)g + (at + i) * width + AHEAD);
#pragma GCC unroll 2
        for (int v = 0; v < 16; v += LANES)
            add_squares(lane, v, lanes_get(g, at + i + v, dtype, LANES));
    }
    for (int v = 0; v < 16; v += LANES)
        add_squares(lane, v, lanes_get(g, at + whole + v, dtype, zk_most(0, n - whole - v)));
    memcpy(sum, lane, sizeof sum);
    for (int w = 8; w; w /= 2)
        for (int i = 0; i < w; i++) sum[i] += sum[i + w];
    return sum[0];
}

static void square_part(void *arg, const zk_part *part)
{
    piece *a = arg;
    for (int64_t i = 0; i < part->n; i += ZK_BLOCK) {
        int64_t n = zk_least(ZK_BLOCK, part->n - i), at = part->at + i;
        double sum = a->g.dtype == ZK_F32    ? square_block(a->g.p, at, n, ZK_F32)
                     : a->g.dtype == ZK_BF16 ? square_block(a->g.p, at, n, ZK_BF16)
                                             : square_block(a->g.p, at, n, ZK_F16);
        a->bad += !limbs_add(a->limb, sum);
    }
}

static void square_task(void *arg, int64_t task, int thread)
{
    const squares *a = arg;
    piece own = {a->g, {0}, 0};
    int64_t lo = a->first + task * a->piece, hi = zk_least(lo + a->piece, a->first + a->n);
    (void)thread;
    zk_each_part(a->spans, a->nspans, a->first, lo, hi, square_part, &own);
    for (int i = 0; i < ZK_LIMBS; i++)
        if (own.limb[i]) __atomic_fetch_add(a->sums + ZK_NORM + i, own.limb[i], __ATOMIC_RELAXED);
    if (own.bad) __atomic_fetch_add(a->sums + ZK_NONFINITE, own.bad, __ATOMIC_RELAXED);
}

void ZK(zk_square_sum)(zk *k, const zk_launch *L, int64_t *sums, const void *g,
                       const zk_span *spans, int64_t nspans, int64_t first, int64_t n, int full)
{
    squares a = {.g = {g, full ? ZK_F32 : k->dtype},
                 .spans = spans,
                 .sums = sums,
                 .nspans = nspans,
                 .first = first,
                 .n = n,
                 .piece = ZK_BLOCK * zk_tile(k, L, 0, BLOCKS)};
    zk_for(k, zk_pieces(n, a.piece), square_task, &a);
}
