/* tune.h -- the table of algorithms for the matrix products of this process. */
#ifndef ZK_CUDA_TUNE_H
#define ZK_CUDA_TUNE_H
#include <stddef.h>
#include <stdint.h>

enum { TUNE_KEY = 128, TUNE_WORDS = 8 };

/* A product: key names its shape, types and alignment; algo is its algorithm; us are microseconds
 * with it and with the library's first choice. */
struct tuned {
    char key[TUNE_KEY];
    uint64_t algo[TUNE_WORDS];
    double us, first;
};

bool tune_timing(void); /* are products to be timed and added? */
void tune_add(const tuned &t);
const uint64_t *tune_find(const char *key);  /* algorithm of a product; NULL: the library chooses */
uint64_t tune_sum(void);                     /* checksum that names the table in use; 0: none */
uint64_t tune_hash(const void *p, size_t n); /* FNV-1a hash of n bytes */

#endif
