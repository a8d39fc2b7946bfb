/* zr_probe.h -- measures the GPU of every rank beside the others (--check-gpus). */
#ifndef ZR_PROBE_H
#define ZR_PROBE_H
#include "zr_rank.h"

/* The measurements: a product, in FLOP/s; a copy within the arena, in bytes read and written a
 * second; an all-gather of all ranks, in bytes received a second. */
enum { ZR_PRODUCT, ZR_COPY, ZR_ALLGATHER, ZR_PROBES };

/* Measure, print a line for each rank, and fail on ranks with a slow GPU. */
void zr_check_gpus(zr *z);
/* Return one rate of this rank's device; 0: it has none. The target provides it, and overwrites the
 * arena. All ranks call it with the same argument. */
double zr_probe(zr *z, int what);

#endif
