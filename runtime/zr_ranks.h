/* zr_ranks.h -- the processes of a run. */
#ifndef ZR_RANKS_H
#define ZR_RANKS_H
#include "zr.h"

/* Start z->ranks processes, each of which runs body, and watch over them. Returns the exit code. */
int zr_ranks(zr *z, void (*body)(zr *z));

#endif
