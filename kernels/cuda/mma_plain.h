/* mma_plain.h -- the PTX half of mma.h in C, for the emulation, which checks every access.
 *
 * Invariants
 *  1. Those of mma.h, of which this is a part.
 *  2. An address on which a GPU would fault is an error here too.
 */
#ifndef ZK_MMA_PLAIN_H
#define ZK_MMA_PLAIN_H
#include "cuda.h"
#include <vector>

typedef uintptr_t place; /* an address in shared memory */

struct late_copy {
    place to;
    const void *from;
    size_t bytes;
    bool some;
};

__device__ inline void copy_now(const late_copy &c)
{
    if (c.some) memcpy((void *)c.to, c.from, c.bytes);
    else memset((void *)c.to, 0, c.bytes);
}

/* Return the copies that a thread of the running block has requested. */
__device__ inline std::vector<late_copy> &late_copies(void)
{
    static thread_local std::vector<late_copy> all[1024];
    return all[threadIdx.x];
}

__device__ inline void copy(const late_copy &c)
{
    if (c.to / 16 % 2) late_copies().push_back(c);
    else copy_now(c);
}

__device__ inline place place_of(const void *shared) { return (place)shared; }

/* Return the address of a PTX instruction's operand of n bytes. A GPU
 * faults if it is not aligned. */
__device__ inline place operand_at(const char *instruction, place at, size_t n)
{
    if (at % n) shim_fail("%s: an address that is no multiple of %zu", instruction, n);
    return at;
}

__device__ inline void copy16(place to, const void *from, bool some)
{
    operand_at("cp.async of 16 bytes", place_of(from), 16);
    copy({operand_at("cp.async of 16 bytes", to, 16), from, 16, some});
}

__device__ inline void copy4(place to, const void *from, bool some)
{
    operand_at("cp.async of 4 bytes", place_of(from), 4);
    copy({operand_at("cp.async of 4 bytes", to, 4), from, 4, some});
}

__device__ inline place again(place x) { return x; }

__device__ inline int block_y(void) { return (int)blockIdx.y; }

__device__ inline int block_z(void) { return (int)blockIdx.z; }

__device__ inline int lane_of(void) { return (int)(threadIdx.x % ZK_WARP); }

__device__ inline int warp_of(void) { return (int)(threadIdx.x / ZK_WARP); }

__device__ inline void wait_copies(void)
{
    for (const late_copy &c : late_copies()) copy_now(c);
    late_copies().clear();
}

__device__ inline uint32_t load2(place from)
{
    uint32_t x;
    memcpy(&x, (const void *)from, sizeof x);
    return x;
}

__device__ inline void load_matrices(uint32_t (&m)[4], place row)
{
    const place *rows = shim_warp(~0u, operand_at("ldmatrix", row, 16));
    int g = lane_of() / 4, t = lane_of() % 4;
    for (int i = 0; i < 4; i++) m[i] = load2(rows[8 * i + g] + 4 * t);
    __syncwarp();
}

__device__ inline void load_turned(uint32_t (&m)[4], place row)
{
    const place *rows = shim_warp(~0u, operand_at("ldmatrix", row, 16));
    int g = lane_of() / 4, t = lane_of() % 4;
    for (int i = 0; i < 4; i++) {
        uint32_t low = load2(rows[8 * i + 2 * t] + g / 2 * 4);
        uint32_t high = load2(rows[8 * i + 2 * t + 1] + g / 2 * 4);
        m[i] = (low >> g % 2 * 16 & 0xffff) | high >> g % 2 * 16 << 16;
    }
    __syncwarp();
}

struct lane_matrices {
    float a[8], b[4];
};

/* Widen the two halves of each register. All data is in registers here and below, so the thread
 * sanitizer need not look at it. */
template <class T, size_t N>
__attribute__((no_sanitize("thread"))) inline void widen(float (&to)[2 * N],
                                                         const uint32_t (&from)[N])
{
    for (size_t i = 0; i < N; i++) {
        to[2 * i] = get(T{(uint16_t)from[i]});
        to[2 * i + 1] = get(T{(uint16_t)(from[i] >> 16)});
    }
}

template <class T>
__attribute__((no_sanitize("thread"))) inline void
multiply(T, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    lane_matrices own;
    widen<T>(own.a, a);
    widen<T>(own.b, {b0, b1});
    int g = lane_of() / 4, t = lane_of() % 4;
    const lane_matrices *all = shim_warp(~0u, own), *rows = all + 4 * g, *columns = all + 8 * t;
#pragma GCC unroll 16
    for (int k = 0; k < 16; k++)
        for (int i = 0; i < 4; i++) {
            float x = rows[k % 8 / 2].a[4 * (k / 8) + 2 * (i / 2) + k % 2];
            float y = columns[4 * (i % 2) + k % 8 / 2].b[2 * (k / 8) + k % 2];
            c[i] = fmaf(x, y, c[i]);
        }
}

template <class T> __device__ inline uint32_t pack(T, float x, float y)
{
    T low, high;
    put(&low, x);
    put(&high, y);
    return low.u | (uint32_t)high.u << 16;
}

__device__ inline void store4(place to, uint32_t x)
{
    memcpy((void *)operand_at("st.shared.u32", to, 4), &x, sizeof x);
}

__device__ inline uint4 load16(place from)
{
    uint4 x;
    memcpy(&x, (const void *)operand_at("ld.shared.v4", from, 16), sizeof x);
    return x;
}

__device__ inline float2 load_pair(place from)
{
    float2 x;
    memcpy(&x, (const void *)operand_at("ld.shared.v2", from, 8), sizeof x);
    return x;
}

#endif
