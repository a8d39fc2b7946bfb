/* cuda.h -- the state of a rank on a GPU: its device, streams, events, graphs and communicators.
 *
 * A queue is a stream. Within a step nearly everything is captured into graphs, which later steps
 * launch. Graphs begin and end on ZR_MAIN's stream, so they run one after the other. Work issued
 * outside of graphs goes to the streams at once. That is all work of a program whose optimizer runs
 * on the host, where an update continues beside the next step.
 *
 * Invariants
 *  1. A rank uses CUDA only in its own process, after the fork.
 *  2. Nothing is allocated after the start except by the libraries, and that is measured.
 *  3. The rank's own thread issues and waits. The watchdog only checks, reports and ends the
 *     process. The thread that saves beside a step copies states to the host, on a stream of its
 *     own and through the ZR_BOUNCE bytes, which nobody else uses until that checkpoint is
 *     complete.
 *
 * Environment
 *   ZR_SHARE_GPU=1     let ranks share a device, for tests: they take turns and are slow; else
 *                      two ranks with one device end the run with exit code 3
 */
#ifndef ZR_CUDA_H
#define ZR_CUDA_H
#include "../zr.h"
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <pthread.h>

enum { ZR_BOUNCE = 1 << 20 };

typedef struct zr_event {
    cudaEvent_t mark;
    int64_t recorded; /* number of the capture; 0: outside of captures; -1: never */
    int queue;        /* queue on which it was recorded */
} zr_event;

typedef struct zr_graph {
    cudaGraphExec_t ready;                                         /* NULL: not captured yet */
    int64_t bytes[ZR_QUEUES], messages[ZR_QUEUES], far[ZR_QUEUES]; /* moved by each launch */
} zr_graph;

/* Operands of host functions, to which streams hold pointers. */
enum { ZR_CHUNK = 1024, ZR_CHUNKS = 1024 };
typedef struct zr_work zr_work;
typedef struct zr_pool {
    zr_work *chunk[ZR_CHUNKS]; /* [ZR_CHUNK] each, or NULL */
    int64_t used;
} zr_pool;

struct zr_target {
    int device;
    cudaStream_t stream[ZR_QUEUES];
    cudaStream_t beside; /* of the thread that saves beside a step; NULL: there is none */
    ncclComm_t *comm;    /* [ZR_COLLECTIVES][p->ngroups] NULL: a group of one rank, or unused */
    void **handle; /* [ZR_COLLECTIVES][p->ngroups] of the arena, registered with each; or NULL */
    int registers; /* 1: the arena is registered at the start, as no graph does it */
    int connected; /* 1: an error of NCCL from now on is not this host's fault */
    pthread_mutex_t within; /* held by the thread that is inside NCCL */
    zr_event *event;        /* [p->events] */
    char *arena;            /* device memory */
    /* pinned host memory: p->host bytes as the plan lays them out, then
     * ZR_BOUNCE bytes for copies */
    char *host;
    cudaEvent_t *read;      /* [p->pinned_batches] the batch in that slot has been copied */
    int64_t filled, copied; /* batches so far: written to slots, known to be copied */
    const void **sources;   /* [p->inboxes][ranks] */
    /* graphs */
    zr_graph graph[ZR_GRAPHS];
    /* number of the current capture, 0: none; captures begun so far */
    int64_t recording, recordings;
    /* host functions: of graphs; of this step and of the one before it, alternately */
    zr_pool recorded, issued[2];
    int turn;
    cudaEvent_t fork, played, joined[ZR_QUEUES];
    cudaEvent_t ended[ZR_QUEUES]; /* the queue's work of the last step is complete */
    unsigned loose;               /* queues (bits) with work that no graph waits for yet */
    unsigned behind;              /* queues (bits) that do not wait for the last graph yet */
    double launch_seconds;        /* of the host, in cudaGraphLaunch */
    int64_t launches;
    /* bytes of device memory: in use before the arena; free before and after it, and after the
     * first step */
    int64_t found, before, after, first;
    int64_t nccl_took; /* bytes that NCCL took when its communicators were made */
    double begun;      /* zr_now() at the start of the step */
    /* --profile: events 2n and 2n + 1 of note n; for each step an event and the host's time */
    cudaEvent_t *clock, *origin;
    double *origin_at;
};

/* ---- stream.c */
/* Fail with a message that names the call, unless a call of CUDA succeeded. */
void zr_cuda(zr *z, cudaError_t error, const char *what);
/* Return the stream of a queue for a command that is issued now. what: its name. */
cudaStream_t zr_on(zr *z, int queue, const char *what);
void zr_mark(zr *z, cudaEvent_t event, int queue);

/* ---- device.c */
/* Wait until the batches before number n are copied. Then their micro-batches have begun. */
void zr_batches(zr *z, int64_t n);

/* ---- collective.c */
void zr_communicators(zr *z);
void zr_part(zr *z); /* destroy the communicators */

#endif
