/* blocks.h -- products of blocks of 64 rows, for attention.
 *
 * A block has 64 rows of `pad` elements: D elements and zeros up to a multiple of 16, or of 32 in
 * the order of tiles. It takes part in products in three forms: `left`, as rows of the first
 * operand; `right`, as rows of the second; `turned`, as its columns. Forms are f32, or words of two
 * bf16 for AMX (amx.h), a tile of 16 x 16 words after the other:
 *
 *   left    [64][pad], the memory of right        [pad / 32][64][16 words of a row]
 *   right   [64][pad]                             [2][pad / 16][16 words of a column][16 columns]
 *   turned  [pad][64]                             [pad / 32][4][16 words of a row][16 rows]
 *
 * Invariants
 *  1. A sum is one FMA chain in ascending k, or with `tiled`, for bf16 in the order ZK_TILES, the
 *     groups of 32 terms of AMX, with denormals as 0. Elements past the end are 0, and so are rows
 *     past the last.
 */
#ifndef ZK_BLOCKS_H
#define ZK_BLOCKS_H
#include "amx.h"

enum { BLOCK = 64 };
/* A register tile of a product is ROWS x 2 vectors, of FEW rows with two sums for each element. */
enum { ROWS = LANES / 2, FEW = ROWS / 2 };
enum { LEFT = 1, RIGHT = 2, TURNED = 4 };

/* Elements of a head, and the order of its products. words: forms are words. */
typedef struct shape {
    int dtype, tiled, words;
    int64_t D, pad;
} shape;

typedef struct block {
    float *left, *right, *turned;
} block;

/* A strided matrix: element (i, k) is at p[i * row + k * column]; words have the form `left`. */
typedef struct view {
    const float *p;
    int64_t row, column;
} view;

/* Return n rows or columns up to the end of a vector, in the order of tiles of a group. */
static int64_t rounded_up(const shape *s, int64_t n)
{
    int64_t unit = s->tiled ? GROUP : 16;
    return zk_pieces(n, unit) * unit;
}

static shape shape_of(const zk *k, int64_t D)
{
    shape s = {.dtype = k->dtype, .D = D};
    s.tiled = s.dtype == ZK_BF16 && k->products == ZK_TILES;
    s.words = s.tiled && TILES;
    s.pad = rounded_up(&s, D);
    return s;
}

/* Return the terms of a sum over n rows. */
static int64_t terms(const shape *s, int64_t n) { return s->tiled ? rounded_up(s, n) : n; }

/* Return whether p and ds are rounded to bf16 apart; packing into words does it by itself. */
static int rounds(const shape *s) { return s->tiled && !s->words; }

/* Return x in bf16, as vcvtneps2bf16 does it. A denormal is 0 of its sign before it is rounded: the
 * largest ones would become a normal number. */
ZK_INLINE lanes rounded(lanes x)
{
    lanes_mask normal = ((lanes_mask)x & 0x7f800000) != 0;
    return (lanes)(lanes_narrow(x) & 0xffff0000 & ((lanes_bits)normal | 0x80000000));
}

/* ---- f32: products */
ZK_INLINE void tile(float *c, int64_t ldc, view a, const float *b, int64_t ldb, int64_t K, int add,
                    const int vectors)
{
    lanes sum[ROWS][2];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            sum[i][v] = add ? lanes_load(c + i * ldc + v * LANES) : lanes_set(0);
    for (int64_t n = 0; n < K; n++) {
        const float *from = a.p + n * a.column;
        lanes row[2];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) row[v] = lanes_load(b + n * ldb + v * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++)
                sum[i][v] = lanes_fma(lanes_set(from[i * a.row]), row[v], sum[i][v]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) lanes_store(c + i * ldc + v * LANES, sum[i][v]);
}

/* The same by groups of 32 terms: those of even and of odd k are chains of their own. */
ZK_INLINE void tile_of_groups(float *c, int64_t ldc, view a, const float *b, int64_t ldb, int64_t K,
                              int add)
{
    for (int64_t g = 0; g < K; g += GROUP) {
        lanes sum[2][FEW][2] = {0};
        for (int64_t n = g; n < g + GROUP; n += 2)
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
                const float *from = a.p + (n + odd) * a.column, *line = b + (n + odd) * ldb;
                lanes low = lanes_load(line), high = lanes_load(line + LANES);
#pragma GCC unroll 4
                for (int i = 0; i < FEW; i++) {
                    lanes x = lanes_set(from[i * a.row]);
                    sum[odd][i][0] = lanes_fma(x, low, sum[odd][i][0]);
                    sum[odd][i][1] = lanes_fma(x, high, sum[odd][i][1]);
                }
            }
#pragma GCC unroll 4
        for (int i = 0; i < FEW; i++)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
                float *to = c + i * ldc + v * LANES;
                lanes old = add || g ? lanes_load(to) : lanes_set(0);
                lanes_store(to, old + (sum[0][i][v] + sum[1][i][v]));
            }
    }
}

static void multiply_by_groups(float *c, int64_t ldc, view a, const float *b, int64_t ldb,
                               int64_t M, int64_t N, int64_t K, int add)
{
    _mm_setcsr(ZK_MXCSR | FLUSH);
    for (int64_t n = 0; n < N; n += 2 * LANES)
        for (int64_t m = 0; m < M; m += FEW) {
            view rows = {a.p + m * a.row, a.row, a.column};
            tile_of_groups(c + m * ldc + n, ldc, rows, b + n, ldb, K, add);
        }
    _mm_setcsr(ZK_MXCSR);
}

/* ---- f32: forms */
/* Load rows[64][pad] from `n` rows of D elements, `stride` apart, the first at element `at`. */
static void load_rows(const shape *s, float *rows, const real *p, int dtype, int64_t at,
                      int64_t stride, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < s->pad; d += LANES)
            lanes_store(rows + i * s->pad + d, lanes_get(p, at + i * stride + d, dtype, s->D - d));
    memset(rows + n * s->pad, 0, (size_t)((BLOCK - n) * s->pad) * sizeof(float));
}

typedef float v8 __attribute__((vector_size(32)));

/* Transpose 8 x 8 elements by three rounds that interleave row i with row i + 4. */
static inline void turn8(float *to, const float *from, int64_t pad)
{
    v8 x[8], z[8];
    for (int i = 0; i < 8; i++) memcpy(&x[i], from + i * pad, sizeof x[i]);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 4; i++) {
            z[2 * i] = __builtin_shufflevector(x[i], x[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
            z[2 * i + 1] = __builtin_shufflevector(x[i], x[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
        }
        memcpy(x, z, sizeof x);
    }
    for (int i = 0; i < 8; i++) memcpy(to + i * BLOCK, &x[i], sizeof x[i]);
}

/* Transpose rows[64][pad] into to[pad][64]. */
static void transpose(const shape *s, float *to, const float *rows)
{
    for (int64_t d = 0; d < s->pad; d += 8)
        for (int64_t i = 0; i < BLOCK; i += 8)
            turn8(to + d * BLOCK + i, rows + i * s->pad + d, s->pad);
}

/* ---- words: forms and products */
#ifdef ZK_AMX
enum { SQUARE = TILE * TILE };

/* Fill the forms of a block that `forms` names. */
static void pack_block(const shape *s, const block *to, int forms, const real *p, int64_t at,
                       int64_t stride, int64_t rows)
{
    const matrix x = {.p = p, .dtype = s->dtype, .order = ZK_TILES};
    for (int64_t d = 0; d < s->pad; d += GROUP) {
        float *left = to->left + d / 2 * BLOCK, *turned = to->turned + d / 2 * BLOCK;
        for (int64_t i = 0; i < BLOCK; i += TILE) {
            lanes r[TILE];
            if (!(forms & (LEFT | TURNED))) break;
            for (int64_t j = 0; j < TILE; j++)
                r[j] = get_words(&x, at + (i + j) * stride + d, i + j < rows ? s->D - d : 0);
            for (int64_t j = 0; forms & LEFT && j < TILE; j++)
                lanes_store(left + (i + j) * TILE, r[j]);
            if (!(forms & TURNED)) continue;
            transpose_lanes(r);
            for (int64_t j = 0; j < TILE; j++) lanes_store(turned + (i + j) * TILE, r[j]);
        }
        for (int64_t i = 0; forms & RIGHT && i < BLOCK; i += 2) {
            float *right = to->right + (i / GROUP * s->pad + d) * TILE + i % GROUP / 2 * TILE;
            lanes low, high;
            pair32(&low, &high, &x, at, stride, i, rows, d, s->D);
            lanes_store(right, low);
            lanes_store(right + SQUARE, high);
        }
    }
}

/* Return the elements of low, then those of high, in bf16: denormals are 0. */
ZK_INLINE __m512i narrow32(lanes low, lanes high)
{
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

/* Pack p[64][64], whose rows are those of the form `left`. */
static void pack_rows(float *to, const float *p)
{
    for (int64_t d = 0; d < BLOCK; d += GROUP)
        for (int64_t i = 0; i < BLOCK; i++, to += TILE) {
            const float *from = p + i * BLOCK + d;
            lanes_store(to, (lanes)narrow32(lanes_load(from), lanes_load(from + TILE)));
        }
}

/* The same where the columns of p are those rows. */
static void pack_columns(float *to, const float *p)
{
    const __m512i mix = _mm512_load_si512(zk_mix[0]);
    for (int64_t k = 0; k < BLOCK; k += GROUP)
        for (int64_t i = 0; i < BLOCK; i += TILE, to += SQUARE) {
            lanes r[TILE];
            for (int j = 0; j < TILE; j++) {
                const float *from = p + (k + 2 * j) * BLOCK + i;
                __m512i both = narrow32(lanes_load(from), lanes_load(from + BLOCK));
                r[j] = (lanes)_mm512_permutexvar_epi16(mix, both);
            }
            transpose_lanes(r);
            for (int j = 0; j < TILE; j++) lanes_store(to + j * TILE, r[j]);
        }
}

/* c[M,N] (+)= a . b, for M, N and K rounded up to 32. b: [K / 32][ldb / 16][16][16] words */
static void multiply_by_tiles(float *c, int64_t ldc, const float *a, const float *b, int64_t ldb,
                              int64_t M, int64_t N, int64_t K, int add)
{
    const int64_t line = 4 * TILE, width = 4 * ldc;
    for (int64_t n = 0; n < N; n += 2 * TILE)
        for (int64_t m = 0; m < M; m += 2 * TILE) {
            float *to = c + m * ldc + n, *below = to + TILE * ldc;
            if (add) {
                _tile_loadd(0, to, width);
                _tile_loadd(1, to + TILE, width);
                _tile_loadd(2, below, width);
                _tile_loadd(3, below + TILE, width);
            } else {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t g = 0; g < K; g += GROUP) {
                const float *x = a + (g / GROUP * BLOCK + m) * TILE;
                const float *y = b + (g / GROUP * ldb + n) * TILE;
                _tile_loadd(4, x, line);
                _tile_loadd(5, x + SQUARE, line);
                _tile_loadd(6, y, line);
                _tile_loadd(7, y + SQUARE, line);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, to, width);
            _tile_stored(1, to + TILE, width);
            _tile_stored(2, below, width);
            _tile_stored(3, below + TILE, width);
        }
}
#else
static void pack_rows(float *to, const float *p) { (void)to, (void)p; }
static void pack_columns(float *to, const float *p) { (void)to, (void)p; }
static void pack_block(const shape *s, const block *to, int forms, const real *p, int64_t at,
                       int64_t stride, int64_t rows)
{
    (void)s, (void)to, (void)forms, (void)p, (void)at, (void)stride, (void)rows;
}
static void multiply_by_tiles(float *c, int64_t ldc, const float *a, const float *b, int64_t ldb,
                              int64_t M, int64_t N, int64_t K, int add)
{
    (void)c, (void)ldc, (void)a, (void)b, (void)ldb, (void)M, (void)N, (void)K, (void)add;
}
#endif

/* ---- both */
/* Configure tiles for the products of a task. */
static void tiles_begin_for(const shape *s)
{
    if (s->words) tiles_begin();
}

/* Release them at its end. */
static void tiles_end_for(const shape *s)
{
    if (s->words) tiles_end();
}

/* Return a block in space of 2 * 64 * pad floats, of 64 * pad if it is never turned. */
static block block_at(const shape *s, float *space)
{
    int64_t half = BLOCK * s->pad / 2;
    return (block){space, s->words ? space + half : space, space + 2 * half};
}

/* Load the forms of a block from `rows` rows of D elements, `stride` apart, the first at element
 * `at`. */
static void load_block(const shape *s, const block *to, int forms, const real *p, int64_t at,
                       int64_t stride, int64_t rows)
{
    if (s->words) {
        pack_block(s, to, forms, p, at, stride, rows);
        return;
    }
    load_rows(s, to->left, p, s->dtype, at, stride, rows);
    if (forms & TURNED) transpose(s, to->turned, to->left);
}

static view rows_of(const shape *s, const block *b) { return (view){b->left, s->pad, 1}; }

/* Return p[64][64] as the left operand of a product. words: [2][64][16], space for it */
static view rows_of_square(const shape *s, const float *p, float *words)
{
    if (!s->words) return (view){p, BLOCK, 1};
    pack_rows(words, p);
    return (view){.p = words};
}

/* The same for the transposed p. */
static view columns_of_square(const shape *s, const float *p, float *words)
{
    if (!s->words) return (view){p, 1, BLOCK};
    pack_columns(words, p);
    return (view){.p = words};
}

/* c[M,N] = (add ? c : 0) + a[M,K] . b[K,N]. M is rounded up to ROWS, N is a multiple of 16, with
 * `tiled` M, N and K are of 32. Rows of c are ldc apart, those of b ldb elements. */
static void multiply(const shape *s, float *c, int64_t ldc, view a, const float *b, int64_t ldb,
                     int64_t M, int64_t N, int64_t K, int add)
{
    if (s->words) {
        multiply_by_tiles(c, ldc, a.p, b, ldb, M, N, K, add);
        return;
    }
    if (s->tiled) {
        multiply_by_groups(c, ldc, a, b, ldb, M, N, K, add);
        return;
    }
    for (int64_t n = 0; n < N; n += 2 * LANES)
        for (int64_t m = 0; m < M; m += ROWS) {
            view rows = {a.p + m * a.row, a.row, a.column};
            if (n + 2 * LANES <= N) tile(c + m * ldc + n, ldc, rows, b + n, ldb, K, add, 2);
            else tile(c + m * ldc + n, ldc, rows, b + n, ldb, K, add, 1);
        }
}

#endif
