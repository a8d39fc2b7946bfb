/* vec.h -- vectors of 16 floats, bf16 and f16.
 *
 * Invariants
 *  1. The bits are those of lanes.h: the same with AVX2 and AVX-512, gcc and clang.
 *  2. Functions ...n touch n elements (0 <= n <= 16; more counts as 16); other lanes are 0.
 */
#ifndef ZK_VEC_H
#define ZK_VEC_H
#include "lanes.h"

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef uint16_t v16h __attribute__((vector_size(32)));
typedef float v16_loose __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t v16h_loose __attribute__((vector_size(32), aligned(2), may_alias));

/* ---- 16 floats */
ZK_INLINE v16 set16(float x) { return (v16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
ZK_INLINE v16 load16(const float *p) { return *(const v16_loose *)p; }
ZK_INLINE void store16(float *p, v16 x) { *(v16_loose *)p = x; }

/* Return mask ? a : b; a mask lane is 0 or -1, as from comparisons. */
ZK_INLINE v16 select16(v16i mask, v16 a, v16 b)
{
    return (v16)(((v16i)a & mask) | ((v16i)b & ~mask));
}

#ifdef __AVX512F__
ZK_INLINE v16 fma16(v16 a, v16 b, v16 c) { return lanes_fma(a, b, c); }
ZK_INLINE v16 sqrt16(v16 x) { return lanes_sqrt(x); }
ZK_INLINE v16 max16(v16 a, v16 b) { return lanes_max(a, b); }
ZK_INLINE v16 exp16(v16 x) { return lanes_exp(x); }
ZK_INLINE v16 log16(v16 x) { return lanes_log(x); }
ZK_INLINE __mmask16 first16(int n)
{
    return (__mmask16)(n <= 0 ? 0 : n >= 16 ? 0xffff : (1 << n) - 1);
}
ZK_INLINE v16 load16n(const float *p, int n) { return (v16)_mm512_maskz_loadu_ps(first16(n), p); }
ZK_INLINE void store16n(float *p, v16 x, int n) { _mm512_mask_storeu_ps(p, first16(n), (__m512)x); }
ZK_INLINE v16h load16hn(const uint16_t *p, int n)
{
    return (v16h)_mm256_maskz_loadu_epi16(first16(n), p);
}
#else
typedef union {
    v16 v;
    lanes h[2];
} v16_halves;
ZK_INLINE v16 fma16(v16 a, v16 b, v16 c)
{
    v16_halves x = {a}, y = {b}, z = {c};
    z.h[0] = lanes_fma(x.h[0], y.h[0], z.h[0]);
    z.h[1] = lanes_fma(x.h[1], y.h[1], z.h[1]);
    return z.v;
}
ZK_INLINE v16 max16(v16 a, v16 b)
{
    v16_halves x = {a}, y = {b};
    return (v16_halves){.h = {lanes_max(x.h[0], y.h[0]), lanes_max(x.h[1], y.h[1])}}.v;
}
#define ZK_BY_HALVES(name)                                                                         \
    ZK_INLINE v16 name##16(v16 x)                                                                  \
    {                                                                                              \
        v16_halves a = {x};                                                                        \
        return (v16_halves){.h = {lanes_##name(a.h[0]), lanes_##name(a.h[1])}}.v;                  \
    }
ZK_BY_HALVES(sqrt)
ZK_BY_HALVES(exp)
ZK_BY_HALVES(log)
ZK_INLINE __m256i first8(int n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
ZK_INLINE v16 load16n(const float *p, int n)
{
    return (v16_halves){.h = {(lanes)_mm256_maskload_ps(p, first8(n)),
                              (lanes)_mm256_maskload_ps(p + 8, first8(n - 8))}}
        .v;
}
ZK_INLINE void store16n(float *p, v16 x, int n)
{
    v16_halves a = {x};
    _mm256_maskstore_ps(p, first8(n), (__m256)a.h[0]);
    _mm256_maskstore_ps(p + 8, first8(n - 8), (__m256)a.h[1]);
}
/* Load 8 halves, with 0 from the n-th on. AVX2 has masks for pairs only; an odd
 * last half is loaded alone. */
ZK_INLINE __m128i load8hn(const uint16_t *p, int n)
{
    n = n < 0 ? 0 : n < 8 ? n : 8;
    __m128i there = _mm_cmpgt_epi32(_mm_set1_epi32(n / 2), _mm_setr_epi32(0, 1, 2, 3));
    __m128i pairs = _mm_maskload_epi32((const int *)p, there);
    if (n % 2 == 0) return pairs;
    __m128i lane = _mm_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7);
    __m128i odd = _mm_cmpeq_epi16(_mm_set1_epi16((short)(n - 1)), lane);
    return _mm_or_si128(pairs, _mm_and_si128(odd, _mm_set1_epi16((short)p[n - 1])));
}
typedef union {
    v16h v;
    __m128i h[2];
} v16h_halves;
ZK_INLINE v16h load16hn(const uint16_t *p, int n)
{
    return (v16h_halves){.h = {load8hn(p, n), load8hn(p + 8, n - 8)}}.v;
}
#endif

/* Return the sum of the lanes, folded 8, 4, 2, 1. */
ZK_INLINE float sum16(v16 x)
{
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

/* ---- bf16: the upper half of a float; rounds to nearest even, NaN stays NaN */
ZK_INLINE v16 widen16(v16h x) { return (v16)(__builtin_convertvector(x, v16u) << 16); }

ZK_INLINE v16h narrow16(v16 x)
{
    v16u u = (v16u)x, even = u + 0x7fff + ((u >> 16) & 1);
    v16u quiet = u | 0x400000;
    v16i nan = x != x;
    v16u kept = (quiet & (v16u)nan) | (even & ~(v16u)nan);
    return __builtin_convertvector(kept >> 16, v16h);
}

/* ---- f16: IEEE half, by F16C; rounds to nearest even, NaN stays NaN */
#ifdef __AVX512F__
ZK_INLINE v16 widen16_f16(v16h x) { return (v16)_mm512_cvtph_ps((__m256i)x); }
ZK_INLINE v16h narrow16_f16(v16 x)
{
    return (v16h)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
ZK_INLINE v16 widen16_f16(v16h x)
{
    v16h_halves a = {x};
    return (v16_halves){.h = {(lanes)_mm256_cvtph_ps(a.h[0]), (lanes)_mm256_cvtph_ps(a.h[1])}}.v;
}
ZK_INLINE v16h narrow16_f16(v16 x)
{
    v16_halves a = {x};
    return (v16h_halves){.h = {_mm256_cvtps_ph((__m256)a.h[0], _MM_FROUND_TO_NEAREST_INT),
                               _mm256_cvtps_ph((__m256)a.h[1], _MM_FROUND_TO_NEAREST_INT)}}
        .v;
}
#endif

/* ---- elements i .. of an array of `dtype` */
ZK_INLINE v16 load16r(const real *p, int64_t i, int dtype)
{
    if (dtype == ZK_F32) return load16((const float *)p + i);
    v16h x = *(const v16h_loose *)((const uint16_t *)p + i);
    return dtype == ZK_F16 ? widen16_f16(x) : widen16(x);
}

ZK_INLINE void store16r(real *p, int64_t i, int dtype, v16 x)
{
    if (dtype == ZK_F32) store16((float *)p + i, x);
    else *(v16h_loose *)((uint16_t *)p + i) = dtype == ZK_F16 ? narrow16_f16(x) : narrow16(x);
}

ZK_INLINE v16 load16rn(const real *p, int64_t i, int dtype, int n)
{
    if (n >= 16) return load16r(p, i, dtype);
    if (dtype == ZK_F32) return load16n((const float *)p + i, n);
    v16h x = load16hn((const uint16_t *)p + i, n);
    return dtype == ZK_F16 ? widen16_f16(x) : widen16(x);
}

ZK_INLINE void store16rn(real *p, int64_t i, int dtype, v16 x, int n)
{
    uint16_t part[16];
    if (n >= 16) {
        store16r(p, i, dtype, x);
        return;
    }
    if (dtype == ZK_F32) {
        store16n((float *)p + i, x, n);
        return;
    }
    store16r(part, 0, dtype, x);
    for (int j = 0; j < n; j++) ((uint16_t *)p)[i + j] = part[j];
}

ZK_INLINE void setr(real *p, int64_t i, int dtype, float x)
{
    if (dtype == ZK_F32) ((float *)p)[i] = x;
    else ((uint16_t *)p)[i] = dtype == ZK_F16 ? narrow_f16(x) : narrow(x);
}

#endif
