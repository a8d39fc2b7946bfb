/* scalar.h -- scalar functions for every target: bf16 and f16 conversion; sine, cosine, exp and log
 * of doubles.
 *
 * Invariants
 *  1. The bits are the same on a CPU and a GPU and with any compiler: only IEEE operations and
 *     explicit FMAs are used, no libm, and everything is compiled with contraction off.
 *  2. Functions of doubles are within 2 ulp of the exact value, sine and cosine for |x| <= 1e7. NaN
 *     gives NaN; infinities give the limits.
 */
#ifndef ZK_SCALAR_H
#define ZK_SCALAR_H
#include <stdint.h>
#include <string.h>

#include "zk.h"

#ifdef __CUDACC__
#define ZK_BOTH static __host__ __device__ inline /* a function of the host and the device */
#else
#define ZK_BOTH static inline
#endif

enum { ZK_BLOCK = 1024 }; /* elements of a block, which norm, hash and shards never split */

ZK_BOTH int64_t zk_least(int64_t a, int64_t b) { return a < b ? a : b; }
ZK_BOTH int64_t zk_most(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- bf16: the upper half of a float; rounds to nearest even, NaN stays NaN */
ZK_BOTH float widen(uint16_t x)
{
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

ZK_BOTH uint16_t narrow(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return (uint16_t)((x != x ? u | 0x400000 : u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

/* ---- f16: IEEE half; rounds to nearest even, 65520 and above to infinity; NaN stays NaN. The bits
 * are those of F16C. */
ZK_BOTH float widen_f16(uint16_t x)
{
    uint32_t low = x & 0x7fff, rise = low < 0x7c00 ? 112 : 224; /* rise: added to the exponent */
    uint32_t u = ((low << 13) + (rise << 23)) | (uint32_t)(low > 0x7c00) << 22;
    float small = (float)low * 0x1p-24f, f;
    if (low < 0x400) memcpy(&u, &small, sizeof u);
    u |= (uint32_t)(x & 0x8000) << 16;
    memcpy(&f, &u, sizeof f);
    return f;
}

ZK_BOTH uint16_t narrow_f16(float x)
{
    uint32_t u, low;
    memcpy(&u, &x, sizeof u);
    uint32_t sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    memcpy(&x, &u, sizeof x);
    x += 0.5f; /* subnormal halves have the spacing of floats in [0.5, 1) */
    memcpy(&low, &x, sizeof low);
    if (u > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (u >> 13 & 0x1ff));
    if (u >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (u < 0x38800000) return (uint16_t)(sign | (low - 0x3f000000));
    return (uint16_t)(sign | (((u + 0xfff + (u >> 13 & 1)) >> 13) - (112 << 10)));
}

/* ---- element i of an array of `dtype` */
ZK_BOTH float realr(const real *p, int64_t i, int dtype)
{
    if (dtype == ZK_F32) return ((const float *)p)[i];
    uint16_t x = ((const uint16_t *)p)[i];
    return dtype == ZK_F16 ? widen_f16(x) : widen(x);
}

/* ---- functions of a double */
ZK_BOTH double zk_power(int64_t n) /* 2^n, where that is a normal number */
{
    int64_t bits = (n + 1023) << 52;
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* 1/n!, 2 <= n <= 18 */
ZK_BOTH double zk_inverse_factorial(int n)
{
    // clang-format off
    static const double value[19] = {
        1.0, 1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320,
        1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800,
        1.0 / 87178291200, 1.0 / 1307674368000, 1.0 / 20922789888000, 1.0 / 355687428096000,
        1.0 / 6402373705728000,
    };
    // clang-format on
    return value[n];
}

/* exp(x), computed as in lanes_exp, with a Taylor series to r^14 */
ZK_BOTH double zk_exp(double x)
{
    if (x != x) return x;
    x = x < -746.0 ? -746.0 : x > 710.0 ? 710.0 : x;
    double shifted = __builtin_fma(x, 0x1.71547652b82fep0, 0x1.8p52), n = shifted - 0x1.8p52;
    double high = __builtin_fma(n, -0x1.62e42fefa39efp-1, x), low = n * -0x1.abc9e3b39803fp-56;
    double r = high + low;
    double p = zk_inverse_factorial(14), rest = high - r + low;
    for (int k = 13; k >= 2; k--) p = __builtin_fma(p, r, zk_inverse_factorial(k));
    p = __builtin_fma(p * r, r, rest) + r + 1.0;
    int64_t e = (int64_t)n, half = e >> 1;
    return p * zk_power(half) * zk_power(e - half);
}

/* log(x), computed as in lanes_log, with a series to the 11th power of s^2 */
ZK_BOTH double zk_log(double x)
{
    if (!(x > 0.0) || x == __builtin_inf())
        return x == 0.0 ? -__builtin_inf() : x < 0.0 ? __builtin_nan("") : x;
    int64_t small = x < 0x1p-1022, bits, mantissa;
    x = small ? x * 0x1p54 : x;
    memcpy(&bits, &x, sizeof bits);
    bits -= 0x3fe6a09e667f3bcd; /* sqrt(1/2) */
    mantissa = (bits & 0xfffffffffffff) + 0x3fe6a09e667f3bcd;
    memcpy(&x, &mantissa, sizeof x);
    double e = (double)((bits >> 52) - 54 * small), f = x - 1.0, s = f / (f + 2.0), z = s * s;
    double r = 2.0 / 23;
    for (double k = 21; k > 1; k -= 2) r = __builtin_fma(r, z, 2.0 / k);
    double half = 0.5 * f * f;
    double tail = __builtin_fma(s, half + r * z, e * 0x1.abc9e3b39803fp-56);
    return __builtin_fma(e, 0x1.62e42fefa39efp-1, f - (half - tail));
}

/* Reduce x to n * pi/2 + r + *low, |r| <= pi/4, and return r. pi/2 is split into three parts of 30
 * bits, whose products with n < 2^23 are exact, and a fourth of 53 bits. */
ZK_BOTH double zk_quadrant(double x, double *low, int *n)
{
    double shifted = __builtin_fma(x, 0x1.45f306dc9c883p-1, 0x1.8p52), k = shifted - 0x1.8p52;
    double a = x - k * 0x1.921fb54p0, p = k * 0x1.10b46118p-30;
    double b = a - p, back = a - b, error = back - p + (a - (b + back));
    double q = k * 0x1.313198ap-61;
    double c = b - q, again = b - c;
    error += again - q + (b - (c + again)) - k * 0x1.701b839a25205p-92;
    double r = c + error;
    int64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    *low = c - r + error;
    *n = (int)(bits & 3);
    return r;
}

/* sin(r + low), Taylor series to r^17; the next term is below 2^-60 */
ZK_BOTH double zk_sine(double r, double low)
{
    double z = r * r, p = zk_inverse_factorial(17);
    for (int k = 15; k >= 3; k -= 2) p = __builtin_fma(-z, p, zk_inverse_factorial(k));
    return r + __builtin_fma(-p * z, r, low * __builtin_fma(-0.5, z, 1.0));
}

/* cos(r + low), Taylor series to r^18; the rounding error of 1 - r^2/2 is added back */
ZK_BOTH double zk_cosine(double r, double low)
{
    double z = r * r, half = 0.5 * z, one = 1.0 - half, p = zk_inverse_factorial(18);
    for (int k = 16; k >= 4; k -= 2) p = __builtin_fma(-z, p, zk_inverse_factorial(k));
    return one + (1.0 - one - half + __builtin_fma(p * z, z, -r * low));
}

ZK_BOTH double zk_turn(double x, int quarter) /* sin(x + quarter * pi/2) */
{
    int n;
    double low, r = zk_quadrant(x, &low, &n);
    double y = (n + quarter) & 1 ? zk_cosine(r, low) : zk_sine(r, low);
    return (n + quarter) & 2 ? -y : y;
}

ZK_BOTH double zk_sin(double x) { return zk_turn(x, 0); }
ZK_BOTH double zk_cos(double x) { return zk_turn(x, 1); }

#endif
