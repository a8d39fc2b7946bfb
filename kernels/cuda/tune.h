/* tune.h -- the table of algorithms that the products of this process take. */
#ifndef ZK_CUDA_TUNE_H
#define ZK_CUDA_TUNE_H
#include <stddef.h>
#include <stdint.h>

enum { TUNE_KEY = 128, TUNE_WORDS = 8 };

/* A product, in words: shape, types, alignment; its algorithm; microseconds it took, and those of
 * the library's first choice. */
struct tuned {
    char key[TUNE_KEY];
    uint64_t algo[TUNE_WORDS];
    double us, first;
};

bool tune_timing(void); /* products are to be timed, and added */
void tune_add(const tuned &t);
const uint64_t *tune_find(const char *key); /* its algorithm; NULL: the library chooses */
uint64_t tune_sum(void);                    /* names the table in use; 0: there is none */

#endif
