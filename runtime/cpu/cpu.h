/* cpu.h -- the state of a rank on a CPU: its arena and its peers', queues of commands and threads.
 *
 * Environment, for tests
 *   ZR_GATHER_DELAY_US=N   delay every all-gather by N microseconds
 *   ZR_UNMAP_PEERS=1       make peers' arenas unreadable outside collectives
 */
#ifndef ZR_CPU_H
#define ZR_CPU_H
#include "../zr_queue.h"
#include <pthread.h>

enum { ZR_RING = 1024 };
enum { ZR_SUMMED = 512 }; /* int64 of an all-reduce that are summed at a time */

/* A connection to ranks whose memory this one cannot read. A queue posts its sends and receives,
 * then polls `test` until all are complete. No call waits except `close`, which all ranks call.
 * Between two ranks the pieces of a queue arrive in the order in which they were posted. */
typedef struct zr_wire {
    void (*send)(zr *z, int queue, int rank, const void *at, int64_t bytes);
    void (*receive)(zr *z, int queue, int rank, void *at, int64_t bytes);
    int (*test)(zr *z, int queue);
    void (*close)(zr *z);
} zr_wire;

typedef struct zr_event {
    int32_t queue;
    int64_t at; /* commands issued on that queue when it was recorded */
} zr_event;

typedef struct zr_lane { /* a queue's thread and its commands */
    zr *z;
    zr_command *ring;                   /* [ZR_RING] */
    int64_t issued, finished, demanded; /* numbers of commands; under lock */
    int quit;
    uint64_t coin, pause; /* random states: whether to hold a command, how long to pause */
    pthread_t thread;
    pthread_cond_t todo; /* a command was issued or demanded, or the thread must end */
    pthread_cond_t done; /* a command has finished */
    uint32_t turn;       /* number of the last collective; used by the thread that runs them */
} zr_lane;

struct zr_target {
    /* memory file of the parts that peers read; those of all ranks, one after the other (near.c) */
    int memory;
    int64_t common; /* bytes of an arena that peers read, at its start */
    int64_t room;   /* bytes of an arena; the rest is private to the rank */
    char *arena, *host;
    char **peer; /* [ranks] arenas; peer[rank] == arena; NULL: not readable from here */
    zr_lane lane[ZR_QUEUES];
    const void **sources; /* [p->inboxes][ranks] */
    zr_event *event;      /* [p->events] newest record */
    uint64_t order;       /* random state: the order in which queues are drained */
    int ahead;            /* 1: a thread of its own runs ZR_MAIN's commands too */
    pthread_mutex_t lock;
    int64_t delay;               /* ZR_GATHER_DELAY_US */
    int unmap, readable;         /* readable: number of collectives in progress; under lock */
    const zr_wire *wire;         /* connection to ranks that cannot be read; NULL: there are none */
    struct zr_mpi *mpi;          /* state of ../mpi/wire.c */
    uint64_t *theirs[ZR_QUEUES]; /* [ranks][ZR_SUMMED] terms of an all-reduce from those ranks */
};

char *zr_arena_of(const zr *z, int queue); /* the arena that functions of a queue work on */

/* ---- memory.c, for near.c and ../mpi/far.c */
int64_t zr_pages(int64_t bytes);         /* rounded up to whole pages */
void zr_check_memory(zr *z, int ranks);  /* fails if this host has no room for so many ranks */
void zr_keep_apart(int rank, int ranks); /* pin one of `ranks` that share the allowed cores */
char *zr_private(zr *z, int64_t bytes);  /* map private memory; NULL for 0 bytes */
int zr_memory(zr *z, int64_t bytes);     /* make a memory file without a name */
/* Map the part of an arena that peers read, from `offset` of the file on. at: the
 * address, or NULL for any. */
char *zr_common(zr *z, int file, int64_t offset, char *at, int protection);
void zr_take_pages(zr *z, char *at, int64_t bytes);

/* ---- near.c or ../mpi/far.c */
void zr_join(zr *z); /* called before the queues' threads start: collectives may begin */
void zr_part(zr *z); /* called after they end: there will be no more collectives */

#endif
