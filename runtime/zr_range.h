/* zr_range.h -- checks of commands: offsets within arenas, valid numbers; dead slots. */
#ifndef ZR_RANGE_H
#define ZR_RANGE_H
#include "zr.h"

void zr_find_column(zr *z); /* sets z->column; fails if the program lacks this target */
/* A row of ZR_EACH_QUEUE, and the words for a wait for the queue. */
typedef struct zr_queue_row {
    const char *name, *awaited;
    int from, to, kernels;
} zr_queue_row;
extern const zr_queue_row zr_queues[ZR_QUEUES];
const char *zr_queue_name(int queue);
/* Check the operands of a command. Each function fails, naming the command, if
 * one is outside its arena. */
void zr_check_queue(zr *z, const char *what, int queue);
void zr_check_event(zr *z, const char *what, int queue, int event);
void zr_check_call(zr *z, const char *name, int queue, int n);
void zr_check_copy(zr *z, int queue, int64_t from, int64_t to, int64_t bytes);
void zr_check_exchange(zr *z, int queue, int group, int64_t from, int64_t from_step, int64_t to,
                       int64_t to_step, int64_t bytes);
void zr_check_gather(zr *z, int queue, int group, int64_t from, int64_t from_step, int64_t to,
                     int64_t to_step, int64_t bytes);
/* Return the number of the inbox slot at `to`; fails if there is none. */
int zr_inbox(zr *z, const char *what, int64_t to);
void zr_check_alltoall(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to,
                       int64_t bytes);
void zr_check_reducescatter(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to,
                            int64_t bytes, int type);
void zr_check_done(zr *z, int queue, int group, int64_t at);
void zr_check_allreduce(zr *z, int queue, int group, int64_t from, int64_t to, int64_t n);
void zr_check_batch(zr *z, int64_t micro_batch, int64_t at);
void zr_check_states(zr *z); /* each master must be in one row of zr_program.states */

/* ---- dead slots (zr_range.c): filled with NaN, except in mode eager */
#define ZR_LAST zr_last(0)
/* Remove zr_last from the operands of command `what` and return a bit for each that had it. Fails
 * if such an operand is in no slot. */
uint32_t zr_unmark(zr *z, const char *what, int queue, int64_t *i, int n);

/* After command `what`, except in mode eager, call poison for the slots of its operands that are
 * marked in `last`. */
typedef void zr_poisoner(zr *z, int queue, int64_t at, int64_t bytes);
void zr_dead(zr *z, const char *what, int queue, const int64_t *i, uint32_t last,
             zr_poisoner *poison);

#endif
