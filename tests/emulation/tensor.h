/* tensor.h -- sums of products of halves (bf16 or f16) as a GPU's tensor cores make them, to the
 * bit.
 *
 * Invariants
 *  1. A sum is that of the model which MMA-Sim (github.com/microsoft/MMA-Sim) found on GPUs. Terms
 *     are exact products and c. Each is cut toward zero to `fraction` bits below the greatest
 *     exponent of all terms; that of a product is the sum of its factors' exponents. The cut terms
 *     are added exactly, the result is cut toward zero to a float.
 *  2. Subnormal numbers are as in IEEE 754. The exponent of a zero is -126. A zero result is +0,
 *     every NaN is 0x7fffffff, and a sum of 2^128 or more is infinite.
 *  3. Nothing here depends on the order of `terms` products that are added at once.
 */
#ifndef SHIM_TENSOR_H
#define SHIM_TENSOR_H
#include <stdint.h>

enum { TENSOR_TERMS = 16 }; /* products of an element of mma.m16n8k16 */

extern "C" {
/* Chooses the tensor cores of GPUs of this major compute capability. */
void tensor_choose(int major);
/* Return the bits of the float c + a . b. */
uint32_t tensor_bf16(const uint16_t *a, const uint16_t *b, uint32_t c);
uint32_t tensor_f16(const uint16_t *a, const uint16_t *b, uint32_t c);
}

#endif
