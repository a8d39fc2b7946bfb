/* zr_best.h -- the best validation of a run: --keep-best and --patience.
 *
 * Invariants
 *  1. All ranks note the same losses, so they take the same path.
 */
#ifndef ZR_BEST_H
#define ZR_BEST_H
#include "zr_checkpoint.h"
#include "zr_options.h"

/* Note the loss of the validation after z->step steps. */
void zr_best_note(zr *z, double loss);
/* With --keep-best, load the weights and states of the best checkpoint, if it is not the last.
 * Returns the step of the weights. */
int64_t zr_best_load(zr *z);

/* Return whether --patience has come to its end. */
static inline int zr_best_was_long_ago(const zr *z)
{
    return z->o->patience && z->checkpoints->best.worse >= z->o->patience;
}

#endif
