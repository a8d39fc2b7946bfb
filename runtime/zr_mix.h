/* zr_mix.h -- samples of several token files, by their weights.
 *
 * The invariants are those of zr_file.h.
 */
#ifndef ZR_MIX_H
#define ZR_MIX_H
#include "zr_data.h"
#include "zr_file.h"

/* Largest number of sources; the number that means a weight of 1. */
enum { ZR_SOURCES = 64, ZR_WEIGHT = 10000 };
typedef struct zr_given {
    const char *file; /* a file or a folder */
    int64_t weight;   /* from 1 to 1000 * ZR_WEIGHT */
    int length;       /* length of `file`, after which more text may follow */
} zr_given;

typedef struct zr_dataset {
    zr_data data;
    int64_t weight; /* ratio of all weights in smallest integers */
    char path[ZR_FILE];
} zr_dataset;

typedef struct zr_mix {
    int n;                  /* number of sources; 0: not given */
    uint64_t shuffle, seed; /* as in zr_program */
    zr_dataset *of;
    struct zr_fork *fork; /* zr_order.h */
} zr_mix;

/* Open the sources. name: name of the file in a folder. */
int zr_mix_open(zr_mix *s, const zr_given *given, int n, const char *name, const zr_form *f,
                char *why);
/* taken[n]: number of samples of each source among the first m */
void zr_mix_taken(const zr_mix *s, int64_t m, int64_t *taken);
/* As zr_data_check, for the first `used` samples; as zr_data_read. */
int zr_mix_check(const zr_mix *s, int64_t used, int rank, int ranks, char *why);
int zr_mix_read(const zr_mix *s, int64_t first, int64_t B, int32_t *tokens, int32_t *targets,
                char *why);
void zr_mix_close(zr_mix *s);

#endif
