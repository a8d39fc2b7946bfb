/* zr_verify.h -- hashes; all queues must be empty. */
#ifndef ZR_VERIFY_H
#define ZR_VERIFY_H
#include "zr.h"

/* Compute the exact hash of the masters, which does not depend on how they are sharded. */
void zr_hash_weights(zr *z, uint64_t sum[2]);
void zr_verify_open(zr *z);
int zr_verify_due(const zr *z, int64_t steps); /* is a check due after this number of steps? */
/* Log that hash. Fails if a rank's copy of replicated data differs. */
void zr_verify(zr *z);

#endif
