/* pack.h -- packs: several elements of an array at a time, with loads and stores of 16 bytes.
 *
 * Invariants
 *  1. A pack is aligned to its size, or to 16 bytes. Slots of a class and tensors are, and so are
 *     rows whose width is a multiple of the pack.
 *  2. A pack is held as it is stored: two elements of bf16 or f16 share a register.
 */
#ifndef ZK_CUDA_PACK_H
#define ZK_CUDA_PACK_H
#include "cuda.h"

/* elements in 16 bytes */
template <class T> constexpr int wide = 16 / (int)sizeof(T);

constexpr int pack_align(int bytes) { return bytes < 16 ? bytes : 16; }

/* A pack of halves T. */
template <class T, int V> struct __attribute__((may_alias, aligned(pack_align(2 * V)))) pack {
    uint32_t v[V / 2];
};

template <> struct pack<bf16, 1> {
    bf16 v;
};

template <> struct pack<f16, 1> {
    f16 v;
};

template <int V> struct alignas(pack_align(4 * V)) pack<float, V> {
    float v[V];
};

/* Return the upper or the lower half of a register. */
__device__ inline float get(bf16, uint32_t both, int upper)
{
    return __uint_as_float(upper ? both & 0xffff0000u : both << 16);
}

__device__ inline float get(f16, uint32_t both, int upper)
{
    return get(f16{(uint16_t)(upper ? both >> 16 : both)});
}

template <int V> __device__ inline float get(const pack<float, V> &p, int j) { return p.v[j]; }

template <class T, int V> __device__ inline float get(const pack<T, V> &p, int j)
{
    if constexpr (V == 1) return get(p.v);
    else return get(T(), p.v[j / 2], j % 2);
}

template <int V> __device__ inline void put(pack<float, V> *p, const float (&x)[V])
{
    for (int j = 0; j < V; j++) p->v[j] = x[j];
}

template <class T, int V> __device__ inline void put(pack<T, V> *p, const float (&x)[V])
{
    if constexpr (V == 1) put(&p->v, x[0]);
    else
        for (int j = 0; j < V / 2; j++) {
            T low, high;
            put(&low, x[2 * j]);
            put(&high, x[2 * j + 1]);
            p->v[j] = low.u | (uint32_t)high.u << 16;
        }
}

template <int V, class T> __device__ inline pack<T, V> load(const T *p)
{
    return *reinterpret_cast<const pack<T, V> *>(p);
}

/* x = p[0 .. V-1] */
template <int V, class T> __device__ inline void fetch(float (&x)[V], const T *p)
{
    pack<T, V> all = load<V>(p);
    for (int j = 0; j < V; j++) x[j] = get(all, j);
}

/* p[0 .. V-1] = x. Compilers split some stores of a pack, so 16-byte stores use store16, which
 * writes to global memory. */
template <int V, class T> __device__ inline void stow(T *p, const pack<T, V> &x)
{
    if constexpr (sizeof x % 16 == 0) {
        uint4 part[sizeof x / 16];
        memcpy(part, &x, sizeof x);
        for (unsigned i = 0; i < sizeof x / 16; i++)
            store16(reinterpret_cast<char *>(p) + 16 * i, part[i]);
    } else {
        *reinterpret_cast<pack<T, V> *>(p) = x;
    }
}

template <int V, class T> __device__ inline void stow(T *p, const float (&x)[V])
{
    pack<T, V> all;
    put(&all, x);
    stow(p, all);
}

/* The same for the first `left` elements; the others read 0. */
template <int V, class T> __device__ inline void fetch(float (&x)[V], const T *p, int64_t left)
{
    if (left >= V) fetch(x, p);
    else
        for (int j = 0; j < V; j++) x[j] = j < left ? get(p[j]) : 0;
}

template <int V, class T> __device__ inline void stow(T *p, const float (&x)[V], int64_t left)
{
    if (left >= V) stow(p, x);
    else
        for (int j = 0; j < V && j < left; j++) put(p + j, x[j]);
}

/* ZK_WIDE(T, V, C, statement): run the statement with V as the elements in 16 bytes if rows of C
 * elements allow that, else with V = 1. */
#define ZK_WIDE(T, V, C, ...)                                                                      \
    do {                                                                                           \
        if ((C) % wide<T> == 0) {                                                                  \
            constexpr int V = wide<T>;                                                             \
            __VA_ARGS__;                                                                           \
        } else {                                                                                   \
            constexpr int V = 1;                                                                   \
            __VA_ARGS__;                                                                           \
        }                                                                                          \
    } while (0)

#endif
