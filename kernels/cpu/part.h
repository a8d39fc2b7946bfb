/* part.h -- cutting elementwise work into tasks, and a flat buffer into its tensors.
 *
 * Tensors of a flat buffer start at multiples of ZK_BLOCK elements, and so does every piece of it
 * that a kernel is given: a block of a tensor is never split.
 */
#ifndef ZK_PART_H
#define ZK_PART_H
#include "cpu.h"
#include "vec.h"
#include <string.h>

static inline int64_t zk_pieces(int64_t n, int64_t piece) { return (n + piece - 1) / piece; }

/* Entry i of this target's tile, or `otherwise` where the launch says nothing. */
static inline int64_t zk_tile(const zk *k, const zk_launch *L, int i, int64_t otherwise)
{
    return L && L[k->column].tile[i] > 0 ? L[k->column].tile[i] : otherwise;
}

/* Up to 16 elements from i on, where n are left; lanes past them read 0 and are not written. */
static inline v16 zk_get(const real *p, int64_t i, int dtype, int64_t n)
{
    return load16rn(p, i, dtype, (int)zk_least(n, 16));
}

static inline void zk_put(real *p, int64_t i, int dtype, v16 x, int64_t n)
{
    store16rn(p, i, dtype, x, (int)zk_least(n, 16));
}

/* Elements [elem, elem + n) of one tensor, which lie at `at` of the piece of the flat buffer. */
typedef struct zk_part {
    const zk_span *span;
    int64_t key, elem, at, n;
} zk_part;

/* Calls f for what each tensor has of flat elements [lo, hi); `first` is the piece's element 0. */
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
