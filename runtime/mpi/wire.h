/* wire.h -- what far.c asks of MPI (wire.c). */
#ifndef ZR_WIRE_H
#define ZR_WIRE_H
#include "../cpu/cpu.h"

extern const zr_wire zr_mpi;

/* By all ranks alike: */
void zr_mpi_ask(zr *z);                                             /* z->net.host, .port */
void zr_mpi_tell_all(zr *z, const void *mine, void *all, size_t n); /* all[ranks][n] */
void zr_mpi_open(zr *z);                                            /* zr_mpi can be used */

#endif
