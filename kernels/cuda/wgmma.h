/* wgmma.h -- products of a warpgroup, which is four warps: by Hopper's wgmma, or warp by warp in
 * the emulation, with the same bits.
 *
 * Invariants
 *  1. Every function is called by all 128 threads of a warpgroup at once. Warp w has rows 16w ..
 *     16w + 15 of its 64 rows, with the fragments of mma.h.
 *  2. A tile in shared memory has panels of 64 columns, each [ROWS][64] halves at a multiple of
 *     1024 bytes, one behind the other. Chunk c (16 bytes) of row r of a panel is stored at chunk
 *     c ^ (r % 8): wgmma's swizzle of 128 bytes.
 *  3. From begin_products() on, products run on their own until wait_products<n>() has left at
 *     most n groups of them unfinished; each closes with end_products(). Meanwhile nothing reads
 *     or writes their sums, left operands in registers, and tiles. settle() follows a wait, for
 *     each of the sums that are complete.
 *  4. Products see data in shared memory only after tell_products() by the threads that wrote it,
 *     and a barrier.
 *  5. Kernels that use these functions have their bodies within #ifdef ZK_GROUPS. Only the sm_90
 *     columns of launch tables name them.
 */
#ifndef ZK_WGMMA_H
#define ZK_WGMMA_H
#include "mma.h"

#if !defined(__CUDACC__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define ZK_GROUPS
#else
/* A launch table that names such a kernel for another processor is wrong. */
__device__ inline void no_groups(void) { asm volatile("trap;"); }
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(ZK_GROUPS)
#error "compile for compute_90a, not compute_90: attention needs wgmma"
#endif

enum { ZK_GROUP = 4 * ZK_WARP };

/* Return the offset of chunk `chunk` of row `row` in a tile of ROWS rows. */
template <int ROWS> __device__ inline place panel_at(int row, int chunk)
{
    return (place)(chunk / 8 * ROWS * 128 + row * 128 + (((chunk ^ row) & 7) << 4));
}

/* Copy `rows` rows of `d` elements as copy_tile does, into a tile of panels. */
template <int D, int ROWS, int THREADS, class T>
__device__ inline void copy_panels(place to, const T *from, int stride, int rows, int d)
{
    constexpr int STEP = THREADS / (D / 8);
    static_assert(ROWS % STEP == 0 && STEP % 8 == 0, "whole rounds, and a chunk keeps its place");
    place thread = again(threadIdx.x);
    int row = (int)(thread / (D / 8)), chunk = (int)(thread % (D / 8));
    const T *p = from + (int64_t)row * stride + chunk * 8;
    to += panel_at<ROWS>(row, chunk);
    rows = chunk * 8 < d ? rows : 0;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, p += (int64_t)STEP * stride)
        copy16(to + (place)(i * 128), p, row + i < rows);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
/* ---- instructions */
__device__ inline void begin_products(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void end_products(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int N> __device__ inline void wait_products(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

__device__ inline void tell_products(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Keep the compiler from moving the use of sums across this place. */
template <int N> __device__ inline void settle(float (&x)[1][N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(x[0][n][i])::"memory");
}

/* The same for left operands, before products that take them. */
__device__ inline void settle(uint32_t (&x)[4][4])
{
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+r"(x[k][i])::"memory");
}

/* Return the descriptor of an operand in a tile (invariant 2). leading: bytes between panels, if
 * the sum is over rows. */
__device__ inline uint64_t operand(place at, int leading)
{
    constexpr uint64_t EIGHT_ROWS = 1024 >> 4, SWIZZLE_128 = 1;
    return (uint64_t)(at >> 4 & 0x3fff) | (uint64_t)(leading >> 4) << 16 | EIGHT_ROWS << 32 |
           SWIZZLE_128 << 62;
}

#define ZK_4(x) "+f"((x)[0]), "+f"((x)[1]), "+f"((x)[2]), "+f"((x)[3])
#define ZK_16(x, n) ZK_4(x[n]), ZK_4(x[n + 1]), ZK_4(x[n + 2]), ZK_4(x[n + 3])
#define ZK_32(x, n) ZK_16(x, n), ZK_16(x, n + 4)
#define ZK_64(x, n) ZK_32(x, n), ZK_32(x, n + 8)
#define ZK_LIST_32                                                                                 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "   \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ZK_LIST_64                                                                                 \
    ZK_LIST_32                                                                                     \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

/* c (+)= a . b: 64 rows, 64 or 128 columns, 16 terms. With a in shared memory, b's columns are
 * summed over; with a in registers, b's rows. */
#define ZK_PRODUCTS(T, TYPES)                                                                      \
    __device__ inline void group_multiply(T, float (&c)[8][4], uint64_t a, uint64_t b, int add)    \
    {                                                                                              \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"                                    \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPES " {" ZK_LIST_32           \
                     "}, %32, %33, p, 1, 1, 0, 0; }"                                               \
                     : ZK_32(c, 0)                                                                 \
                     : "l"(a), "l"(b), "r"(add)                                                    \
                     : "memory");                                                                  \
    }                                                                                              \
    __device__ inline void group_multiply(T, float (&c)[8][4], const uint32_t (&a)[4], uint64_t b) \
    {                                                                                              \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0;\n"                                      \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPES " {" ZK_LIST_32           \
                     "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1; }"                                 \
                     : ZK_32(c, 0)                                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                          \
                     : "memory");                                                                  \
    }                                                                                              \
    __device__ inline void group_multiply(T, float (&c)[16][4], const uint32_t (&a)[4],            \
                                          uint64_t b)                                              \
    {                                                                                              \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0;\n"                                      \
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPES " {" ZK_LIST_64          \
                     "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"                                 \
                     : ZK_64(c, 0)                                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                          \
                     : "memory");                                                                  \
    }
ZK_PRODUCTS(bf16, "bf16.bf16")
ZK_PRODUCTS(f16, "f16.f16")

/* to = rows of a . rows of b: 64 rows of a tile of A rows by 64 rows of a tile of B rows, over D
 * columns. */
template <class T, int D, int A, int B>
__device__ inline void group_dot(float (&to)[1][8][4], place a, place b)
{
    uint64_t left = operand(a, 16), right = operand(b, 16);
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        group_multiply(T(), to[0], left + (uint64_t)((k / 4 * A * 128 + k % 4 * 32) >> 4),
                       right + (uint64_t)((k / 4 * B * 128 + k % 4 * 32) >> 4), k > 0);
}

/* to += x . b: 64 x 64 by 64 rows of C columns, of a tile of B rows. */
template <class T, int C, int B>
__device__ inline void group_add(float (&to)[1][C / 8][4], const uint32_t (&x)[4][4], place b)
{
    uint64_t right = operand(b, B * 128);
#pragma unroll
    for (int k = 0; k < 4; k++) group_multiply(T(), to[0], x[k], right + (uint64_t)(k * 2048 >> 4));
}
#elif defined(ZK_GROUPS)
/* ---- warp by warp, each product complete at once */
__device__ inline void begin_products(void) {}
__device__ inline void end_products(void) {}
template <int N> __device__ inline void wait_products(void) {}
__device__ inline void tell_products(void) {}
template <int N> __device__ inline void settle(float (&)[1][N][4]) {}
__device__ inline void settle(uint32_t (&)[4][4]) {}

template <class T, int D, int A, int B>
__device__ inline void group_dot(float (&to)[1][8][4], place a, place b)
{
    int lane = lane_of(), row = warp_of() % 4 * 16 + (lane & 15);
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) to[0][n][i] = 0;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t left[4], right[4];
        load_matrices(left, a + panel_at<A>(row, 2 * k + (lane >> 4)));
#pragma unroll
        for (int n = 0; n < 4; n++) {
            load_matrices(right, b + panel_at<B>(16 * n + (lane & 7) + (lane >> 4 << 3),
                                                 2 * k + (lane >> 3 & 1)));
            multiply(T(), to[0][2 * n], left, right[0], right[1]);
            multiply(T(), to[0][2 * n + 1], left, right[2], right[3]);
        }
    }
}

template <class T, int C, int B>
__device__ inline void group_add(float (&to)[1][C / 8][4], const uint32_t (&x)[4][4], place b)
{
    int lane = lane_of();
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int c = 0; c < C / 16; c++) {
            uint32_t right[4];
            load_turned(right, b + panel_at<B>(16 * k + (lane & 15), 2 * c + (lane >> 4)));
            multiply(T(), to[0][2 * c], x[k], right[0], right[1]);
            multiply(T(), to[0][2 * c + 1], x[k], right[2], right[3]);
        }
}
#endif

#ifdef ZK_GROUPS
/* Round a warp's 16 x 64 sums to the left operands of a product over those 64. */
template <class T> __device__ inline void pack_left(uint32_t (&to)[4][4], const float (&x)[1][8][4])
{
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *half = &x[0][2 * k + i / 2][i % 2 * 2];
            to[k][i] = pack(T(), half[0], half[1]);
        }
    settle(to);
}
#endif

#endif
