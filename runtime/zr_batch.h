/* zr_batch.h -- the samples of a step, and of an evaluation. */
#ifndef ZR_BATCH_H
#define ZR_BATCH_H
#include "zr_memory.h"
#include "zr_mix.h"
#include "zr_rank.h"

/* Return the option that names these files. */
const char *zr_option_of(const zr *z, const zr_mix *m);

/* Return the number of samples that all ranks take at once: in a step, or in an evaluation. */
static inline int64_t zr_step_samples(const zr *z)
{
    return z->p->micro_batches * z->ranks / zr_blocks(z->p) * z->p->batch;
}
static inline int64_t zr_eval_samples(const zr *z)
{
    return z->ranks / zr_context(z->p) * z->p->batch;
}

/* Load the next evaluation of a rank: its samples among those of all ranks from `first` on, or
 * its blocks of them. Ranks beyond the last sample get rows without targets. */
void zr_batch_eval(zr *z, int64_t first);
/* Return the place of a sample that is evaluated alone: tokens and targets, int32 [T], which are
 * empty. zr_batch_alone_filled loads it, or the rank's blocks of it. */
zr_arrays zr_batch_alone(zr *z);
void zr_batch_alone_filled(zr *z);
#endif
