/* zr_products.h -- the order of a CPU's bf16 products. */
#ifndef ZR_PRODUCTS_H
#define ZR_PRODUCTS_H
#include "zr_rank.h"

/* Set z->order: the spec's, that of --products, that of the resumed run, or the faster one. */
void zr_settle_order(zr *z);
static inline const char *zr_order_name(int order) { return order == ZR_TILES ? "tiles" : "pairs"; }
/* Return the recipe's line for the order; NULL if the program's recipe has it or there is none. */
static inline const char *zr_order_line(const zr *z)
{
    if (z->order < 0 || z->p->order >= 0) return NULL;
    return z->order == ZR_TILES ? "train.products: \"tiles\"" : "train.products: \"pairs\"";
}

#endif
