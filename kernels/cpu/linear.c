/* linear.c -- the products of a linear layer and its gradients, by one packed and blocked GEMM.
 *
 * Invariants
 *  1. In f32 an output element is one FMA chain in ascending k that starts at 0, or, to carry on,
 *     at the output, which holds it from one depth block to the next. The bias is added to the
 *     finished chain, rounded once. Halves widen exactly, the chain is the same, f32 scratch
 *     carries it, and the result is rounded once. So no tile, thread or object changes a
 *     bit. What is scaled or added to the output lies in scratch, too: out + scale * chain is one
 *     FMA.
 *  2. A task is one tile of the output, and no element outside matrices is read or written: edges
 *     are packed as zeros, and their sums go through scratch.
 *  3. Scratch of a thread: A panel [rows/MR][depth][MR], B panel [depth][NR], an edge block
 *     [MR][NR], and but for f32 the tile's sums [rows][cols], in whole blocks.
 */
#include "lanes.h"

/* The block of sums in registers is MR x NR. The A panel is meant for the second-level cache, the B
 * panel for the first and second. */
#ifdef __AVX512F__
enum { MR = 8, NR = 48 };
static inline lanes lanes_part(const float *p, int n) { return load16n(p, n); }
typedef __m256i halves;
static inline halves half_load(const uint16_t *p) { return _mm256_loadu_si256((const halves *)p); }
static inline halves half_part(const uint16_t *p, int n) { return (halves)load16hn(p, n); }
static inline lanes lanes_widen(halves x, int dtype)
{
    return dtype == ZK_F16 ? (lanes)_mm512_cvtph_ps(x)
                           : (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
}
/* a0 b0 a1 b1 ... and the same of the upper halves */
static inline lanes lanes_low(lanes a, lanes b)
{
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
static inline lanes lanes_high(lanes a, lanes b)
{
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                   31);
}
#else
enum { MR = 6, NR = 16 };
static inline lanes lanes_part(const float *p, int n)
{
    return (lanes)_mm256_maskload_ps(p, first8(n));
}
typedef __m128i halves;
static inline halves half_load(const uint16_t *p) { return _mm_loadu_si128((const halves *)p); }
static inline halves half_part(const uint16_t *p, int n) { return load8hn(p, n); }
static inline lanes lanes_widen(halves x, int dtype)
{
    return dtype == ZK_F16 ? (lanes)_mm256_cvtph_ps(x)
                           : (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16);
}
/* a0 b0 a1 b1 ... and the same of the upper halves */
static inline lanes lanes_low(lanes a, lanes b)
{
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}
static inline lanes lanes_high(lanes a, lanes b)
{
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
#endif
enum { VECTORS = NR / LANES };

/* A tile at most; sums of halves lie in scratch, so their tiles are narrower. */
enum { ROWS = 384, COLS = 4096 / NR * NR, HALF_COLS = 1152, DEPTH = 384 };
enum { FEWEST_ROWS = 48, FEWEST_COLS = 192 }; /* where smaller tiles would feed more threads */
enum {
    A_FLOATS = ROWS * DEPTH + LANES, /* stores into a panel may run on by LANES */
    B_FLOATS = NR * DEPTH + LANES,
    SUM_FLOATS = ROWS * HALF_COLS
};
_Static_assert(ROWS % MR == 0 && HALF_COLS % NR == 0 && FEWEST_COLS % NR == 0, "whole blocks");
_Static_assert(4 * (A_FLOATS + B_FLOATS + MR * NR + SUM_FLOATS) <= ZK_SCRATCH,
               "a tile fits a thread's scratch");

/* A matrix read by element: (i, j) at p[i * row + j * column], one of the two being 1. */
typedef struct matrix {
    const real *p;
    int64_t row, column;
    int dtype;
} matrix;

typedef struct product {
    zk *k;
    matrix a, b;      /* [M,K], [K,N] */
    void *out;        /* [M,N] of `dtype`, rows `stride` apart; 0: N */
    const real *bias; /* [N] of the context's dtype, or NULL */
    int64_t M, N, K, stride;
    int64_t rows, cols, depth;         /* of a tile */
    int dtype, carry;                  /* carry: the chain goes on from the output */
    enum { PLAIN, SCALED, ADDED } end; /* the output is the chain, or scale * chain, or + that */
    float scale;
} product;

/* One tile at work. */
typedef struct tile {
    const product *g;
    float *a, *b, *edge; /* [rows/MR][depth][MR], [depth][NR], [MR][NR] */
    float *sum;          /* [rows][cols], `stride` apart: the output, or scratch */
    int64_t m, n, rows, cols, stride;
} tile;

/* ---- packing */
static inline int64_t element(const matrix *x) { return x->dtype == ZK_F32 ? 4 : 2; }

/* LANES elements from `at`, 0 from the n-th on */
static inline lanes get(const matrix *x, int64_t at, int64_t n)
{
    if (x->dtype == ZK_F32) {
        const float *p = (const float *)x->p + at;
        return n >= LANES ? lanes_load(p) : lanes_part(p, (int)n);
    }
    const uint16_t *p = (const uint16_t *)x->p + at;
    return lanes_widen(n >= LANES ? half_load(p) : half_part(p, (int)n), x->dtype);
}

/* r[i] lane j becomes r[j] lane i: with an element's address written as row bits, lane bits, each
 * round moves the first bit to the end. */
static inline void transpose_lanes(lanes r[LANES])
{
    lanes t[LANES];
#pragma GCC unroll 4
    for (int round = 1; round < LANES; round *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) t[i] = r[i];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            r[2 * i] = lanes_low(t[i], t[i + LANES / 2]);
            r[2 * i + 1] = lanes_high(t[i], t[i + LANES / 2]);
        }
    }
}

/* Lines that lie side by side: element i of line v at p[at + v + i * step]. */
static void pack_across(float *to, const matrix *x, int64_t at, int64_t step, int64_t lines,
                        int64_t n, int width)
{
    const char *next = (const char *)x->p + (at + width) * element(x); /* lines packed next */
    for (int64_t i = 0; i < n; i++)
        for (int v = 0; v < width; v += LANES) {
            __builtin_prefetch(next + (i * step + v) * element(x), 0, 2);
            lanes_store(to + i * width + v, get(x, at + i * step + v, lines - v));
        }
}

/* Up to LANES lines of LANES elements, `step` apart, to columns `width` apart; further lines 0 */
static void turn_block(float *to, const matrix *x, int64_t at, int64_t step, int64_t lines,
                       int width)
{
    lanes r[LANES];
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) r[j] = j < lines ? get(x, at + j * step, LANES) : lanes_set(0);
    transpose_lanes(r);
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) lanes_store(to + j * width, r[j]);
}

/* Lines of adjacent elements: element i of line v at p[at + v * step + i]. */
static void pack_along(float *to, const matrix *x, int64_t at, int64_t step, int64_t lines,
                       int64_t n, int width)
{
    for (int64_t i = 0; i < n; i += LANES)
        for (int v = 0; v < width; v += LANES) {
            if (i + LANES <= n) {
                turn_block(to + i * width + v, x, at + v * step + i, step, lines - v, width);
                continue;
            }
            lanes r[LANES];
            for (int j = 0; j < LANES; j++)
                r[j] = get(x, at + (v + j) * step + i, v + j < lines ? n - i : 0);
            transpose_lanes(r);
            for (int j = 0; j < LANES && i + j < n; j++)
                lanes_store(to + (i + j) * width + v, r[j]);
        }
}

/* to[n][width] = `lines` lines of n elements, lines past the last one 0. Element i of line v is at
 * p[at + v * across + i * along]. A store may write LANES floats past the end of `to`. */
static void pack(float *to, const matrix *x, int64_t at, int64_t across, int64_t along,
                 int64_t lines, int64_t n, int width)
{
    if (across == 1) pack_across(to, x, at, along, lines, n, width);
    else pack_along(to, x, at, across, lines, n, width);
}

/* ---- the block in registers
 * sum[MR][NR], rows `stride` apart, carries on (first: begins) its chains by a[depth][MR] and
 * b[depth][NR]; the block below is fetched meanwhile. */
static __attribute__((noinline)) void multiply_block(float *sum, int64_t stride, const float *a,
                                                     const float *b, int64_t depth, int first)
{
    lanes s[MR][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++)
            s[i][v] = first ? lanes_set(0) : lanes_load(sum + i * stride + v * LANES);
    for (int i = MR; i < 2 * MR; i++)
        for (int v = 0; v < NR; v += 16) __builtin_prefetch(sum + i * stride + v, 1);
    for (int64_t k = 0; k < depth; k++, a += MR, b += NR) {
        lanes row[VECTORS];
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) row[v] = lanes_load(b + v * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
            lanes x = lanes_set(a[i]);
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++) s[i][v] = lanes_fma(x, row[v], s[i][v]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) lanes_store(sum + i * stride + v * LANES, s[i][v]);
}

/* ---- a tile of the output */
static void copy(float *to, int64_t to_stride, const float *from, int64_t from_stride, int64_t rows,
                 int64_t cols)
{
    for (int64_t i = 0; i < rows; i++)
        memcpy(to + i * to_stride, from + i * from_stride, (size_t)cols * sizeof(float));
}

/* Rows and columns from (i, j) of the tile: finished sums become output. */
static void finish_sums(const tile *t, int64_t i, int64_t j, int64_t rows, int64_t cols)
{
    const product *g = t->g;
    const matrix bias = {.p = g->bias, .dtype = g->k->dtype};
    const matrix old = {.p = g->out, .dtype = g->dtype};
    for (int64_t r = i; r < i + rows; r++)
        for (int64_t c = j; c < j + cols; c += LANES) {
            int n = (int)zk_least(LANES, j + cols - c);
            lanes y = lanes_get(t->sum, r * t->stride + c, ZK_F32, n);
            int64_t to = (t->m + r) * g->stride + t->n + c;
            if (g->bias) y += get(&bias, t->n + c, n);
            if (g->end == SCALED) y *= lanes_set(g->scale);
            if (g->end == ADDED) y = lanes_fma(lanes_set(g->scale), y, get(&old, to, n));
            lanes_put(g->out, to, g->dtype, y, n);
        }
}

/* Whether sums lie in the output as they grow */
static inline int direct(const product *g) { return g->dtype == ZK_F32 && g->end == PLAIN; }

/* One block of registers over elements [k, k + depth) of the chain. */
static void block(const tile *t, int64_t i, int64_t j, int64_t k, int64_t depth)
{
    const product *g = t->g;
    int64_t rows = zk_least(MR, t->rows - i), cols = zk_least(NR, t->cols - j);
    int first = !k && !g->carry;
    float *sum = t->sum + i * t->stride + j;
    const float *a = t->a + i * depth;
    if (direct(g) && (rows < MR || cols < NR)) {
        copy(t->edge, NR, sum, t->stride, first ? 0 : rows, cols);
        multiply_block(t->edge, NR, a, t->b, depth, first);
        copy(sum, t->stride, t->edge, NR, rows, cols);
    } else {
        multiply_block(sum, t->stride, a, t->b, depth, first);
    }
    if (k + depth == g->K && (g->bias || !direct(g))) finish_sums(t, i, j, rows, cols);
}

static void tile_task(void *arg, int64_t task, int thread)
{
    const product *g = arg;
    int64_t across = zk_pieces(g->N, g->cols);
    float *scratch = zk_scratch(g->k, thread);
    tile t = {.g = g,
              .a = scratch,
              .b = scratch + A_FLOATS,
              .edge = scratch + A_FLOATS + B_FLOATS,
              .m = task / across * g->rows,
              .n = task % across * g->cols};
    t.rows = zk_least(g->rows, g->M - t.m);
    t.cols = zk_least(g->cols, g->N - t.n);
    t.sum = direct(g) ? (float *)g->out + t.m * g->stride + t.n : t.edge + MR * NR;
    t.stride = direct(g) ? g->stride : g->cols;
    for (int64_t k = 0; k < g->K; k += g->depth) {
        int64_t depth = zk_least(g->depth, g->K - k);
        for (int64_t i = 0; i < t.rows; i += MR)
            pack(t.a + i * depth, &g->a, (t.m + i) * g->a.row + k * g->a.column, g->a.row,
                 g->a.column, zk_least(MR, t.rows - i), depth, MR);
        for (int64_t j = 0; j < t.cols; j += NR) {
            pack(t.b, &g->b, (t.n + j) * g->b.column + k * g->b.row, g->b.column, g->b.row,
                 zk_least(NR, t.cols - j), depth, NR);
            for (int64_t i = 0; i < t.rows; i += MR) block(&t, i, j, k, depth);
        }
    }
}

/* ---- choosing tiles */
/* n in equal pieces of at most `most`, in whole units */
static int64_t even(int64_t n, int64_t most, int64_t unit)
{
    return zk_pieces(zk_pieces(n, zk_pieces(n, most)), unit) * unit;
}

static int64_t given(const product *g, const zk_launch *L, int i, int64_t most, int64_t unit)
{
    int64_t n = L ? L[g->k->column].tile[i] : 0;
    return n > 0 ? zk_least(zk_pieces(n, unit) * unit, most) : 0;
}

static int64_t tasks(const product *g)
{
    return zk_pieces(g->M, g->rows) * zk_pieces(g->N, g->cols);
}

static void multiply_all(product *g, const zk_launch *L)
{
    int64_t most = direct(g) ? COLS : HALF_COLS;
    int64_t rows = given(g, L, 0, ROWS, MR), cols = given(g, L, 1, most, NR);
    int64_t depth = given(g, L, 2, DEPTH, 1);
    g->rows = rows ? rows : even(g->M, ROWS, MR);
    g->cols = cols ? cols : even(g->N, most, NR);
    g->depth = depth ? depth : even(g->K, DEPTH, 1);
    g->stride = g->stride ? g->stride : g->N;
    int threads = g->k->threads;
    while (threads > 1 && !cols && tasks(g) < 3 * threads && g->cols > FEWEST_COLS)
        g->cols = zk_pieces(g->cols / 2, NR) * NR;
    while (threads > 1 && !rows && tasks(g) < threads && g->rows > FEWEST_ROWS)
        g->rows = zk_pieces(g->rows / 2, MR) * MR;
    zk_for(g->k, tasks(g), tile_task, g);
}

static matrix plain(const real *p, int64_t columns, int dtype)
{
    return (matrix){p, columns, 1, dtype};
}

static matrix turned(const real *p, int64_t columns, int dtype)
{
    return (matrix){p, 1, columns, dtype};
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

/* dw[K,N] = x^T . dy or dw[N,K] = dy^T . x: the chain runs over rows */
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

/* ---- kernels of a slice: columns [at, at + n) of y and dy are rows of w */
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

/* ---- kernels of an adapter, on columns [at, at + n) of y and dy */
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

void ZK(zk_lora_bwd_w)(zk *k, const zk_launch *L, real *dw, const real *dy, const real *x,
                       int64_t M, int64_t N, int64_t K, int64_t at, int64_t n, float scale)
{
    product g = {.k = k,
                 .out = dw,
                 .dtype = k->dtype,
                 .end = SCALED,
                 .scale = scale,
                 .M = n,
                 .N = K,
                 .K = M,
                 .a = turned(from(dy, at, k->dtype), N, k->dtype),
                 .b = plain(x, K, k->dtype)};
    multiply_all(&g, L);
}

/* ---- gradient of the bias: a task sums the rows of BIAS_COLS columns */
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

/* Always in tasks of BIAS_COLS columns: the rows of a tile would be the summed index. */
void ZK(zk_linear_bwd_b)(zk *k, const zk_launch *L, real *db, const real *dy, int64_t M, int64_t N)
{
    bias g = {.k = k, .db = db, .dy = plain(dy, N, k->dtype), .M = M, .N = N};
    (void)L;
    zk_for(k, zk_pieces(N, BIAS_COLS), bias_task, &g);
}
