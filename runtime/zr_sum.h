/* zr_sum.h -- the checksum of a tensor in a checkpoint, a sum over its stored elements. It does not
 * depend on sharding, but changes if two elements are swapped.
 *
 *   sum over i of mix((i + 1) * constant ^ bits[i]), modulo 2^64
 */
#ifndef ZR_SUM_H
#define ZR_SUM_H
#include <stdint.h>
#include <string.h>

/* Return the term of element i. */
static inline uint64_t zr_sum_one(int64_t i, uint64_t bits)
{
    uint64_t x = (uint64_t)(i + 1) * 0x9e3779b97f4a7c15 ^ bits;
    x = (x ^ x >> 31) * 0xbf58476d1ce4e5b9;
    return x ^ x >> 29;
}

/* Return the sum of n elements of `width` bytes, 4 or 2; the first is
 * element `first` of its tensor. */
static inline __attribute__((always_inline)) uint64_t zr_sum_plain(const char *from, int64_t width,
                                                                   int64_t first, int64_t n)
{
    uint64_t sum = 0;
    for (int64_t i = 0; width == 4 && i < n; i++) {
        uint32_t bits;
        memcpy(&bits, from + 4 * i, 4);
        sum += zr_sum_one(first + i, bits);
    }
    for (int64_t i = 0; width == 2 && i < n; i++) {
        uint16_t bits;
        memcpy(&bits, from + 2 * i, 2);
        sum += zr_sum_one(first + i, bits);
    }
    return sum;
}

/* The same with eight elements at once: AVX-512 multiplies 64 by 64 bits in one instruction. */
__attribute__((target("avx512f,avx512dq,avx512vl"))) static inline uint64_t
zr_sum_avx512(const char *from, int64_t width, int64_t first, int64_t n)
{
    return zr_sum_plain(from, width, first, n);
}

static inline int zr_has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

static inline uint64_t zr_sum_of(const char *from, int64_t width, int64_t first, int64_t n)
{
    return zr_has_avx512() ? zr_sum_avx512(from, width, first, n)
                           : zr_sum_plain(from, width, first, n);
}

#endif
