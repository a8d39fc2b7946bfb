/* loss.cu -- cross-entropy, and its sum over a micro-batch.
 *
 *   loss = log(sum(exp(x - top))) - (x[target] - top), top = max(x)
 *   dlogits = (exp(x - top) / sum - [i = target]) * scale / rows
 *   soft: loss += penalty * lse^2 - smoothing * mean(x - x[target]), lse = log(sum(exp(x)))
 *         dlogits = (p * (1 + 2 * penalty * lse) - (1 - smoothing) * [i = target] - smoothing / V)
 *                   * max(1 - (x / cap)^2, 0) * scale / rows, p = exp(x - top) / sum
 *
 * Invariants
 *  1. A block has one row and reads it twice, the second time backwards while its end is still
 *     cached. A thread adds exponentials relative to its own largest logit so far; these sums are
 *     rescaled to the largest of the row and folded in one order. The largest logit contributes 1,
 *     so a sum is at least 1 and a loss at least 0.
 *  2. An ignored row has loss 0 and gradient 0, whatever its logits; columns beyond C have gradient
 *     0. A row is read in packs, and element by element after the last whole pack before C.
 *  3. dlogits may be logits: a thread reads its logits again before it overwrites them, and all
 *     threads have read the target's before any is written.
 */
#include "functions.h"
#include "pack.h"

#include "../limbs.h"

namespace {

/* Lowest finite float; subtracting it from an infinity gives an infinity. */
const float LOWEST = -3.402823466e+38f;

struct exponentials {
    float top, sum; /* sum: of exp(x - top) */
};

/* Add this thread's part of x [C], V elements at a time. */
template <class T, int V>
__device__ inline void add_up(exponentials &e, const T *x, int C)
{
    for (int i = (int)threadIdx.x * V; i < C; i += (int)blockDim.x * V) {
        float a[V], most = e.top;
        fetch(a, x + i);
        for (int j = 0; j < V; j++) most = a[j] > most ? a[j] : most;
        if (most > e.top) {
            e.sum *= exp_below(e.top - most);
            e.top = most;
        }
        for (int j = 0; j < V; j++) e.sum += exp_below(a[j] - most);
    }
}

/* Combine the threads' results into that of the row, in every thread. */
__device__ inline exponentials together(const exponentials &mine)
{
    exponentials e;
    e.top = block_max(mine.top, LOWEST);
    e.sum = block_sum(mine.sum * exp_below(mine.top - e.top));
    return e;
}

/* Return the row's largest logit and its sum of exponentials, in every thread. x [C] */
template <class T, int V> __device__ inline exponentials of_row(const T *x, int C)
{
    exponentials e = {LOWEST, 0};
    add_up<T, V>(e, x, C / V * V);
    add_up<T, 1>(e, x + C / V * V, C % V);
    return together(e);
}

/* d [R] = (exp(x - top) / sum - [i = target]) * each, and 0 from C on. hot: the target's logit. */
template <class T, int V>
__device__ inline void slope(T *d, const T *x, int C, int R, const exponentials &e, int target,
                             float hot, float each)
{
    float share = __fdiv_rn(1.0f, e.sum), peak = (exp_below(hot - e.top) * share - 1.0f) * each;
    int mine = (int)threadIdx.x, step = (int)blockDim.x, last = C / V - 1 - mine;
    for (int i = C / V * V + mine; i < R; i += step) {
        float one = exp_below(get(x[i]) - e.top) * share * each;
        put(d + i, i == target ? peak : i < C ? one : 0);
    }
    for (int i = last < 0 ? -1 : mine + last / step * step; i >= 0; i -= step) {
        float a[V];
        fetch(a, x + i * V);
        for (int j = 0; j < V; j++) a[j] = exp_below(a[j] - e.top) * share * each;
        stow(d + i * V, a);
    }
    if (target < C / V * V && target / V % step == mine) put(d + target, peak);
}

template <class T, int V> __device__ inline void zero(T *d, int C)
{
    const float none[V] = {};
    for (int i = (int)threadIdx.x * V; i < C; i += (int)blockDim.x * V) stow(d + i, none);
}

/* loss [M]; d [M,R] or NULL; x [M,R], of which C columns count. */
template <class T, int V>
__global__ void __launch_bounds__(512, 3)
    entropy(float *loss, T *d, const T *x, const int32_t *target, const double *scale, int64_t M,
            int C, int R, float each)
{
    each *= scale ? (float)*scale : 1.0f;
    for (int64_t m = blockIdx.x; m < M; m += gridDim.x) {
        float result = 0;
        int32_t hit = target[m];
        if (hit >= 0) {
            const T *row = x + m * R;
            float hot = get(row[hit]);
            exponentials e = of_row<T, V>(row, C);
            result = (float)zk_log(e.sum) - (hot - e.top);
            if (d) slope<T, V>(d + m * R, row, C, R, e, hit, hot, each);
        } else if (d) {
            zero<T, V>(d + m * R, R);
        }
        if (threadIdx.x == 0) loss[m] = result;
    }
}

struct softness {
    float smoothing, penalty, cap;
};

/* Return this thread's part of the sum of x - hot over x [C], V elements at a time. */
template <class T, int V> __device__ inline float above(const T *x, int C, float hot)
{
    float sum = 0;
    for (int i = (int)threadIdx.x * V; i < C; i += (int)blockDim.x * V) {
        float a[V];
        fetch(a, x + i);
        for (int j = 0; j < V; j++) sum += a[j] - hot;
    }
    return sum;
}

/* Write the gradient of the soft loss to d [R], V elements at a time. share: of an exponential. */
template <class T, int V>
__device__ inline void soft_slope(T *d, const T *x, int C, int R, float top, float share,
                                  int target, const softness &s, float each)
{
    float base = __fdiv_rn(s.smoothing, (float)C);
    for (int i = (int)threadIdx.x * V; i < R; i += (int)blockDim.x * V) {
        float a[V];
        fetch(a, x + i);
        for (int j = 0; j < V; j++) {
            float one = fmaf(exp_below(a[j] - top), share, -base);
            if (i + j == target) one -= 1.0f - s.smoothing;
            float u = s.cap > 0 ? __fdiv_rn(a[j], s.cap) : 0.0f, bend = fmaf(-u, u, 1.0f);
            a[j] = i + j < C ? one * (bend < 0.0f ? 0.0f : bend) * each : 0.0f;
        }
        stow(d + i, a);
    }
}

/* The same as entropy, of the soft loss. */
template <class T, int V>
__global__ void __launch_bounds__(512, 3)
    soft_entropy(float *loss, T *d, const T *x, const int32_t *target, const double *scale,
                 int64_t M, int C, int R, float each, softness s)
{
    each *= scale ? (float)*scale : 1.0f;
    for (int64_t m = blockIdx.x; m < M; m += gridDim.x) {
        float result = 0;
        int32_t hit = target[m];
        if (hit >= 0) {
            const T *row = x + m * R;
            float hot = get(row[hit]);
            exponentials e = of_row<T, V>(row, C);
            float high = (float)zk_log(e.sum), lse = e.top + high;
            result = high - (hot - e.top);
            if (s.penalty > 0) result = fmaf(s.penalty * lse, lse, result);
            if (s.smoothing > 0) {
                float sum = above<T, V>(row, C / V * V, hot);
                sum += above<T, 1>(row + C / V * V, C % V, hot);
                result -= s.smoothing * __fdiv_rn(block_sum(sum), (float)C);
            }
            float share = __fdiv_rn(1.0f + 2.0f * s.penalty * lse, e.sum);
            soft_slope<T, V>(d + m * R, row, C, R, e.top, share, hit, s, each);
        } else {
            zero<T, V>(d + m * R, R);
        }
        if (threadIdx.x == 0) loss[m] = result;
    }
}

/* y [C], x [M,C]; one block. */
template <class T>
__global__ void pick(T *y, const T *x, const int32_t *target, int64_t M, int64_t C)
{
    int last = -1;
    for (int m = (int)threadIdx.x; m < M; m += (int)blockDim.x) last = target[m] >= 0 ? m : last;
    last = block_max(last, -1);
    for (int64_t c = threadIdx.x; last >= 0 && c < C; c += blockDim.x) y[c] = x[last * C + c];
}

/* Return the number of valid targets, in every thread of the block. */
__device__ int64_t valid_of(const int32_t *target, int64_t M)
{
    int64_t valid = 0;
    for (int64_t m = threadIdx.x; m < M; m += blockDim.x) valid += target[m] >= 0;
    return block_sum(valid);
}

/* Add the losses of a micro-batch in one block, as the terms are few and
 * their order must be fixed. A: tokens of `all`, 0 if the losses are added as they are. */
__global__ void add_losses(int64_t *sums, const float *loss, const int32_t *target,
                           const int32_t *all, int64_t M, int64_t A)
{
    double sum = 0;
    for (int64_t m = threadIdx.x; m < M; m += blockDim.x) sum += loss[m];
    sum = block_sum(sum);
    int64_t valid = valid_of(target, M), every = valid_of(all, A);
    if (threadIdx.x == 0) {
        sums[ZK_MEANS] += A > 0;
        sums[ZK_VALID] += valid;
        if (A) sum = sum / zk_most(1, every) * ((double)A / (double)M);
        sums[ZK_LOST] += !limbs_add(sums + ZK_LOSS, sum);
    }
}

/* Set the factor in one block. */
__global__ void set_factor(double *factor, const int32_t *all, const double *scale, int64_t A)
{
    int64_t valid = valid_of(all, A);
    if (threadIdx.x == 0) *factor = valid ? (double)A / (double)valid * (scale ? *scale : 1) : 0;
}

}

extern "C" {

void zk_cross_entropy(zk *k, const zk_launch *L, float *loss, real *dlogits, const real *logits,
                      const int32_t *target, const double *scale, int64_t M, int64_t V,
                      int64_t rows)
{
    int R = (int)((V + ZK_VOCAB - 1) / ZK_VOCAB * ZK_VOCAB);
    ZK_REAL(k, T,
            ZK_LAUNCH(k, L, 0, (entropy<T, wide<T>>), loss, (T *)dlogits, (const T *)logits, target,
                      scale, M, (int)V, R, 1.0f / (float)rows));
}

void zk_soft_cross_entropy(zk *k, const zk_launch *L, float *loss, real *dlogits,
                           const real *logits, const int32_t *target, const double *scale,
                           int64_t M, int64_t V, int64_t rows, float smoothing, float penalty,
                           float cap)
{
    int R = (int)((V + ZK_VOCAB - 1) / ZK_VOCAB * ZK_VOCAB);
    softness s = {smoothing, penalty, cap};
    if (!dlogits) return zk_cross_entropy(k, L, loss, NULL, logits, target, scale, M, V, rows);
    ZK_REAL(k, T,
            ZK_LAUNCH(k, L, 0, (soft_entropy<T, wide<T>>), loss, (T *)dlogits, (const T *)logits,
                      target, scale, M, (int)V, R, 1.0f / (float)rows, s));
}

void zk_pick(zk *k, const zk_launch *L, real *y, const real *x, const int32_t *target, int64_t M,
             int64_t C)
{
    ZK_REAL(k, T, ZK_LAUNCH(k, L, 0, pick<T>, (T *)y, (const T *)x, target, M, C));
}

void zk_loss_sum(zk *k, const zk_launch *L, int64_t *sums, const float *loss, const int32_t *target,
                 int64_t M)
{
    ZK_LAUNCH(k, L, 0, add_losses, sums, loss, target, target, M, 0);
}

void zk_loss_mean(zk *k, const zk_launch *L, int64_t *sums, const float *loss,
                  const int32_t *target, const int32_t *all, int64_t M, int64_t A)
{
    ZK_LAUNCH(k, L, 0, add_losses, sums, loss, target, all, M, A);
}

void zk_loss_factor(zk *k, const zk_launch *L, double *factor, const int32_t *all,
                    const double *scale, int64_t A)
{
    ZK_LAUNCH(k, L, 0, set_factor, factor, all, scale, A);
}
}
