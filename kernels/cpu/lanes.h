/* lanes.h -- as many floats as a register of this object holds, for products and for what is done
 * to every element of an optimizer's states.
 *
 * The 16 floats of vec.h are two registers of AVX2; gcc takes such pairs through memory between one
 * operation and the next. The bits are the same.
 */
#ifndef ZK_LANES_H
#define ZK_LANES_H
#include "part.h"

#define ZK_LANES ZK_INLINE /* what begins a function of update.h */

#ifdef __AVX512F__
typedef v16 lanes;
typedef v16u lanes_bits;
enum { LANES = 16 };
ZK_INLINE lanes lanes_load(const float *p) { return load16(p); }
ZK_INLINE void lanes_store(float *p, lanes x) { store16(p, x); }
ZK_INLINE lanes lanes_set(float x) { return set16(x); }
ZK_INLINE lanes lanes_fma(lanes a, lanes b, lanes c) { return fma16(a, b, c); }
ZK_INLINE lanes lanes_sqrt(lanes x) { return sqrt16(x); }
ZK_INLINE lanes lanes_sign(lanes x)
{
    return select16(x > 0.0f, set16(1), select16(x < 0.0f, set16(-1), set16(0)));
}
ZK_INLINE lanes lanes_dither(lanes x, lanes_bits chance) { return dither16(x, chance); }
ZK_INLINE lanes lanes_get(const real *p, int64_t i, int dtype, int n)
{
    return zk_get(p, i, dtype, n);
}
ZK_INLINE void lanes_put(real *p, int64_t i, int dtype, lanes x, int n)
{
    zk_put(p, i, dtype, x, n);
}

#else
typedef float lanes __attribute__((vector_size(32)));
typedef uint32_t lanes_bits __attribute__((vector_size(32)));
typedef int32_t lanes_mask __attribute__((vector_size(32)));
enum { LANES = 8 };
ZK_INLINE lanes lanes_load(const float *p) { return (lanes)_mm256_loadu_ps(p); }
ZK_INLINE void lanes_store(float *p, lanes x) { _mm256_storeu_ps(p, (__m256)x); }
ZK_INLINE lanes lanes_set(float x) { return (lanes)_mm256_set1_ps(x); }
ZK_INLINE lanes lanes_fma(lanes a, lanes b, lanes c)
{
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
ZK_INLINE lanes lanes_sqrt(lanes x) { return (lanes)_mm256_sqrt_ps((__m256)x); }
ZK_INLINE lanes lanes_select(lanes_mask mask, lanes a, lanes b)
{
    return (lanes)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)mask);
}
ZK_INLINE lanes lanes_sign(lanes x)
{
    lanes below = lanes_select(x < 0.0f, lanes_set(-1), lanes_set(0));
    return lanes_select(x > 0.0f, lanes_set(1), below);
}

/* As dither16 */
ZK_INLINE lanes lanes_dither(lanes x, lanes_bits chance)
{
    lanes_bits u = (lanes_bits)x, made = (u + chance) & 0xffff0000;
    return lanes_select((lanes_mask)((u & 0x7f800000) == 0x7f800000), x, (lanes)made);
}

/* As narrow16: the 16 bits of each that a bf16 keeps, in its upper half */
ZK_INLINE lanes_bits lanes_narrow(lanes x)
{
    lanes_bits u = (lanes_bits)x, even = u + 0x7fff + ((u >> 16) & 1);
    return (lanes_bits)lanes_select(x != x, (lanes)(u | 0x400000), (lanes)even);
}

/* Elements i .. i + n - 1 of an array of f32 or bf16; n: 0 to 8, lanes past them 0 */
ZK_INLINE lanes lanes_get(const real *p, int64_t i, int dtype, int n)
{
    uint16_t part[LANES] = {0};
    const uint16_t *from = (const uint16_t *)p + i;
    if (dtype == ZK_F32 && n == LANES) return (lanes)_mm256_loadu_ps((const float *)p + i);
    if (dtype == ZK_F32) return (lanes)_mm256_maskload_ps((const float *)p + i, first8(n));
    if (n < LANES) {
        for (int j = 0; j < n; j++) part[j] = from[j];
        from = part;
    }
    __m128i x = _mm_loadu_si128((const __m128i_u *)from);
    return (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16);
}

ZK_INLINE void lanes_put(real *p, int64_t i, int dtype, lanes x, int n)
{
    uint16_t part[LANES], *to = (uint16_t *)p + i;
    if (dtype == ZK_F32 && n == LANES) {
        _mm256_storeu_ps((float *)p + i, (__m256)x);
        return;
    }
    if (dtype == ZK_F32) {
        _mm256_maskstore_ps((float *)p + i, first8(n), (__m256)x);
        return;
    }
    __m256i u = (__m256i)(lanes_narrow(x) >> 16);
    __m128i low = _mm256_castsi256_si128(u), high = _mm256_extracti128_si256(u, 1);
    __m128i made = dtype == ZK_F16 ? _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT)
                                   : _mm_packus_epi32(low, high);
    _mm_storeu_si128((__m128i_u *)(n == LANES ? to : part), made);
    for (int j = 0; n < LANES && j < n; j++) to[j] = part[j];
}
#endif

#endif
