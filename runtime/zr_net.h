/* zr_net.h -- ranks that a launcher starts, on this host or others; not every target has them. */
#ifndef ZR_NET_H
#define ZR_NET_H
#include "zr_fail.h"
#include "zr_rank.h"
#include "zr_shared.h"

struct zr_far {
    void (*tell)(zr *z, void *what, size_t n); /* zr_tell between them */
    void (*total)(zr *z, uint64_t sum[2]);     /* zr_total between them */
};

struct zr_net {
    char host[ZR_HOST_NAME]; /* rank 0's host: names and addresses, separated by commas */
    int port;                /* rank 0's port; 0: not given, then `ask` finds it */
    void (*ask)(zr *z); /* called by all ranks: sets host and port; NULL: there is nobody to ask */
    const char *rank;   /* rank as the launcher gives it; NULL: not given, or no launcher */
    int own;            /* 1: rank 0's address is not given, so it is this host */
    uint64_t run;       /* hash of the launcher's name of the run */
    int local;          /* local rank of the lowest rank started here; -1: not known */
    int neighbours;     /* ranks on this host; 0: not known yet */
    int sharing;        /* ranks that share this rank's CPUs, as far as is known */
    int *line;          /* [ranks] sockets, -1: none; NULL: no connections at all */
    char (*end)[ZR_ADDRESS]; /* [ranks] addresses of the peers' ends */
    double until;            /* deadline for ranks to meet; 0: they have met */
};

/* ---- the launcher (zr_launcher.c), how ranks meet (zr_meet.c) and talk (zr_plane.c) */
void zr_refuse_launcher(zr *z); /* fails if a launcher started this process */
/* Return the rank that the launcher gave this process, of `all`; NULL without a launcher, or if it
 * started only one task, or a pod of several ranks. */
const char *zr_launched(int all);
void zr_find_launcher(zr *z);        /* sets lowest, here, net, far; fails if variables disagree */
int zr_port_of(zr *z, uint64_t run); /* a port in ZR_PORTS that Linux gives to nobody else */
uint64_t zr_host(void);              /* hash of this host's name */
void zr_meet(zr *z);          /* called by every rank of a launcher; sets net.local, .neighbours */
extern const zr_far zr_plane; /* zr_plane.c */
/* Send n bytes to the rank if `out`, else receive them from it. */
void zr_plane_move(zr *z, int rank, void *at, size_t n, int out);
int zr_plane_late(const zr *z);      /* has the deadline to meet passed? */
void zr_plane_lost(zr *z, int rank); /* fails: the rank is gone */
void zr_plane_grace(zr *z); /* give a rank that knows why a peer is gone time to report it first */
void zr_plane_look(zr *z);  /* fails if a rank is gone */
void zr_plane_beat(zr *z);  /* tell all ranks that may wait for this one that it lives */
/* Fail on all ranks if two give the same `what`, which each must have for itself; "" is
 * not checked. All ranks call it. */
void zr_plane_alone(zr *z, const char *what, const char *advice);

#endif
