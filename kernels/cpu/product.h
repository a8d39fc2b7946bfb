/* product.h -- a product of matrices, and how finished sums become its output. */
#ifndef ZK_PRODUCT_H
#define ZK_PRODUCT_H
#include "pack.h"

enum { FLUSH = 0x8040 }; /* MXCSR: denormals are 0, as in AVX512_BF16 */

typedef struct product {
    zk *k;
    matrix a, b;      /* [M,K], [K,N] */
    void *out;        /* [M,N] of `dtype`, rows `stride` apart; stride 0: N */
    const real *bias; /* [N] of the context's dtype, or NULL */
    int64_t M, N, K, stride;
    int64_t rows, cols, depth; /* of a tile or a slab; depth in elements of the chain */
    int unit;                  /* elements of the chain that must stay together */
    int dtype, carry;          /* carry: start from the old output */
    int place;                 /* a is read in place: its words lie along the chain */
    /* output = chain, scale * chain, or output + scale * chain */
    enum { PLAIN, SCALED, ADDED } end;
    float scale;
} product;

/* Return whether sums are accumulated in the output itself. */
static inline int direct(const product *g) { return g->dtype == ZK_F32 && g->end == PLAIN; }

/* Return whether finished sums still must become output. */
static inline int unfinished(const product *g) { return g->bias || !direct(g); }

/* Turn finished sums, `stride` apart, into rows and columns of the output from (i, j) on. */
static inline void finish_sums(const product *g, const float *sum, int64_t stride, int64_t i,
                               int64_t j, int64_t rows, int64_t cols)
{
    const matrix bias = {.p = g->bias, .dtype = g->k->dtype};
    const matrix old = {.p = g->out, .dtype = g->dtype};
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c += LANES) {
            int n = (int)zk_least(LANES, cols - c);
            lanes y = lanes_get(sum, r * stride + c, ZK_F32, n);
            int64_t to = (i + r) * g->stride + j + c;
            if (g->bias) y += get(&bias, j + c, n);
            if (g->end == SCALED) y *= lanes_set(g->scale);
            if (g->end == ADDED) y = lanes_fma(lanes_set(g->scale), y, get(&old, to, n));
            lanes_put(g->out, to, g->dtype, y, n);
        }
}

static inline void copy(float *to, int64_t to_stride, const float *from, int64_t from_stride,
                        int64_t rows, int64_t cols)
{
    for (int64_t i = 0; i < rows; i++)
        memcpy(to + i * to_stride, from + i * from_stride, (size_t)cols * sizeof(float));
}

/* ---- choosing sizes */
/* Return the size of equal pieces of n, each at most `most`, in whole units. */
static inline int64_t even(int64_t n, int64_t most, int64_t unit)
{
    return zk_pieces(zk_pieces(n, zk_pieces(n, most)), unit) * unit;
}

/* Return the launch's size i in whole units, at most `most`; 0 if it is not given. */
static inline int64_t given(const product *g, const zk_launch *L, int i, int64_t most, int64_t unit)
{
    int64_t n = L ? L[g->k->column].tile[i] : 0;
    return n > 0 ? zk_least(zk_pieces(n, unit) * unit, most) : 0;
}

#endif
