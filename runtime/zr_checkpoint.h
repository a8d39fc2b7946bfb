/* zr_checkpoint.h -- a run's checkpoints: folders DIR/step-00001000 of safetensors and run.json.
 *
 * Invariants
 *  1. A folder that bears its final name is whole and on the disk. The newest one is found by its
 *     name; what begins with a dot is unfinished, or on its way out.
 *  2. A folder is removed when a newer one is durable, and only if it has a run.json.
 *  3. Every rank goes the same way through these functions. Between the first step and the last
 *     they allocate nothing.
 */
#ifndef ZR_CHECKPOINT_H
#define ZR_CHECKPOINT_H
#include "zr_int.h"

/* What run.json says of the run that has written it. */
typedef struct zr_past {
    int64_t steps, skipped, skips;
    uint64_t *sums;        /* of all tensors of all files */
    const char *accepted;  /* by its run's --accept-change; good while it is read */
    char kernels[ZR_TOLD]; /* the object that it ran */
    uint64_t control[32];  /* of states that are numbers, from the last on */
} zr_past;

/* Lays out run.json; c->record.text from then on. */
void zr_run_open(zr *z, zr_run *r, int64_t sums);
/* Takes down the numbers of a run as they are now. */
void zr_run_note(zr *z, zr_run *r);
/* Writes into the end of text[n], ZR_SEAL bytes, the checksum of what is before. */
enum { ZR_SEAL = 32 };
void zr_run_seal(char *text, int64_t n);
/* These to a file; 0, or -1 and errno. sums[n]: over all ranks */
int zr_run_write(zr_run *r, const uint64_t *sums, int64_t n, int fd);
/* 0; -1 and why: it cannot be read; 1 and why: it is of another recipe, or of other data. */
int zr_run_read(zr *z, const char *file, zr_past *to, char *why);

/* The order of products (ZR_PAIRS ...) of the run that has written it; -1: none, as of a GPU.
 * Returns 0, or -1 and why. */
int zr_run_order(const char *file, int *order, char *why);

int zr_accepts(const zr *z, const char *key); /* by --accept-change */

/* Locks the folder, clears away what is unfinished, finds where to go on. */
void zr_checkpoint_find(zr *z);
/* Lays out what is saved; fails where there is no room for all that will be kept. */
void zr_checkpoint_open(zr *z);
/* Gives back the room that was held for further ones. */
void zr_checkpoint_close(zr *z);
/* All states of the checkpoint that the run goes on from; z->step and all that is counted. */
void zr_checkpoint_load(zr *z);
/* A checkpoint of z->step steps, unless there is one. All queues are empty. What goes wrong is said
 * and ends only this checkpoint. Returns whether it is there; beside: where it can be, it is begun,
 * written beside the next step, and to be ended then. */
int zr_checkpoint_save(zr *z, int beside);
void zr_checkpoint_end(zr *z);                     /* of one that was begun, if there is any */
int zr_checkpoint_due(const zr *z, int64_t steps); /* behind so many steps? */
/* Has anyone been asked to leave? All ranks have the same answer. */
int zr_asked_to_leave(zr *z);

#endif
