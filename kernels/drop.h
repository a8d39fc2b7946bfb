/* drop.h -- dropout: which elements stay, and what they are multiplied by, on every target.
 *
 * Element e of a sample has word e % 4 of the counter (e / 4, place | ZK_PLACE), which is no
 * tensor's; it stays where that is `least` or more. */
#ifndef ZK_DROP_H
#define ZK_DROP_H
#include "scalar.h"

#define ZK_PLACE (UINT64_C(1) << 62)

typedef struct drop {
    uint64_t place;
    uint32_t least;
    float scale;
} drop;

/* p: the share that does not stay, below 1 */
static inline drop drop_of(int64_t place, float p)
{
    drop d = {(uint64_t)place | ZK_PLACE, (uint32_t)((double)p * 0x1p32),
              (float)(1 / (1 - (double)p))};
    return d;
}

#endif
