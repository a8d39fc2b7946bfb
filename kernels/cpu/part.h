/* part.h -- splitting of elementwise work into tasks, and of a flat buffer into its tensors.
 *
 * Tensors of a flat buffer start at multiples of ZK_BLOCK elements, and so does every piece of it
 * that a kernel is given, so a block of a tensor is never split.
 */
#ifndef ZK_PART_H
#define ZK_PART_H
#include "cpu.h"
#include "vec.h"
#include <string.h>

static inline int64_t zk_pieces(int64_t n, int64_t piece) { return (n + piece - 1) / piece; }

/* Return entry i of this target's tile, or `otherwise` if the launch does not set it. */
static inline int64_t zk_tile(const zk *k, const zk_launch *L, int i, int64_t otherwise)
{
    return L && L[k->column].tile[i] > 0 ? L[k->column].tile[i] : otherwise;
}

/* Load or store up to 16 elements from i on, of which n are left; lanes past them
 * read 0 and are not written. */
static inline v16 zk_get(const real *p, int64_t i, int dtype, int64_t n)
{
    return load16rn(p, i, dtype, (int)zk_least(n, 16));
}

static inline void zk_put(real *p, int64_t i, int dtype, v16 x, int64_t n)
{
    store16rn(p, i, dtype, x, (int)zk_least(n, 16));
}

/* narrow16 for lanes: the 16 bits of each bf16 in the upper half. */
ZK_INLINE lanes_bits lanes_narrow(lanes x)
{
    lanes_bits u = (lanes_bits)x, even = u + 0x7fff + ((u >> 16) & 1);
    return (lanes_bits)lanes_select(x != x, (lanes)(u | 0x400000), (lanes)even);
}

/* zk_get and zk_put for up to LANES elements. */
#ifdef __AVX512F__
ZK_INLINE lanes lanes_get(const real *p, int64_t i, int dtype, int64_t n)
{
    return zk_get(p, i, dtype, n);
}

ZK_INLINE void lanes_put(real *p, int64_t i, int dtype, lanes x, int64_t n)
{
    zk_put(p, i, dtype, x, n);
}
#else
ZK_INLINE lanes lanes_get(const real *p, int64_t i, int dtype, int64_t n)
{
    uint16_t part[LANES] = {0};
    const uint16_t *from = (const uint16_t *)p + i;
    if (dtype == ZK_F32 && n >= LANES) return lanes_load((const float *)p + i);
    if (dtype == ZK_F32) return (lanes)_mm256_maskload_ps((const float *)p + i, first8((int)n));
    if (n < LANES) {
        for (int j = 0; j < n; j++) part[j] = from[j];
        from = part;
    }
    __m128i x = _mm_loadu_si128((const __m128i_u *)from);
    return dtype == ZK_F16 ? (lanes)_mm256_cvtph_ps(x)
                           : (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16);
}

ZK_INLINE void lanes_put(real *p, int64_t i, int dtype, lanes x, int64_t n)
{
    uint16_t part[LANES], *to = (uint16_t *)p + i;
    if (dtype == ZK_F32 && n >= LANES) {
        lanes_store((float *)p + i, x);
        return;
    }
    if (dtype == ZK_F32) {
        _mm256_maskstore_ps((float *)p + i, first8((int)n), (__m256)x);
        return;
    }
    __m256i u = (__m256i)(lanes_narrow(x) >> 16);
    __m128i low = _mm256_castsi256_si128(u), high = _mm256_extracti128_si256(u, 1);
    __m128i made = dtype == ZK_F16 ? _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT)
                                   : _mm_packus_epi32(low, high);
    _mm_storeu_si128((__m128i_u *)(n >= LANES ? to : part), made);
    for (int j = 0; n < LANES && j < n; j++) to[j] = part[j];
}
#endif

/* Elements [elem, elem + n) of one tensor, which are at `at` of the given
 * piece of the flat buffer. */
typedef struct zk_part {
    const zk_span *span;
    int64_t key, elem, at, n;
} zk_part;

/* Call f for the part of each tensor in flat elements [lo, hi). first: element
 * at which the piece starts. */
static inline void zk_each_part(const zk_span *spans, int64_t nspans, int64_t first, int64_t lo,
                                int64_t hi, void (*f)(void *arg, const zk_part *part), void *arg)
{
    for (const zk_span *s = spans; s < spans + nspans; s++) {
        int64_t past = lo - s->at - s->elems;
        int64_t i = past > 0 && s->stride > 0 ? past / s->stride : 0;
        for (; i < s->count && s->at + i * s->stride < hi; i++) {
            int64_t start = s->at + i * s->stride;
            int64_t from = zk_most(lo, start), to = zk_least(hi, start + s->elems);
            zk_part part = {s, s->key + i * s->key_stride, from - start, from - first, to - from};
            if (part.n > 0) f(arg, &part);
        }
    }
}

#endif
