/* philox.h -- the counter-based generator Philox 4x32-10 (Salmon and others, SC 2011). */
#ifndef ZK_PHILOX_H
#define ZK_PHILOX_H
#include <immintrin.h>
#include <stdint.h>

typedef uint64_t v8u __attribute__((vector_size(64)));

/* x * by, for the lower halves of the lanes */
static inline v8u low_product(v8u x, uint32_t by)
{
#ifdef __AVX512F__
    return (v8u)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(by));
#else
    union {
        v8u v;
        __m256i h[2];
    } both = {x};
    both.h[0] = _mm256_mul_epu32(both.h[0], _mm256_set1_epi64x(by));
    both.h[1] = _mm256_mul_epu32(both.h[1], _mm256_set1_epi64x(by));
    return both.v;
#endif
}

/* Replace words 0 .. 3 of 8 counters by their random words; the upper
 * half of a lane is undefined. */
static inline void philox(v8u c[4], uint64_t key)
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int i = 0; i < 10; i++) {
        v8u a = low_product(c[0], 0xd2511f53u), b = low_product(c[2], 0xcd9e8d57u);
        c[0] = b >> 32 ^ c[1] ^ k0;
        c[2] = a >> 32 ^ c[3] ^ k1;
        c[1] = b;
        c[3] = a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
}

/* ---- random words for 64 elements */
enum { DRAWN = 64 };

/* Write word i of counter first + lane, for 16 lanes, to out[lane * by_lane + i * by_word]. */
static inline __attribute__((always_inline)) void
words(uint32_t out[DRAWN], int by_lane, int by_word, uint64_t seed, uint64_t key, uint64_t first)
{
    for (int half = 0; half < 2; half++) {
        v8u at = first + 8 * half + (v8u){0, 1, 2, 3, 4, 5, 6, 7};
        v8u c[4] = {at, at >> 32, (v8u){0} + key, (v8u){0} + (key >> 32)};
        philox(c, seed);
        for (int i = 0; i < 4; i++)
            for (int lane = 0; lane < 8; lane++)
                out[(8 * half + lane) * by_lane + i * by_word] = (uint32_t)c[i][lane];
    }
}

#endif
