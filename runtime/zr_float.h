/* zr_float.h -- floats as the runtime and files of weights store them: f32, bf16, IEEE halves. */
#ifndef ZR_FLOAT_H
#define ZR_FLOAT_H
#include <stdint.h>
#include <string.h>

/* The first of zr_safetensors.c's dtypes. */
enum { F32 = 0, BF16 = 1, F16 = 2 };

/* Return the f32 bits of an IEEE half: exact, with the payload of a NaN. */
static inline uint32_t zr_of_half(uint32_t h)
{
    uint32_t sign = (h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023, bits;
    float tiny = (float)m * 0x1p-24f; /* exact, and normal in f32 */
    memcpy(&bits, &tiny, 4);
    if (e > 0) bits = (e == 31 ? 255 : e + 112) << 23 | m << 13;
    return sign | bits;
}

/* to[n] = floats from 2-byte numbers */
static inline void zr_widen(float *to, const uint16_t *from, int64_t n, int dtype)
{
    for (int64_t k = 0; k < n; k++) {
        uint32_t bits = dtype == BF16 ? (uint32_t)from[k] << 16 : zr_of_half(from[k]);
        memcpy(&to[k], &bits, 4);
    }
}

/* Return the nearest bf16 of a float's bits, ties to even; NaN stays NaN. */
static inline uint32_t zr_to_bf16(uint32_t u)
{
    return ((u & 0x7fffffff) > 0x7f800000 ? u | 0x400000 : u + 0x7fff + (u >> 16 & 1)) >> 16;
}

/* Return the nearest IEEE half, ties to even; above 65504 infinity, NaN stays NaN. */
static inline uint32_t zr_to_half(uint32_t u)
{
    uint32_t sign = u >> 16 & 0x8000, m = u & 0x7fffffff;
    if (m > 0x7f800000) return sign | 0x7e00;
    if (m >= 0x477ff000) return sign | 0x7c00;
    if (m >= 0x38800000) return sign | (m - 0x38000000 + 0xfff + (m >> 13 & 1)) >> 13;
    float x; /* subnormal: the last bit of the sum is 2^-24 */
    memcpy(&x, &m, 4);
    x += 0.5f;
    memcpy(&m, &x, 4);
    return sign | (m - 0x3f000000);
}

/* to[n] = bf16 or halves from floats */
static inline void zr_narrow(uint16_t *to, const float *from, int64_t n, int dtype)
{
    for (int64_t k = 0; k < n; k++) {
        uint32_t u;
        memcpy(&u, &from[k], 4);
        to[k] = (uint16_t)(dtype == BF16 ? zr_to_bf16(u) : zr_to_half(u));
    }
}

/* ---- numbers that a type has not */
/* for each type the bits of the smallest f32 that is not rounded to a finite number */
static const uint32_t zr_limits[] = {[F32] = 0x7f800000, [BF16] = 0x7f7f8000, [F16] = 0x477ff000};

/* Return whether an element's magnitude, as bits, is at or above the limit:
 * one pass without branches. */
static inline int zr_any_beyond32(const char *from, int64_t n, uint32_t limit)
{
    uint32_t any = 0, x;
    for (int64_t i = 0; i < n; i++) {
        memcpy(&x, from + 4 * i, 4);
        any |= (x & 0x7fffffff) + (0x80000000 - limit);
    }
    return any >> 31;
}

static inline int zr_any_beyond16(const char *from, int64_t n, uint16_t limit)
{
    uint16_t any = 0, x;
    for (int64_t i = 0; i < n; i++) {
        memcpy(&x, from + 2 * i, 2);
        any |= (uint16_t)((x & 0x7fff) + (0x8000 - limit));
    }
    return any >> 15;
}

static inline int zr_any_beyond(const char *from, int type, int64_t n, uint32_t limit)
{
    if (type == F32) return zr_any_beyond32(from, n, limit);
    /* bf16 is the upper half of an f32; all finite f16 are below every limit */
    return zr_any_beyond16(from, n, type == F16 ? 0x7c00 : (uint16_t)((limit + 0xffff) >> 16));
}

#endif
