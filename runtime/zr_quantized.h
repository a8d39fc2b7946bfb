/* zr_quantized.h -- tensors whose weights are stored in few bits. */
#ifndef ZR_QUANTIZED_H
#define ZR_QUANTIZED_H
#include "zr.h"

/* Return the format of a tensor: ZK_INT8 or ZK_NF4; 0: it is not quantized. */
static inline int zr_format(const zr_program *p, const zr_tensor *t)
{
    return p->formats ? p->formats[t - p->tensors] : 0;
}

/* Return the elements of the program's type that a tensor takes in its flat. */
static inline int64_t zr_stored_elements(const zr_program *p, const zr_tensor *t)
{
    int64_t n = t->ndim == 1 ? t->shape[0] : t->shape[0] * t->shape[1];
    int format = zr_format(p, t);
    return format ? p->quantized(format, n) / (p->type == ZR_F32 ? 4 : 2) : n;
}

#endif
