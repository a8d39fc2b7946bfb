/* vec.c -- functions of lanes.h, vec.h and part.h under names that a test can call.
 *
 * Arrays in, arrays out; n is a multiple of 16 except in over_part and over_first.
 */
#include "../../kernels/cpu/part.h"

#define FLOATS(name)                                                                               \
    void over_##name(float *y, const float *x, int64_t n)                                          \
    {                                                                                              \
        for (int64_t i = 0; i < n; i += LANES)                                                     \
            lanes_store(y + i, lanes_##name(lanes_load(x + i)));                                   \
    }
FLOATS(exp)
FLOATS(log)
FLOATS(erf)
FLOATS(tanh)
FLOATS(sqrt)

#define FLOATS16(name)                                                                             \
    void over_##name##16(float *y, const float *x, int64_t n)                                      \
    {                                                                                              \
        for (int64_t i = 0; i < n; i += 16) store16(y + i, name##16(load16(x + i)));               \
    }
FLOATS16(exp)
FLOATS16(log)
FLOATS16(sqrt)

/* Stores n floats as another type, and loads n of that type. */
#define HALVES(name, dtype)                                                                        \
    void over_put_##name(uint16_t *y, const float *x, int64_t n)                                   \
    {                                                                                              \
        for (int64_t i = 0; i < n; i += LANES) lanes_put(y, i, dtype, lanes_load(x + i), n - i);   \
    }                                                                                              \
    void over_get_##name(float *y, const uint16_t *x, int64_t n)                                   \
    {                                                                                              \
        for (int64_t i = 0; i < n; i += LANES) lanes_store(y + i, lanes_get(x, i, dtype, n - i));  \
    }
HALVES(bf16, ZK_BF16)
HALVES(f16, ZK_F16)

#define DOUBLES(name)                                                                              \
    void over_##name(double *y, const double *x, int64_t n)                                        \
    {                                                                                              \
        for (int64_t i = 0; i < n; i++) y[i] = name(x[i]);                                         \
    }
DOUBLES(zk_sin)
DOUBLES(zk_cos)
DOUBLES(zk_exp)
DOUBLES(zk_log)

void over_narrow(uint16_t *y, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i += 16) store16r(y, i, ZK_BF16, load16(x + i));
}

/* The first half by scalars, the second by vectors. */
void over_both(float *y, const uint16_t *x, int64_t n)
{
    for (int64_t i = 0; i < n / 2; i++) y[i] = realr(x, i, ZK_BF16);
    for (int64_t i = n / 2; i < n; i += 16) store16(y + i, load16r(x, i, ZK_BF16));
}

void over_scalar(uint16_t *y, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) setr(y, i, ZK_BF16, x[i]);
}

void over_narrow_f16(uint16_t *y, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i += 16) store16r(y, i, ZK_F16, load16(x + i));
}

void over_widen_f16(float *y, const uint16_t *x, int64_t n)
{
    for (int64_t i = 0; i < n; i += 16) store16(y + i, load16r(x, i, ZK_F16));
}

/* The same by scalars. */
void over_scalar_f16(uint16_t *y, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) setr(y, i, ZK_F16, x[i]);
}

void over_one_f16(float *y, const uint16_t *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] = realr(x, i, ZK_F16);
}

/* registers: by registers, and not 16 at a time */
void over_part(void *y, const void *x, int64_t n, int dtype, int registers)
{
    if (!registers) store16rn(y, 0, dtype, load16rn(x, 0, dtype, (int)n), (int)n);
    for (int64_t i = 0; registers && i < 16; i += LANES)
        lanes_put(y, i, dtype, lanes_get(x, i, dtype, n - i), n - i);
}

/* y[16]: n elements, then 0 */
void over_first(float *y, const void *x, int64_t n, int dtype, int registers)
{
    if (!registers) store16(y, load16rn(x, 0, dtype, (int)n));
    for (int64_t i = 0; registers && i < 16; i += LANES)
        lanes_store(y + i, lanes_get(x, i, dtype, n - i));
}

/* y[0..4] = sum, then lane by lane over 16: max, min, fma, select by x > y */
void over_lanes(float *y, const float *a, const float *b)
{
    v16 x = load16(a), z = load16(b);
    y[0] = sum16(x);
    store16(y + 1, max16(x, z));
    for (int i = 0; i < 16; i += LANES)
        lanes_store(y + 17 + i, lanes_min(lanes_load(a + i), lanes_load(b + i)));
    store16(y + 33, fma16(x, z, x));
    store16(y + 49, select16(x > z, x, z));
}
