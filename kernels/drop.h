/* drop.h -- dropout: which elements are kept, and their scale, on every target.
 *
 *   y = x / (1 - p) if word >= least, else 0; least = p * 2^32
 *
 * The word of element e of a sample is word e % 4 of Philox at counter (e / 4, place | ZK_PLACE), a
 * counter that no tensor uses.
 */
#ifndef ZK_DROP_H
#define ZK_DROP_H
#include "scalar.h"

#define ZK_PLACE (UINT64_C(1) << 62)

typedef struct drop {
    uint64_t place;
    uint32_t least;
    float scale;
} drop;

/* p: the share of elements dropped, below 1 */
static inline drop drop_of(int64_t place, float p)
{
    drop d = {(uint64_t)place | ZK_PLACE, (uint32_t)((double)p * 0x1p32),
              (float)(1 / (1 - (double)p))};
    return d;
}

#endif
