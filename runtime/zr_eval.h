/* zr_eval.h -- evaluations and multiple choice. */
#ifndef ZR_EVAL_H
#define ZR_EVAL_H
#include "zr.h"

void zr_all_dead(zr *z);              /* poison all slots that can die, once all work is done */
double zr_mean(zr *z, double *valid); /* mean loss of all batches evaluated since `clear` */

void zr_eval_open(zr *z);          /* fails if the file is wrong */
void zr_eval(zr *z, int64_t step); /* does nothing without --eval; step: steps done */

#endif
