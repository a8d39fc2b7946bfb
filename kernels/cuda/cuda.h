/* cuda.h -- the parts that GPU kernels share: the context, storage types, launches, block
 * reductions.
 *
 * Invariants
 *  1. A file of kernels is CUDA C++ that a plain C++ compiler accepts too. Launches, dynamic shared
 *     memory and inline PTX go through the macros and wrappers of this file, whose other half, for
 *     a CPU, is tests/emulation/shim.h.
 *  2. Grids, blocks and bytes of shared memory come from the launch table; only ZK_LAUNCH launches.
 *  3. The order of a reduction depends only on the number of threads, so every run gives the same
 *     bits.
 *  4. Warp collectives name all 32 lanes; blocks are whole warps.
 *  5. An error of CUDA or cuBLASLt ends the process with a message and exit code 3.
 */
#ifndef ZK_CUDA_H
#define ZK_CUDA_H

#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include "../../tests/emulation/shim.h"
#endif
#include <cublasLt.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

extern "C" {
#include "../zk.h"
}
#include "../scalar.h"

struct gemms;               /* linear.cu: products that have run, with their algorithms */
gemms *zk_gemms_open(void); /* NULL: out of memory */
void zk_gemms_close(gemms *all);

struct zk {
    cudaStream_t stream;
    char *device, *host; /* the plan's classes `workspace` (NULL: none) and `pinned_scratch` */
    int dtype, column, processors;
    cublasLtHandle_t lt;
    struct gemms *gemms;
};

/* ---- storage types: float; bf16, the upper half of a float; f16, IEEE half */
struct bf16 {
    uint16_t u;
};

struct f16 {
    uint16_t u;
};

__device__ inline float get(float x) { return x; }

__device__ inline float get(bf16 x) { return __uint_as_float((uint32_t)x.u << 16); }

__device__ inline float get(f16 x)
{
#ifdef __CUDA_ARCH__
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.u));
    return f;
#else
    return widen_f16(x.u);
#endif
}

__device__ inline void put(float *to, float x) { *to = x; }

/* Round to nearest even, 65520 and above to infinity; NaN stays NaN. */
__device__ inline void put(f16 *to, float x)
{
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->u) : "f"(x));
#else
    to->u = narrow_f16(x);
#endif
}

/* Round to nearest even; NaN stays NaN. */
__device__ inline void put(bf16 *to, float x)
{
    uint32_t u = __float_as_uint(x);
    int nan = (u & 0x7fffffff) > 0x7f800000;
    to->u = (uint16_t)(nan ? u >> 16 | 0x40 : (u + (0x7fff + (u >> 16 & 1))) >> 16);
}

/* ---- functions of the host */
inline void zk_must(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    fflush(stderr);
    _exit(3);
}

/* Copy to host memory after all earlier work of the stream, and wait for it. */
inline void zk_to_host(zk *k, void *to, const void *from, size_t bytes)
{
    zk_must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, k->stream), "copy to host");
    zk_must(cudaStreamSynchronize(k->stream), "copy to host");
}

/* ---- launches */
/* Exit with a message if a launch was not accepted. The launch's own result is checked, because
 * cudaGetLastError may report another, harmless error. */
inline void zk_launched(cudaError_t error, const char *kernel, const zk_grid *g)
{
    if (error == cudaSuccess) return;
    fprintf(stderr, "kernel %s: %s (grid %dx%dx%d, %d threads, %d bytes of shared memory)\n",
            kernel, cudaGetErrorString(error), g->x, g->y, g->z, g->block, g->shared);
    fflush(stderr);
    _exit(3);
}

/* Dynamic shared memory above this limit must be allowed for each kernel. */
enum { ZK_SHARED_PLAIN = 48 << 10 };

template <class F> inline cudaError_t zk_allow_shared(F *kernel, const zk_grid *g)
{
    if (g->shared <= ZK_SHARED_PLAIN) return cudaSuccess;
    return cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                g->shared);
}

/* ZK_LAUNCH(k, L, 0, (add<T>), y, a, b, n): launch `part` of a call, in the context's column. */
#define ZK_LAUNCH(k, L, part_, kernel, ...)                                                        \
    do {                                                                                           \
        const zk_grid *g_ = &(L)[(k)->column].part[part_];                                         \
        zk_launched(zk_allow_shared(kernel, g_), #kernel, g_);                                     \
        zk_launched(ZK_START(kernel, g_, (k)->stream, __VA_ARGS__), #kernel, g_);                  \
    } while (0)

/* ZK_SHARED(float, row): declare the launch's dynamic shared memory as an array of that type. */
#ifdef __CUDACC__
extern __shared__ __align__(1024) char zk_shared[];
#define ZK_SHARED(type, name) type *name = reinterpret_cast<type *>(zk_shared)
#define ZK_START(kernel, g, stream, ...) zk_start(g, stream, kernel, __VA_ARGS__)
template <class... Formal, class... Actual>
inline cudaError_t zk_start(const zk_grid *g, cudaStream_t stream, void (*kernel)(Formal...),
                            Actual &&...actual)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)g->x, (unsigned)g->y, (unsigned)g->z);
    config.blockDim = dim3((unsigned)g->block);
    config.dynamicSmemBytes = (size_t)g->shared;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, static_cast<Actual &&>(actual)...);
}
#else
#define ZK_SHARED(type, name) type *name = reinterpret_cast<type *>(shim_shared())
#define ZK_START(kernel, g, stream, ...)                                                           \
    shim_launch(#kernel, dim3((g)->x, (g)->y, (g)->z), (g)->block, (g)->shared, stream, (kernel),  \
                __VA_ARGS__)
#endif

/* ZK_REAL(k, T, statement): run the statement with T as the context's storage type. */
#define ZK_REAL(k, T, ...)                                                                         \
    do {                                                                                           \
        if ((k)->dtype == ZK_BF16) {                                                               \
            typedef bf16 T;                                                                        \
            __VA_ARGS__;                                                                           \
        } else if ((k)->dtype == ZK_F16) {                                                         \
            typedef f16 T;                                                                         \
            __VA_ARGS__;                                                                           \
        } else {                                                                                   \
            typedef float T;                                                                       \
            __VA_ARGS__;                                                                           \
        }                                                                                          \
    } while (0)

/* ---- reductions: every thread gets the result */
enum { ZK_WARP = 32, ZK_ALL = -1 }; /* lanes of a warp; the mask of all of them */

struct add_of {
    template <class T> __device__ T operator()(T a, T b) const { return a + b; }
};

struct max_of {
    template <class T> __device__ T operator()(T a, T b) const { return a > b ? a : b; }
};

/* Fold lanes 16 apart, then 8, 4, 2, 1. */
template <class T, class Of> __device__ inline T warp_fold(T x, Of of)
{
    for (int apart = ZK_WARP / 2; apart; apart /= 2)
        x = of(x, __shfl_xor_sync((unsigned)ZK_ALL, x, apart));
    return x;
}

/* Fold each warp, then the warps' results in the same way. none: the neutral element. */
template <class T, class Of> __device__ inline T block_fold(T x, Of of, T none)
{
    __shared__ T part[ZK_WARP];
    int lane = (int)(threadIdx.x % ZK_WARP), warp = (int)(threadIdx.x / ZK_WARP);
    x = warp_fold(x, of);
    __syncthreads(); /* all threads have read the values of the last call in `part` */
    if (lane == 0) part[warp] = x;
    __syncthreads();
    return warp_fold(lane < (int)(blockDim.x / ZK_WARP) ? part[lane] : none, of);
}

template <class T> __device__ inline T warp_sum(T x) { return warp_fold(x, add_of()); }

template <class T> __device__ inline T warp_max(T x) { return warp_fold(x, max_of()); }

template <class T> __device__ inline T block_sum(T x) { return block_fold(x, add_of(), (T)0); }

/* Return the maximum, at least `least`. */
template <class T> __device__ inline T block_max(T x, T least)
{
    return block_fold(x, max_of(), least);
}

/* ---- wrappers of PTX: the instruction on a GPU, the same arithmetic in C elsewhere */

/* Store x to global memory at `to` with one instruction. */
__device__ inline void store16(void *to, uint4 x)
{
#ifdef __CUDA_ARCH__
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
                 "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
#else
    struct __attribute__((may_alias)) any : uint4 {};
    static_cast<uint4 &>(*reinterpret_cast<any *>(to)) = x;
#endif
}

/* Flush results below 2^-126 to 0; NaN stays. */
__device__ inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? 0 : x; }

/* 2^x, with a relative error of at most 2^-22 */
__device__ inline float power2(float x)
{
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return flushed(exp2f(x));
#endif
}

/* 1 / x, with a relative error of at most 2^-23 */
__device__ inline float inverse(float x)
{
#ifdef __CUDA_ARCH__
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return flushed(1 / x);
#endif
}

#endif
