/* ptx.h -- declarations for kernels that ptx.py wrote as C++ (ptx.cpp runs them).
 *
 * Invariants
 *  1. A kernel's function runs one thread from where it was left to its end, or to the next place
 *     where the lanes of its warp meet; `in` and `out` are that instruction's operands and results.
 *  2. Every access to memory goes through a function that checks it: its state space, its bounds,
 *     its alignment, and races with other threads and streams.
 *  3. Addresses of shared, local and parameter memory are offsets, as on a GPU; those of shared
 *     memory begin at PTX_SHARED_FIRST, so that a null pointer is none.
 */
#ifndef PTX_H
#define PTX_H
#include <vector_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <limits>
#include <type_traits>

enum : uint32_t { PTX_ENDED = ~0u, PTX_SHARED_FIRST = 1024 };

/* ---- places where the lanes of a warp meet */
enum class ptx_meeting {
    START,
    BARRIER,
    WARP,
    SHFL_BFLY,
    SHFL_IDX,
    SHFL_UP,
    VOTE_ANY,
    VOTE_BALLOT,
    LOAD_MATRICES,
    LOAD_TURNED,
    MULTIPLY_BF16,
    MULTIPLY_F16,
    PRODUCT, /* this and the rest are of a warpgroup */
    FENCE,
    COMMIT_GROUP,
    WAIT_GROUP
};

struct ptx_thread {
    uint32_t pc; /* index of the site where it waits, or PTX_ENDED */
    uint32_t tid, in[10], out[4];
    char *d, *a; /* of a product: registers of the kinds that D and A are of */
};

/* wgmma.mma_async: D is 64 x n. d, a: numbers of a thread's registers; no a: A is in shared memory.
 * A thread's `in` is four registers of A or the two halves of its descriptor, the halves of B's,
 * and whether D is added. */
struct ptx_product {
    unsigned n;
    bool bf16, turned_a, turned_b;
    const uint16_t *d, *a;
};

struct ptx_site {
    ptx_meeting kind;
    const char *spelling;
    int line; /* of the PTX */
    const ptx_product *product;
};

struct ptx_given {
    unsigned at, bytes;
};

struct ptx_kernel {
    const char *name; /* mangled */
    void (*run)(ptx_thread &);
    size_t bytes;            /* of a thread */
    unsigned most;           /* threads */
    unsigned dynamic;        /* offset of dynamic shared memory */
    const ptx_given *arrays; /* static ones in shared memory */
    unsigned fixed;          /* their number, without the last one, of no bytes */
    const ptx_given *params;
    unsigned count, param_bytes;
    const ptx_site *sites;
};

bool ptx_know(const ptx_kernel *table, int n);

/* ---- memory */
struct ptx_place {
    unsigned ntid;
    uint3 ctaid;
    dim3 nctaid;
};
extern ptx_place ptx_now;

enum ptx_access { ptx_reads, ptx_writes, ptx_both };
/* Check an access of n bytes, and return where they are. */
char *ptx_global(uint64_t at, unsigned n, ptx_access how, int line);
char *ptx_shared(uint64_t at, unsigned n, ptx_access how, int line);
char *ptx_param(uint64_t at, unsigned n, ptx_access how, int line);
char *ptx_local(char *depot, size_t bytes, uint64_t at, unsigned n, ptx_access how, int line);
/* cp.async: n bytes, of which `some` are read and the others are 0; it has arrived after
 * ptx_arrive. */
void ptx_copy(const ptx_thread &t, uint64_t to, uint64_t from, unsigned n, unsigned some, int line);
void ptx_arrive(const ptx_thread &t);
/* fence.proxy.async: products may read the memory that t has written. */
void ptx_fence(const ptx_thread &t);
[[noreturn]] void ptx_fail(int line, const char *what);

/* ---- operands */
#define PTX_INLINE __attribute__((always_inline)) static inline

/* The bits of x as a T; integers of another size are converted. */
template <class T, class F> PTX_INLINE T as(F x)
{
    if constexpr (sizeof(T) == sizeof(F)) {
        T to;
        memcpy(&to, &x, sizeof to);
        return to;
    } else {
        static_assert(std::is_integral<T>::value && std::is_integral<F>::value, "integers");
        return (T)x;
    }
}

template <class T> PTX_INLINE T loaded(const char *p)
{
    T x;
    memcpy(&x, p, sizeof x);
    return x;
}

template <class T> PTX_INLINE void store(char *p, T x) { memcpy(p, &x, sizeof x); }

/* ---- instructions that C++ has no operator for */
template <class T> PTX_INLINE T shifted_left(T x, uint32_t n)
{
    return n < 8 * sizeof x ? (T)(x << n) : 0;
}

template <class T> PTX_INLINE T shifted_right(T x, uint32_t n)
{
    return (T)(x >> std::min(n, (uint32_t)(8 * sizeof x - 1)) >> (n >= 8 * sizeof x));
}

template <class T> PTX_INLINE T quotient(T a, T b, int line)
{
    if (!b) ptx_fail(line, "a division by 0");
    if (std::is_signed<T>::value && b == (T)-1) return (T)(0 - (uint64_t)a);
    return (T)(a / b);
}

template <class T> PTX_INLINE T remainder(T a, T b, int line)
{
    if (!b) ptx_fail(line, "a division by 0");
    if (std::is_signed<T>::value && b == (T)-1) return 0;
    return (T)(a % b);
}

PTX_INLINE uint32_t leading_zeros(uint32_t x) { return x ? (uint32_t)__builtin_clz(x) : 32; }
PTX_INLINE uint32_t leading_zeros(uint64_t x) { return x ? (uint32_t)__builtin_clzll(x) : 64; }
PTX_INLINE uint32_t shift_to_top(uint32_t x) { return x ? (uint32_t)__builtin_clz(x) : ~0u; }

static inline uint32_t reversed(uint32_t x)
{
    uint32_t y = 0;
    for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
    return y;
}

/* The lowest n bits of a in place of b's from bit `at` on. */
template <class T> static inline T inserted(T a, T b, uint32_t at, uint32_t n)
{
    at &= 255, n &= 255;
    T ones = n < 8 * sizeof a ? (T)(((T)1 << n) - 1) : (T) ~(T)0, mask = shifted_left(ones, at);
    return (T)((shifted_left(a, at) & mask) | (b & ~mask));
}

/* Each digit of `how` chooses one of the eight bytes of b and a; 8 more: its sign. */
static inline uint32_t permuted(uint32_t a, uint32_t b, uint32_t how)
{
    uint64_t both = (uint64_t)b << 32 | a;
    uint32_t to = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t digit = how >> 4 * i & 15, byte = (uint32_t)(both >> 8 * (digit & 7)) & 255;
        if (digit & 8) byte = byte & 128 ? 255 : 0;
        to |= byte << 8 * i;
    }
    return to;
}

/* Of a number and NaN the number; -0 is less than 0. */
PTX_INLINE float minimum(float a, float b)
{
    if (a != a) return b;
    if (b != b) return a;
    return a < b || (a == b && std::signbit(a)) ? a : b;
}

PTX_INLINE float maximum(float a, float b)
{
    if (a != a) return b;
    if (b != b) return a;
    return a > b || (a == b && std::signbit(b)) ? a : b;
}

/* .ftz: numbers below 2^-126 are 0 of their sign. */
PTX_INLINE float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

/* To nearest even; every NaN becomes the one that has all bits set but the sign. */
PTX_INLINE uint16_t to_f16(float x)
{
    return x == x ? (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT) : 0x7fff;
}

PTX_INLINE float from_f16(uint16_t x) { return _cvtsh_ss(x); }

PTX_INLINE uint16_t to_bf16(float x)
{
    uint32_t bits = as<uint32_t>(x);
    return x == x ? (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fff;
}

PTX_INLINE uint32_t pair(uint16_t high, uint16_t low) { return (uint32_t)high << 16 | low; }

#endif
