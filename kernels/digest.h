/* digest.h -- the hash of a block of weights: two 64-bit numbers, which are added over blocks. */
#ifndef ZK_DIGEST_H
#define ZK_DIGEST_H
#include "scalar.h"

/* The finalizer of MurmurHash3 (public domain): every bit of x affects every bit of the result. */
ZK_BOTH uint64_t digest_mix(uint64_t x)
{
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ull;
    return x ^ x >> 33;
}

#define DIGEST_A 0x9fb21c651e98df25ull
#define DIGEST_B 0xc6a4a7935bd1e995ull

/* Return the start value for n elements, block `block` of tensor `key`. Its
 * complement starts the second hash. */
ZK_BOTH uint64_t digest_start(uint64_t key, uint64_t block, int64_t n)
{
    uint64_t start = digest_mix(key + 0x9e3779b97f4a7c15ull) ^ (block + 1) * 0xd1b54a32d192ed03ull;
    return digest_mix(start) + (uint64_t)n;
}

/* Add the two hashes of a block to sum[2]: elements at .. at + n - 1 of p as floats, n <= ZK_BLOCK,
 * two floats to a 64-bit word. */
ZK_BOTH void digest_block(uint64_t sum[2], uint64_t key, uint64_t block, const real *p, int64_t at,
                          int64_t n, int dtype)
{
    uint64_t start = digest_start(key, block, n), a = digest_mix(start), b = digest_mix(~start);
    for (int64_t i = 0; i < n; i += 2) {
        float pair[2] = {realr(p, at + i, dtype), i + 1 < n ? realr(p, at + i + 1, dtype) : 0};
        uint32_t low, high;
        memcpy(&low, pair, 4);
        memcpy(&high, pair + 1, 4);
        uint64_t word = (uint64_t)high << 32 | low;
        a = (a ^ word) * DIGEST_A;
        b = (b ^ word) * DIGEST_B;
        a ^= a >> 32;
        b ^= b >> 29;
    }
    sum[0] += digest_mix(a);
    sum[1] += digest_mix(b);
}

#endif
