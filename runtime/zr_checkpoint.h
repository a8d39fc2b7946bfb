/* zr_checkpoint.h -- a run's checkpoints: folders DIR/step-00001000 of safetensors files and
 * run.json.
 *
 * Invariants
 *  1. A folder under its final name is complete and on the disk, and the newest one is found by its
 *     name. Names that begin with a dot are unfinished or being removed.
 *  2. A folder is removed only after a newer one is durable, and only if it has a run.json.
 *  3. All ranks take the same path through these functions. Between the first step and the last
 *     they allocate nothing.
 */
#ifndef ZR_CHECKPOINT_H
#define ZR_CHECKPOINT_H
#include "zr_rank.h"
#include "zr_shared.h"
#include "zr_weights.h"

enum { ZR_STORED = 8 };
/* The validations of a run so far. */
typedef struct zr_best {
    int64_t at;    /* step of the last one; 0: none */
    int64_t step;  /* step of the best one; 0: none had a finite loss */
    int64_t worse; /* number of them since the best one */
    double loss;   /* of the best one */
} zr_best;
typedef struct zr_run { /* contents of run.json */
    char *text;         /* [n] */
    int64_t n;
    /* offsets in the text of the numbers, of the checksums, and of the hash of a GPU's algorithms;
     * 0: a CPU */
    int64_t *number, *sum, algorithms;
    int64_t loss; /* of the best validation */
} zr_run;

struct zr_checkpoints {
    int64_t from, last; /* step the run resumed from; step of the newest checkpoint, -1: none */
    int64_t at;         /* step of the checkpoint being written */
    zr_best best;
    int beside;           /* 1: it is being written beside the next step */
    int64_t *kept, nkept; /* rank 0: steps of the checkpoints that may be deleted, oldest first */
    int64_t rooms; /* rank 0: number of folders that reserve space for the next checkpoints */
    zr_stored stored[ZR_STORED]; /* files of each checkpoint */
    zr_header header[ZR_STORED];
    /* rank 0: open files while a checkpoint is written; the last one is run.json */
    int fd[ZR_STORED + 1];
    int nstored;
    int64_t tensors, bytes; /* totals of all files */
    uint64_t *sums;         /* [tensors] checksums */
    zr_chunk *chunk;
    zr_run record;
    char data[ZR_TOLD];        /* description of the files of --data */
    const char *const *recipe; /* [nrecipe] the program's lines, then the weights of the sources */
    int nrecipe;
    uint64_t algorithms; /* those of the run that is resumed on a GPU of its kind; 0: none */
    int late;            /* 1: the time to save in has passed (--grace), the same on all ranks */
    int64_t unsynced;    /* bytes this rank has written that may not be on the disk yet */
    double turned;       /* zr_now() between the last two steps; 0: none yet */
    double saving;       /* seconds since then that training stood still for checkpoints */
    /* zr_now() when the current checkpoint began; seconds of `saving` it caused */
    double begun, pause;
    double waited; /* seconds that an update waited for it */
    /* longest so far: time from one step to the next without `saving`; `saving` itself */
    double turn, save;
};

typedef struct zr_number {
    uint64_t bits;
    int given;
} zr_number;

/* Contents of run.json about the run that wrote it. */
typedef struct zr_past {
    int64_t steps, skipped, skips;
    zr_best best;
    uint64_t *sums;        /* checksums of all tensors of all files */
    const char *accepted;  /* the argument of --accept-change, valid during the read */
    char kernels[ZR_TOLD]; /* its kernel object */
    uint64_t algorithms;   /* its algorithms of a GPU's products; 0: not known */
    zr_number *control;    /* [p->nstates] values of the states that are single numbers */
} zr_past;

/* Prepare run.json in r->text. sums: number of checksums. */
void zr_run_open(zr *z, zr_run *r, int64_t sums);
/* Write the current numbers of the run into it. */
void zr_run_note(zr *z, zr_run *r);
/* Write the checksum of text[0 .. n - ZR_SEAL) into the last ZR_SEAL bytes. */
enum { ZR_SEAL = 32 };
void zr_run_seal(char *text, int64_t n);
/* Write run.json to a file. sums[n]: checksums over all ranks. Returns 0, or -1 and errno. */
int zr_run_write(zr_run *r, const uint64_t *sums, int64_t n, int fd);
/* Read run.json. Returns 0; -1 and why: not readable; 1 and why: another recipe or other data. */
int zr_run_read(zr *z, const char *file, zr_past *to, char *why);

/* Read the order of products (ZR_PAIRS ...; -1: none, as on a GPU) of the run that wrote the file.
 * Returns 0, or -1 and why. */
int zr_run_order(const char *file, int *order, char *why);

int zr_accepts(const zr *z, const char *key); /* named by --accept-change? */

/* Lock the folder, remove unfinished checkpoints, find the step to resume from. */
void zr_checkpoint_find(zr *z);
/* Prepare saving. Fails if there is no space for all checkpoints to be kept. */
void zr_checkpoint_open(zr *z);
/* Release the space reserved for further checkpoints. */
void zr_checkpoint_close(zr *z);
/* Load all states of the checkpoint to resume from, with z->step and the counters. */
void zr_checkpoint_load(zr *z);
/* Save a checkpoint of z->step steps unless there is one. All queues must be empty. A failure is
 * reported and ends only this checkpoint. Returns whether it exists. beside: if possible only begin
 * it; it is written beside the next step, and zr_checkpoint_end completes it. */
int zr_checkpoint_save(zr *z, int beside);
void zr_checkpoint_end(zr *z);                   /* complete one that was begun, if any */
int zr_checkpoint_is_there(zr *z, int64_t step); /* for rank 0 */
void zr_checkpoint_read(zr *z, int64_t step);    /* load all states, and no counters, of a step */
/* Return the order of products of the run that is resumed; below 0: none. */
int zr_past_order(zr *z);
/* Return whether the run is asked to exit, the same on all ranks. */
int zr_asked_to_leave(zr *z);

#endif
