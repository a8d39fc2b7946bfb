/* tiles.h -- bf16 products of a linear layer by AMX (amx.h).
 *
 * A product is computed in slabs of rows, columns and elements of the chain. All threads pack a
 * slab's operands into the panels of the context, then multiply them. The panels hold, in words of
 * two elements, a[rows / 32][depth / 32][2][16][16] and b[cols / 32][depth / 32][2][16][16], then
 * the sums [rows][cols] if they are not kept in the output and the chain takes several slabs.
 *
 * Invariants
 *  1. Groups of 32 elements are counted from the start of the chain, so the depth of a slab
 *     changes no bit.
 */
#ifndef ZK_TILES_H
#define ZK_TILES_H
#include "amx.h"

#ifdef ZK_AMX
#include <cpuid.h>
#include <immintrin.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { BLOCK = 2 * TILE };
enum { GRANT = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
/* Bits of cpuid leaf 7; compilers name them differently. */
enum { HAS_TILES = 1 << 24, HAS_BF16 = 1 << 22 };
/* DEEPEST: elements of the chain at once, so that a block of sums leaves its registers once.
 * RANGE_B: words of b for a range of columns, 768 KB, which stay in the second-level cache. */
enum { DEEPEST = 3072, RANGE_B = 3 << 16, ROWS_AT_ONCE = 2 * BLOCK, MOST_RANGES = 64 };

/* Return whether the processor has AMX and the system lets this process use it. The system must be
 * asked before any thread uses tiles. */
int ZK(zk_tiles)(void)
{
    unsigned a, b, c, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & HAS_TILES && d & HAS_BF16 &&
           !syscall(SYS_arch_prctl, GRANT, TILE_DATA);
}

typedef struct slab {
    const product *g;
    float *a, *b; /* packed words */
    float *sum;   /* of (m, n), rows `stride` apart; NULL: each block is finished */
    int64_t stride;
    int64_t m, n, k;                       /* first row, column and element of the chain */
    int64_t rows, cols, words;             /* words of the chain */
    int packs_a;                           /* 0: a is there from the slab before */
    int64_t width;                         /* columns of a range */
    _Atomic int64_t next_row[MOST_RANGES]; /* of each range */
} slab;

/* Work of a thread between the instructions of tiles: sums that still must become output, and rows
 * of sums that are needed next. */
typedef struct pending {
    const product *g;
    const float *sum;
    int64_t stride, i, j, rows, cols;
    const char *out;
    int64_t across, fetched; /* bytes from row to row of sums; rows to prefetch */
} pending;

/* Turn rows of BLOCK finished sums into bf16, as finish_sums does. */
static inline void finish_whole(const pending *r, int64_t rows)
{
    const product *g = r->g;
    uint16_t *to = (uint16_t *)g->out + r->i * g->stride + r->j;
    lanes low = {0}, high = {0};
    if (g->bias) {
        low = zk_get(g->bias, r->j, ZK_BF16, TILE);
        high = zk_get(g->bias, r->j + TILE, ZK_BF16, TILE);
    }
    for (int64_t i = 0; i < rows; i++) {
        const float *sum = r->sum + i * r->stride;
        lanes x = lanes_load(sum), y = lanes_load(sum + TILE);
        if (g->bias) x += low, y += high;
        __m512i first = _mm512_castsi256_si512((__m256i)narrow16(x));
        _mm512_storeu_si512(to + i * g->stride, _mm512_inserti64x4(first, (__m256i)narrow16(y), 1));
    }
}

static inline void store_ready(pending *r, int64_t rows)
{
    int64_t n = zk_least(rows, r->rows);
    if (!n) return;
    if (r->cols == BLOCK && r->g->end == PLAIN && r->g->dtype == ZK_BF16) finish_whole(r, n);
    else finish_sums(r->g, r->sum, r->stride, r->i, r->j, n, r->cols);
    r->sum += n * r->stride;
    r->i += n;
    r->rows -= n;
}

/* Continue the chains sum[BLOCK][BLOCK], rows `stride` apart, or start them if `first`, by
 * a[words / TILE][2][TILE][TILE] and b of the same shape. A tile is contiguous, 1 KB: rows an even
 * number of cache lines apart load slower. At each step `share` rows of r are finished; all of
 * them, which may overlap sum, before the block is stored. */
static void multiply_tiles(float *sum, int64_t stride, const float *a, const float *b,
                           int64_t words, int first, pending *r)
{
    int64_t share = zk_pieces(BLOCK * TILE, words);
    float *below = sum + TILE * stride;
    int64_t width = stride * 4, row = TILE * 4;
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sum, width);
        _tile_loadd(1, sum + TILE, width);
        _tile_loadd(2, below, width);
        _tile_loadd(3, below + TILE, width);
    }
    for (int64_t k = 0; k < words; k += TILE, a += 2 * TILE * TILE, b += TILE * BLOCK) {
        _tile_loadd(4, a, row);
        _tile_loadd(6, b, row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, a + TILE * TILE, row);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(7, b + TILE * TILE, row);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
        int64_t rows = zk_least(share, r->fetched);
        for (int64_t i = 0; i < rows; i++, r->out += r->across) {
            __builtin_prefetch(r->out, 1);
            __builtin_prefetch(r->out + 64, 1);
        }
        r->fetched -= rows;
        store_ready(r, share);
    }
    store_ready(r, BLOCK);
    _tile_stored(0, sum, width);
    _tile_stored(1, sum + TILE, width);
    _tile_stored(2, below, width);
    _tile_stored(3, below + TILE, width);
}

/* ---- packing */
/* Pack elements [i, i + GROUP) of all lines of a, which lie side by side. */
static void pack_across_a(const slab *p, int64_t i)
{
    const matrix *a = &p->g->a;
    int64_t at = p->m + (p->k + i) * a->column, n = p->g->K - p->k - i;
    int64_t lines = zk_least(p->rows, p->g->M - p->m);
    for (int64_t v = 0; v < p->rows; v += BLOCK) {
        float *to = p->a + v * p->words + i / 2 * BLOCK;
        lanes r[BLOCK];
        for (int w = 0; w < TILE; w++)
            pair32(&r[w], &r[TILE + w], a, at, a->column, 2 * w, n, v, lines);
        transpose_lanes(r);
        transpose_lanes(r + TILE);
        for (int w = 0; w < BLOCK; w++) lanes_store(to + w * TILE, r[w]);
    }
}

/* Pack BLOCK lines of a, from line v on, whose elements lie side by side. */
static void pack_along_a(const slab *p, int64_t v)
{
    const matrix *a = &p->g->a;
    float *to = p->a + v * p->words;
    int64_t rows = p->g->M - p->m - v, n = zk_least(2 * p->words, p->g->K - p->k);
    for (int64_t i = 0; i < 2 * p->words; i += GROUP)
        for (int j = 0; j < BLOCK; j++, to += TILE)
            lanes_store(to, get_words(a, (p->m + v + j) * a->row + p->k + i, j < rows ? n - i : 0));
}

/* Pack elements [i, i + GROUP) of all lines of b, which lie side by side. */
static void pack_across_b(const slab *p, int64_t i)
{
    const matrix *b = &p->g->b;
    int64_t at = p->n + (p->k + i) * b->row, n = p->g->K - p->k - i;
    int64_t lines = zk_least(p->cols, p->g->N - p->n);
    for (int64_t v = 0; v < p->cols; v += BLOCK) {
        float *to = p->b + v * p->words + i / 2 * BLOCK;
        for (int w = 0; w < TILE; w++, to += TILE) {
            lanes low, high;
            pair32(&low, &high, b, at, b->row, 2 * w, n, v, lines);
            lanes_store(to, low);
            lanes_store(to + TILE * TILE, high);
        }
    }
}

/* Pack BLOCK lines of b, from line v on, whose elements lie side by side. */
static void pack_along_b(const slab *p, int64_t v)
{
    const matrix *b = &p->g->b;
    float *to = p->b + v * p->words;
    int64_t lines = p->g->N - p->n - v, n = zk_least(2 * p->words, p->g->K - p->k);
    for (int64_t i = 0; i < 2 * p->words; i += GROUP, to += TILE * BLOCK)
        for (int h = 0; h < BLOCK; h += TILE) {
            int64_t at = (p->n + v + h) * b->column + p->k + i;
            lanes r[TILE];
            for (int j = 0; j < TILE; j++)
                r[j] = get_words(b, at + j * b->column, h + j < lines ? n - i : 0);
            transpose_lanes(r);
            for (int j = 0; j < TILE; j++) lanes_store(to + (h + j) * TILE, r[j]);
        }
}

static int64_t pieces_a(const slab *p)
{
    return !p->packs_a ? 0 : p->g->a.column == 1 ? p->rows / BLOCK : p->words / TILE;
}

static void pack_task(void *arg, int64_t task, int thread)
{
    const slab *p = arg;
    const matrix *b = &p->g->b;
    int64_t there = pieces_a(p), v = (task - there) * BLOCK;
    (void)thread;
    if (task < there && p->g->a.column == 1) pack_along_a(p, task * BLOCK);
    else if (task < there) pack_across_a(p, task * GROUP);
    else if (b->column == 1) pack_across_b(p, (task - there) * GROUP);
    else pack_along_b(p, v);
}

/* ---- multiplying */
/* Compute the block at row i and column j of a slab. */
static void block_of_tiles(const slab *p, float *edge, int64_t i, int64_t j, pending *r)
{
    const product *g = p->g;
    int64_t rows = zk_least(BLOCK, g->M - p->m - i), cols = zk_least(BLOCK, g->N - p->n - j);
    int64_t stride = p->sum ? p->stride : BLOCK;
    float *sum = p->sum ? p->sum + i * stride + j : edge;
    const float *a = p->a + i * p->words, *b = p->b + j * p->words;
    int first = !p->k && !g->carry, last = p->k + 2 * p->words >= g->K;
    if (direct(g) && (rows < BLOCK || cols < BLOCK)) {
        copy(edge, BLOCK, sum, stride, first ? 0 : rows, cols);
        multiply_tiles(edge, BLOCK, a, b, p->words, first, r);
        copy(sum, stride, edge, BLOCK, rows, cols);
    } else {
        multiply_tiles(sum, stride, a, b, p->words, first, r);
    }
    if (!last || !unfinished(g)) return;
    r->sum = sum;
    r->stride = stride;
    r->i = p->m + i;
    r->j = p->n + j;
    r->rows = rows;
    r->cols = cols;
}

/* Multiply rows from m on, ROWS_AT_ONCE at most, by the range of columns from n on. */
static void multiply_rows(const slab *p, int64_t m, int64_t n, float *edge)
{
    int64_t end = zk_least(m + ROWS_AT_ONCE, p->rows), cols = zk_least(p->width, p->cols - n);
    pending r = {.g = p->g};
    for (int64_t i = m; i < end; i += BLOCK)
        for (int64_t j = n; j < n + cols; j += BLOCK) {
            if (p->sum) {
                int64_t more = j + BLOCK < n + cols;
                r.out = (const char *)(p->sum + (i + !more * BLOCK) * p->stride +
                                       (more ? j + BLOCK : n));
                r.across = p->stride * 4;
                r.fetched = BLOCK;
            }
            block_of_tiles(p, edge, i, j, &r);
        }
    store_ready(&r, BLOCK);
}

static int64_t ranges(const slab *p) { return zk_pieces(p->cols, p->width); }

/* Multiply ranges of columns, of which each thread first takes its own: b stays in its cache. */
static void multiply_task(void *arg, int64_t task, int thread)
{
    slab *p = arg;
    float *edge = zk_scratch(p->g->k, thread);
    _mm_setcsr(ZK_MXCSR | FLUSH);
    tiles_begin();
    for (int64_t r = 0; r < ranges(p); r++) {
        int64_t n = (task + r) % ranges(p);
        for (int64_t m; (m = atomic_fetch_add(&p->next_row[n], ROWS_AT_ONCE)) < p->rows;)
            multiply_rows(p, m, n * p->width, edge);
    }
    tiles_end();
    _mm_setcsr(ZK_MXCSR);
}

/* Choose the ranges of a slab: one for each thread at least, except in an output of many rows that
 * holds the sums themselves, which is written in long runs of a row. */
static void divide(slab *p)
{
    int64_t threads = p->g->k->threads, most = RANGE_B / p->words;
    if (!direct(p->g) || p->rows < threads * ROWS_AT_ONCE) most = zk_least(most, p->cols / threads);
    most = zk_most(zk_most(most, BLOCK), zk_pieces(p->cols, MOST_RANGES));
    p->width = even(p->cols, most, BLOCK);
    for (int64_t n = 0; n < ranges(p); n++) p->next_row[n] = 0;
}

static int64_t whole(int64_t n) { return zk_most(1, n / BLOCK) * BLOCK; }

/* Choose the size of a slab, so that its operands and sums fit into the panels. */
static void size_slabs(product *g, const zk_launch *L)
{
    int64_t room = ZK_PANELS / 4, depth = given(g, L, 2, DEEPEST, GROUP);
    g->depth = depth ? depth : even(g->K, DEEPEST, GROUP);
    int64_t words = g->depth / 2, sums = g->depth < g->K && !direct(g);
    int64_t rows = whole(zk_least(room / 2 / words, room / 4 / BLOCK));
    int64_t most = given(g, L, 0, rows, BLOCK);
    g->rows = even(g->M, most ? most : rows, BLOCK);
    int64_t cols = whole((room - g->rows * words) / (words + sums * g->rows));
    most = given(g, L, 1, cols, BLOCK);
    g->cols = even(g->N, most ? most : cols, BLOCK);
}

static void multiply_slabs(product *g, const zk_launch *L)
{
    slab p = {.g = g, .stride = g->stride};
    size_slabs(g, L);
    p.a = (float *)g->k->panels;
    for (p.m = 0; p.m < g->M; p.m += g->rows)
        for (p.n = 0; p.n < g->N; p.n += g->cols)
            for (p.k = 0; p.k < g->K; p.k += g->depth) {
                p.rows = zk_pieces(zk_least(g->rows, g->M - p.m), BLOCK) * BLOCK;
                p.cols = zk_pieces(zk_least(g->cols, g->N - p.n), BLOCK) * BLOCK;
                p.words = padded(&g->a, zk_least(g->depth, g->K - p.k)) / 2;
                p.b = p.a + p.rows * p.words;
                p.packs_a = !p.n || g->depth < g->K;
                if (direct(g)) {
                    p.sum = (float *)g->out + p.m * g->stride + p.n;
                } else if (g->depth < g->K) {
                    p.sum = p.a + g->depth / 2 * (g->rows + g->cols);
                    p.stride = p.cols;
                }
                divide(&p);
                zk_for(g->k, pieces_a(&p) + (g->b.column == 1 ? p.words / TILE : p.cols / BLOCK),
                       pack_task, &p);
                zk_for(g->k, g->k->threads, multiply_task, &p);
            }
}

#else
static void multiply_slabs(product *g, const zk_launch *L) { (void)g, (void)L; }
#endif

#endif
