/* draw.h -- sampling a token from a row of logits, on the host for every target.
 *
 *   weight = exp((logit - top) / temperature); P(token) = weight / sum of the weights kept
 */
#ifndef ZK_DRAW_H
#define ZK_DRAW_H
#include "scalar.h"

typedef struct draw_row {
    const real *logits; /* [V] */
    int dtype;
    int64_t V;
    double top, temperature; /* top: the greatest logit */
} draw_row;

/* Return the weight of a token; the likeliest has weight 1. */
static inline double token_weight(const draw_row *r, int64_t i)
{
    return zk_exp((realr(r->logits, i, r->dtype) - r->top) / r->temperature);
}

/* Map a float to an integer of the same order, with -0 below 0. */
static inline uint32_t token_order(const draw_row *r, int64_t i)
{
    float x = realr(r->logits, i, r->dtype);
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? ~bits : bits | UINT32_C(1) << 31;
}

/* Count the tokens of order `least` and above, or add up their weights. */
static inline double tokens_from(const draw_row *r, uint32_t least, int weighs)
{
    double sum = 0;
    for (int64_t i = 0; i < r->V; i++)
        if (token_order(r, i) >= least) sum += weighs ? token_weight(r, i) : 1;
    return sum;
}

/* Return the highest order at and above which there is at least `much`; equal logits are kept or
 * dropped together. */
static inline uint32_t place_of(const draw_row *r, double much, int weighs)
{
    uint32_t least = 0;
    for (int bit = 31; bit >= 0; bit--) {
        uint32_t higher = least | UINT32_C(1) << bit;
        if (tokens_from(r, higher, weighs) >= much) least = higher;
    }
    return least;
}

/* Sample one of the tokens of logits [V]: from the top_k likeliest (0: all), and of these from the
 * likeliest whose probabilities add up to top_p. temperature 0: the likeliest, the first if several
 * are equal. u: a random number in [0,1). */
static inline int32_t draw(const real *logits, int dtype, int64_t V, float temperature,
                           int64_t top_k, double top_p, double u)
{
    int64_t best = 0, last = 0;
    double sum = 0, below = 0;
    for (int64_t i = 1; i < V; i++)
        if (realr(logits, i, dtype) > realr(logits, best, dtype)) best = i;
    if (!(temperature > 0)) return (int32_t)best;
    const draw_row r = {logits, dtype, V, realr(logits, best, dtype), temperature};
    uint32_t least = top_k > 0 && top_k < V ? place_of(&r, (double)top_k, 0) : 0;
    if (top_p < 1) least = place_of(&r, top_p * tokens_from(&r, least, 1), 1);
    if (least > token_order(&r, best)) least = token_order(&r, best);
    sum = tokens_from(&r, least, 1);
    for (int64_t i = 0; i < V; i++) {
        if (token_order(&r, i) < least) continue;
        double share = token_weight(&r, i) / sum;
        last = share > 0 ? i : last;
        below += share;
        if (u < below) return (int32_t)i;
    }
    return (int32_t)last; /* u is above the rounded total */
}

#endif
