/* zr_grow.c -- first values of the rows of new tokens: the mean of the rows in a folder; see
 * zr_grow.h.
 *
 * Invariants
 *  1. The order of the additions is the file's, so every rank and layout has the same bits.
 */
#include "zr_file.h"
#include "zr_float.h"
#include "zr_grow.h"
#include "zr_packed.h"
#include "zr_safetensors.h"
#include <stdlib.h>

enum { CHUNK = 65536 }; /* elements that are read at once */

/* Add n elements to sums[columns]. first: place of element 0 among all elements */
static void add_elements(double *sums, const float *x, int64_t first, int64_t n, int64_t columns)
{
    int64_t k = first % columns;
    for (int64_t i = 0; i < n; i++) {
        sums[k] += x[i];
        if (++k == columns) k = 0;
    }
}

/* Add all rows to sums[columns]. x, half: [CHUNK] */
static int add_rows(double *sums, float *x, uint16_t *half, const zr_table *t, const zr_entry *e,
                    int64_t rows, int64_t columns)
{
    int64_t all = rows * columns;
    void *to = e->dtype == ZR_F32 ? (void *)x : half;
    for (int64_t i = 0; i < all; i += CHUNK) {
        int64_t n = zr_least(all - i, CHUNK);
        if (zr_elements(t, e, to, i, n)) return -1;
        if (e->dtype != ZR_F32) zr_widen(x, half, n, e->dtype);
        add_elements(sums, x, i, n, columns);
    }
    return 0;
}

float *zr_mean_row(const zr_table *t, const zr_entry *e, int64_t rows, int64_t columns)
{
    double *sums = calloc((size_t)columns, sizeof *sums);
    float *mean = malloc((size_t)columns * sizeof *mean), *x = malloc(CHUNK * sizeof *x);
    uint16_t *half = malloc(CHUNK * sizeof *half);
    int bad = !sums || !mean || !x || !half || add_rows(sums, x, half, t, e, rows, columns);
    for (int64_t k = 0; !bad && k < columns; k++) mean[k] = (float)(sums[k] / (double)rows);
    free(sums);
    free(x);
    free(half);
    if (!bad) return mean;
    free(mean);
    return NULL;
}
