/* amx.h -- tiles of AMX, in the objects that are compiled with ZK_AMX.
 *
 * An instruction multiplies 16 x 32 by 32 x 16 elements. Starting from 0 it sums the products of
 * even k and those of odd k, each as a chain of FMAs in ascending k, adds the two sums, and adds
 * the result to the block's sum. Denormals are 0 (tdpbf16ps in Intel's manual;
 * tests/kernels/pairs.c). Other objects do the same with FMAs (linear.c, blocks.h).
 *
 * A thread has tiles configured only from tiles_begin to tiles_end; otherwise a switch to another
 * thread would have to save 8 KB.
 */
#ifndef ZK_AMX_H
#define ZK_AMX_H
#include "product.h"

#ifdef ZK_AMX
enum { TILE = 16 }; /* rows of a tile, and words of a row */
_Static_assert((int)LANES == (int)TILE, "a row of a tile is a register");

static inline void tiles_begin(void)
{
    static const struct {
        uint8_t palette, start, zero[14];
        uint16_t bytes[16]; /* bytes of a row */
        uint8_t rows[16];
    } eight = {.palette = 1, .bytes = {[0 ... 7] = 4 * TILE}, .rows = {[0 ... 7] = TILE}};
    _tile_loadconfig(&eight);
}

static inline void tiles_end(void) { _tile_release(); }

/* The order of elements that pairs the two halves of a vector, and of two vectors. */
static const uint16_t zk_mix[2][2 * TILE]
    __attribute__((aligned(64))) = {{0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31},
                                    {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47}};

/* Set low and high to the words of 32 lines that lie side by side: elements i and i + 1 of n. */
static inline void pair32(lanes *low, lanes *high, const matrix *x, int64_t at, int64_t step,
                          int64_t i, int64_t n, int64_t v, int64_t lines)
{
    __m512i index = _mm512_load_si512(zk_mix[1]), sixteen = _mm512_set1_epi16(TILE);
    __m512i even = (__m512i)get_words(x, at + i * step + v, i < n ? lines - v : 0);
    __m512i odd = (__m512i)get_words(x, at + (i + 1) * step + v, i + 1 < n ? lines - v : 0);
    *low = (lanes)_mm512_permutex2var_epi16(even, index, odd);
    *high = (lanes)_mm512_permutex2var_epi16(even, _mm512_add_epi16(index, sixteen), odd);
}
#else
static inline void tiles_begin(void) {}
static inline void tiles_end(void) {}
#endif

#endif
