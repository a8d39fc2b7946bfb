/* zr_stall.h -- detection of ranks that make no progress. */
#ifndef ZR_STALL_H
#define ZR_STALL_H
#include "zr.h"
#include <sys/types.h>

/* The parent's records of one rank, and of all. */
typedef struct zr_watched {
    pid_t pid;   /* 0: the process has ended */
    int stopped; /* 1: stopped by a signal and not continued */
    double cpu;  /* CPU seconds half-way through a quiet period, as is `waited` */
    uint32_t waited[ZR_QUEUES + 1];
} zr_watched;
typedef struct zr_stall {
    double looked;         /* time of the last look */
    double quiet, longest; /* seconds without a completed command: now, longest so far */
    uint32_t moves;        /* commands completed by all ranks at the last look */
    zr_watched *rank;      /* [here] */
} zr_stall;
/* Return whether it is time to end the run, with the reason in why[ZR_WHY]. */
int zr_stalled(zr *z, zr_stall *s, char *why);

#endif
