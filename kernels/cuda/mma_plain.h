/* mma_plain.h -- the PTX half of mma.h in C, for the emulation, which checks every access.
 *
 * Invariants
 *  1. Those of mma.h, of which this is a part.
 *  2. An address on which a GPU would fault is an error here too.
 *  3. Sums are those of the emulated device's tensor cores (tests/emulation/tensor.h).
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
    if (at % n) shim_fail("%s: an address that is not a multiple of %zu", instruction, n);
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

/* Return c + a . b as the device's tensor cores do. */
inline uint32_t dot16(bf16, const uint16_t *a, const uint16_t *b, uint32_t c)
{
    return tensor_bf16(a, b, c);
}

inline uint32_t dot16(f16, const uint16_t *a, const uint16_t *b, uint32_t c)
{
    return tensor_f16(a, b, c);
}

struct lane_matrices {
    uint32_t a[4], b[2];
};

/* All data is in registers here, so the thread sanitizer need not look at it. */
template <class T>
__attribute__((no_sanitize("thread"))) inline void
multiply(T, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    lane_matrices own = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    int g = lane_of() / 4, t = lane_of() % 4;
    const lane_matrices *all = shim_warp(~0u, own), *rows = all + 4 * g, *columns = all + 8 * t;
    for (int i = 0; i < 4; i++) {
        uint16_t x[16], y[16];
        for (int k = 0; k < 16; k++) {
            x[k] = (uint16_t)(rows[k % 8 / 2].a[k / 8 * 2 + i / 2] >> k % 2 * 16);
            y[k] = (uint16_t)(columns[4 * (i % 2) + k % 8 / 2].b[k / 8] >> k % 2 * 16);
        }
        c[i] = __uint_as_float(dot16(T(), x, y, __float_as_uint(c[i])));
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
