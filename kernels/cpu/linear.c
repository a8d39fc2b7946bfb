/* linear.c -- the products of a linear layer and its gradients, by one packed and blocked GEMM.
 *
 * Invariants
 *  1. In f32 and f16 an output element is one FMA chain in ascending k that starts at 0, or, to
 *     carry on, at the output, which holds it from one depth block to the next. In bf16 the chain
 *     goes by pairs from an even k on, the odd element of a pair first (one past the end is 0), and
 *     denormals are 0 in products and sums: what AVX512_BF16 computes. Halves widen exactly. The
 *     bias is added to the finished chain, rounded once; f32 scratch carries the chain of halves,
 *     and the result is rounded once. So no tile, thread or object changes a bit. What is scaled or
 *     added to the output lies in scratch, too: out + scale * chain is one FMA.
 *  2. A task is one tile of the output, and no element outside matrices is read or written: edges
 *     are packed as zeros, and their sums go through scratch.
 *  3. Panels hold words: an f32, or a pair of bf16 where the object multiplies these. A matrix
 *     whose words lie along the chain as they are is not packed but for its edge.
 *  4. Scratch of a thread: B panel [depth][NR], an edge block [MR][NR], A panel
 *     [rows/MR][depth][MR], and, where the chain of what is no f32 comes in several blocks, the
 *     tile's sums [rows][cols], in whole blocks.
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

/* Elements of a bf16 chain in a word, and of a line in a vector of words */
#ifdef __AVX512BF16__
enum { PAIR = 2 };
#else
enum { PAIR = 1 };
#endif

/* A tile at most; sums of halves lie in scratch, so their tiles are narrower. Depths in words. */
enum { ROWS = 384, COLS = 4096 / NR * NR, HALF_COLS = 1152, DEPTH = 384 };
enum { FEWEST_ROWS = 48, FEWEST_COLS = 192 }; /* where smaller tiles would feed more threads */
enum { PAIRS_DEPTH = 512, PLACE_DEPTH = 2048, PLACE_COLS = 384 };
enum { ROOM = ZK_SCRATCH / 4 }; /* words of a thread's scratch */
enum { FLUSH = 0x8040 };        /* MXCSR: denormals are 0, as AVX512_BF16 has them anyway */
_Static_assert(ROWS % MR == 0 && HALF_COLS % NR == 0 && FEWEST_COLS % NR == 0, "whole blocks");
_Static_assert(PLACE_COLS % NR == 0, "whole blocks");

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
    int64_t rows, cols, depth;         /* of a tile; depth in elements of the chain */
    int dtype, carry;                  /* carry: the chain goes on from the output */
    int place;                         /* words of a lie along the chain as they are */
    enum { PLAIN, SCALED, ADDED } end; /* the output is the chain, or scale * chain, or + that */
    float scale;
} product;

/* One tile at work. */
typedef struct tile {
    const product *g;
    float *a, *b, *edge; /* [rows/MR][depth][MR], [depth][NR], [MR][NR] */
    float *sum;          /* [rows][cols], `stride` apart: the output, or scratch; NULL: edge */
    int64_t m, n, rows, cols, stride;
    int64_t placed; /* rows that are read where they lie */
} tile;

/* ---- packing */
static inline int64_t element(const matrix *x) { return x->dtype == ZK_F32 ? 4 : 2; }

static inline int paired(const matrix *x) { return PAIR == 2 && x->dtype == ZK_BF16; }

/* The words of n elements of a chain */
static inline int64_t taken(const matrix *x, int64_t n)
{
    return x->dtype == ZK_BF16 ? (n + 1) / 2 * (2 / PAIR) : n;
}

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

/* The words of a line's next n elements, 0 past them */
static inline lanes get_words(const matrix *x, int64_t at, int64_t n)
{
#ifdef __AVX512BF16__
    if (paired(x)) {
        const uint16_t *p = (const uint16_t *)x->p + at;
        if (n >= 2 * LANES) return (lanes)_mm512_loadu_si512(p);
        return (lanes)_mm512_maskz_loadu_epi16((1u << (n > 0 ? n : 0)) - 1, p);
    }
#endif
    return get(x, at, n);
}

/* The words of element i and i + 1 of LANES lines, which begin a pair of bf16 */
static inline void put_pair(float *to, int width, lanes even, lanes odd)
{
#ifdef __AVX512BF16__
    (void)width;
    lanes_store(to, (lanes)((lanes_bits)even >> 16 | (lanes_bits)odd));
#else
    lanes_store(to, odd);
    lanes_store(to + width, even);
#endif
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

/* The same of bf16 */
static void pack_pairs(float *to, const matrix *x, int64_t at, int64_t step, int64_t lines,
                       int64_t n, int width)
{
    const char *next = (const char *)x->p + (at + width) * element(x); /* lines packed next */
    for (int64_t i = 0; i < n; i += 2)
        for (int v = 0; v < width; v += LANES) {
            int64_t from = at + i * step + v;
            __builtin_prefetch(next + (i * step + v) * element(x), 0, 2);
            __builtin_prefetch(next + ((i + 1) * step + v) * element(x), 0, 2);
            put_pair(to + taken(x, i) * width + v, width, get(x, from, lines - v),
                     get(x, from + step, i + 1 < n ? lines - v : 0));
        }
}

/* Of up to LANES lines, `step` apart, n elements become a row of words, `width` apart; further
 * lines 0 */
static void turn_block(float *to, const matrix *x, int64_t at, int64_t step, int64_t lines,
                       int64_t n, int width)
{
    lanes r[LANES];
    if (n >= LANES * (paired(x) ? 2 : 1)) {
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++)
            r[j] = j < lines ? get_words(x, at + j * step, n) : lanes_set(0);
    } else {
        for (int j = 0; j < LANES; j++) r[j] = get_words(x, at + j * step, j < lines ? n : 0);
    }
    transpose_lanes(r);
    if (x->dtype == ZK_BF16 && PAIR == 1) { /* a pair's odd element comes first */
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j += 2) {
            lanes even = r[j];
            r[j] = r[j + 1];
            r[j + 1] = even;
        }
    }
    if (taken(x, n) >= LANES) {
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) lanes_store(to + j * width, r[j]);
    } else {
        for (int j = 0; j < taken(x, n); j++) lanes_store(to + j * width, r[j]);
    }
}

/* Lines of adjacent elements: element i of line v at p[at + v * step + i]. */
static void pack_along(float *to, const matrix *x, int64_t at, int64_t step, int64_t lines,
                       int64_t n, int width)
{
    int64_t most = LANES * (paired(x) ? 2 : 1);
    for (int64_t i = 0; i < n; i += most)
        for (int v = 0; v < width; v += LANES)
            turn_block(to + taken(x, i) * width + v, x, at + v * step + i, step, lines - v,
                       zk_least(most, n - i), width);
}

/* to[words of n][width] = `lines` lines of n elements, lines past the last one 0. Element i of line
 * v is at p[at + v * across + i * along]. A store may write LANES words past the end of `to`. */
static void pack(float *to, const matrix *x, int64_t at, int64_t across, int64_t along,
                 int64_t lines, int64_t n, int width)
{
    if (across != 1) pack_along(to, x, at, across, lines, n, width);
    else if (x->dtype == ZK_BF16) pack_pairs(to, x, at, along, lines, n, width);
    else pack_across(to, x, at, along, lines, n, width);
}

/* ---- the block in registers */
/* sum + a * b of words */
static inline lanes step(lanes a, lanes b, lanes sum, const int pairs)
{
#ifdef __AVX512BF16__
    if (pairs) return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
    (void)pairs;
    return lanes_fma(a, b, sum);
}

/* sum[MR][NR], rows `stride` apart, carries on (first: begins) its chains by the words of a, rows
 * `row` bytes and words `next` bytes apart, and b[depth][NR]; the block below is fetched
 * meanwhile. */
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
    for (int64_t k = 0; k < depth; k++, a += next, b += NR) {
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
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) lanes_store(sum + i * stride + v * LANES, s[i][v]);
}

/* By a[depth][MR] */
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

/* ---- a tile of the output */
static void copy(float *to, int64_t to_stride, const float *from, int64_t from_stride, int64_t rows,
                 int64_t cols)
{
    for (int64_t i = 0; i < rows; i++)
        memcpy(to + i * to_stride, from + i * from_stride, (size_t)cols * sizeof(float));
}

/* Rows and columns from (i, j) of the tile: finished sums, rows `stride` apart, become output. */
static void finish_sums(const tile *t, const float *sum, int64_t stride, int64_t i, int64_t j,
                        int64_t rows, int64_t cols)
{
    const product *g = t->g;
    const matrix bias = {.p = g->bias, .dtype = g->k->dtype};
    const matrix old = {.p = g->out, .dtype = g->dtype};
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c += LANES) {
            int n = (int)zk_least(LANES, cols - c);
            lanes y = lanes_get(sum, r * stride + c, ZK_F32, n);
            int64_t to = (t->m + i + r) * g->stride + t->n + j + c;
            if (g->bias) y += get(&bias, t->n + j + c, n);
            if (g->end == SCALED) y *= lanes_set(g->scale);
            if (g->end == ADDED) y = lanes_fma(lanes_set(g->scale), y, get(&old, to, n));
            lanes_put(g->out, to, g->dtype, y, n);
        }
}

/* Whether sums lie in the output as they grow */
static inline int direct(const product *g) { return g->dtype == ZK_F32 && g->end == PLAIN; }

/* Whether a chain comes in several blocks: an odd end is packed even where a is not. */
static inline int in_blocks(const product *g)
{
    return g->depth < g->K || (g->place && g->K % 2 && g->K > 1);
}

/* The block at (i, j) of a tile carries on by elements [k, k + depth) of the chain */
static void carry_on(const tile *t, float *sum, int64_t stride, int64_t i, int64_t k, int64_t depth)
{
    const product *g = t->g;
    int64_t n = taken(&g->a, depth);
    int first = !k && !g->carry;
    const float *packed = t->a + (i - t->placed) * n;
    if (i < t->placed) {
        int64_t at = (t->m + i) * g->a.row + k, size = element(&g->a);
        multiply_pairs(sum, stride, (const char *)g->a.p + at * size, g->a.row * size, 4, t->b, n,
                       first);
    } else if (paired(&g->a)) {
        multiply_pairs(sum, stride, (const char *)packed, 4, 4 * MR, t->b, n, first);
    } else {
        multiply_block(sum, stride, packed, t->b, n, first);
    }
}

/* One block of registers over elements [k, k + depth) of the chain. */
static void block(const tile *t, int64_t i, int64_t j, int64_t k, int64_t depth)
{
    const product *g = t->g;
    int64_t rows = zk_least(MR, t->rows - i), cols = zk_least(NR, t->cols - j), stride = t->stride;
    float *sum = t->sum ? t->sum + i * stride + j : t->edge;
    if (direct(g) && (rows < MR || cols < NR)) {
        copy(t->edge, NR, sum, stride, k || g->carry ? rows : 0, cols);
        carry_on(t, t->edge, NR, i, k, depth);
        copy(sum, stride, t->edge, NR, rows, cols);
    } else {
        carry_on(t, sum, stride, i, k, depth);
    }
    if (k + depth == g->K && (g->bias || !direct(g))) finish_sums(t, sum, stride, i, j, rows, cols);
}

static __attribute__((noinline)) void fill_tile(tile *t)
{
    const product *g = t->g;
    for (int64_t k = 0, depth; k < g->K; k += depth) {
        depth = zk_least(g->depth, g->K - k);
        if (g->place && depth > 1) depth -= depth % 2;
        t->placed = g->place && depth > 1 ? t->rows / MR * MR : 0;
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

/* Words of the packed panels; a store may run on by LANES */
static int64_t panel_b(const product *g) { return NR * taken(&g->b, g->depth) + LANES; }
static int64_t panel_a(const product *g)
{
    int64_t n = taken(&g->a, g->depth), rows = zk_pieces(g->rows, MR) * MR;
    return (g->place ? zk_most(MR * n, rows) : rows * n) + LANES;
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

/* Half of a number of units */
static int64_t half(int64_t n, int64_t unit) { return zk_pieces(n / 2, unit) * unit; }

static void multiply_all(product *g, const zk_launch *L)
{
    int pairs = paired(&g->a), unit = g->a.dtype == ZK_BF16 ? 2 : 1;
    g->place = pairs && g->a.column == 1;
    int64_t deepest = g->place ? 2 * PLACE_DEPTH : pairs ? 2 * PAIRS_DEPTH : DEPTH;
    int64_t depth = given(g, L, 2, deepest, unit);
    g->depth = depth ? depth : even(g->K, deepest, unit);
    int64_t highest = g->place ? MR * PLACE_DEPTH : ROWS;
    int64_t most = direct(g) ? COLS : !g->place ? HALF_COLS : in_blocks(g) ? PLACE_COLS : NR;
    int64_t rows = given(g, L, 0, highest, MR), cols = given(g, L, 1, most, NR);
    g->rows = rows ? rows : even(g->M, highest, MR);
    g->cols = cols ? cols : even(g->N, most, NR);
    g->stride = g->stride ? g->stride : g->N;
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
