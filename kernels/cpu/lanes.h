/* lanes.h -- vectors of as many floats as a register of this object holds, and functions of them.
 *
 * The 16 floats of vec.h are two AVX2 registers, and gcc passes such pairs through memory between
 * operations. Products and elementwise work therefore use single registers; 16 lanes are used for
 * sums, whose order they define. The bits are the same.
 *
 * Invariants
 *  1. AVX2 and AVX-512, gcc and clang give the same bits: only IEEE operations and explicit FMAs
 *     are used, no libm, and everything is compiled with -ffp-contract=off.
 *  2. lanes_exp, lanes_log and lanes_erf are within 2 ulp of the exact value for all floats, and
 *     lanes_tanh within 4. NaN gives NaN; infinities give the limits.
 */
#ifndef ZK_LANES_H
#define ZK_LANES_H
#include "../scalar.h"
#include <immintrin.h>

#define ZK_INLINE static inline __attribute__((always_inline))
#define ZK_LANES ZK_INLINE /* qualifiers of a function in update.h */

#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
typedef float lanes __attribute__((vector_size(4 * LANES)));
/* 0 or -1, as from comparisons. */
typedef int32_t lanes_mask __attribute__((vector_size(4 * LANES)));
typedef uint32_t lanes_bits __attribute__((vector_size(4 * LANES)));

#ifdef __AVX512F__
ZK_INLINE lanes lanes_load(const float *p) { return (lanes)_mm512_loadu_ps(p); }
ZK_INLINE void lanes_store(float *p, lanes x) { _mm512_storeu_ps(p, (__m512)x); }
ZK_INLINE void lanes_stream(float *p, lanes x) { _mm512_stream_ps(p, (__m512)x); }
ZK_INLINE lanes lanes_set(float x) { return (lanes)_mm512_set1_ps(x); }
ZK_INLINE lanes lanes_fma(lanes a, lanes b, lanes c)
{
    return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
ZK_INLINE lanes lanes_sqrt(lanes x) { return (lanes)_mm512_sqrt_ps((__m512)x); }
/* a > b ? a : b, so b if either is NaN; lanes_min likewise */
ZK_INLINE lanes lanes_max(lanes a, lanes b) { return (lanes)_mm512_max_ps((__m512)a, (__m512)b); }
ZK_INLINE lanes lanes_min(lanes a, lanes b) { return (lanes)_mm512_min_ps((__m512)a, (__m512)b); }
ZK_INLINE lanes lanes_select(lanes_mask mask, lanes a, lanes b)
{
    return (lanes)(((lanes_mask)a & mask) | ((lanes_mask)b & ~mask));
}
#else
ZK_INLINE lanes lanes_load(const float *p) { return (lanes)_mm256_loadu_ps(p); }
ZK_INLINE void lanes_store(float *p, lanes x) { _mm256_storeu_ps(p, (__m256)x); }
ZK_INLINE void lanes_stream(float *p, lanes x) { _mm256_stream_ps(p, (__m256)x); }
ZK_INLINE lanes lanes_set(float x) { return (lanes)_mm256_set1_ps(x); }
ZK_INLINE lanes lanes_fma(lanes a, lanes b, lanes c)
{
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
ZK_INLINE lanes lanes_sqrt(lanes x) { return (lanes)_mm256_sqrt_ps((__m256)x); }
/* a > b ? a : b, so b if either is NaN; lanes_min likewise */
ZK_INLINE lanes lanes_max(lanes a, lanes b) { return (lanes)_mm256_max_ps((__m256)a, (__m256)b); }
ZK_INLINE lanes lanes_min(lanes a, lanes b) { return (lanes)_mm256_min_ps((__m256)a, (__m256)b); }
ZK_INLINE lanes lanes_select(lanes_mask mask, lanes a, lanes b)
{
    return (lanes)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask);
}
#endif

ZK_INLINE lanes lanes_sign(lanes x)
{
    lanes below = lanes_select(x < 0.0f, lanes_set(-1), lanes_set(0));
    return lanes_select(x > 0.0f, lanes_set(1), below);
}

/* Round x to bf16 stochastically: up if the 16 bits that are dropped and `chance` (below 2^16)
 * carry, so the expected value is x. Values that are not finite stay. */
ZK_INLINE lanes lanes_dither(lanes x, lanes_bits chance)
{
    lanes_bits u = (lanes_bits)x, made = (u + chance) & 0xffff0000;
    return lanes_select((lanes_mask)((u & 0x7f800000) == 0x7f800000), x, (lanes)made);
}

/* ---- functions */
#define EXP_SHIFT 0x1.8p23f /* added to n it leaves n in the low bits */

/* Split x = n ln 2 + r, |r| <= ln 2 / 2. Return n + EXP_SHIFT. */
ZK_INLINE lanes lanes_split(lanes x, lanes *r)
{
    const lanes shift = lanes_set(EXP_SHIFT);
    lanes shifted = lanes_fma(x, lanes_set(0x1.715476p0f), shift), n = shifted - shift;
    lanes high = lanes_fma(n, lanes_set(-0x1.62e430p-1f), x);
    *r = lanes_fma(n, lanes_set(0x1.05c610p-29f), high);
    return shifted;
}

/* e^r - 1, |r| <= ln 2 / 2, with a Taylor series to r^7 whose next term is below 0.1 ulp of e^r */
ZK_INLINE lanes lanes_rise(lanes r)
{
    lanes p = lanes_set(1.0f / 5040);
    p = lanes_fma(p, r, lanes_set(1.0f / 720));
    p = lanes_fma(p, r, lanes_set(1.0f / 120));
    p = lanes_fma(p, r, lanes_set(1.0f / 24));
    p = lanes_fma(p, r, lanes_set(1.0f / 6));
    p = lanes_fma(p, r, lanes_set(0.5f));
    return lanes_fma(p * r, r, r);
}

/* exp(x) = 2^n * e^r. Below -104 it rounds to 0 and is not computed: where the instruction
 * underflowed it took 25 times as long. Above 89 it is infinity. Without an instruction for it 2^n
 * is applied in two steps, so that subnormals are rounded once. */
ZK_INLINE lanes lanes_exp(lanes x)
{
    lanes_mask vanishes = x < -104.0f;
    x = lanes_max(lanes_set(-104.0f), lanes_min(lanes_set(89.0f), x));
    lanes r, shifted = lanes_split(x, &r), p = lanes_rise(r) + 1.0f;
#ifdef __AVX512F__
    __mmask16 there = (__mmask16)~_mm512_movepi32_mask((__m512i)vanishes);
    return (lanes)_mm512_maskz_scalef_ps(there, (__m512)p,
                                         (__m512)(shifted - lanes_set(EXP_SHIFT)));
#else
    lanes_mask e = (lanes_mask)shifted - (lanes_mask)lanes_set(EXP_SHIFT), half = e >> 1;
    p = lanes_select(vanishes, lanes_set(0), p);
    return p * (lanes)((half + 127) << 23) * (lanes)((e - half + 127) << 23);
#endif
}

/* log(x) for x = 2^e * (1 + f), 1 + f in [sqrt(1/2), sqrt(2)). With s = f / (2 + f): log(1 + f) = 2
 * atanh(s) = f - s * (f - r), r = 2 s^2 / 3 + 2 s^4 / 5 ..., s^2 < 0.03. */
ZK_INLINE lanes lanes_log(lanes x)
{
    lanes_mask small = x < 0x1p-126f;
    lanes y = lanes_select(small, x * 0x1p23f, x);
    lanes_mask bits = (lanes_mask)y - 0x3f3504f3; /* sqrt(1/2) */
    lanes e = __builtin_convertvector((bits >> 23) + (small & -23), lanes);
    lanes f = (lanes)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
    lanes s = f / (f + 2.0f), z = s * s, r = lanes_set(2.0f / 11);
    r = lanes_fma(r, z, lanes_set(2.0f / 9));
    r = lanes_fma(r, z, lanes_set(2.0f / 7));
    r = lanes_fma(r, z, lanes_set(2.0f / 5));
    r = lanes_fma(r, z, lanes_set(2.0f / 3));
    lanes tail = lanes_fma(e, lanes_set(-0x1.05c610p-29f), s * lanes_fma(r, z, -f));
    lanes log = lanes_fma(e, lanes_set(0x1.62e430p-1f), f + tail);
    lanes infinity = lanes_set(__builtin_inff()), none = lanes_set(__builtin_nanf(""));
    lanes zero_or_none = lanes_select(x == 0.0f, -infinity, none);
    return lanes_select(x > 0.0f, lanes_select(x == infinity, x, log), zero_or_none);
}

/* erf(x). |x| < 0.875: Taylor series to x^19. Else 1 - exp(p(|x|)) with the sign of x,
 * where p is a minimax fit of log(erfc) on [0.875, 4] weighted by erfc (error 6e-9);
 * erfc(4) is below half an ulp of 1. */
ZK_INLINE lanes lanes_erf(lanes x)
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
    lanes_mask sign = (lanes_mask)x & INT32_MIN;
    lanes a = (lanes)((lanes_mask)x ^ sign), z = a * a, t = lanes_min(lanes_set(4.0f), a);
    lanes near = lanes_set(series[0]), far = lanes_set(fit[0]);
    for (int i = 1; i < 9; i++) near = lanes_fma(near, z, lanes_set(series[i]));
    near = lanes_fma(near, z, lanes_set(0.128379167f)); /* 2/sqrt(pi) - 1 */
    near = lanes_fma(near, a, a);
    for (int i = 1; i < 7; i++) far = lanes_fma(far, t, lanes_set(fit[i]));
    lanes y = lanes_select(a < 0.875f, near, 1.0f - lanes_exp(far));
    return (lanes)((lanes_mask)y | sign);
}

/* tanh(x) = m / (m + 2) with m = exp(2 |x|) - 1 = 2^n (e^r - 1) + (2^n - 1), and the sign of x. It
 * rounds to 1 from |x| = 10 on. */
ZK_INLINE lanes lanes_tanh(lanes x)
{
    lanes_mask sign = (lanes_mask)x & INT32_MIN;
    lanes a = (lanes)((lanes_mask)x ^ sign), r;
    lanes shifted = lanes_split(lanes_min(lanes_set(20.0f), a + a), &r);
    lanes two = (lanes)(((lanes_mask)shifted - (lanes_mask)lanes_set(EXP_SHIFT) + 127) << 23);
    lanes m = lanes_fma(two, lanes_rise(r), two - 1.0f);
    return (lanes)((lanes_mask)(m / (m + 2.0f)) | sign);
}

#endif
