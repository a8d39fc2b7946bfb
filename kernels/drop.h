/* drop.h -- dropout: which elements are kept, and their scale, on every target.
 *
 *   y = x / (1 - p) if word >= least, else 0; least = p * 2^32
 *
 * Words are those of Philox at counter (n, place | ZK_PLACE), which no tensor uses, with the
 * sample's key. Element e of a sample has word e % 4 of counter n = e / 4. Four probabilities of
 * attention share a counter, as a lane of a product on tensor cores has them: of a sample's head h,
 * query q and key k it is n = (h T + q') T + k', where q' and k' are q and k without their bit of
 * 8, and these bits choose the word: 2 * (q has it) + (k has it).
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
