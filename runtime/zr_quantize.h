/* zr_quantize.h -- quantizes weights as they are loaded (kernels/quantized.h has the formats). */
#ifndef ZR_QUANTIZE_H
#define ZR_QUANTIZE_H
#include "zr.h"

/* Return the format of a tensor: ZK_INT8 or ZK_NF4; 0: it is not quantized. */
static inline int zr_format(const zr_program *p, const zr_tensor *t)
{
    return p->formats ? p->formats[t - p->tensors] : 0;
}

/* Return the elements of the stored type that a tensor takes in its flat. */
int64_t zr_stored_elements(const zr_program *p, const zr_tensor *t);

/* Quantize n weights of a tensor, whole chunks or up to its end. Returns their bytes in to[]. */
int64_t zr_quantize(uint8_t *to, const float *from, int64_t n, int format);

#endif
