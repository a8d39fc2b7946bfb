/* zr_queue.h -- the queues of a rank, which the target runs. */
#ifndef ZR_QUEUE_H
#define ZR_QUEUE_H
#include "zr_rank.h"

enum { ZR_OPERANDS = 16 };

struct zr_queue {
    void *stream; /* for its kernels; NULL: the target has no streams */
    void *k;      /* kernel context; NULL: the queue runs no kernels */
    /* bytes received from peers; collectives; bytes received from other hosts */
    int64_t bytes, messages, far;
    int group;      /* group of the last collective */
    int64_t copied; /* bytes moved by zr_copy */
};

typedef struct zr_command zr_command;
struct zr_command {
    void (*run)(zr *z, int queue, const zr_command *c);
    const char *name; /* for --profile; NULL: not noted */
    zr_fn *fn;
    int64_t i[ZR_OPERANDS];
};

static inline int64_t zr_address(void *p) { return (int64_t)(intptr_t)p; } /* as an operand */

void zr_queues_start(zr *z);
void zr_queues_stop(zr *z);
void zr_step_begin(zr *z); /* around program->step: test modes run ahead in it */
/* Wait until ZR_MAIN is empty. Other queues may still run work that the next step waits for. */
void zr_step_end(zr *z);
/* Make the graph that zr_replay will launch before the first step, so that its
 * memory is allocated then. */
void zr_ready(zr *z, int graph, void (*issue)(zr *z));
void zr_finish(zr *z, int queue);                    /* wait until the queue is empty */
void zr_drain(zr *z);                                /* wait until all queues are empty */
void zr_push(zr *z, int queue, const zr_command *c); /* runs c at once if the queue is inline */

void zr_poison(zr *z, int queue, int64_t at, int64_t bytes); /* queue a fill with NaN */

#endif
