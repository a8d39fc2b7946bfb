/* philox.h -- the counter-based generator Philox 4x32-10 (Salmon and others, SC 2011). */
#ifndef ZK_CUDA_PHILOX_H
#define ZK_CUDA_PHILOX_H
#include <stdint.h>

/* Replace the counter by its random words. */
static __device__ inline void philox(uint32_t c[4], uint64_t key)
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int i = 0; i < 10; i++) {
        uint64_t a = (uint64_t)c[0] * 0xd2511f53u, b = (uint64_t)c[2] * 0xcd9e8d57u;
        c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k0;
        c[2] = (uint32_t)(a >> 32) ^ c[3] ^ k1;
        c[1] = (uint32_t)b;
        c[3] = (uint32_t)a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
}

/* Set c to words 0 .. 3 of a tensor's counter `counter`. */
static __device__ inline void words(uint32_t c[4], uint64_t seed, uint64_t key, uint64_t counter)
{
    c[0] = (uint32_t)counter, c[1] = (uint32_t)(counter >> 32);
    c[2] = (uint32_t)key, c[3] = (uint32_t)(key >> 32);
    philox(c, seed);
}

#endif
