/* zr_eval.c -- multiple choice: how many examples of --eval the model gets right; what all
 * evaluations need.
 *
 * Example e is rank e % ranks' own. Its completions go through the model one by one, each behind
 * the context in the first row of a micro-batch that has no other target; the right one must have
 * the least mean loss over its tokens, of equal ones the first counts.
 *
 * Invariants
 *  1. Every rank issues as many evaluations, without a target where it has no completion left:
 *     peers may need its part of the parameters.
 *  2. A mean is of this rank's sums alone (z->apart), so no bit of it depends on the other ranks.
 *  3. Nothing is allocated but when the file is opened.
 */
#include "zr_int.h"
#include <math.h>

/* ---- any evaluation */

void zr_blank(const zr *z, int64_t first, int32_t *tokens, int32_t *targets)
{
    for (int64_t i = first; i < z->p->batch * z->p->sequence; i++) {
        tokens[i] = 0;
        targets[i] = -1;
    }
}

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

/* How often the ranks of the examples from `first` on, one each, must evaluate */
static int64_t turns_of(const zr *z, int64_t first)
{
    const zr_choices *c = &z->choices;
    int64_t most = 0;
    for (int64_t e = first; e < zr_least(first + z->ranks, c->n); e++)
        if (c->count[e] > most) most = c->count[e];
    return most;
}

void zr_eval_open(zr *z)
{
    char why[ZR_WHY];
    z->choices.fd = -1;
    if (!z->o->eval) return;
    if (zr_choices_open(&z->choices, z->o->eval, z->p->sequence, z->p->vocab, why))
        zr_fail(z, ZR_USER, "%s", why);
    for (int64_t e = 0; e < z->choices.n; e += z->ranks) z->tries += turns_of(z, e);
}

/* The mean loss of the next completion of the rank's example; there is none: of nothing */
static double mean_loss(zr *z, int there)
{
    double valid;
    int32_t *tokens, *targets;
    zr_batch_place(z, 0, &tokens, &targets);
    zr_blank(z, 0, tokens, targets);
    if (there) zr_choices_next(&z->choices, tokens, targets);
    zr_batch_filled(z, 0, ZR_NO_SAMPLE);
    zr_call(z, ZR_MAIN, z->p->clear, 0);
    zr_replay(z, ZR_EVAL, z->p->eval);
    zr_all_dead(z);
    return zr_mean(z, &valid);
}

/* Of the examples from `first` on the rank's own: 1 where it is right. A loss that is no number is
 * none that counts. */
static int is_right(zr *z, int64_t first)
{
    char why[ZR_WHY];
    zr_choices *c = &z->choices;
    int64_t own = first + z->rank, turns = turns_of(z, first), best = -1;
    int64_t many = own < c->n ? c->count[own] : 0;
    double least = INFINITY;
    if (many && zr_choices_read(c, own, why)) zr_fail(z, ZR_USER, "%s", why);
    for (int64_t k = 0; k < turns; k++) {
        double loss = mean_loss(z, k < many);
        if (k >= many || !(loss < least)) continue;
        least = loss;
        best = k;
    }
    return many && best == c->label;
}

void zr_eval(zr *z, int64_t step)
{
    uint64_t right[2] = {0, 0};
    int64_t examples = z->choices.n;
    if (!z->o->eval) return;
    zr_progress(z, "eval", "micro-batch", z->tries);
    zr_lives(z, ZR_STEPS);
    z->apart = 1;
    for (int64_t e = 0; e < examples; e += z->ranks) right[0] += (uint64_t)is_right(z, e);
    z->apart = 0;
    zr_lives(z, ZR_BETWEEN);
    zr_total(z, right);
    zr_progress(z, NULL, NULL, 0);
    zr_log_eval(z, step, (int64_t)right[0], examples);
}
