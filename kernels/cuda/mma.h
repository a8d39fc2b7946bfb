/* mma.h -- warp-wide products of halves (bf16 or f16) and copies into shared memory, in PTX and in
 * C.
 *
 * Invariants
 *  1. Every function is called by all 32 lanes of a warp at once, except copies and stores of one
 *     lane.
 *  2. Fragments are laid out as in the PTX manual (matrix fragments for mma.m16n8k16). With g =
 *     lane / 4 and t = lane % 4, a register holds the elements of columns (A, C) or rows (B) 2t,
 *     2t+1, the lower half first:
 *         A 16x16: a[0] row g, a[1] row g+8, a[2] row g columns +8, a[3] row g+8 columns +8
 *         B 16x8:  b0 column g, b1 column g rows +8
 *         C 16x8:  c[0], c[1] row g; c[2], c[3] row g+8
 *  3. A tile in shared memory has rows of `D` halves (64, 128 or 256) in chunks of 16 bytes. Chunk
 *     c of row r is stored at chunk c ^ (r % 8), so that eight rows of one chunk, or eight chunks
 *     of one row, touch all 32 banks once. A tile starts at a multiple of the bytes of its rows.
 *  4. A copy has arrived only after wait_copies() and a barrier. In C, half of the chunks are
 *     copied at the request and half at the wait, so that a read of the new data too soon, or
 *     of the old data too late, is noticed.
 */
#ifndef ZK_MMA_H
#define ZK_MMA_H
#include "cuda.h"

#ifdef __CUDACC__
typedef uint32_t place; /* an address in shared memory */

/* ---- instructions */
__device__ inline place place_of(const void *shared)
{
    return (place)__cvta_generic_to_shared(shared);
}

/* Copy 16 or 4 bytes; if not `some`, write zeros and read nothing. */
__device__ inline void copy16(place to, const void *from, bool some)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(some ? 16 : 0)
                 : "memory");
}

__device__ inline void copy4(place to, const void *from, bool some)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                 "r"(some ? 4 : 0)
                 : "memory");
}

/* Return x as a value that the compiler does not know, so that addresses made from it are computed
 * when needed instead of being kept in registers. */
__device__ inline place again(place x)
{
    asm volatile("" : "+r"(x));
    return x;
}

/* Return blockIdx.y and .z, read again instead of kept in a register. */
__device__ inline int block_y(void)
{
    unsigned y;
    asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(y));
    return (int)y;
}

__device__ inline int block_z(void)
{
    unsigned z;
    asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(z));
    return (int)z;
}

__device__ inline int lane_of(void) { return (int)(again(threadIdx.x) % ZK_WARP); }

__device__ inline int warp_of(void) { return (int)(again(threadIdx.x) / ZK_WARP); }

/* Wait until this thread's copies have arrived. */
__device__ inline void wait_copies(void) { asm volatile("cp.async.wait_all;" ::: "memory"); }

/* Load four 8x8 matrices. Lane 8i + r gives the address of row r of matrix i; lane (g, t) gets
 * elements 2t and 2t+1 of row g of each. */
__device__ inline void load_matrices(uint32_t (&m)[4], place row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
}

/* The same transposed: lane (g, t) gets rows 2t and 2t+1 of column g of each. */
__device__ inline void load_turned(uint32_t (&m)[4], place row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
}

/* c += a . b */
__device__ inline void multiply(bf16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void multiply(f16, float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Round two floats to halves, to nearest even, with x in the lower half. */
__device__ inline uint32_t pack(bf16, float x, float y)
{
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    return both;
}

__device__ inline uint32_t pack(f16, float x, float y)
{
    uint32_t both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    return both;
}

__device__ inline void store4(place to, uint32_t x)
{
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

__device__ inline uint4 load16(place from)
{
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}

__device__ inline float2 load_pair(place from)
{
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
    return x;
}
#else
#include "mma_plain.h"
#endif

/* ---- tiles, on a GPU and in C */
/* Return the offset of chunk `chunk` of row `row` in a tile. */
template <int D> __device__ inline place chunk_at(int row, int chunk)
{
    return (place)(row * D * 2 + ((chunk ^ (row & 7)) << 4));
}

/* Return a lane's offset in a tile for load_matrices of 16 rows x 16 columns as A, or for
 * load_turned as two B (rows summed over) side by side. Column block k is then at ^ (k << 5), row
 * block i at + i * 16 rows. */
template <int D> __device__ inline place lane_of_rows(void)
{
    int lane = lane_of();
    return chunk_at<D>(lane & 15, lane >> 4);
}

/* The same for load_matrices as two B (columns summed over): the upper 8 rows and the lower 8. */
template <int D> __device__ inline place lane_of_columns(void)
{
    int lane = lane_of();
    return chunk_at<D>((lane & 7) + (lane >> 4 << 3), lane >> 3 & 1);
}

/* Copy `rows` rows of `d` elements, `stride` elements apart, into a tile [ROWS][D], with 0 for the
 * rest. d and stride are multiples of 8; `from` is aligned to 16 bytes. */
template <int D, int ROWS, int THREADS, class T>
__device__ inline void copy_tile(place to, const T *from, int stride, int rows, int d)
{
    constexpr int STEP = THREADS / (D / 8);
    static_assert(ROWS % STEP == 0, "whole rounds");
    place thread = again(threadIdx.x);
    int row = (int)(thread / (D / 8)), chunk = (int)(thread % (D / 8));
    const T *p = from + (int64_t)row * stride + chunk * 8;
    rows = chunk * 8 < d ? rows : 0;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, p += (int64_t)STEP * stride)
        copy16(to + chunk_at<D>(row + i, chunk), p, row + i < rows);
}

/* A warp's 16*M rows of D as left operands; `at` comes from lane_of_rows. The first HELD steps of
 * 16 columns are kept in registers, the others are read for each product. */
template <int D, int M, int HELD> struct left_rows {
    place at;
    uint32_t held[HELD ? HELD : 1][M][4];
    __device__ explicit left_rows(place rows) : at(rows)
    {
        place from = again(rows);
#pragma unroll
        for (int k = 0; k < HELD; k++) load(held[k], from, k);
    }
    __device__ static void load(uint32_t (&to)[M][4], place from, int k)
    {
#pragma unroll
        for (int m = 0; m < M; m++)
            load_matrices(to[m], (from ^ (place)(k << 5)) + (place)(m * 16 * D * 2));
    }
    /* Get step k. from: `at`. */
    __device__ void take(uint32_t (&to)[M][4], place from, int k) const
    {
        if (k >= HELD) return load(to, from, k);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) to[m][i] = held[HELD ? k : 0][m][i];
    }
};

/* to = rows of a . rows of b: 16*M rows by N rows of D; b comes from lane_of_columns. */
template <class T, int D, int M, int N8, int HELD>
__device__ inline void dot_rows(float (&to)[M][N8][4], const left_rows<D, M, HELD> &a, place b)
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) to[m][n][i] = 0;
    place from = again(a.at);
    b = again(b);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t left[M][4], right[4];
        a.take(left, from, k);
#pragma unroll
        for (int n = 0; n < N8 / 2; n++) {
            load_matrices(right, (b ^ (place)(k << 5)) + (place)(n * 16 * D * 2));
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply(T(), to[m][2 * n], left[m], right[0], right[1]);
                multiply(T(), to[m][2 * n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

/* to += x . C columns of b from column `first` on: 16*M x N by N rows of D; b comes
 * from lane_of_rows. x is rounded to T, because the registers of one sum are the left
 * operand of the next product. */
template <class T, int D, int C, int M, int N>
__device__ inline void add_product(float (&to)[M][C / 8][4], const float (&x)[M][N / 8][4], place b,
                                   int first)
{
    b = again(b);
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
        uint32_t left[M][4], right[4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *half = &x[m][2 * k + i / 2][i % 2 * 2];
                left[m][i] = pack(T(), half[0], half[1]);
            }
#pragma unroll
        for (int c = 0; c < C / 16; c++) {
            load_turned(right, (b ^ (place)((first / 16 + c) << 5)) + (place)(k * 16 * D * 2));
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply(T(), to[m][2 * c], left[m], right[0], right[1]);
                multiply(T(), to[m][2 * c + 1], left[m], right[2], right[3]);
            }
        }
    }
}

/* Round a warp's sums, 16*M x C, and store them to `rows` rows of `d` elements. through: [16*M][D]
 * of shared memory that no other warp reads. */
template <int D, int C, int M, class T>
__device__ inline void store_tile(T *to, int64_t stride, int rows, int d, place through,
                                  const float (&x)[M][C / 8][4])
{
    int g = lane_of() / 4, t = lane_of() % 4;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int c = 0; c < C / 8; c++) {
            place at = through + (place)(4 * t);
            store4(at + chunk_at<D>(16 * m + g, c), pack(T(), x[m][c][0], x[m][c][1]));
            store4(at + chunk_at<D>(16 * m + g + 8, c), pack(T(), x[m][c][2], x[m][c][3]));
        }
    __syncwarp();
#pragma unroll
    for (int i = lane_of(); i < 16 * M * C / 8; i += ZK_WARP) {
        int row = i / (C / 8), chunk = i % (C / 8);
        if (row < rows && chunk * 8 < d)
            *reinterpret_cast<uint4 *>(to + row * stride + chunk * 8) =
                load16(through + chunk_at<D>(row, chunk));
    }
}

#endif
