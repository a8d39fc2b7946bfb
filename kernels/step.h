/* step.h -- the constants of an optimizer step, computed in f64 from the recipe and the exact sums.
 *
 *   loss = sum of losses / valid; norm = sqrt(sum of squares) * weight / scale
 *   weight = M / valid, as a micro-batch's gradient is that of its sum / M
 *   means: loss = sum of micro-batches' means / means; weight = 1 / means
 *   factor = weight / scale, times clip / (norm + 1e-6) if norm > clip; it multiplies gradients
 *   bias1 = 1 / (1 - beta1^applied); bias2 = 1 / (1 - beta2^applied)
 */
#ifndef ZK_STEP_H
#define ZK_STEP_H
#include "limbs.h"

/* Return the value of a schedule at a step, counted from 1. ZK_LOG takes logarithms of the steps
 * since the origin. */
ZK_BOTH double step_phase(const zk_phase *p, int64_t step)
{
    while (p->until && step >= p->until) p++;
    int64_t n = step - p->origin;
    double x = (double)n / (double)p->span;
    if (p->stairs) x = (double)(n * p->stairs / p->span) / (double)p->stairs;
    if (p->curve == ZK_RESTARTS) x = (double)(n * p->stairs % p->span) / (double)p->span;
    if (p->curve == ZK_COSINE || p->curve == ZK_RESTARTS)
        x = 0.5 - 0.5 * zk_cos(3.14159265358979323846 * x);
    if (p->curve == ZK_LOG) x = zk_log((double)n) / zk_log((double)p->span);
    if (p->curve == ZK_INVERSE) return p->from / (1 + p->to * x);
    return p->from + (p->to - p->from) * x;
}

/* x^n by squaring, n >= 0 */
ZK_BOTH double step_power(double x, int64_t n)
{
    double y = 1;
    for (; n; n >>= 1, x *= x)
        if (n & 1) y *= x;
    return y;
}

/* Set the loss scale by the result of the last step. DeepSpeed derives from the step's number
 * whether a whole number of windows has passed since the last overflow; here `clean` counts it. */
ZK_BOTH void step_scale(zk_ctl *ctl, const zk_scaler *s)
{
    int overflow = ctl->skipped == ZK_RESCALED;
    if (!ctl->step) {
        ctl->scale = s->first;
        ctl->hysteresis = s->hysteresis;
    }
    if (!ctl->step || !s->window || ctl->skipped == ZK_FAULTY) return;
    ctl->clean = overflow ? 0 : ctl->clean + 1;
    int rises = ctl->clean == s->window;
    if (overflow && ctl->hysteresis > 1) ctl->hysteresis--;
    else if (overflow) ctl->scale = ctl->scale / 2 > s->least ? ctl->scale / 2 : s->least;
    if (rises || (s->consecutive && !overflow)) ctl->hysteresis = s->hysteresis;
    if (rises) {
        ctl->scale *= 2;
        ctl->clean = 0;
    }
}

/* Return why the step is skipped, or ZK_APPLIED. */
ZK_BOTH int64_t step_skipped(const zk_ctl *ctl, int finite, const zk_scaler *s)
{
    if (finite || !s->window) return finite && ctl->valid ? ZK_APPLIED : ZK_FAULTY;
    return ctl->hysteresis <= 1 && ctl->scale == s->least ? ZK_LOWEST : ZK_RESCALED;
}

ZK_BOTH void step_begin(zk_ctl *ctl, const zk_recipe *r)
{
    step_scale(ctl, &r->scaler);
    ctl->step++;
    ctl->lr = (float)step_phase(r->rate, ctl->applied + 1);
    ctl->beta1 = step_phase(r->momentum, ctl->applied + 1);
    ctl->leaves = 0;
}

/* Compute the mean loss, over micro-batches if their means were added, else over valid tokens, and
 * the number of valid tokens, from the sums. */
ZK_BOTH void step_mean(const int64_t *sums, double *loss, double *valid)
{
    int64_t terms = sums[ZK_MEANS] ? sums[ZK_MEANS] : sums[ZK_VALID];
    double mean = limbs_value(sums + ZK_LOSS) / zk_most(1, terms);
    *loss = sums[ZK_LOST] ? __builtin_nan("") : mean;
    *valid = (double)sums[ZK_VALID];
}

ZK_BOTH void step_factor(zk_ctl *ctl, const int64_t *sums, const zk_recipe *r)
{
    int finite = !sums[ZK_NONFINITE] && !sums[ZK_LOST];
    double valid, scale;
    step_mean(sums, &ctl->loss, &valid);
    ctl->valid = sums[ZK_VALID];
    scale = ctl->valid ? (double)r->rows / valid : 0;
    if (ctl->valid && sums[ZK_MEANS]) scale = 1.0 / (double)sums[ZK_MEANS];
    if (ctl->scale > 0) scale /= ctl->scale;
    ctl->norm = finite ? __builtin_sqrt(limbs_value(sums + ZK_NORM)) * scale : __builtin_inf();
    ctl->skipped = step_skipped(ctl, finite, &r->scaler);
    if (ctl->skipped) return;
    ctl->applied++;
    if (r->clip > 0 && ctl->norm > r->clip) scale *= r->clip / (ctl->norm + 1e-6);
    ctl->factor = (float)scale;
    ctl->bias1 = (float)(1 / (1 - step_power(ctl->beta1, ctl->applied)));
    ctl->bias2 = (float)(1 / (1 - step_power(r->beta2, ctl->applied)));
}

ZK_BOTH void step_report(const zk_ctl *ctl, double *out)
{
    out[0] = (double)ctl->step, out[1] = ctl->loss, out[2] = ctl->norm;
    out[3] = ctl->lr, out[4] = (double)ctl->valid, out[5] = (double)ctl->skipped;
    out[6] = ctl->scale;
}

#endif
