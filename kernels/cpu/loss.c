/* loss.c -- cross-entropy, caps of logits, sums of losses, and the numbers that a run reports.
 *
 *   loss = log(sum(exp(x - top))) - (x[target] - top), top = max(x)
 *   dlogits = (exp(x - top) / sum - [i = target]) * scale / rows
 *   soft: loss += penalty * lse^2 - smoothing * mean(x - x[target]), lse = log(sum(exp(x)))
 *         dlogits = (p * (1 + 2 * penalty * lse) - (1 - smoothing) * [i = target] - smoothing / V)
 *                   * max(1 - (x / cap)^2, 0) * scale / rows, p = exp(x - top) / sum
 *
 * Invariants
 *  1. A row's sum of exponentials has 16 lanes: element i is added to lane i % 16, ascending, and
 *     sum16 folds them. The largest logit contributes 1, so a sum is at least 1 and a loss at least
 *     0.
 *  2. An ignored row has loss 0 and gradient 0, whatever its logits; columns beyond V have gradient
 *     0.
 *  3. A target of -infinity has loss infinity, with smoothing NaN. A logit may exceed its cap by
 *     rounding; it has gradient 0.
 */
#include "../draw.h"
#include "../step.h"
#include "part.h"

enum { ROWS = 4 }; /* rows of a task by default */

typedef struct entropy {
    float *loss;           /* [M] */
    real *d;               /* [M,R], or NULL */
    const real *x;         /* [M,R], of which V columns count */
    const int32_t *target; /* [M] */
    float each;            /* factor of each gradient: scale / rows */
    int64_t M, V, R, rows;
    int dtype;
    float smoothing, penalty, cap;
} entropy;

/* ---- cross-entropy. A row x[V] starts at element `at`. */
static float largest(const real *x, int64_t at, int64_t V, int dtype)
{
    v16 top = set16(-__builtin_inff());
    int64_t i = 0;
    for (; i + 16 <= V; i += 16) top = max16(top, load16r(x, at + i, dtype));
    float most = top[0];
    for (int lane = 1; lane < 16; lane++) most = top[lane] > most ? top[lane] : most;
    for (; i < V; i++) {
        float one = realr(x, at + i, dtype);
        most = one > most ? one : most;
    }
    return most;
}

/* Return the sum of exp(x - top). */
static float exponentials(const real *x, int64_t at, int64_t V, int dtype, float top)
{
    v16 sum = set16(0);
    int64_t i = 0;
    for (; i + 16 <= V; i += 16) sum += exp16(load16r(x, at + i, dtype) - set16(top));
    if (i < V) {
        float part[16];
        store16(part, exp16(load16rn(x, at + i, dtype, (int)(V - i)) - set16(top)));
        sum += load16n(part, (int)(V - i));
    }
    return sum16(sum);
}

/* Set n elements of d from element `at` on to 0. */
static void zero(const entropy *a, int64_t at, int64_t n)
{
    int64_t width = a->dtype == ZK_F32 ? 4 : 2;
    memset((char *)a->d + at * width, 0, n * width);
}

/* Compute d[V] = (exp(x - top) / sum - [i = target]) * each. */
static void slope(const entropy *a, int64_t at, float top, float sum, int32_t target)
{
    lanes share = lanes_set(1 / sum), each = lanes_set(a->each);
    lanes hit =
        lanes_exp(lanes_set(realr(a->x, at + target, a->dtype) - top)) * share - lanes_set(1);
    for (int64_t i = 0; i < a->V; i += LANES) {
        lanes e = lanes_exp(lanes_get(a->x, at + i, a->dtype, a->V - i) - lanes_set(top));
        lanes_put(a->d, at + i, a->dtype, e * share * each, a->V - i);
    }
    setr(a->d, at + target, a->dtype, (hit * each)[0]);
    zero(a, at + a->V, a->R - a->V);
}

/* The same of the soft loss: d[V] is the gradient of the logits before their cap. */
static void soft_slope(const entropy *a, int64_t at, float top, float sum, int32_t target)
{
    float lse = top + (float)zk_log(sum);
    lanes share = lanes_set((1 + 2 * a->penalty * lse) / sum), each = lanes_set(a->each);
    lanes base = lanes_set(a->smoothing / (float)a->V);
    for (int64_t i = 0; i < a->V; i += LANES) {
        lanes x = lanes_get(a->x, at + i, a->dtype, a->V - i);
        lanes d = lanes_fma(lanes_exp(x - lanes_set(top)), share, -base);
        if (target - i >= 0 && target - i < LANES) d[target - i] -= 1 - a->smoothing;
        if (a->cap > 0) {
            lanes u = x / lanes_set(a->cap);
            d *= lanes_max(lanes_set(0), lanes_fma(-u, u, lanes_set(1)));
        }
        lanes_put(a->d, at + i, a->dtype, d * each, a->V - i);
    }
    zero(a, at + a->V, a->R - a->V);
}

/* Return the mean of x - hot over the row. Parts of 1024 elements are summed in f32. */
static float mean_above(const entropy *a, int64_t at, float hot)
{
    double total = 0;
    for (int64_t from = 0; from < a->V; from += 1024) {
        int64_t end = zk_least(from + 1024, a->V), i = from;
        v16 sum = set16(0);
        for (; i + 16 <= end; i += 16) sum += load16r(a->x, at + i, a->dtype) - set16(hot);
        float part = sum16(sum);
        for (; i < end; i++) part += realr(a->x, at + i, a->dtype) - hot;
        total += part;
    }
    return (float)(total / (double)a->V);
}

/* Return the terms that the soft loss adds to the cross-entropy. */
static float softened(const entropy *a, int64_t at, float top, float sum, float hot)
{
    float more = 0, lse = top + (float)zk_log(sum);
    if (a->penalty > 0) more = a->penalty * lse * lse;
    if (a->smoothing > 0) more -= a->smoothing * mean_above(a, at, hot);
    return more;
}

static void entropy_task(void *arg, int64_t task, int thread)
{
    const entropy *a = arg;
    int soft = a->smoothing > 0 || a->penalty > 0 || a->cap > 0;
    (void)thread;
    for (int64_t m = task * a->rows; m < zk_least((task + 1) * a->rows, a->M); m++) {
        int32_t target = a->target[m];
        int64_t at = m * a->R;
        if (target < 0) {
            a->loss[m] = 0;
            if (a->d) zero(a, at, a->R);
            continue;
        }
        float top = largest(a->x, at, a->V, a->dtype);
        float sum = exponentials(a->x, at, a->V, a->dtype, top);
        float hot = realr(a->x, at + target, a->dtype);
        a->loss[m] = (float)zk_log(sum) - (hot - top);
        if (a->d && soft) {
            a->loss[m] += softened(a, at, top, sum, hot);
            soft_slope(a, at, top, sum, target);
        } else if (a->d) {
            slope(a, at, top, sum, target);
        }
    }
}

void ZK(zk_soft_cross_entropy)(zk *k, const zk_launch *L, float *loss, real *dlogits,
                               const real *logits, const int32_t *target, const double *scale,
                               int64_t M, int64_t V, int64_t rows, float smoothing, float penalty,
                               float cap)
{
    entropy a = {.loss = loss,
                 .d = dlogits,
                 .x = logits,
                 .target = target,
                 .each = 1 / (float)rows * (scale ? (float)*scale : 1),
                 .M = M,
                 .V = V,
                 .R = zk_pieces(V, ZK_VOCAB) * ZK_VOCAB,
                 .rows = zk_tile(k, L, 0, ROWS),
                 .dtype = k->dtype,
                 .smoothing = smoothing,
                 .penalty = penalty,
                 .cap = cap};
    zk_for(k, zk_pieces(M, a.rows), entropy_task, &a);
}

void ZK(zk_cross_entropy)(zk *k, const zk_launch *L, float *loss, real *dlogits, const real *logits,
                          const int32_t *target, const double *scale, int64_t M, int64_t V,
                          int64_t rows)
{
    ZK(zk_soft_cross_entropy)(k, L, loss, dlogits, logits, target, scale, M, V, rows, 0, 0, 0);
}

/* ---- sums and reports */
static int64_t valid_of(const int32_t *target, int64_t M)
{
    int64_t valid = 0;
    for (int64_t m = 0; m < M; m++) valid += target[m] >= 0;
    return valid;
}

static double sum_of(const float *loss, int64_t M)
{
    double sum = 0;
    for (int64_t m = 0; m < M; m++) sum += loss[m];
    return sum;
}

void ZK(zk_loss_sum)(zk *k, const zk_launch *L, int64_t *sums, const float *loss,
                     const int32_t *target, int64_t M)
{
    (void)k, (void)L;
    sums[ZK_VALID] += valid_of(target, M);
    sums[ZK_LOST] += !limbs_add(sums + ZK_LOSS, sum_of(loss, M));
}

void ZK(zk_loss_mean)(zk *k, const zk_launch *L, int64_t *sums, const float *loss,
                      const int32_t *target, const int32_t *all, int64_t M, int64_t A)
{
    double blocks = (double)A / (double)M, mean = sum_of(loss, M) / zk_most(1, valid_of(all, A));
    (void)k, (void)L;
    sums[ZK_MEANS]++;
    sums[ZK_VALID] += valid_of(target, M);
    sums[ZK_LOST] += !limbs_add(sums + ZK_LOSS, mean * blocks);
}

void ZK(zk_loss_factor)(zk *k, const zk_launch *L, double *factor, const int32_t *all,
                        const double *scale, int64_t A)
{
    int64_t valid = valid_of(all, A);
    (void)k, (void)L;
    *factor = valid ? (double)A / (double)valid * (scale ? *scale : 1) : 0;
}

void ZK(zk_pick)(zk *k, const zk_launch *L, real *y, const real *x, const int32_t *target,
                 int64_t M, int64_t C)
{
    int64_t m = M - 1, bytes = C * (k->dtype == ZK_F32 ? 4 : 2);
    (void)L;
    while (m >= 0 && target[m] < 0) m--;
    if (m >= 0) memcpy(y, (const char *)x + m * bytes, bytes);
}

void ZK(zk_mean)(zk *k, const int64_t *sums, double *loss, double *valid)
{
    (void)k;
    step_mean(sums, loss, valid);
}

void ZK(zk_report)(zk *k, const zk_ctl *ctl, double *out)
{
    (void)k;
    step_report(ctl, out);
}

int32_t ZK(zk_sample)(zk *k, const real *logits, int64_t V, float temperature, int64_t top_k,
                      double top_p, double u)
{
    return draw(logits, k->dtype, V, temperature, top_k, top_p, u);
}
