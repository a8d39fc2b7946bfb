/* draw.h -- a token drawn from a row of logits, on the host for every target. */
#ifndef ZK_DRAW_H
#define ZK_DRAW_H
#include "scalar.h"

typedef struct draw_row {
    const real *logits; /* [V] */
    int dtype;
    int64_t V;
    double top, temperature; /* top: the greatest of them */
} draw_row;

/* What a token weighs; the likeliest 1 */
static inline double token_weight(const draw_row *r, int64_t i)
{
    return zk_exp((realr(r->logits, i, r->dtype) - r->top) / r->temperature);
}

/* The order of numbers in that of integers: -0 below 0 */
static inline uint32_t token_order(const draw_row *r, int64_t i)
{
    float x = realr(r->logits, i, r->dtype);
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? ~bits : bits | UINT32_C(1) << 31;
}

/* How many tokens there are, or what they weigh, from this place in the order on */
static inline double tokens_from(const draw_row *r, uint32_t least, int weighs)
{
    double sum = 0;
    for (int64_t i = 0; i < r->V; i++)
        if (token_order(r, i) >= least) sum += weighs ? token_weight(r, i) : 1;
    return sum;
}

/* The highest place from which on there is so much; equal logits stay or go together. */
static inline uint32_t place_of(const draw_row *r, double much, int weighs)
{
    uint32_t least = 0;
    for (int bit = 31; bit >= 0; bit--) {
        uint32_t higher = least | UINT32_C(1) << bit;
        if (tokens_from(r, higher, weighs) >= much) least = higher;
    }
    return least;
}

/* One of the tokens of logits [V]: of the top_k likeliest (0: of all), of these of the likeliest
 * that have a share of top_p; temperature 0: the likeliest, the first of equals. u in [0, 1) */
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
    return (int32_t)last; /* u lies in what rounding left over */
}

#endif
