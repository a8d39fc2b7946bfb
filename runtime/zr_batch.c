/* zr_batch.c -- loads samples, or the blocks of samples that a rank has.
 *
 * Invariants
 *  1. Order of samples: micro-batch g of step s, of G micro-batches of all ranks, has samples (s*G
 *     + g)*B + b of the stream, however many ranks there are. Of samples in n blocks, micro-batch
 *     g*n + j stands for block j of micro-batch g.
 */
#include "zr_batch.h"
#include "zr_data.h"
#include "zr_eval.h"
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_memory.h"
#include "zr_mix.h"
#include "zr_queue.h"
#include "zr_range.h"
#include "zr_shared.h"
#include <errno.h>
#include <stdatomic.h>
#include <string.h>

const char *zr_option_of(const zr *z, const zr_mix *m) { return m == z->val ? "--val" : "--data"; }

static void fetch(zr *z, const zr_mix *d, int64_t first, int64_t rows, int32_t *tokens,
                  int32_t *targets)
{
    char why[ZR_WHY];
    errno = 0;
    if (rows > 0 && zr_mix_read(d, first, rows, tokens, targets, why))
        zr_fail(z, zr_code_of(errno), "%s %s", zr_option_of(z, d), why);
}

/* Fill n rows with tokens that have no targets. */
static void blank(int64_t n, int32_t *tokens, int32_t *targets)
{
    for (int64_t i = 0; i < n; i++) {
        tokens[i] = 0;
        targets[i] = -1;
    }
}

/* ---- samples in blocks */

static zr_arrays whole_sample(const zr *z)
{
    int64_t T = z->p->sequence;
    return (zr_arrays){.tokens = z->whole, .targets = z->whole + T, .positions = z->whole + 2 * T};
}

/* Copy a block of the whole sample to sample b of a micro-batch. */
static void cut(const zr *z, int64_t block, int64_t b, const zr_arrays *to)
{
    int64_t T = z->p->sequence, n = T / zr_blocks(z->p), at = block * n;
    size_t bytes = (size_t)n * sizeof(int32_t), all = (size_t)T * sizeof(int32_t);
    zr_arrays whole = whole_sample(z);
    memcpy(to->tokens + b * n, whole.tokens + at, bytes);
    memcpy(to->targets + b * n, whole.targets + at, bytes);
    memcpy(to->positions + b * n, whole.positions + at, bytes);
    if (z->p->documents) memcpy(to->documents + b * T, whole.positions, all);
    if (z->p->sample_targets) memcpy(to->sample_targets + b * T, whole.targets, all);
}

/* Read a block of `rows` samples. Each is read whole, since positions depend on the tokens
 * before. */
static void load_block(zr *z, const zr_mix *d, int64_t first, int64_t rows, int64_t block,
                       const zr_arrays *to)
{
    zr_arrays whole = whole_sample(z);
    for (int64_t b = 0; b < z->p->batch; b++) {
        fetch(z, d, first + b, b < rows, whole.tokens, whole.targets);
        if (b >= rows) blank(z->p->sequence, whole.tokens, whole.targets);
        zr_positions(z->p, 1, &whole);
        cut(z, block, b, to);
    }
}

/* ---- micro-batches */

/* Read `rows` samples from `first` on, then empty ones, or a block of each, into the arena, `at`
 * bytes after their places. */
static void load(zr *z, int64_t at, const zr_mix *d, int64_t first, int64_t rows, int64_t block)
{
    zr_arrays to = zr_batch_place(z, at);
    rows = rows < 0 ? 0 : zr_least(rows, z->p->batch);
    if (zr_blocks(z->p) > 1) {
        load_block(z, d, first, rows, block, &to);
    } else {
        int64_t read = rows * z->p->sequence;
        fetch(z, d, first, rows, to.tokens, to.targets);
        blank(zr_batch_tokens(z->p) - read, to.tokens + read, to.targets + read);
    }
    zr_batch_filled(z, at, d == z->train ? first * zr_blocks(z->p) + block : ZR_NO_SAMPLE);
}

/* Return the first block of a sample that this rank has. */
static int64_t first_block(const zr *z) { return z->rank % zr_context(z->p) * zr_own_blocks(z->p); }

static void run_batch(zr *z, int queue, const zr_command *c)
{
    int64_t nth = c->i[0], at = c->i[1], n = zr_blocks(z->p), B = z->p->batch;
    (void)queue;
    /* several at once: no progress by parts */
    if (z->rank == 0 && at) atomic_store(&z->shared->task.parts, 0);
    int64_t micro_batch = z->step * z->p->micro_batches * z->ranks + nth;
    load(z, at, z->train, micro_batch / n * B, B, micro_batch % n);
}

void zr_batch_at(zr *z, int64_t micro_batch, int64_t at)
{
    zr_check_batch(z, micro_batch, at);
    zr_push(z, ZR_MAIN, &(zr_command){run_batch, "batch", NULL, {micro_batch, at}});
}

void zr_batch(zr *z, int64_t micro_batch) { zr_batch_at(z, micro_batch, 0); }

void zr_batch_eval(zr *z, int64_t first)
{
    int64_t B = z->p->batch, mine = first + z->rank / zr_context(z->p) * B;
    for (int64_t i = 0; i < zr_own_blocks(z->p); i++)
        load(z, i * z->p->batch_step, z->val, mine, z->val->of->data.samples - mine,
             first_block(z) + i);
}

zr_arrays zr_batch_alone(zr *z)
{
    int cuts = zr_blocks(z->p) > 1;
    zr_arrays to = cuts ? whole_sample(z) : zr_batch_place(z, 0);
    blank(cuts ? z->p->sequence : zr_batch_tokens(z->p), to.tokens, to.targets);
    return to;
}

/* Of samples in blocks, all of a micro-batch have the tokens, and the first alone has targets. */
void zr_batch_alone_filled(zr *z)
{
    int64_t own = zr_batch_tokens(z->p) / z->p->batch;
    zr_arrays whole = whole_sample(z);
    if (zr_blocks(z->p) == 1) {
        zr_batch_filled(z, 0, ZR_NO_SAMPLE);
        return;
    }
    zr_positions(z->p, 1, &whole);
    for (int64_t i = 0; i < zr_own_blocks(z->p); i++) {
        zr_arrays to = zr_batch_place(z, i * z->p->batch_step);
        for (int64_t b = 0; b < z->p->batch; b++) cut(z, first_block(z) + i, b, &to);
        for (int64_t m = own; m < zr_batch_tokens(z->p); m++) to.targets[m] = -1;
        zr_batch_filled(z, i * z->p->batch_step, ZR_NO_SAMPLE);
    }
}
