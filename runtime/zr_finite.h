/* zr_finite.h -- finds numbers of a file that a type cannot have. */
#ifndef ZR_FINITE_H
#define ZR_FINITE_H
#include "zr_float.h"

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
