/* pairs.c -- sums of bf16 products in the order of AVX512_BF16 and of AMX, one term after the
 * other. Each term is added by one fused multiply-add to nearest. Denormals count as 0 before it,
 * and so do results below the least normal number, rounded as if exponents went on, whatever MXCSR
 * says. */
#include <math.h>
#include <stdint.h>
#include <string.h>

static float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

static float widened(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return flushed(y);
}

/* a * b + sum of numbers below 1, rounded as if exponents went on below: at 2^64 times the size. */
static float far_fused(float a, float b, float sum)
{
    float *small = fabsf(a) < fabsf(b) ? &a : &b;
    *small *= 0x1p64f;
    float large = fmaf(a, b, sum * 0x1p64f);
    return fabsf(large) < 0x1p-62f ? copysignf(0, large) : large * 0x1p-64f;
}

static float step(float sum, uint16_t a, uint16_t b)
{
    float x = widened(a), y = widened(b), s = flushed(sum);
    return fabsf(x * y) < 1 && fabsf(s) < 1 ? far_fused(x, y, s) : fmaf(x, y, s);
}

/* y[M,N] = a[M,K] . b[K,N]; elements after an odd K are 0. The odd product of a pair is added
 * first; odd_first 0: the even one. */
void pairs(float *y, const uint16_t *a, const uint16_t *b, int64_t M, int64_t N, int64_t K,
           int odd_first)
{
    for (int64_t m = 0; m < M; m++)
        for (int64_t n = 0; n < N; n++) {
            float sum = 0;
            for (int64_t k = 0; k < K + K % 2; k++) {
                int64_t i = odd_first ? k ^ 1 : k;
                sum = step(sum, i < K ? a[m * K + i] : 0, i < K ? b[i * N + n] : 0);
            }
            y[m * N + n] = sum;
        }
}

static float add(float a, float b) { return flushed(flushed(a) + flushed(b)); }

/* The same in groups of 32 elements: the products of even k and of odd k are a sum each, from 0 on.
 * These are added, and then added to y. */
void groups(float *y, const uint16_t *a, const uint16_t *b, int64_t M, int64_t N, int64_t K)
{
    for (int64_t m = 0; m < M; m++)
        for (int64_t n = 0; n < N; n++) {
            float total = 0;
            for (int64_t k = 0; k < K; k += 32) {
                float sum[2] = {0, 0};
                for (int64_t i = k; i < k + 32; i++)
                    sum[i % 2] =
                        step(sum[i % 2], i < K ? a[m * K + i] : 0, i < K ? b[i * N + n] : 0);
                total = add(total, add(sum[0], sum[1]));
            }
            y[m * N + n] = total;
        }
}

/* sum[i] += a[i] . b[i], n pairs each. */
void modelled(float *sum, const uint16_t (*a)[2], const uint16_t (*b)[2], int64_t n)
{
    for (int64_t i = 0; i < n; i++) sum[i] = step(step(sum[i], a[i][1], b[i][1]), a[i][0], b[i][0]);
}

#ifdef __AVX512BF16__
#include <immintrin.h>

/* n is a multiple of 16. */
void executed(float *sum, const uint16_t (*a)[2], const uint16_t (*b)[2], int64_t n)
{
    for (int64_t i = 0; i < n; i += 16) {
        __m512bh x = (__m512bh)_mm512_loadu_si512(a + i), y = (__m512bh)_mm512_loadu_si512(b + i);
        _mm512_storeu_ps(sum + i, _mm512_dpbf16_ps(_mm512_loadu_ps(sum + i), x, y));
    }
}
#endif
