/* functions.h -- exp, erf and tanh of a float on a GPU, computed step by step as in
 * kernels/cpu/lanes.h.
 *
 * Invariants
 *  1. exponential, error and tangent give the bits of lanes_exp, lanes_erf and lanes_tanh for all
 *     floats.
 *  2. NaN gives NaN: bounds are set by comparisons that are false for NaN.
 */
#ifndef ZK_CUDA_FUNCTIONS_H
#define ZK_CUDA_FUNCTIONS_H
#include "cuda.h"

/* exp(r) - 1, |r| <= ln 2 / 2, with a Taylor series to r^7 */
__device__ inline float exp_rise(float r)
{
    float p = 1.0f / 5040;
    p = fmaf(p, r, 1.0f / 720);
    p = fmaf(p, r, 1.0f / 120);
    p = fmaf(p, r, 1.0f / 24);
    p = fmaf(p, r, 1.0f / 6);
    p = fmaf(p, r, 0.5f);
    return fmaf(p * r, r, r);
}

__device__ inline float exp_rest(float r) { return exp_rise(r) + 1.0f; }

static const float EXP_SHIFT = 0x1.8p23f; /* added to n it leaves n in the low bits */

/* Split x = n ln 2 + r; returns n + EXP_SHIFT. */
__device__ inline float exp_split(float x, float *r)
{
    float shifted = fmaf(x, 0x1.715476p0f, EXP_SHIFT), n = shifted - EXP_SHIFT;
    *r = fmaf(n, 0x1.05c610p-29f, fmaf(n, -0x1.62e430p-1f, x));
    return shifted;
}

__device__ inline float exponential(float x)
{
    x = 89.0f < x ? 89.0f : x;
    x = -104.0f > x ? -104.0f : x;
    float r, shifted = exp_split(x, &r), p = exp_rest(r);
    int e = __float_as_int(shifted) - __float_as_int(EXP_SHIFT), half = e >> 1;
    return p * __int_as_float((half + 127) << 23) * __int_as_float((e - half + 127) << 23);
}

/* exp(x) for x <= 0 in fewer steps: the bits of `exponential` where the result is 2^-126 or more,
 * and 0 from exp(-88) = 2^-127 down */
__device__ inline float exp_below(float x)
{
    x = x < -88.0f ? -88.0f : x;
    float r, shifted = exp_split(x, &r);
    return exp_rest(r) * __uint_as_float((__float_as_uint(shifted) << 23) + (127u << 23));
}

/* erf(x). |x| < 0.875: a Taylor series; else 1 - exp(p(|x|)): see lanes_erf. */
__device__ inline float error(float x)
{
    float a = fabsf(x), z = a * a, t = 4.0f < a ? 4.0f : a;
    float near = -1.63658447e-07f, far = 1.99901304e-04f;
    near = fmaf(near, z, 1.64621144e-06f);
    near = fmaf(near, z, -1.49256506e-05f);
    near = fmaf(near, z, 1.20553330e-04f);
    near = fmaf(near, z, -8.54832702e-04f);
    near = fmaf(near, z, 5.22397762e-03f);
    near = fmaf(near, z, -2.68661706e-02f);
    near = fmaf(near, z, 1.12837917e-01f);
    near = fmaf(near, z, -3.76126389e-01f);
    near = fmaf(near, z, 0.128379167f);
    near = fmaf(near, a, a);
    far = fmaf(far, t, -3.08199530e-03f);
    far = fmaf(far, t, 2.23810282e-02f);
    far = fmaf(far, t, -1.04250193e-01f);
    far = fmaf(far, t, -6.36820674e-01f);
    far = fmaf(far, t, -1.12788939e+00f);
    far = fmaf(far, t, -1.44211808e-04f);
    float y = a < 0.875f ? near : 1.0f - exponential(far);
    return copysignf(y, x);
}

/* tanh(x) = m / (m + 2), m = exp(2 |x|) - 1: see lanes_tanh */
__device__ inline float tangent(float x)
{
    float a = fabsf(x), r, z = a + a;
    float shifted = exp_split(20.0f < z ? 20.0f : z, &r);
    float two = __int_as_float((__float_as_int(shifted) - __float_as_int(EXP_SHIFT) + 127) << 23);
    float m = fmaf(two, exp_rise(r), two - 1.0f);
    return copysignf(__fdiv_rn(m, m + 2.0f), x);
}

#endif
