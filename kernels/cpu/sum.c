/* sum.c -- sums over gradients: leaves by canonical trees, squares exactly.
 *
 * Invariants
 *  1. A node of 2^b leaves is older + newer, its two halves in order of their leaves, and so is the
 *     sum of whole blocks and the next; which calls, pieces or threads did it never shows.
 *  2. Of a tile of elements everything is read before anything is written, so a source may lie on
 *     the first node buffer.
 *  3. A square of an f32 is exact in f64; a block's squares are added in 16 lanes, element i to
 *     lane i % 16 ascending, folded 8,4,2,1; block sums are added as integers.
 */
#include "../limbs.h"
#include "part.h"

enum { TILE = 1024, DEPTH = 63 }; /* elements at a time; levels of any tree */
enum { BLOCKS = 64 };             /* a task's blocks of squares by default */

typedef struct push {
    zk *k;
    float *node;            /* [buffers][stride] */
    const void *const *src; /* count pointers to [n] */
    int64_t stride, count, n, lo, total, mask, block, tile;
    int dtype;
} push;

/* ---- leaves. A tile is at most TILE elements, here `n` from element `at` on. */
static void read(const push *a, float *out, int64_t leaf, int64_t at, int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES)
        lanes_put(out, i, ZK_F32, lanes_get(a->src[leaf], at + i, a->dtype, n - i), n - i);
}

/* out = older + newer */
static void join(float *out, const float *older, const float *newer, int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES) {
        lanes sum = lanes_get(older, i, ZK_F32, n - i) + lanes_get(newer, i, ZK_F32, n - i);
        lanes_put(out, i, ZK_F32, sum, n - i);
    }
}

/* The nodes that are pending after so many leaves, a bit each */
static int64_t pending(const push *a, int64_t leaves)
{
    return (leaves & (a->block - 1)) | (leaves < a->block ? 0 : a->block);
}

/* The pending node of 2^b leaves, or of all whole blocks */
static float *buffer(const push *a, int b)
{
    return a->node + a->stride * __builtin_popcountll((uint64_t)a->mask & ((1ull << b) - 1));
}

/* Where the counter's pending nodes end: in their buffers, or all in the first. level[b]: [n], or
 * NULL. A node made here lies in tile[b]. */
static void settle(const push *a, float *const *level, float (*tile)[TILE], int64_t at, int64_t n)
{
    if (a->lo + a->count < a->total) {
        for (int b = 0; b < DEPTH; b++)
            if (level[b] == tile[b]) memcpy(buffer(a, b) + at, tile[b], n * sizeof **tile);
        return;
    }
    float *acc = NULL;
    for (int b = 0; b < DEPTH; b++) {
        if (!level[b]) continue;
        if (acc) join(tile[b], level[b], acc, n);
        acc = acc ? tile[b] : level[b];
    }
    if (acc != a->node + at) memcpy(a->node + at, acc, n * sizeof *acc);
}

static void push_tile(const push *a, float (*tile)[TILE], int64_t at, int64_t n)
{
    float *level[DEPTH];
    for (int b = 0; b < DEPTH; b++)
        level[b] = pending(a, a->lo) >> b & 1 ? buffer(a, b) + at : NULL;
    for (int64_t i = 0; i < a->count; i++) {
        int b = __builtin_ctzll(~(a->lo + i) | a->block); /* the level where the carry stops */
        float *sum = tile[level[b] ? DEPTH : b];          /* there are whole blocks already */
        read(a, sum, i, at, n);
        for (int c = 0; c < b; c++) {
            join(sum, level[c], sum, n);
            level[c] = NULL;
        }
        if (level[b]) join(tile[b], level[b], sum, n);
        level[b] = tile[b];
    }
    settle(a, level, tile, at, n);
}

static void push_task(void *arg, int64_t task, int thread)
{
    const push *a = arg;
    float (*tile)[TILE] = zk_scratch(a->k, thread); /* [DEPTH + 1] */
    int64_t end = zk_least((task + 1) * a->tile, a->n);
    for (int64_t at = task * a->tile; at < end; at += TILE)
        push_tile(a, tile, at, zk_least(TILE, end - at));
}

void ZK(zk_push)(zk *k, const zk_launch *L, float *node, int64_t stride, const void *const *src,
                 int64_t count, int full, int64_t n, const zk_ctl *ctl, int64_t total, int64_t mask,
                 int64_t block)
{
    // clang-format off
    push a = {k, node, src, stride, count, n, ctl ? ctl->leaves : 0, total, mask, block,
              TILE * zk_tile(k, L, 0, 4), full ? ZK_F32 : k->dtype};
    // clang-format on
    _Static_assert((DEPTH + 1) * TILE * sizeof(float) <= ZK_SCRATCH, "the tiles fit");
    zk_for(k, zk_pieces(n, a.tile), push_task, &a);
}

void ZK(zk_count)(zk *k, const zk_launch *L, zk_ctl *ctl, int64_t leaves)
{
    (void)k, (void)L;
    ctl->leaves += leaves;
}

/* ---- squares. The 16 lanes are registers of doubles. */
#ifdef __AVX512F__
typedef __m512d doubles;
static inline doubles widen_floats(const float *p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
#else
typedef __m256d doubles;
static inline doubles widen_floats(const float *p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
#endif
enum { DOUBLES = sizeof(doubles) / sizeof(double), REGISTERS = 16 / DOUBLES };

typedef struct squares {
    const float *g;       /* [n] */
    const zk_span *spans; /* [nspans] */
    int64_t *sums;        /* [ZK_SUMS] */
    int64_t nspans, first, n, piece;
} squares;

typedef struct piece {
    const float *g;
    int64_t limb[ZK_LIMBS], bad;
} piece;

/* lane[16] += the squares of g[16] */
static inline void add_squares(doubles *lane, const float *g)
{
    for (int v = 0; v < REGISTERS; v++) {
        doubles x = widen_floats(g + v * DOUBLES);
        lane[v] += x * x;
    }
}

/* Sum of the squares of a block, g [n], n <= ZK_BLOCK */
static double square_block(const float *g, int64_t n)
{
    doubles lane[REGISTERS] = {0};
    double sum[16];
    float last[16];
    int64_t whole = n / 16 * 16;
    for (int64_t i = 0; i < whole; i += 16) add_squares(lane, g + i);
    if (whole < n) {
        store16(last, load16n(g + whole, (int)(n - whole)));
        add_squares(lane, last);
    }
    memcpy(sum, lane, sizeof sum);
    for (int w = 8; w; w /= 2)
        for (int i = 0; i < w; i++) sum[i] += sum[i + w];
    return sum[0];
}

static void square_part(void *arg, const zk_part *part)
{
    piece *a = arg;
    for (int64_t i = 0; i < part->n; i += ZK_BLOCK) {
        double sum = square_block(a->g + part->at + i, zk_least(ZK_BLOCK, part->n - i));
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

void ZK(zk_square_sum)(zk *k, const zk_launch *L, int64_t *sums, const float *g,
                       const zk_span *spans, int64_t nspans, int64_t first, int64_t n)
{
    squares a = {g, spans, sums, nspans, first, n, ZK_BLOCK * zk_tile(k, L, 0, BLOCKS)};
    zk_for(k, zk_pieces(n, a.piece), square_task, &a);
}
