/* cpu.h -- what a rank on a CPU keeps: its arena and its peers', queues of commands and threads.
 *
 * Environment, for tests
 *   ZR_GATHER_DELAY_US=N   every gather takes N microseconds longer
 *   ZR_UNMAP_PEERS=1       peers' arenas cannot be read outside collectives
 */
#ifndef ZR_CPU_H
#define ZR_CPU_H
#include "../zr_int.h"

enum { ZR_RING = 1024 };
enum { ZR_PART = 512 }; /* int64 of an allreduce that are summed at a time */

/* To ranks whose memory this one does not see. A queue says what goes and what comes, then asks
 * until all has gone and come; no call waits but `close`, which all ranks make. Between two ranks
 * the pieces of a queue come in the order in which they were said. */
typedef struct zr_wire {
    void (*send)(zr *z, int queue, int rank, const void *at, int64_t bytes);
    void (*receive)(zr *z, int queue, int rank, void *at, int64_t bytes);
    int (*test)(zr *z, int queue);
    void (*close)(zr *z);
} zr_wire;

typedef struct zr_event {
    int32_t queue;
    int64_t at; /* its first so many commands */
} zr_event;

typedef struct zr_lane { /* a queue's thread and what it runs */
    zr *z;
    zr_command *ring;                   /* [ZR_RING] */
    int64_t issued, finished, demanded; /* commands; under lock */
    int quit;
    uint64_t coin, pause; /* random states: holding, pausing */
    pthread_t thread;
    pthread_cond_t todo; /* something was issued or demanded, or it shall quit */
    pthread_cond_t done; /* something was finished */
    uint32_t turn;       /* of its collectives, by the thread that runs them */
} zr_lane;

struct zr_target {
    int memory;     /* file of what peers read; of all ranks, one after the other (near.c) */
    int64_t common; /* of an arena: bytes in it, that peers read */
    int64_t room;   /* of an arena: all; the rest is this rank's alone */
    char *arena, *host;
    char **peer; /* [ranks] arenas; peer[rank] == arena; NULL: not to be seen from here */
    zr_lane lane[ZR_QUEUES];
    const void **sources; /* [p->inboxes][ranks] */
    zr_event *event;      /* [p->events] newest record issued */
    uint64_t order;       /* random state: in which order queues are emptied */
    int ahead;            /* 1: ZR_MAIN's commands run on its own thread, too */
    pthread_mutex_t lock;
    int64_t delay;               /* ZR_GATHER_DELAY_US */
    int unmap, readable;         /* readable: collectives in progress; under lock */
    const zr_wire *wire;         /* to those; NULL: there are none */
    struct zr_mpi *mpi;          /* what ../mpi/wire.c keeps */
    uint64_t *theirs[ZR_QUEUES]; /* [ranks][ZR_PART] of an allreduce, from those */
};

char *zr_arena_of(const zr *z, int queue); /* what the queue's functions work on */

/* ---- memory.c, for near.c and ../mpi/far.c */
int64_t zr_pages(int64_t bytes);         /* rounded up to whole ones */
void zr_check_memory(zr *z, int ranks);  /* fails where so many ranks have no room here */
void zr_keep_apart(int rank, int ranks); /* that share the cores allowed here */
char *zr_private(zr *z, int64_t bytes);  /* NULL: 0 bytes */
int zr_memory(zr *z, int64_t bytes);     /* a file of so many, which has no name */
/* What peers read of an arena, from `offset` of the file on; at: there, or anywhere (NULL). */
char *zr_common(zr *z, int file, int64_t offset, char *at, int protection);
void zr_take_pages(zr *z, char *at, int64_t bytes);

/* ---- near.c or ../mpi/far.c */
void zr_join(zr *z); /* before the queues' threads: the ranks' collectives can begin */
void zr_part(zr *z); /* behind them: there will be none */

#endif
