/* zr_rows.h -- the order of a tensor's rows in files.
 *
 * A file may have q, k and v of each head together, [head][q, k, v], where the program has
 * [q, k, v][head] (GPT-NeoX). Then both have the same blocks of elements in another order. */
#ifndef ZR_ROWS_H
#define ZR_ROWS_H
#include "zr.h"

typedef struct zr_rows {
    int64_t block, heads; /* elements of a block, number of heads; heads 0: the program's order */
} zr_rows;

static inline zr_rows zr_rows_of(const zr_program *p, const zr_tensor *t)
{
    int64_t heads = p->heads ? p->heads[t - p->tensors] : 0;
    if (!heads) return (zr_rows){0, 0};
    return (zr_rows){t->shape[0] / (3 * heads) * (t->ndim == 1 ? 1 : t->shape[1]), heads};
}

/* Return how many elements of a tensor from `at` on, at most n, follow each other in a file, too.
 * *place: the first one's place there. */
static inline int64_t zr_run_of(zr_rows o, int64_t at, int64_t n, int64_t *place)
{
    *place = at;
    if (!o.heads) return n;
    int64_t i = at / o.block, within = at % o.block;
    *place = (i % o.heads * 3 + i / o.heads) * o.block + within;
    return n < o.block - within ? n : o.block - within;
}

#endif
