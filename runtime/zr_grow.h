/* zr_grow.h -- rows by token that a loaded folder lacks.
 *
 * The invariants are those of zr_file.h.
 */
#ifndef ZR_GROW_H
#define ZR_GROW_H
#include "zr_safetensors.h"

/* Return the mean of the rows of a folder's tensor, float[columns], to be freed: rows are added in
 * their order in doubles, and each element is rounded once. Returns NULL and errno on failure. */
float *zr_mean_row(const zr_table *t, const zr_entry *e, int64_t rows, int64_t columns);

#endif
