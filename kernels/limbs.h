/* limbs.h -- exact sums of non-negative f64 as fixed-point numbers of ZK_LIMBS 32-bit digits.
 *
 * Invariants
 *  1. Bit 0 of limb i has weight 2^(32*i - 448). A term adds less than 2^32 to each limb, so 2^31
 *     terms fit; carries are left to limbs_value.
 *  2. A term below 2^430 whose lowest bit has weight 2^-448 or more is added exactly. The square of
 *     an f32 lies in [2^-298, 2^256], and 1024 of them stay below 2^266; f32 losses have no bit
 *     below 2^-149.
 */
#ifndef ZK_LIMBS_H
#define ZK_LIMBS_H
#include "scalar.h"

/* Split s into three digits for the limbs from *at on. Returns 0 if s is not
 * finite or breaks invariant 2. */
ZK_BOTH int limbs_split(double s, int *at, uint32_t digit[3])
{
    uint64_t bits;
    memcpy(&bits, &s, 8);
    int bit = (int)(bits >> 52 & 0x7ff) - 1075 + 448, shift = bit & 31;
    bits = bit < 0 ? 0 : (bits & ((1ull << 52) - 1)) | 1ull << 52;
    *at = bit < 0 ? 0 : bit / 32;
    digit[0] = (uint32_t)(bits << shift);
    digit[1] = (uint32_t)(bits << shift >> 32);
    digit[2] = (uint32_t)(bits >> 32 >> (32 - shift));
    return s >= 0 && s < 0x1p430 && (bit >= 0 || s == 0);
}

/* Add s to the sum. Returns 0, and adds nothing, if s cannot be split. */
ZK_BOTH int limbs_add(int64_t *limb, double s)
{
    uint32_t digit[3];
    int at, good = limbs_split(s, &at, digit);
    for (int i = 0; good && i < 3; i++) limb[at + i] += digit[i];
    return good;
}

/* Return the sum, rounded once to nearest even. */
ZK_BOTH double limbs_value(const int64_t *limb)
{
    uint32_t digit[ZK_LIMBS + 4] = {0}; /* two zeros below, space for a carry above */
    int64_t carry = 0;
    int top = 0;
    for (int i = 0; i < ZK_LIMBS + 2; i++) {
        carry += i < ZK_LIMBS ? limb[i] : 0;
        digit[i + 2] = (uint32_t)carry;
        carry >>= 32;
        top = digit[i + 2] ? i + 2 : top;
    }
    if (!top) return 0;
    uint64_t high = digit[top], low = (uint64_t)digit[top - 1] << 32 | digit[top - 2];
    int drop = 33 - __builtin_clz(digit[top]); /* leaves 63 bits; the last is sticky */
    int64_t head = (int64_t)(high << (64 - drop) | low >> drop);
    int rest = (low & ((1ull << drop) - 1)) != 0;
    for (int i = 0; i < top - 2; i++) rest |= digit[i] != 0;
    uint64_t bits = (uint64_t)(1023 + 32 * (top - 4) + drop - 448) << 52;
    double scale;
    memcpy(&scale, &bits, 8);
    return (double)(head | rest) * scale;
}

#endif
