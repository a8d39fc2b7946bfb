/* limbs.h -- exact sums of non-negative f64 as fixed-point numbers of ZK_LIMBS 32-bit digits.
 *
 * Invariants
 *  1. Bit 0 of limb i weighs 2^(32*i - 448). A term adds less than 2^32 to each limb, so 2^31 terms
 *     fit; carries wait for limbs_value.
 *  2. A term below 2^430 whose lowest bit weighs 2^-448 or more is added exactly. A square of an
 *     f32 lies in [2^-298, 2^256], 1024 of them stay below 2^266; f32 losses have no bit below
 *     2^-149.
 */
#ifndef ZK_LIMBS_H
#define ZK_LIMBS_H
#include "../zk.h"
#include <string.h>

/* Adds s; returns 0, adding nothing, where s is not finite (or beyond invariant 2). */
static inline int limbs_add(int64_t *limb, double s)
{
    uint64_t bits, digits;
    if (!(s >= 0 && s < 0x1p430))
        return 0;
    memcpy(&bits, &s, 8);
    int at = (int)(bits >> 52 & 0x7ff) - 1075 + 448;
    digits = (bits & ((1ull << 52) - 1)) | 1ull << 52;
    if (at < 0)
        return s == 0;
    unsigned __int128 wide = (unsigned __int128)digits << at % 32;
    for (int i = 0; i < 3; i++)
        limb[at / 32 + i] += (int64_t)(uint32_t)(wide >> 32 * i);
    return 1;
}

/* The sum, rounded once to nearest even. */
static inline double limbs_value(const int64_t *limb)
{
    uint32_t digit[ZK_LIMBS + 4] = {0};          /* two zeros below, room for a carry above */
    int64_t carry = 0;
    int top = 0;
    for (int i = 0; i < ZK_LIMBS + 2; i++) {
        carry += i < ZK_LIMBS ? limb[i] : 0;
        digit[i + 2] = (uint32_t)carry;
        carry >>= 32;
        top = digit[i + 2] ? i + 2 : top;
    }
    if (!top)
        return 0;
    unsigned __int128 wide = (unsigned __int128)digit[top] << 64;
    wide |= (uint64_t)digit[top - 1] << 32 | digit[top - 2];
    int drop = 33 - __builtin_clz(digit[top]);   /* leaves 63 bits, the last one sticky */
    int64_t head = (int64_t)(wide >> drop);
    int rest = (wide & (((unsigned __int128)1 << drop) - 1)) != 0;
    for (int i = 0; i < top - 2; i++)
        rest |= digit[i] != 0;
    uint64_t bits = (uint64_t)(1023 + 32 * (top - 4) + drop - 448) << 52;
    double scale;
    memcpy(&scale, &bits, 8);
    return (double)(head | rest) * scale;
}

#endif
