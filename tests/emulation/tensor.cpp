/* tensor.cpp -- sums of products as tensor cores make them: integers at one exponent. */
#include "tensor.h"
#include "shim.h"

#include <algorithm>

namespace {

/* Tensor cores of a major compute capability: bits kept below the greatest exponent; products that
 * are added at once. Of more, the first sum is the c of the next. */
struct cores {
    int major, fraction, terms;
};
const cores known[] = {{8, 24, 8}, {9, 25, 16}, {10, 25, 16}};

const cores *chosen = &known[1];

enum { LOWEST = -126, BIAS = 127, FRACTION = 23, INFINITE = 0x7f800000, NO_NUMBER = 0x7fffffff };

/* A format of IEEE's kind: bits of the fraction and of the exponent. */
template <int FRACTION_BITS, int EXPONENT_BITS> struct format {
    enum {
        BITS = FRACTION_BITS,
        TOP = (1 << EXPONENT_BITS) - 1, /* exponent of infinity and NaN */
        SHIFT = TOP / 2,
        SIGN = FRACTION_BITS + EXPONENT_BITS
    };
    static int biased(uint32_t u) { return (int)(u >> BITS) & TOP; }
    static int significand(uint32_t u)
    {
        return (int)(u & ((1u << BITS) - 1)) | (biased(u) ? 1 << BITS : 0);
    }
    static int exponent(uint32_t u)
    {
        int e = biased(u);
        return u << (32 - SIGN) ? (e ? e : 1) - SHIFT : LOWEST;
    }
    static double value(uint32_t u)
    {
        double x = biased(u) < TOP               ? std::ldexp(significand(u), exponent(u) - BITS)
                   : significand(u) == 1 << BITS ? HUGE_VAL
                                                 : NAN;
        return u >> SIGN & 1 ? -x : x;
    }
};
typedef format<7, 8> bf16;
typedef format<10, 5> f16;
typedef format<FRACTION, 8> f32;

/* Return the float nearest to sum * 2^exponent that is no larger in magnitude; from 2^128 on
 * infinity. */
uint32_t cut(int64_t sum, int exponent)
{
    uint64_t size = (uint64_t)(sum < 0 ? -sum : sum);
    if (!size) return 0;
    int top = std::max(63 - __builtin_clzll(size) + exponent, (int)LOWEST);
    int down = top - FRACTION - exponent;
    size = down < 0 ? size << -down : size >> down;
    if (!size) return 0;
    uint32_t sign = sum < 0 ? 1u << 31 : 0, bits = (uint32_t)size;
    if (top > BIAS) return sign | INFINITE;
    if (size >> FRACTION) bits += (uint32_t)(top + BIAS - 1) << FRACTION; /* else subnormal */
    return sign | bits;
}

/* Return c + a . b where a term is infinite or NaN; finite terms do not change the result. */
template <class H> uint32_t special(const uint16_t *a, const uint16_t *b, int n, uint32_t c)
{
    double sum = f32::value(c);
    for (int k = 0; k < n; k++) sum += H::value(a[k]) * H::value(b[k]);
    return sum != sum ? (uint32_t)NO_NUMBER : sum < 0 ? 1u << 31 | INFINITE : (uint32_t)INFINITE;
}

template <class H, int N>
uint32_t add(const uint16_t *a, const uint16_t *b, uint32_t c, int fraction)
{
    int32_t product[N], exponent[N], most = f32::exponent(c), sum = 0;
    bool finite = f32::biased(c) < f32::TOP;
    for (int k = 0; k < N; k++) {
        finite &= H::biased(a[k]) < H::TOP && H::biased(b[k]) < H::TOP;
        product[k] = H::significand(a[k]) * H::significand(b[k]) << (fraction - 2 * H::BITS);
        exponent[k] = H::exponent(a[k]) + H::exponent(b[k]);
        most = std::max(most, exponent[k]);
    }
    if (!finite) return special<H>(a, b, N, c);
    for (int k = 0; k < N; k++) { /* each is below 2^27, so the sum of 16 is below 2^31 */
        int32_t part = product[k] >> std::min(most - exponent[k], 31);
        sum += (a[k] ^ b[k]) >> H::SIGN & 1 ? -part : part;
    }
    int32_t own = f32::significand(c) << (fraction - FRACTION);
    own >>= std::min(most - f32::exponent(c), 31);
    return cut((int64_t)sum + (c >> 31 ? -own : own), most - fraction);
}

template <class H> uint32_t dot(const uint16_t *a, const uint16_t *b, uint32_t c)
{
    const cores &of = *chosen;
    if (of.terms == TENSOR_TERMS) return add<H, TENSOR_TERMS>(a, b, c, of.fraction);
    enum { HALF = TENSOR_TERMS / 2 };
    c = add<H, HALF>(a, b, c, of.fraction);
    return add<H, HALF>(a + HALF, b + HALF, c, of.fraction);
}

}

void tensor_choose(int major)
{
    for (const cores &c : known)
        if (c.major == major) {
            chosen = &c;
            return;
        }
    shim_fail("compute capability %d: tensor cores that the emulation does not know", major);
}

uint32_t tensor_bf16(const uint16_t *a, const uint16_t *b, uint32_t c)
{
    return dot<bf16>(a, b, c);
}

uint32_t tensor_f16(const uint16_t *a, const uint16_t *b, uint32_t c) { return dot<f16>(a, b, c); }
