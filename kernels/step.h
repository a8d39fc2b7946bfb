/* step.h -- the constants of an optimizer step, made in f64 from the recipe and the exact sums. */
#ifndef ZK_STEP_H
#define ZK_STEP_H
#include "limbs.h"

/* The value of a schedule at a step, 1 and on. Logarithms are of steps since the origin. */
ZK_BOTH double step_phase(const zk_phase *p, int64_t step)
{
    while (p->until && step >= p->until)
        p++;
    int64_t n = step - p->origin;
    double x = (double)n / (double)p->span;
    if (p->stairs)
        x = (double)(n * p->stairs / p->span) / (double)p->stairs;
    if (p->curve == ZK_COSINE)
        x = 0.5 - 0.5 * zk_cos(3.14159265358979323846 * x);
    if (p->curve == ZK_LOG)
        x = zk_log((double)n) / zk_log((double)p->span);
    if (p->curve == ZK_INVERSE)
        return p->from / (1 + p->to * x);
    return p->from + (p->to - p->from) * x;
}

/* x^n by squaring, n >= 0 */
ZK_BOTH double step_power(double x, int64_t n)
{
    double y = 1;
    for (; n; n >>= 1, x *= x)
        if (n & 1)
            y *= x;
    return y;
}

ZK_BOTH void step_begin(zk_ctl *ctl, const zk_recipe *r)
{
    ctl->step++;
    ctl->lr = (float)step_phase(r->rate, ctl->applied + 1);
    ctl->beta1 = step_phase(r->momentum, ctl->applied + 1);
    ctl->leaves = 0;
}

ZK_BOTH void step_factor(zk_ctl *ctl, const int64_t *sums, const zk_recipe *r)
{
    int64_t valid = sums[ZK_VALID];
    int finite = !sums[ZK_NONFINITE];
    double scale = valid ? (double)r->rows / (double)valid : 0;
    ctl->valid = valid;
    ctl->loss = finite ? limbs_value(sums + ZK_LOSS) / zk_most(1, valid) : __builtin_nan("");
    ctl->norm = finite ? __builtin_sqrt(limbs_value(sums + ZK_NORM)) * scale : __builtin_inf();
    ctl->skipped = !finite || !valid;
    if (ctl->skipped)
        return;
    ctl->applied++;
    if (r->clip > 0 && ctl->norm > r->clip)
        scale *= r->clip / (ctl->norm + 1e-6);
    ctl->factor = (float)scale;
    ctl->bias1 = (float)(1 / (1 - step_power(ctl->beta1, ctl->applied)));
    ctl->bias2 = (float)(1 / (1 - step_power(r->beta2, ctl->applied)));
}

/* The mean loss over valid tokens, and their number, held in sums */
ZK_BOTH void step_mean(const int64_t *sums, double *loss, double *valid)
{
    double mean = limbs_value(sums + ZK_LOSS) / zk_most(1, sums[ZK_VALID]);
    *loss = sums[ZK_NONFINITE] ? __builtin_nan("") : mean;
    *valid = (double)sums[ZK_VALID];
}

ZK_BOTH void step_report(const zk_ctl *ctl, double *out)
{
    out[0] = (double)ctl->step, out[1] = ctl->loss, out[2] = ctl->norm;
    out[3] = ctl->lr, out[4] = (double)ctl->valid, out[5] = (double)ctl->skipped;
}

#endif
