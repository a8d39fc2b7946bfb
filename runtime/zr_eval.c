/* zr_eval.c -- multiple choice: how many examples of --eval the model gets right; functions for all
 * evaluations.
 *
 * Example e belongs to rank e % ranks, or to the ranks that share a sample. Its completions go
 * through the model one at a time, each after the context, in a micro-batch without other targets.
 * The right completion must have the smallest mean loss over its tokens; the first of equal ones
 * counts.
 *
 * Invariants
 *  1. Every rank issues the same number of evaluations, because peers may need its part of the
 *     parameters. A rank that has no completion left evaluates micro-batches without targets.
 *  2. A mean uses the sums of a sample's ranks only (z->apart), so no bit of it depends on others.
 *  3. Memory is allocated only when the file is opened.
 */
#include "zr_batch.h"
#include "zr_choices.h"
#include "zr_eval.h"
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_log.h"
#include "zr_memory.h"
#include "zr_options.h"
#include "zr_progress.h"
#include "zr_queue.h"
#include "zr_rank.h"
#include "zr_seats.h"
#include "zr_shared.h"
#include <math.h>

/* ---- any evaluation */

void zr_all_dead(zr *z)
{
    zr_drain(z);
    if (z->o->mode == ZR_EAGER) return;
    for (int k = 0; k < z->p->nslots; k++)
        zr_poison(z, ZR_MAIN, z->p->slots[k][0], z->p->slots[k][1] * z->p->slots[k][2]);
    zr_drain(z);
}

double zr_mean(zr *z, double *valid)
{
    double loss;
    z->p->total(z);
    zr_call(z, ZR_MAIN, z->p->mean, zr_address(&loss), zr_address(valid));
    zr_drain(z);
    return *valid > 0 ? loss : NAN;
}

/* ---- multiple choice */

/* Return the number of examples that are evaluated at once. */
static int64_t at_once(const zr *z) { return z->ranks / zr_context(z->p); }

/* Return the evaluations that every rank must issue for the examples from `first` on that are
 * evaluated at once. */
static int64_t turns_of(const zr *z, int64_t first)
{
    const zr_choices *c = z->choices;
    int64_t most = 0;
    for (int64_t e = first; e < zr_least(first + at_once(z), c->n); e++)
        if (c->count[e] > most) most = c->count[e];
    return most;
}

void zr_eval_open(zr *z)
{
    char why[ZR_WHY];
    z->choices->fd = -1;
    if (!z->o->eval) return;
    if (zr_choices_open(z->choices, z->o->eval, z->p->sequence, z->p->vocab, why))
        zr_fail(z, ZR_USER, "--eval %s", why);
    for (int64_t e = 0; e < z->choices->n; e += at_once(z)) z->tries += turns_of(z, e);
}

/* Return the mean loss of the next completion of the rank's example. there: 0 if there is none. */
static double mean_loss(zr *z, int there)
{
    double valid;
    zr_arrays to = zr_batch_alone(z);
    if (there) zr_choices_next(z->choices, to.tokens, to.targets);
    zr_batch_alone_filled(z);
    zr_call(z, ZR_MAIN, z->p->clear, 0);
    zr_replay(z, ZR_EVAL, z->p->eval);
    zr_all_dead(z);
    return zr_mean(z, &valid);
}

/* Return 1 if this rank's example among those from `first` on is right, and the rank is the first
 * of those that share it. A loss of NaN never counts. */
static int is_right(zr *z, int64_t first)
{
    char why[ZR_WHY];
    zr_choices *c = z->choices;
    int64_t own = first + z->rank / zr_context(z->p), turns = turns_of(z, first), best = -1;
    int64_t many = own < c->n ? c->count[own] : 0;
    double least = INFINITY;
    if (many && zr_choices_read(c, own, why)) zr_fail(z, ZR_USER, "--eval %s", why);
    for (int64_t k = 0; k < turns; k++) {
        double loss = mean_loss(z, k < many);
        if (k >= many || !(loss < least)) continue;
        least = loss;
        best = k;
    }
    return many && best == c->label && z->rank % zr_context(z->p) == 0;
}

void zr_eval(zr *z, int64_t step)
{
    uint64_t right[2] = {0, 0};
    int64_t examples = z->choices->n;
    if (!z->o->eval) return;
    zr_progress(z, "eval", "micro-batch", z->tries * zr_own_blocks(z->p));
    zr_lives(z, ZR_STEPS);
    z->apart = 1;
    for (int64_t e = 0; e < examples; e += at_once(z)) right[0] += (uint64_t)is_right(z, e);
    z->apart = 0;
    zr_lives(z, ZR_BETWEEN);
    zr_total(z, right);
    zr_progress(z, NULL, NULL, 0);
    zr_log_eval(z, step, (int64_t)right[0], examples);
}
