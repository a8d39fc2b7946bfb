/* zr_packed.h -- weights of a folder that bitsandbytes has quantized.
 *
 *   4 bits  NAME has two elements a byte, the first in the upper half, whatever its type.
 *           NAME.absmax        a factor for each block
 *           NAME.quant_map     F32 [16], the levels
 *           NAME.quant_state.bitsandbytes__nf4 or __fp4: JSON with blocksize, shape, dtype ...
 *           NAME.nested_absmax, NAME.nested_quant_map: the factors are U8, and a factor is
 *             nested_quant_map[absmax] * nested_absmax[block / nested_blocksize] + nested_offset
 *           w = level * factor, rounded to dtype
 *   8 bits  NAME is I8 [rows, columns], beside it are SCB, F32 [rows], and weight_format, 0.
 *           w = q * SCB * (1 / 127)
 *
 * Invariants
 *  1. An element has the bits of bitsandbytes' dequantize_4bit or int8_vectorwise_dequant.
 *  2. An open folder has such a weight as a tensor of its dtype and shape, without the others.
 */
#ifndef ZR_PACKED_H
#define ZR_PACKED_H
#include "zr_safetensors.h"

enum { ZR_INT8 = 1, ZR_NF4 = 2 }; /* formats of a run, numbered as in kernels/zk.h */

typedef struct zr_packed {
    zr_entry codes, factors, scales; /* of the files; scales: nested_absmax */
    int64_t block, nested;           /* elements of a factor; factors of a scale, or 0 */
    float levels[16], dynamic[256], mean;
    int32_t bits, format; /* format: of a run that has the same codes; 0: none */
} zr_packed;

/* As zr_table_open, with packed weights. */
int zr_folder_open(zr_table *t, const char *dir, char *why);
/* Read n elements of an F32, BF16 or F16 tensor, from its element `first` on. */
int zr_elements(const zr_table *t, const zr_entry *e, void *to, int64_t first, int64_t n);
/* Return whether a program that stores a tensor in this format can keep its numbers. */
int zr_packed_fits(const zr_packed *q, const zr_program *p, int format);
/* Write n elements with the numbers that they have, in the format of a run, and return their bytes,
 * or -1. They begin at a chunk. */
int64_t zr_packed_keep(const zr_table *t, const zr_packed *q, const zr_program *p, uint8_t *to,
                       int64_t first, int64_t n);

#endif
