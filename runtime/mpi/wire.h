/* wire.h -- the functions of MPI (wire.c) that far.c uses. */
#ifndef ZR_WIRE_H
#define ZR_WIRE_H
#include "../cpu/cpu.h"

extern const zr_wire zr_mpi;

/* All ranks must call these together. */
void zr_mpi_ask(zr *z); /* sets z->net->host and .port */
/* all-gather into all[ranks][n]. */
void zr_mpi_tell_all(zr *z, const void *mine, void *all, size_t n);
void zr_mpi_open(zr *z); /* makes zr_mpi usable */

#endif
