/* zr_memory.h -- the device and the arenas of a rank. The target has these functions. */
#ifndef ZR_MEMORY_H
#define ZR_MEMORY_H
#include "zr.h"

extern const int zr_is_gpu; /* 0: the target lacks a GPU's options */

/* Make z->t before the ranks start, and check whether there is room for them. */
void zr_prepare(zr *z);
void zr_open(zr *z);  /* open a rank's device, before its kernels */
void zr_arena(zr *z); /* allocate this rank's arena, all zero, and map its peers' */
/* The next micro-batch, int32 [B,T] each, or [B,T/n] if samples are cut into n blocks. */
typedef struct zr_arrays {
    int32_t *tokens, *targets, *positions;
    int32_t *documents, *sample_targets; /* [B,T]: positions and targets of whole samples */
} zr_arrays;
/* Find the place for the next micro-batch, which the rank's own thread fills. zr_batch_filled then
 * copies it to its place in the arena, or `at` bytes after it, before any command issued later. It
 * also copies keys, and the arrays of whole samples, if the program has them. first: number
 * of the first sample or block in the run, or ZR_NO_SAMPLE if they are not for training. */
enum { ZR_NO_SAMPLE = -1 };
zr_arrays zr_batch_place(zr *z, int64_t at);
void zr_batch_filled(zr *z, int64_t at, int64_t first);

/* Return the blocks of a sample, and the ranks that share them. */
static inline int64_t zr_blocks(const zr_program *p)
{
    return p->sequence_blocks ? p->sequence_blocks : 1;
}
static inline int64_t zr_context(const zr_program *p) { return p->context ? p->context : 1; }

/* Return the blocks of a sample that a rank has, all in a row. */
static inline int64_t zr_own_blocks(const zr_program *p) { return zr_blocks(p) / zr_context(p); }

/* Return the tokens of a micro-batch, or of a block of it. */
static inline int64_t zr_batch_tokens(const zr_program *p)
{
    return p->batch * p->sequence / zr_blocks(p);
}

/* Compute each token's position in its document, for B whole samples. A document begins with each
 * sample and after each token `end`. */
static inline void zr_positions(const zr_program *p, int64_t B, const zr_arrays *of)
{
    for (int64_t i = 0; i < B * p->sequence; i++)
        of->positions[i] =
            i % p->sequence && of->tokens[i - 1] != p->end ? of->positions[i - 1] + 1 : 0;
}

/* Compute the random keys of a micro-batch, int64 [B]; 0: no dropout. Blocks of samples have keys
 * of their own: block j of sample s of n blocks has number s*n + j. first: number of the first. */
static inline void zr_keys(const zr_program *p, int64_t first, int64_t *keys)
{
    for (int64_t b = 0; b < p->batch; b++) {
        uint64_t own =
            p->seed + (uint64_t)(first + b * zr_blocks(p)) * UINT64_C(0xd1342543de82ef95);
        keys[b] = first < 0 ? 0 : (int64_t)(own << 1 | 1);
    }
}

/* Return the number of the first block of the sample that block `first` is of. */
static inline int64_t zr_sample_of(const zr_program *p, int64_t first)
{
    return first < 0 ? first : first - first % zr_blocks(p);
}

/* Copy from and to a queue's arena at offset `at`. All queues must be empty. */
void zr_read(zr *z, int queue, void *to, int64_t at, int64_t bytes);
void zr_write(zr *z, int queue, int64_t at, const void *from, int64_t bytes);
char *zr_reach(const zr *z, int queue, int64_t at); /* address in the host's memory, or NULL */

void zr_epilogue(zr *z); /* print the target's report after training */

#endif
