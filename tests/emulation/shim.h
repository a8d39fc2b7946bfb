/* shim.h -- the device half of CUDA C++ on a CPU: all that kernels/cuda/cuda.h needs, without nvcc.
 *
 * Invariants
 *  1. Blocks run one after the other, and a block's threads as fibres of one system thread. Each
 *     runs until it ends or reaches a barrier or a collective of its warp.
 *  2. A barrier or collective that some threads do not reach, or reach at different lines, is
 *     reported with its place, and the process ends with SHIM_MISTAKE.
 *  3. A launch's arguments are copied when it is made, and converted to the kernel's parameters.
 *  4. The executor (queue.h) chooses the order of threads and blocks: no result may depend on it.
 */
#ifndef SHIM_H
#define SHIM_H
#include "tensor.h"

#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __constant__ static
#define __launch_bounds__(...)

enum { SHIM_MISTAKE = 86, SHIM_WARP = 32, SHIM_SLOT = 64 };

/* ---- launches */
struct shim_grid {
    dim3 grid;
    unsigned block;
    size_t shared;
    /* A number for the kernel's arguments: the integers, and which pointers are equal */
    uint64_t given;
};

/* Queues a launch. Its success or failure is also the next result of cudaGetLastError. */
cudaError_t shim_enqueue(const char *name, const void *kernel, const shim_grid &g,
                         cudaStream_t stream, std::function<void()> thread);
/* If set, it receives each launch, which is then neither watched nor queued. */
extern "C" void (*shim_told)(const void *kernel, unsigned block, size_t shared);
const char *shim_kernel(void); /* the running kernel */
/* Runs all threads of all blocks now. */
void shim_run(const char *name, const void *kernel, const shim_grid &g,
              const std::function<void()> &thread);
/* Reports a mistake and ends the process. */
[[noreturn]] void shim_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

template <class... P> uint64_t shim_given(P... args)
{
    const void *pointers[sizeof...(P) + 1] = {}; /* the first is null */
    uint64_t all = 0, here = 0, count = 1;
    auto add = [&](auto x) {
        typedef decltype(x) T;
        here = 0;
        if constexpr (std::is_integral<T>::value) here = (uint64_t)x;
        if constexpr (std::is_pointer<T>::value) {
            while (here < count && pointers[here] != (const void *)x) here++;
            if (here == count) pointers[count++] = (const void *)x;
        }
        all = (all ^ here) * 0x9e3779b97f4a7c15 + 1;
    };
    (add(args), ...);
    return all;
}

template <class... P, class... A>
cudaError_t shim_launch(const char *name, dim3 grid, int block, int shared, cudaStream_t stream,
                        void (*kernel)(P...), const A &...given)
{
    std::tuple<P...> args(static_cast<P>(given)...);
    uint64_t all = std::apply([](auto... x) { return shim_given(x...); }, args);
    return shim_enqueue(name, (const void *)kernel, {grid, (unsigned)block, (size_t)shared, all},
                        stream, [kernel, args] { std::apply(kernel, args); });
}

/* ---- the place of a thread */
struct shim_place {
    uint3 thread, block;
    dim3 block_dim, grid_dim;
};
extern shim_place shim_now;
#define threadIdx (shim_now.thread)
#define blockIdx (shim_now.block)
#define blockDim (shim_now.block_dim)
#define gridDim (shim_now.grid_dim)
static const int warpSize = SHIM_WARP;

char *shim_shared(void); /* the block's dynamic shared memory, 1024-byte aligned */

/* ---- barriers and warps */
void shim_barrier(const char *file, int line);
char *shim_slots(void); /* of this warp's next collective: SHIM_SLOT * 32 bytes */
int shim_lane(void);
/* Returns when all 32 lanes have arrived. orders: whether it orders their accesses to memory. */
void shim_meet(unsigned mask, bool orders, const char *file, int line);

#define SHIM_FROM const char *file = __builtin_FILE(), int line = __builtin_LINE()

/* Returns the values of all lanes, by lane. They are valid until the warp's next collective but
 * one. */
template <class T> inline const T *shim_warp(unsigned mask, T mine, SHIM_FROM)
{
    static_assert(sizeof(T) <= SHIM_SLOT && std::is_trivially_copyable<T>::value, "fits a slot");
    T *slot = reinterpret_cast<T *>(shim_slots());
    slot[shim_lane()] = mine;
    shim_meet(mask, false, file, line);
    return slot;
}

inline void __syncthreads(SHIM_FROM) { shim_barrier(file, line); }

inline void __syncwarp(unsigned mask = ~0u, SHIM_FROM) { shim_meet(mask, true, file, line); }

template <class T> inline T __shfl_sync(unsigned mask, T x, int from, int width = 32, SHIM_FROM)
{
    int first = shim_lane() / width * width;
    return shim_warp(mask, x, file, line)[first + from % width];
}

template <class T> inline T __shfl_xor_sync(unsigned mask, T x, int by, int width = 32, SHIM_FROM)
{
    int lane = shim_lane(), from = lane ^ by;
    return shim_warp(mask, x, file, line)[from / width <= lane / width ? from : lane];
}

template <class T> inline T __shfl_down_sync(unsigned mask, T x, int by, int width = 32, SHIM_FROM)
{
    int lane = shim_lane();
    return shim_warp(mask, x, file, line)[lane % width + by < width ? lane + by : lane];
}

template <class T> inline T __shfl_up_sync(unsigned mask, T x, int by, int width = 32, SHIM_FROM)
{
    int lane = shim_lane();
    return shim_warp(mask, x, file, line)[lane % width >= by ? lane - by : lane];
}

inline unsigned __ballot_sync(unsigned mask, int yes, SHIM_FROM)
{
    const int *all = shim_warp(mask, yes, file, line);
    unsigned bits = 0;
    for (int lane = 0; lane < SHIM_WARP; lane++) bits |= (unsigned)(all[lane] != 0) << lane;
    return bits;
}

inline int __any_sync(unsigned mask, int yes, SHIM_FROM)
{
    return __ballot_sync(mask, yes, file, line) != 0;
}

inline int __all_sync(unsigned mask, int yes, SHIM_FROM)
{
    return __ballot_sync(mask, yes, file, line) == ~0u;
}

inline void __threadfence(void) {}

inline void __threadfence_block(void) {}

/* ---- atomics, of integers only: sums of floats would depend on the order */
void shim_atomic(void *p, size_t n); /* an atomic follows */

template <class T> using shim_integer = std::enable_if_t<std::is_integral<T>::value, T>;

#define SHIM_ATOMIC(name, result)                                                                  \
    template <class T>                                                                             \
    __attribute__((no_sanitize("thread"))) shim_integer<T> name(T *p, std::common_type_t<T> x)     \
    {                                                                                              \
        shim_atomic(p, sizeof *p);                                                                 \
        T old = *p;                                                                                \
        *p = result;                                                                               \
        return old;                                                                                \
    }
SHIM_ATOMIC(atomicAdd, old + x)
SHIM_ATOMIC(atomicMax, old > x ? old : x)
SHIM_ATOMIC(atomicMin, old < x ? old : x)
SHIM_ATOMIC(atomicOr, old | x)
SHIM_ATOMIC(atomicExch, x)

/* ---- bits and arithmetic; a GPU's approximations are exact here or nearly so */
__forceinline__ unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
__forceinline__ int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
__forceinline__ float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
__forceinline__ float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
__forceinline__ long long __double_as_longlong(double x)
{
    return __builtin_bit_cast(long long, x);
}
__forceinline__ double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }

inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline float __frcp_rn(float x) { return 1 / x; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline double __dsqrt_rn(double x) { return __builtin_sqrt(x); }
inline double __drcp_rn(double x) { return 1 / x; }
inline float __double2float_rn(double x) { return (float)x; }
inline int __float2int_rn(float x) { return (int)__builtin_rintf(x); }
inline float __int2float_rn(int x) { return (float)x; }
inline long long __double2ll_rn(double x) { return (long long)__builtin_rint(x); }
inline int __double2int_rn(double x) { return (int)__builtin_rint(x); }
inline float rsqrtf(float x) { return 1 / __builtin_sqrtf(x); }

template <class T> inline T __ldg(const T *p) { return *p; }

#define SHIM_MIN_MAX(T)                                                                            \
    inline T min(T a, T b) { return b < a ? b : a; }                                               \
    inline T max(T a, T b) { return a < b ? b : a; }
SHIM_MIN_MAX(int)
SHIM_MIN_MAX(unsigned)
SHIM_MIN_MAX(long)
SHIM_MIN_MAX(unsigned long)
SHIM_MIN_MAX(long long)
SHIM_MIN_MAX(unsigned long long)
SHIM_MIN_MAX(float)
SHIM_MIN_MAX(double)

#endif
