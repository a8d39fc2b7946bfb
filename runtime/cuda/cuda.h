/* cuda.h -- what a rank on a GPU keeps: its device, streams, events, graphs and communicators.
 *
 * A queue is a stream. Within a step nearly everything is issued while a graph is recorded, and
 * from then on the graph is played; graphs begin and end on ZR_MAIN's stream, so that they run one
 * after the other. What is issued outside of graphs goes to the streams at once: all of a program
 * whose optimizer is on the host, where an update goes on beside the next step.
 *
 * Invariants
 *  1. A rank touches CUDA only in its own process, after the fork.
 *  2. Nothing is allocated after the start but what the libraries take: that is measured.
 *  3. The rank's own thread issues and waits; the watchdog only looks, speaks and ends the process;
 *     who saves beside a step copies states to the host, on a stream of its own and through the
 *     ZR_BOUNCE bytes, which nobody else uses until that checkpoint is ended.
 *
 * Environment
 *   ZR_SHARE_GPU=1     ranks may share a device, for tests: they take turns and are slow; without
 *                      it two ranks with one device end the run with exit code 3
 */
#ifndef ZR_CUDA_H
#define ZR_CUDA_H
#include "../zr_int.h"
#include <cuda_runtime_api.h>
#include <nccl.h>

enum { ZR_BOUNCE = 1 << 20 };

typedef struct zr_event {
    cudaEvent_t mark;
    int64_t recorded; /* in which recording; 0: outside of any; -1: never */
    int queue;        /* that it was recorded on */
} zr_event;

typedef struct zr_graph {
    cudaGraphExec_t ready;                                         /* NULL: not recorded yet */
    int64_t bytes[ZR_QUEUES], messages[ZR_QUEUES], far[ZR_QUEUES]; /* that it moves */
} zr_graph;

/* Work that streams point to. */
enum { ZR_CHUNK = 1024, ZR_CHUNKS = 1024 };
typedef struct zr_work zr_work;
typedef struct zr_pool {
    zr_work *chunk[ZR_CHUNKS]; /* [ZR_CHUNK] each, or NULL */
    int64_t used;
} zr_pool;

struct zr_target {
    int device, nccl; /* nccl: its version, 22809 for 2.28.9 */
    cudaStream_t stream[ZR_QUEUES];
    cudaStream_t beside;    /* of who saves beside a step; NULL: nobody does */
    ncclComm_t *comm;       /* [ZR_REDUCE + 1][p->ngroups] NULL: of one rank, or without use */
    int connected;          /* what NCCL met from here on is no fault of this host */
    pthread_mutex_t within; /* held by the one thread that is within NCCL */
    zr_event *event;        /* [p->events] */
    char *arena;            /* device memory */
    /* Pinned: p->host bytes as the plan has them, then ZR_BOUNCE for copies. */
    char *host;
    cudaEvent_t *read;      /* [p->pinned_batches] the batch there has been copied */
    int64_t filled, copied; /* batches so far: put in place, known to be copied */
    const void **sources;   /* [p->inboxes][ranks] */
    /* graphs */
    zr_graph graph[ZR_GRAPHS];
    int64_t recording, recordings; /* 0: none is going on; so many were begun */
    /* functions of the host: in graphs; of this step and of the one before it, by turns */
    zr_pool recorded, issued[2];
    int turn;
    cudaEvent_t fork, played, joined[ZR_QUEUES];
    cudaEvent_t ended[ZR_QUEUES]; /* what a queue had at the last step's end is done */
    unsigned loose;               /* queues (bits) with work that no graph waits for yet */
    unsigned behind;              /* queues that do not wait for the last graph yet */
    double launch_seconds;        /* of the host, in cudaGraphLaunch */
    int64_t launches;
    /* bytes of device memory: free before and after the arena, after the first step */
    int64_t before, after, first;
    int64_t nccl_took; /* of them, when its communicators were made */
    double begun;      /* when the step did */
    /* --profile: of note n, events 2n and 2n + 1; of its step, an event and the host's time */
    cudaEvent_t *clock, *origin;
    double *origin_at;
};

/* ---- stream.c */
/* Fails, saying what was tried, unless a call of CUDA went well. */
void zr_cuda(zr *z, cudaError_t error, const char *what);
/* The stream of a queue, for something that is issued now: `what` */
cudaStream_t zr_on(zr *z, int queue, const char *what);
void zr_mark(zr *z, cudaEvent_t event, int queue);

/* ---- device.c */
/* Batches below n are copied: waits for that. Then their micro-batches have begun. */
void zr_batches(zr *z, int64_t n);

/* ---- collective.c */
void zr_communicators(zr *z);
void zr_part(zr *z); /* the communicators' end */

#endif
