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
    int memory;     /* file that holds all arenas, one after the other */
    int64_t common; /* of an arena: bytes in it, that peers read */
    int64_t room;   /* of an arena: all; the rest is this rank's alone */
    char *arena, *host;
    char **peer; /* [ranks] arenas; peer[rank] == arena */
    zr_lane lane[ZR_QUEUES];
    const void **sources; /* [p->inboxes][ranks] */
    zr_event *event;      /* [p->events] newest record issued */
    uint64_t order;       /* random state: in which order queues are emptied */
    int ahead;            /* 1: ZR_MAIN's commands run on its own thread, too */
    pthread_mutex_t lock;
    int64_t delay;       /* ZR_GATHER_DELAY_US */
    int unmap, readable; /* readable: collectives in progress; under lock */
};

char *zr_arena_of(const zr *z, int queue); /* what the queue's functions work on */

#endif
