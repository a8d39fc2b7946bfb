/* zr_memory.h -- the device and the arenas of a rank. The target has these functions. */
#ifndef ZR_MEMORY_H
#define ZR_MEMORY_H
#include "zr.h"

extern const int zr_is_gpu; /* 0: the target lacks a GPU's options */

/* Make z->t before the ranks start, and check whether there is room for them. */
void zr_prepare(zr *z);
void zr_open(zr *z);  /* open a rank's device, before its kernels */
void zr_arena(zr *z); /* allocate this rank's arena, all zero, and map its peers' */
/* Find the place for the next tokens and targets, int32 [B,T] each, which the rank's own thread
 * fills. zr_batch_filled then copies them to their places in the arena, or `at` bytes after these,
 * before any command issued later. It also copies positions and keys, if the program has them.
 * first: number of the first sample in the run, or ZR_NO_SAMPLE if they are not for training. */
enum { ZR_NO_SAMPLE = -1 };
void zr_batch_place(zr *z, int64_t at, int32_t **tokens, int32_t **targets);
void zr_batch_filled(zr *z, int64_t at, int64_t first);
/* Compute each token's position in its document. A document begins with each sample
 * and after each token `end`. */
static inline void zr_positions(const zr_program *p, const int32_t *tokens, int32_t *positions)
{
    for (int64_t i = 0; i < p->batch * p->sequence; i++)
        positions[i] = i % p->sequence && tokens[i - 1] != p->end ? positions[i - 1] + 1 : 0;
}

/* Compute the random keys of the samples from `first` on, int64 [B]; 0: no dropout. */
static inline void zr_keys(const zr_program *p, int64_t first, int64_t *keys)
{
    for (int64_t b = 0; b < p->batch; b++) {
        uint64_t own = p->seed + (uint64_t)(first + b) * UINT64_C(0xd1342543de82ef95);
        keys[b] = first < 0 ? 0 : (int64_t)(own << 1 | 1);
    }
}

/* Copy from and to a queue's arena at offset `at`. All queues must be empty. */
void zr_read(zr *z, int queue, void *to, int64_t at, int64_t bytes);
void zr_write(zr *z, int queue, int64_t at, const void *from, int64_t bytes);
char *zr_reach(const zr *z, int queue, int64_t at); /* address in the host's memory, or NULL */

void zr_epilogue(zr *z); /* print the target's report after training */

#endif
