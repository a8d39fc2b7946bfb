/* draw.h -- a token drawn from a row of logits, on the host for every target. */
#ifndef ZK_DRAW_H
#define ZK_DRAW_H
#include "scalar.h"

/* One of the tokens of logits [V]; temperature 0: the likeliest, the first of equals */
static inline int32_t draw(const real *logits, int dtype, int64_t V, float temperature, double u)
{
    int64_t best = 0, last = 0;
    double sum = 0, below = 0;
    for (int64_t i = 1; i < V; i++)
        if (realr(logits, i, dtype) > realr(logits, best, dtype)) best = i;
    double top = realr(logits, best, dtype);
    if (!(temperature > 0)) return (int32_t)best;
    for (int64_t i = 0; i < V; i++) sum += zk_exp((realr(logits, i, dtype) - top) / temperature);
    for (int64_t i = 0; i < V; i++) {
        double share = zk_exp((realr(logits, i, dtype) - top) / temperature) / sum;
        last = share > 0 ? i : last;
        below += share;
        if (u < below) return (int32_t)i;
    }
    return (int32_t)last; /* u lies in what rounding left over */
}

#endif
