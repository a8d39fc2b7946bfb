/* vec.h -- 16 floats at a time, their functions, bf16 and f16.
 *
 * Invariants
 *  1. The same bits on AVX2 and AVX-512, gcc and clang: IEEE operations and written-out FMA only,
 *     no libm. Everything is compiled with -ffp-contract=off.
 *  2. exp16, log16, tanh16, erf16 are within 2 ulp of the exact value over all floats. NaN gives
 *     NaN, infinities give the limits.
 *  3. The ...n forms touch n elements (0 <= n <= 16; more counts as 16), other lanes are 0.
 */
#ifndef ZK_VEC_H
#define ZK_VEC_H
#include "../scalar.h"
#include <immintrin.h>

#define ZK_INLINE static inline __attribute__((always_inline))

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef uint16_t v16h __attribute__((vector_size(32)));
typedef float v16_loose __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t v16h_loose __attribute__((vector_size(32), aligned(2), may_alias));

/* ---- 16 floats */
ZK_INLINE v16 set16(float x) { return (v16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
ZK_INLINE v16i set16i(int32_t x) { return (v16i){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
ZK_INLINE v16 load16(const float *p) { return *(const v16_loose *)p; }
ZK_INLINE void store16(float *p, v16 x) { *(v16_loose *)p = x; }

/* mask ? a : b; a mask lane is 0 or -1, as comparisons give */
ZK_INLINE v16 select16(v16i mask, v16 a, v16 b)
{
    return (v16)(((v16i)a & mask) | ((v16i)b & ~mask));
}

#ifdef __AVX512F__
ZK_INLINE v16 fma16(v16 a, v16 b, v16 c)
{
    return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
ZK_INLINE v16 sqrt16(v16 x) { return (v16)_mm512_sqrt_ps((__m512)x); }
/* a > b ? a : b, so b where either is NaN; min16 likewise */
ZK_INLINE v16 max16(v16 a, v16 b) { return (v16)_mm512_max_ps((__m512)a, (__m512)b); }
ZK_INLINE v16 min16(v16 a, v16 b) { return (v16)_mm512_min_ps((__m512)a, (__m512)b); }
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
    __m256 h[2];
} v16_halves;
ZK_INLINE v16 fma16(v16 a, v16 b, v16 c)
{
    v16_halves x = {a}, y = {b}, z = {c};
    z.h[0] = _mm256_fmadd_ps(x.h[0], y.h[0], z.h[0]);
    z.h[1] = _mm256_fmadd_ps(x.h[1], y.h[1], z.h[1]);
    return z.v;
}
ZK_INLINE v16 sqrt16(v16 x)
{
    v16_halves a = {x};
    return (v16_halves){.h = {_mm256_sqrt_ps(a.h[0]), _mm256_sqrt_ps(a.h[1])}}.v;
}
/* a > b ? a : b, so b where either is NaN; min16 likewise */
ZK_INLINE v16 max16(v16 a, v16 b)
{
    v16_halves x = {a}, y = {b};
    return (v16_halves){.h = {_mm256_max_ps(x.h[0], y.h[0]), _mm256_max_ps(x.h[1], y.h[1])}}.v;
}
ZK_INLINE v16 min16(v16 a, v16 b)
{
    v16_halves x = {a}, y = {b};
    return (v16_halves){.h = {_mm256_min_ps(x.h[0], y.h[0]), _mm256_min_ps(x.h[1], y.h[1])}}.v;
}
ZK_INLINE __m256i first8(int n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
ZK_INLINE v16 load16n(const float *p, int n)
{
    return (v16_halves){
        .h = {_mm256_maskload_ps(p, first8(n)), _mm256_maskload_ps(p + 8, first8(n - 8))}}
        .v;
}
ZK_INLINE void store16n(float *p, v16 x, int n)
{
    v16_halves a = {x};
    _mm256_maskstore_ps(p, first8(n), a.h[0]);
    _mm256_maskstore_ps(p + 8, first8(n - 8), a.h[1]);
}
/* 8 halves, 0 from the n-th on: AVX2 has masks for pairs, an odd one comes by itself. */
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

/* lanes folded 8, 4, 2, 1 */
ZK_INLINE float sum16(v16 x)
{
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

/* ---- bf16: the upper half of a float; rounded to nearest even, NaN stays NaN */
ZK_INLINE v16 widen16(v16h x) { return (v16)(__builtin_convertvector(x, v16u) << 16); }

ZK_INLINE v16h narrow16(v16 x)
{
    v16u u = (v16u)x, even = u + 0x7fff + ((u >> 16) & 1);
    v16u quiet = u | 0x400000;
    v16i nan = x != x;
    v16u kept = (quiet & (v16u)nan) | (even & ~(v16u)nan);
    return __builtin_convertvector(kept >> 16, v16h);
}

/* x made a bf16 by chance: up where the 16 bits that it drops and those of `chance` (below 2^16)
 * carry, so that its mean is x. What is not finite stays. */
ZK_INLINE v16 dither16(v16 x, v16u chance)
{
    v16u u = (v16u)x, made = (u + chance) & 0xffff0000;
    return select16((v16i)((u & 0x7f800000) == 0x7f800000), x, (v16)made);
}

/* ---- f16: IEEE's half, by F16C; rounded to nearest even, NaN stays NaN */
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
    return (v16_halves){.h = {_mm256_cvtph_ps(a.h[0]), _mm256_cvtph_ps(a.h[1])}}.v;
}
ZK_INLINE v16h narrow16_f16(v16 x)
{
    v16_halves a = {x};
    return (v16h_halves){.h = {_mm256_cvtps_ph(a.h[0], _MM_FROUND_TO_NEAREST_INT),
                               _mm256_cvtps_ph(a.h[1], _MM_FROUND_TO_NEAREST_INT)}}
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

/* ---- functions of 16 floats */
/* exp by 2^n * e^r, |r| <= ln 2 / 2; Taylor to r^7, the next term is below 0.1 ulp. Below -104 the
 * result rounds to 0, above 89 to infinity; 2^n in two steps where there is no instruction for it:
 * subnormals are rounded once. */
ZK_INLINE v16 exp16(v16 x)
{
    const v16 shift = set16(0x1.8p23f);
    x = max16(set16(-104.0f), min16(set16(89.0f), x));
    v16 shifted = fma16(x, set16(0x1.715476p0f), shift), n = shifted - shift;
    v16 r = fma16(n, set16(0x1.05c610p-29f), fma16(n, set16(-0x1.62e430p-1f), x));
    v16 p = set16(1.0f / 5040);
    p = fma16(p, r, set16(1.0f / 720));
    p = fma16(p, r, set16(1.0f / 120));
    p = fma16(p, r, set16(1.0f / 24));
    p = fma16(p, r, set16(1.0f / 6));
    p = fma16(p, r, set16(0.5f));
    p = fma16(p * r, r, r) + 1.0f;
#ifdef __AVX512F__
    return (v16)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    v16i e = (v16i)shifted - (v16i)shift, half = e >> 1;
    return p * (v16)((half + 127) << 23) * (v16)((e - half + 127) << 23);
#endif
}

/* log by x = 2^e * (1 + f), 1 + f in [sqrt(1/2), sqrt(2)); with s = f / (2 + f), log(1 + f) =
 * 2 atanh(s) = f - s * (f - r), r = 2 s^2 / 3 + 2 s^4 / 5 ...; s^2 < 0.03 */
ZK_INLINE v16 log16(v16 x)
{
    v16i small = x < 0x1p-126f;
    v16 y = select16(small, x * 0x1p23f, x);
    v16i bits = (v16i)y - 0x3f3504f3; /* sqrt(1/2) */
    v16 e = __builtin_convertvector((bits >> 23) + (small & -23), v16);
    v16 f = (v16)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
    v16 s = f / (f + 2.0f), z = s * s, r = set16(2.0f / 11);
    r = fma16(r, z, set16(2.0f / 9));
    r = fma16(r, z, set16(2.0f / 7));
    r = fma16(r, z, set16(2.0f / 5));
    r = fma16(r, z, set16(2.0f / 3));
    v16 tail = fma16(e, set16(-0x1.05c610p-29f), s * fma16(r, z, -f));
    v16 log = fma16(e, set16(0x1.62e430p-1f), f + tail);
    v16 zero_or_nan = select16(x == 0.0f, set16(-__builtin_inff()), set16(__builtin_nanf("")));
    return select16(x > 0.0f, select16(x == __builtin_inff(), x, log), zero_or_nan);
}

/* |x| < 1: x minus a correction from Lambert's continued fraction cut after x^2/11 (error < 0.1
 * ulp); else 1 - 2 / (exp(2|x|) + 1) with x's sign */
ZK_INLINE v16 tanh16(v16 x)
{
    v16i sign = (v16i)x & INT32_MIN;
    v16 a = (v16)((v16i)x ^ sign), z = a * a;
    v16i small = a < 1.0f;
    v16 over = a * z * fma16(z, z + 189.0f, set16(3465.0f));
    v16 under = fma16(z, fma16(z, z + 210.0f, set16(4725.0f)), set16(10395.0f));
    v16 q = select16(small, over, set16(2.0f)) / select16(small, under, exp16(a + a) + 1.0f);
    v16 y = select16(small, a, set16(1.0f)) - q;
    return (v16)((v16i)y | sign);
}

/* |x| < 0.875: the Taylor series to x^19. Else 1 - exp(p(|x|)) with x's sign, p a minimax fit of
 * log(erfc) on [0.875, 4] weighted by erfc (error 6e-9); erfc(4) is below half an ulp of 1. */
ZK_INLINE v16 erf16(v16 x)
{
    static const float series[] = {
        /* 2/sqrt(pi) * (-1)^n / (n! * (2n + 1)), n = 9 .. 1 */
        -1.63658447e-07f, 1.64621144e-06f,  -1.49256506e-05f, 1.20553330e-04f,  -8.54832702e-04f,
        5.22397762e-03f,  -2.68661706e-02f, 1.12837917e-01f,  -3.76126389e-01f,
    };
    static const float fit[] = {
        1.99901304e-04f,  -3.08199530e-03f, 2.23810282e-02f,  -1.04250193e-01f,
        -6.36820674e-01f, -1.12788939e+00f, -1.44211808e-04f,
    };
    v16i sign = (v16i)x & INT32_MIN;
    v16 a = (v16)((v16i)x ^ sign), z = a * a;
    v16 t = min16(set16(4.0f), a), near = set16(series[0]), far = set16(fit[0]);
    for (int i = 1; i < 9; i++) near = fma16(near, z, set16(series[i]));
    near = fma16(near, z, set16(0.128379167f)); /* 2/sqrt(pi) - 1 */
    near = fma16(near, a, a);
    for (int i = 1; i < 7; i++) far = fma16(far, t, set16(fit[i]));
    v16 y = select16(a < 0.875f, near, 1.0f - exp16(far));
    return (v16)((v16i)y | sign);
}

#endif
