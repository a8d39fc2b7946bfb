/* pack.h -- packing of panels: the elements of a matrix in the order in which a product reads them.
 *
 * A word is one f32, or, if an instruction multiplies pairs, two bf16 with the even element in the
 * lower half.
 *
 * Invariants
 *  1. No element outside the matrix is read: lines past the last and elements past the end are 0.
 *  2. The group() elements of a bf16 chain that belong together are packed whole.
 */
#ifndef ZK_PACK_H
#define ZK_PACK_H
#include "part.h"

/* The block of sums in registers is MR x NR. The A panel is meant for the second-level cache, the B
 * panel for the first and second levels. */
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
/* Return a0 b0 a1 b1 ...; lanes_high: the same for the upper halves. */
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
/* Return a0 b0 a1 b1 ...; lanes_high: the same for the upper halves. */
static inline lanes lanes_low(lanes a, lanes b)
{
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}
static inline lanes lanes_high(lanes a, lanes b)
{
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
#endif
enum { VECTORS = NR / LANES, GROUP = 32 }; /* GROUP: elements of a chain in the order ZK_TILES */
#ifdef ZK_AMX
enum { TILES = 1 };
#else
enum { TILES = 0 };
#endif

/* Order of products for which this object multiplies pairs; -1: none. */
#ifdef __AVX512BF16__
enum { PAIRED = TILES ? ZK_TILES : ZK_PAIRS };
#else
enum { PAIRED = -1 };
#endif

/* A strided matrix: element (i, j) is at p[i * row + j * column], where row or column is 1. order:
 * of the products of a bf16 matrix. */
typedef struct matrix {
    const real *p;
    int64_t row, column;
    int dtype, order;
} matrix;

static inline int64_t element(const matrix *x) { return x->dtype == ZK_F32 ? 4 : 2; }

/* Return the number of elements of a chain that belong together. */
static inline int group(const matrix *x)
{
    return x->dtype != ZK_BF16 ? 1 : x->order == ZK_TILES ? GROUP : 2;
}

/* Return whether a word is a pair. */
static inline int paired(const matrix *x) { return x->dtype == ZK_BF16 && x->order == PAIRED; }

/* Return n elements of a chain, padded to whole groups. */
static inline int64_t padded(const matrix *x, int64_t n)
{
    return zk_pieces(n, group(x)) * group(x);
}

/* Return the words of n elements of a chain. */
static inline int64_t taken(const matrix *x, int64_t n) { return padded(x, n) >> paired(x); }

/* Return whether f32 words hold the elements of pairs, the odd element of each first. */
static inline int odd_first(const matrix *x)
{
    return x->dtype == ZK_BF16 && x->order == ZK_PAIRS && !paired(x);
}

/* Load LANES elements from `at`, with 0 from the n-th on. */
static inline lanes get(const matrix *x, int64_t at, int64_t n)
{
    if (x->dtype == ZK_F32) {
        const float *p = (const float *)x->p + at;
        return n >= LANES ? lanes_load(p) : lanes_part(p, (int)n);
    }
    const uint16_t *p = (const uint16_t *)x->p + at;
    return lanes_widen(n >= LANES ? half_load(p) : half_part(p, (int)n), x->dtype);
}

/* Load the words of the next n elements of a line, with 0 past them. */
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

/* Transpose: lane j of r[i] becomes lane i of r[j]. With the address of an element written as row
 * bits, lane bits, each round moves the first bit to the end. */
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

/* Pack lines that lie side by side: element i of line v is at p[at + v + i * step]. */
static void pack_across(float *to, const matrix *x, int64_t at, int64_t step, int64_t lines,
                        int64_t n, int width)
{
    /* lines that are packed next */
    const char *next = (const char *)x->p + (at + width) * element(x);
    for (int64_t i = 0; i < taken(x, n); i++) {
        int64_t from = i ^ odd_first(x), some = from < n ? lines : 0;
        for (int v = 0; v < width; v += LANES) {
            __builtin_prefetch(next + (from * step + v) * element(x), 0, 2);
            lanes_store(to + i * width + v, get(x, at + from * step + v, some - v));
        }
    }
}

/* The same for words that are pairs. */
static void pack_pairs(float *to, const matrix *x, int64_t at, int64_t step, int64_t lines,
                       int64_t n, int width)
{
    /* lines that are packed next */
    const char *next = (const char *)x->p + (at + width) * element(x);
    for (int64_t i = 0; i < n; i += 2)
        for (int v = 0; v < width; v += LANES) {
            int64_t from = at + i * step + v;
            __builtin_prefetch(next + (i * step + v) * element(x), 0, 2);
            __builtin_prefetch(next + ((i + 1) * step + v) * element(x), 0, 2);
            lanes_bits even = (lanes_bits)get(x, from, lines - v);
            lanes_bits odd = (lanes_bits)get(x, from + step, i + 1 < n ? lines - v : 0);
            lanes_store(to + i / 2 * width + v, (lanes)(even >> 16 | odd));
        }
    for (int64_t i = zk_pieces(n, 2) * width; i < taken(x, n) * width; i += LANES)
        lanes_store(to + i, lanes_set(0));
}

/* Transpose the next n elements of up to LANES lines, `step` apart, into `rows` rows of words,
 * `width` apart. Missing lines and elements are 0. */
static void turn_block(float *to, const matrix *x, int64_t at, int64_t step, int64_t lines,
                       int64_t n, int64_t rows, int width)
{
    lanes r[LANES];
    if (n >= LANES << paired(x)) {
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++)
            r[j] = j < lines ? get_words(x, at + j * step, n) : lanes_set(0);
    } else {
        for (int j = 0; j < LANES; j++) r[j] = get_words(x, at + j * step, j < lines ? n : 0);
    }
    transpose_lanes(r);
    if (odd_first(x)) {
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j += 2) {
            lanes even = r[j];
            r[j] = r[j + 1];
            r[j + 1] = even;
        }
    }
    if (rows >= LANES) {
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) lanes_store(to + j * width, r[j]);
    } else {
        for (int j = 0; j < rows; j++) lanes_store(to + j * width, r[j]);
    }
}

/* Pack lines of adjacent elements: element i of line v is at p[at + v * step + i]. */
static void pack_along(float *to, const matrix *x, int64_t at, int64_t step, int64_t lines,
                       int64_t n, int width)
{
    int64_t words = taken(x, n);
    for (int64_t i = 0; i < words; i += LANES)
        for (int v = 0; v < width; v += LANES)
            turn_block(to + i * width + v, x, at + v * step + (i << paired(x)), step, lines - v,
                       n - (i << paired(x)), words - i, width);
}

/* Pack `lines` lines of n elements into to[words of n][width], with 0 for missing lines.
 * Element i of line v is at p[at + v * across + i * along]. A store may write LANES
 * words past the end of `to`. */
static void pack(float *to, const matrix *x, int64_t at, int64_t across, int64_t along,
                 int64_t lines, int64_t n, int width)
{
    if (across != 1) pack_along(to, x, at, across, lines, n, width);
    else if (paired(x)) pack_pairs(to, x, at, along, lines, n, width);
    else pack_across(to, x, at, along, lines, n, width);
}

#endif
