/* zr_order.h -- integer functions of a sample's number: its source, and which of that source's
 * samples it is. No state is kept from sample to sample.
 *
 *   zr_turns(f, m) = round(m * weight[0] / (weight[0] + weight[1]))
 *
 * Invariants
 *  1. Only integers of at most 64 bits are used, so results are the same on every host.
 *  2. zr_turns(f, m) grows by 0 or 1 with m, and differs from m times the share of f's first branch
 *     by less than half a sample, or by exactly half when it rounds up.
 *  3. zr_permuted is a permutation of 0 .. n-1 for every key.
 */
#ifndef ZR_ORDER_H
#define ZR_ORDER_H
#include <stdint.h>

/* A fork sends each sample one of two ways, by their weights, whose sum is below 2^31. A negative
 * way is source ~way; any other is the number of a fork. */
typedef struct zr_fork {
    int64_t weight[2];
    int way[2];
} zr_fork;

/* Return how many of the first m samples go the first way: m * weight[0] / sum, rounded. */
static inline int64_t zr_turns(const zr_fork *f, int64_t m)
{
    int64_t sum = f->weight[0] + f->weight[1], rest = m % sum;
    return m / sum * f->weight[0] + (2 * rest * f->weight[0] + sum) / (2 * sum);
}

/* Return the source of sample *at, and set *at to its number within the source. root: the fork that
 * all samples enter, or ~0 with one source. */
static inline int zr_source_of(const zr_fork *fork, int root, int64_t *at)
{
    int way = root;
    while (way >= 0) {
        const zr_fork *f = &fork[way];
        int64_t first = zr_turns(f, *at);
        int second = zr_turns(f, *at + 1) == first;
        *at = second ? *at - first : first;
        way = f->way[second];
    }
    return ~way;
}

/* The finalizer of splitmix64 (Steele, Lea, Flood 2014). */
static inline uint64_t zr_mixed(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

/* splitmix64: return the next random number */
static inline uint64_t zr_random(uint64_t *state) { return zr_mixed(*state += 0x9e3779b97f4a7c15); }

/* Return the key of an order of samples. */
static inline uint64_t zr_order_key(uint64_t seed, uint64_t source, uint64_t epoch)
{
    return zr_mixed(zr_mixed(zr_mixed(seed + 0x9e3779b97f4a7c15) + source) + epoch);
}

/* Return the image of 0 <= at < n: a Feistel network over two halves, with just enough bits for n,
 * repeated while the result is n or more: less than four times on average (Black, Rogaway 2002). */
static inline int64_t zr_permuted(uint64_t key, int64_t n, int64_t at)
{
    enum { ROUNDS = 8 };
    int bits = 1;
    while ((uint64_t)(n - 1) >> (2 * bits)) bits++;
    uint64_t mask = ((uint64_t)1 << bits) - 1, x = (uint64_t)at;
    do {
        uint64_t left = x >> bits, right = x & mask;
        for (uint64_t round = 1; round <= ROUNDS; round++) {
            uint64_t next = left ^ (zr_mixed(zr_mixed(key + round) ^ right) & mask);
            left = right;
            right = next;
        }
        x = left << bits | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

#endif
