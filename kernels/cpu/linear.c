/* linear.c -- the products of a linear layer and its gradients, by one packed and blocked GEMM.
 *
 *   y[M,N] = x[M,K] . w + b; dx = dy . w^T; dw = x^T . dy; db = sum of the rows of dy
 *
 * Invariants
 *  1. An output element is a sum in a fixed order, so no tile, thread or other object changes a
 *     bit. f32 and f16: one FMA chain in ascending k, which starts at 0, or at the old output with
 *     `carry`; between depth blocks the sum is kept exactly. bf16: denormals are 0 in products and
 *     sums, elements past the end are 0, and the order is the context's. ZK_PAIRS: the chain runs
 *     over pairs from an even k, the odd element of a pair first, as AVX512_BF16 does. ZK_TILES:
 *     groups of 32 elements, as AMX does (tiles.h). Every object computes both orders. Halves are
 *     widened exactly; their sums are kept in f32 scratch. The bias is added to the finished chain,
 *     and the result is rounded once. A result that is scaled or added to the output is also kept
 *     in scratch: out + scale * chain is one FMA.
 *  2. A task is one tile of the output, or with AMX a part of a slab (tiles.h). No element outside
 *     the matrices is read or written: edges are packed as zeros, and their sums go through
 *     scratch.
 *  3. Panels hold words: one f32, or a pair of bf16 if an instruction multiplies pairs. A matrix
 *     whose words already lie along the chain is not packed, except its edge.
 *  4. The scratch of a thread holds an edge block [MR][NR], the B panel [depth][NR], the A panel
 *     [rows/MR][depth][MR], and, if sums are not kept in the output and the chain takes several
 *     depth blocks, the sums of the tile [rows][cols] in whole blocks. AMX packs into panels that
 *     all threads share (tiles.h).
 */
#include "tiles.h"

/* Largest tiles. Tiles of halves are narrower, as their sums are in
 * scratch. Depths are in words. */
enum { ROWS = 384, COLS = 4096 / NR * NR, HALF_COLS = 1152, DEPTH = 384 };
/* Below these sizes tiles are not split to feed more threads. */
enum { FEWEST_ROWS = 48, FEWEST_COLS = 192 };
enum { PAIRS_DEPTH = 512, PLACE_DEPTH = 2048, PLACE_COLS = 384 };
enum { ROOM = ZK_SCRATCH / 4 }; /* words of scratch per thread */
_Static_assert(ROWS % MR == 0 && HALF_COLS % NR == 0 && FEWEST_COLS % NR == 0, "whole blocks");
_Static_assert(PLACE_COLS % NR == 0, "whole blocks");

/* A tile being computed. */
typedef struct tile {
    const product *g;
    float *a, *b, *edge; /* [rows/mr][depth][mr], [depth][nr], [mr][nr] */
    float *sum;          /* [rows][cols], `stride` apart: the output or scratch; NULL: use edge */
    int64_t m, n, rows, cols, stride;
    int64_t placed; /* number of rows of a that are read in place */
} tile;

/* ---- the block of sums in registers */
/* Return sum + a * b, for words. */
static inline lanes step(lanes a, lanes b, lanes sum, const int pairs)
{
#ifdef __AVX512BF16__
    if (pairs) return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
    (void)pairs;
    return lanes_fma(a, b, sum);
}

/* Continue the chains s by every `each`-th of `depth` words of a, with rows `row` bytes and words
 * `next` bytes apart, and of b[depth][NR]. */
ZK_INLINE void chain(lanes s[MR][VECTORS], const char *a, int64_t row, int64_t next, const float *b,
                     int64_t depth, const int each, const int pairs)
{
    for (int64_t k = 0; k < depth; k += each, a += each * next, b += each * NR) {
        lanes line[VECTORS];
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) line[v] = lanes_load(b + v * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
            float word;
            memcpy(&word, a + i * row, sizeof word);
            lanes x = lanes_set(word);
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) s[i][v] = step(x, line[v], s[i][v], pairs);
        }
    }
}

/* Continue the chains sum[MR][NR], rows `stride` apart, or start them if `first`, by the
 * words of a, with rows `row` bytes and words `next` bytes apart, and of b[depth][NR].
 * Prefetches the block below. */
ZK_INLINE void multiply_words(float *sum, int64_t stride, const char *a, int64_t row, int64_t next,
                              const float *b, int64_t depth, int first, const int pairs)
{
    lanes s[MR][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++)
            s[i][v] = first ? lanes_set(0) : lanes_load(sum + i * stride + v * LANES);
    for (int i = MR; i < 2 * MR; i++)
        for (int v = 0; v < NR; v += 16) __builtin_prefetch(sum + i * stride + v, 1);
    chain(s, a, row, next, b, depth, 1, pairs);
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) lanes_store(sum + i * stride + v * LANES, s[i][v]);
}

/* The same with a[depth][MR]. */
static __attribute__((noinline)) void multiply_block(float *sum, int64_t stride, const float *a,
                                                     const float *b, int64_t depth, int first)
{
    multiply_words(sum, stride, (const char *)a, sizeof *a, MR * sizeof *a, b, depth, first, 0);
}

static __attribute__((noinline)) void multiply_pairs(float *sum, int64_t stride, const char *a,
                                                     int64_t row, int64_t next, const float *b,
                                                     int64_t depth, int first)
{
    multiply_words(sum, stride, a, row, next, b, depth, first, 1);
}

/* Set s to one chain over every second word of a group, starting at its first or second word. */
ZK_INLINE void half_group(lanes s[MR][VECTORS], const float *a, const float *b)
{
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) s[i][v] = lanes_set(0);
    chain(s, (const char *)a, sizeof *a, MR * sizeof *a, b, GROUP, 2, 0);
}

/* The same with a[depth][MR], in groups (ZK_TILES). */
static __attribute__((noinline)) void multiply_groups(float *sum, int64_t stride, const float *a,
                                                      const float *b, int64_t depth, int first)
{
    lanes even[MR][VECTORS], s[MR][VECTORS];
    for (int64_t k = 0; k < depth; k += GROUP, a += GROUP * MR, b += GROUP * NR) {
        half_group(s, a, b);
        memcpy(even, s, sizeof s);
        half_group(s, a + MR, b + NR);
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++)
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) {
                float *to = sum + i * stride + v * LANES;
                lanes old = first && !k ? lanes_set(0) : lanes_load(to);
                lanes_store(to, old + (even[i][v] + s[i][v]));
            }
    }
}

/* ---- a tile of the output */
/* Return whether a chain takes several depth blocks. An end that is not a whole unit is packed even
 * if a is read in place. */
static inline int in_blocks(const product *g)
{
    return g->depth < g->K || (g->place && g->K % g->unit && g->K > g->unit);
}

/* Continue the block at row i of a tile by elements [k, k + depth) of the chain. */
static void carry_on(tile *t, float *sum, int64_t stride, int64_t i, int64_t k, int64_t depth)
{
    const product *g = t->g;
    int64_t n = taken(&g->a, depth);
    int first = !k && !g->carry;
    const float *packed = t->a + (i - t->placed) * n;
    int64_t at = (t->m + i) * g->a.row + k, size = element(&g->a);
    const char *place = (const char *)g->a.p + at * size;
    if (i < t->placed) {
        multiply_pairs(sum, stride, place, g->a.row * size, 4, t->b, n, first);
    } else if (paired(&g->a)) {
        multiply_pairs(sum, stride, (const char *)packed, 4, 4 * MR, t->b, n, first);
    } else if (g->unit == GROUP) {
        multiply_groups(sum, stride, packed, t->b, n, first);
    } else {
        multiply_block(sum, stride, packed, t->b, n, first);
    }
}

/* Compute one block of sums over elements [k, k + depth) of the chain. */
static void block(tile *t, int64_t i, int64_t j, int64_t k, int64_t depth)
{
    const product *g = t->g;
    int64_t rows = zk_least(MR, t->rows - i), cols = zk_least(NR, t->cols - j);
    int64_t stride = t->stride;
    float *sum = t->sum ? t->sum + i * stride + j : t->edge;
    int last = k + depth == g->K && unfinished(g);
    if (direct(g) && (rows < MR || cols < NR)) {
        copy(t->edge, NR, sum, stride, k || g->carry ? rows : 0, cols);
        carry_on(t, t->edge, NR, i, k, depth);
        copy(sum, stride, t->edge, NR, rows, cols);
    } else {
        carry_on(t, sum, stride, i, k, depth);
    }
    if (last) finish_sums(g, sum, stride, t->m + i, t->n + j, rows, cols);
}

static __attribute__((noinline)) void fill_tile(tile *t)
{
    const product *g = t->g;
    for (int64_t k = 0, depth; k < g->K; k += depth) {
        depth = zk_least(g->depth, g->K - k);
        int whole = g->place && depth >= g->unit;
        if (whole) depth -= depth % g->unit;
        t->placed = whole ? t->rows / MR * MR : 0;
        for (int64_t i = t->placed; i < t->rows; i += MR)
            pack(t->a + (i - t->placed) * taken(&g->a, depth), &g->a,
                 (t->m + i) * g->a.row + k * g->a.column, g->a.row, g->a.column,
                 zk_least(MR, t->rows - i), depth, MR);
        for (int64_t j = 0; j < t->cols; j += NR) {
            pack(t->b, &g->b, (t->n + j) * g->b.column + k * g->b.row, g->b.column, g->b.row,
                 zk_least(NR, t->cols - j), depth, NR);
            for (int64_t i = 0; i < t->rows; i += MR) block(t, i, j, k, depth);
        }
    }
}

/* Return the words of the packed panels; a store may write up to LANES words past them. */
static int64_t panel_b(const product *g) { return NR * taken(&g->b, g->depth) + LANES; }
static int64_t panel_a(const product *g)
{
    int64_t n = taken(&g->a, g->depth), rows = zk_pieces(g->rows, MR) * MR;
    int64_t end = g->K % g->unit ? taken(&g->a, 1) : 0; /* the end, which is packed whole */
    return (g->place ? zk_most(MR * n, rows * end) : rows * n) + LANES;
}

static int64_t sums(const product *g) { return in_blocks(g) && !direct(g) ? g->rows * g->cols : 0; }

static void tile_task(void *arg, int64_t task, int thread)
{
    const product *g = arg;
    int64_t across = zk_pieces(g->N, g->cols);
    float *scratch = zk_scratch(g->k, thread);
    tile t = {.g = g,
              .edge = scratch,
              .b = scratch + MR * NR,
              .a = scratch + MR * NR + panel_b(g),
              .stride = NR,
              .m = task / across * g->rows,
              .n = task % across * g->cols};
    t.rows = zk_least(g->rows, g->M - t.m);
    t.cols = zk_least(g->cols, g->N - t.n);
    if (direct(g)) {
        t.sum = (float *)g->out + t.m * g->stride + t.n;
        t.stride = g->stride;
    } else if (in_blocks(g)) {
        t.sum = t.a + panel_a(g);
        t.stride = g->cols;
    }
    if (g->a.dtype == ZK_BF16) _mm_setcsr(ZK_MXCSR | FLUSH);
    fill_tile(&t);
    _mm_setcsr(ZK_MXCSR);
}

/* ---- choosing tiles */
static int64_t tasks(const product *g)
{
    return zk_pieces(g->M, g->rows) * zk_pieces(g->N, g->cols);
}

/* Return half of n, in whole units. */
static int64_t half(int64_t n, int64_t unit) { return zk_pieces(n / 2, unit) * unit; }

static void multiply_all(product *g, const zk_launch *L)
{
    g->a.order = g->b.order = g->k->products;
    int pairs = paired(&g->a);
    g->unit = group(&g->a);
    g->stride = g->stride ? g->stride : g->N;
    if (TILES && pairs) {
        multiply_slabs(g, L);
        return;
    }
    g->place = pairs && g->a.column == 1;
    int64_t words = g->place ? PLACE_DEPTH : pairs ? PAIRS_DEPTH : DEPTH;
    int64_t deepest = pairs ? 2 * words : words;
    int64_t depth = given(g, L, 2, deepest, g->unit);
    g->depth = depth ? depth : even(g->K, deepest, g->unit);
    int64_t highest = g->place ? MR * PLACE_DEPTH : ROWS;
    int64_t most = direct(g) ? COLS : !g->place ? HALF_COLS : in_blocks(g) ? PLACE_COLS : NR;
    int64_t rows = given(g, L, 0, highest, MR), cols = given(g, L, 1, most, NR);
    g->rows = rows ? rows : even(g->M, highest, MR);
    g->cols = cols ? cols : even(g->N, most, NR);
    int threads = g->k->threads;
    while (threads > 1 && !cols && tasks(g) < 3 * threads && g->cols > FEWEST_COLS)
        g->cols = half(g->cols, NR);
    while (threads > 1 && !rows && tasks(g) < threads && g->rows > FEWEST_ROWS)
        g->rows = half(g->rows, MR);
    while (MR * NR + panel_b(g) + panel_a(g) + sums(g) > ROOM)
        if (g->cols > NR) g->cols = half(g->cols, NR);
        else g->rows = half(g->rows, MR);
    zk_for(g->k, tasks(g), tile_task, g);
}

static matrix plain(const real *p, int64_t columns, int dtype)
{
    return (matrix){.p = p, .row = columns, .column = 1, .dtype = dtype};
}

static matrix turned(const real *p, int64_t columns, int dtype)
{
    return (matrix){.p = p, .row = 1, .column = columns, .dtype = dtype};
}

/* ---- kernels */
void ZK(zk_linear_fwd)(zk *k, const zk_launch *L, real *y, const real *x, const real *w,
                       const real *b, int64_t M, int64_t N, int64_t K, int layout)
{
    product g = {.k = k,
                 .out = y,
                 .dtype = k->dtype,
                 .bias = b,
                 .M = M,
                 .N = N,
                 .K = K,
                 .a = plain(x, K, k->dtype),
                 .b = layout == ZK_IN_OUT ? plain(w, N, k->dtype) : turned(w, K, k->dtype)};
    multiply_all(&g, L);
}

/* dx[M,K] = dy[M,N] . w^T */
void ZK(zk_linear_bwd_x)(zk *k, const zk_launch *L, real *dx, const real *dy, const real *w,
                         int64_t M, int64_t N, int64_t K, int layout)
{
    product g = {.k = k,
                 .out = dx,
                 .dtype = k->dtype,
                 .M = M,
                 .N = K,
                 .K = N,
                 .a = plain(dy, N, k->dtype),
                 .b = layout == ZK_IN_OUT ? turned(w, N, k->dtype) : plain(w, K, k->dtype)};
    multiply_all(&g, L);
}

/* dw[K,N] = x^T . dy, or dw[N,K] = dy^T . x; the chain runs over the M rows */
void ZK(zk_linear_bwd_w)(zk *k, const zk_launch *L, void *dw, const real *dy, const real *x,
                         int64_t M, int64_t N, int64_t K, int layout, int full, int carry)
{
    product g = {.k = k, .out = dw, .dtype = full ? ZK_F32 : k->dtype, .carry = carry, .K = M};
    if (layout == ZK_IN_OUT) {
        g.a = turned(x, K, k->dtype);
        g.b = plain(dy, N, k->dtype);
        g.M = K;
        g.N = N;
    } else {
        g.a = turned(dy, N, k->dtype);
        g.b = plain(x, K, k->dtype);
        g.M = N;
        g.N = K;
    }
    multiply_all(&g, L);
}

/* ---- slices: columns [at, at + n) of y and dy are rows of w */
static real *from(const real *p, int64_t at, int dtype)
{
    return (char *)p + at * (dtype == ZK_F32 ? 4 : 2);
}

void ZK(zk_slice_fwd)(zk *k, const zk_launch *L, real *y, const real *x, const real *w,
                      const real *b, int64_t M, int64_t N, int64_t K, int64_t at, int64_t n)
{
    product g = {.k = k,
                 .out = from(y, at, k->dtype),
                 .dtype = k->dtype,
                 .M = M,
                 .N = n,
                 .K = K,
                 .stride = N,
                 .bias = b ? from(b, at, k->dtype) : NULL,
                 .a = plain(x, K, k->dtype),
                 .b = turned(w, K, k->dtype)};
    multiply_all(&g, L);
}

void ZK(zk_slice_bwd_x)(zk *k, const zk_launch *L, float *dx, const real *dy, const real *w,
                        int64_t M, int64_t N, int64_t K, int64_t at, int64_t n)
{
    product g = {.k = k,
                 .out = dx,
                 .dtype = ZK_F32,
                 .carry = at > 0,
                 .M = M,
                 .N = K,
                 .K = n,
                 .a = plain(from(dy, at, k->dtype), N, k->dtype),
                 .b = plain(w, K, k->dtype)};
    multiply_all(&g, L);
}

void ZK(zk_slice_bwd_w)(zk *k, const zk_launch *L, real *dw, const real *dy, const real *x,
                        int64_t M, int64_t N, int64_t K, int64_t at, int64_t n)
{
    product g = {.k = k,
                 .out = dw,
                 .dtype = k->dtype,
                 .M = n,
                 .N = K,
                 .K = M,
                 .a = turned(from(dy, at, k->dtype), N, k->dtype),
                 .b = plain(x, K, k->dtype)};
    multiply_all(&g, L);
}

/* ---- LoRA adapters on columns [at, at + n) of y and dy */
typedef struct copies {
    void *to;
    const void *from;
    int64_t bytes; /* of a row */
} copies;

static void copy_row(void *arg, int64_t row, int thread)
{
    const copies *c = arg;
    (void)thread;
    memcpy((char *)c->to + row * c->bytes, (const char *)c->from + row * c->bytes,
           (size_t)c->bytes);
}

void ZK(zk_lora_fwd)(zk *k, const zk_launch *L, real *y, const real *base, const real *x,
                     const real *w, int64_t M, int64_t N, int64_t K, int64_t at, int64_t n,
                     float scale)
{
    copies all = {y, base, N * (k->dtype == ZK_F32 ? 4 : 2)};
    product g = {.k = k,
                 .out = from(y, at, k->dtype),
                 .dtype = k->dtype,
                 .end = ADDED,
                 .scale = scale,
                 .M = M,
                 .N = n,
                 .K = K,
                 .stride = N,
                 .a = plain(x, K, k->dtype),
                 .b = turned(w, K, k->dtype)};
    if (y != base) zk_for(k, M, copy_row, &all);
    multiply_all(&g, L);
}

void ZK(zk_lora_bwd_x)(zk *k, const zk_launch *L, real *dx, const real *dy, const real *w,
                       int64_t M, int64_t N, int64_t K, int64_t at, int64_t n, float scale)
{
    product g = {.k = k,
                 .out = dx,
                 .dtype = k->dtype,
                 .end = SCALED,
                 .scale = scale,
                 .M = M,
                 .N = K,
                 .K = n,
                 .a = plain(from(dy, at, k->dtype), N, k->dtype),
                 .b = plain(w, K, k->dtype)};
    multiply_all(&g, L);
}

void ZK(zk_lora_bwd_w)(zk *k, const zk_launch *L, void *dw, const real *dy, const real *x,
                       int64_t M, int64_t N, int64_t K, int64_t at, int64_t n, float scale,
                       int full, int carry)
{
    product g = {.k = k,
                 .out = dw,
                 .dtype = full ? ZK_F32 : k->dtype,
                 .end = carry ? ADDED : SCALED,
                 .scale = scale,
                 .M = n,
                 .N = K,
                 .K = M,
                 .a = turned(from(dy, at, k->dtype), N, k->dtype),
                 .b = plain(x, K, k->dtype)};
    multiply_all(&g, L);
}

/* ---- gradient of the bias: a task sums BIAS_COLS columns over all rows */
enum { BIAS_VECTORS = 4, BIAS_COLS = BIAS_VECTORS * LANES };

typedef struct bias {
    zk *k;
    real *db;  /* [N] */
    matrix dy; /* [M,N] */
    int64_t M, N;
} bias;

static void bias_task(void *arg, int64_t task, int thread)
{
    const bias *g = arg;
    int64_t n = task * BIAS_COLS, left = g->N - n;
    lanes sum[BIAS_VECTORS];
    float out[BIAS_COLS];
    (void)thread;
    for (int v = 0; v < BIAS_VECTORS; v++) sum[v] = lanes_set(0);
    for (int64_t m = 0; m < g->M; m++)
        for (int v = 0; v < BIAS_VECTORS; v++)
            sum[v] += get(&g->dy, m * g->N + n + v * LANES, left - v * LANES);
    for (int v = 0; v < BIAS_VECTORS; v++) lanes_store(out + v * LANES, sum[v]);
    for (int64_t i = 0; i < BIAS_COLS && i < left; i += 16)
        store16rn(g->db, n + i, g->k->dtype, load16(out + i), (int)zk_least(16, left - i));
}

/* The launch's tile is ignored: its rows would split the summed index. */
void ZK(zk_linear_bwd_b)(zk *k, const zk_launch *L, real *db, const real *dy, int64_t M, int64_t N)
{
    bias g = {.k = k, .db = db, .dy = plain(dy, N, k->dtype), .M = M, .N = N};
    (void)L;
    zk_for(k, zk_pieces(N, BIAS_COLS), bias_task, &g);
}
