/* norm.c -- layer norm, RMS norm and the RMS norm of query and key heads, forward and backward.
 *
 *   y = hat * w + b, hat = (x - mean) * rstd, rstd = 1 / sqrt(mean((x - mean)^2) + eps)
 *   dx = rstd * (g - mean(g) - hat * mean(g * hat)), g = dy * w; dw = sum(dy * hat); db = sum(dy)
 *   RMS norm: the same without mean, mean(g) and b. stat holds mean and rstd; r is rstd.
 *   rmsnorm1, qknorm1: 1 + w in place of w; a layer norm without w: 1.
 *
 * Invariants
 *  1. A sum over a row has 16 lanes: element i is added to lane i % 16, ascending; lanes past the
 *     end hold 0; sum16 folds them.
 *  2. An element of dw or db is one f32 chain over ascending rows (and ascending heads within a
 *     row). It needs no scratch here; other targets do.
 *  3. Backward recomputes the normalized value from x and the f32 mean and rstd.
 */
#include "part.h"

enum { ROWS = 16 };            /* rows of a task by default */
enum { WIDE = 64, HEAD = 16 }; /* columns of a task: of a whole row, of one head */

/* Operands of a task. A row of `stride` elements holds `heads` runs of C elements from element
 * `at`; a plain norm has one run of C = stride. stat has `stats` floats per row. */
typedef struct norm {
    int dtype;
    real *y, *dw, *db;          /* y or dx [M, stride]; dw, db [C] */
    real *sum;                  /* [M,C]: receives left + more, and is then x */
    float *stat;                /* [M, stats] */
    const real *x, *dy, *w, *b; /* x, dy [M, stride]; w, b [C] */
    const real *left, *more;    /* [M,C]; more: NULL if there is none */
    /* first: index of the first of these heads in a row of stat */
    int64_t M, C, stride, heads, at, rows, stats, first;
    int64_t span;
    float eps;
    int one_plus; /* the factor is 1 + w */
} norm;

/* The factors of 16 columns, or of the lanes of a register. */
ZK_INLINE v16 factors16(const norm *a, const real *w, int64_t c)
{
    if (!w) return set16(1);
    v16 x = zk_get(w, c, a->dtype, a->C - c);
    return a->one_plus ? x + set16(1) : x;
}

ZK_INLINE lanes factors(const norm *a, const real *w, int64_t c)
{
    if (!w) return lanes_set(1);
    lanes x = lanes_get(w, c, a->dtype, a->C - c);
    return a->one_plus ? x + lanes_set(1) : x;
}

/* Set lanes n .. 15 of x to 0. */
ZK_INLINE v16 first_lanes(v16 x, int64_t n)
{
    const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return select16(lane < (int32_t)zk_least(n, 16), x, set16(0));
}

/* to = x + more for the row of C elements at `at`, which is in the cache; rounds as zk_add does. */
static void add_row(const norm *a, real *to, const real *x, int64_t at)
{
    for (int64_t c = 0; c < a->C; c += LANES) {
        int64_t n = a->C - c;
        lanes more = lanes_get(a->more, at + c, a->dtype, n);
        lanes_put(to, at + c, a->dtype, lanes_get(x, at + c, a->dtype, n) + more, n);
    }
}

/* ---- layer norm */
static void layer_fwd_row(const norm *a, int64_t m)
{
    int64_t at = m * a->C;
    v16 sum = set16(0), square = set16(0);
    if (a->more) add_row(a, a->sum, a->left, at);
    for (int64_t c = 0; c < a->C; c += 16) sum += zk_get(a->x, at + c, a->dtype, a->C - c);
    float mean = sum16(sum) / (float)a->C;
    for (int64_t c = 0; c < a->C; c += 16) {
        v16 d = first_lanes(zk_get(a->x, at + c, a->dtype, a->C - c) - set16(mean), a->C - c);
        square = fma16(d, d, square);
    }
    float r = 1.0f / __builtin_sqrtf(sum16(square) / (float)a->C + a->eps);
    for (int64_t c = 0; c < a->C; c += LANES) {
        int64_t n = a->C - c;
        lanes hat = (lanes_get(a->x, at + c, a->dtype, n) - lanes_set(mean)) * lanes_set(r);
        lanes b = a->b ? lanes_get(a->b, c, a->dtype, n) : lanes_set(0);
        lanes_put(a->y, at + c, a->dtype, lanes_fma(hat, factors(a, a->w, c), b), n);
    }
    a->stat[2 * m] = mean;
    a->stat[2 * m + 1] = r;
}

/* dx = r * (g - mean(g) - hat * mean(g * hat)), g = dy * w */
static void layer_bwd_row(const norm *a, int64_t m)
{
    int64_t at = m * a->C;
    float mean = a->stat[2 * m], r = a->stat[2 * m + 1];
    v16 sum = set16(0), dot = set16(0);
    for (int64_t c = 0; c < a->C; c += 16) {
        int64_t n = a->C - c;
        v16 g = zk_get(a->dy, at + c, a->dtype, n) * factors16(a, a->w, c);
        sum += g;
        dot = fma16(g, (zk_get(a->x, at + c, a->dtype, n) - set16(mean)) * set16(r), dot);
    }
    lanes g_mean = lanes_set(sum16(sum) / (float)a->C);
    lanes g_dot = lanes_set(-(sum16(dot) / (float)a->C));
    for (int64_t c = 0; c < a->C; c += LANES) {
        int64_t n = a->C - c;
        lanes g = lanes_get(a->dy, at + c, a->dtype, n) * factors(a, a->w, c);
        lanes hat = (lanes_get(a->x, at + c, a->dtype, n) - lanes_set(mean)) * lanes_set(r);
        lanes_put(a->y, at + c, a->dtype, lanes_fma(hat, g_dot, g - g_mean) * lanes_set(r), n);
    }
    if (a->more) add_row(a, a->y, a->y, at);
}

static void layer_fwd_task(void *arg, int64_t task, int thread)
{
    const norm *a = arg;
    (void)thread;
    for (int64_t m = task * a->rows; m < zk_least((task + 1) * a->rows, a->M); m++)
        layer_fwd_row(a, m);
}

static void layer_bwd_task(void *arg, int64_t task, int thread)
{
    const norm *a = arg;
    (void)thread;
    for (int64_t m = task * a->rows; m < zk_least((task + 1) * a->rows, a->M); m++)
        layer_bwd_row(a, m);
}

static void layer_columns_task(void *arg, int64_t task, int thread)
{
    const norm *a = arg;
    int64_t from = task * WIDE, to = zk_least(from + WIDE, a->C);
    lanes dw[WIDE / LANES] = {0}, db[WIDE / LANES] = {0};
    (void)thread;
    for (int64_t m = 0; m < a->M; m++) {
        lanes mean = lanes_set(a->stat[2 * m]), r = lanes_set(a->stat[2 * m + 1]);
        for (int64_t c = from; c < to; c += LANES) {
            lanes dy = lanes_get(a->dy, m * a->C + c, a->dtype, to - c);
            lanes hat = (lanes_get(a->x, m * a->C + c, a->dtype, to - c) - mean) * r;
            dw[(c - from) / LANES] = lanes_fma(dy, hat, dw[(c - from) / LANES]);
            db[(c - from) / LANES] += dy;
        }
    }
    for (int64_t c = from; c < to; c += LANES) {
        if (a->dw) lanes_put(a->dw, c, a->dtype, dw[(c - from) / LANES], to - c);
        if (a->db) lanes_put(a->db, c, a->dtype, db[(c - from) / LANES], to - c);
    }
}

void ZK(zk_layernorm_fwd)(zk *k, const zk_launch *L, real *y, float *stat, real *sum, const real *x,
                          const real *more, const real *w, const real *b, int64_t M, int64_t C,
                          float eps)
{
    norm a = {.dtype = k->dtype,
              .y = y,
              .stat = stat,
              .sum = sum,
              .x = more ? sum : x,
              .left = x,
              .more = more,
              .w = w,
              .b = b,
              .M = M,
              .C = C,
              .rows = zk_tile(k, L, 0, ROWS),
              .eps = eps};
    zk_for(k, zk_pieces(M, a.rows), layer_fwd_task, &a);
}

void ZK(zk_layernorm_bwd)(zk *k, const zk_launch *L, real *dx, real *dw, real *db, const real *dy,
                          const real *more, const real *x, const float *stat, const real *w,
                          float *scratch, int64_t M, int64_t C)
{
    norm a = {.dtype = k->dtype,
              .y = dx,
              .dw = dw,
              .db = db,
              .stat = (float *)stat,
              .x = x,
              .dy = dy,
              .more = more,
              .w = w,
              .M = M,
              .C = C,
              .rows = zk_tile(k, L, 0, ROWS)};
    (void)scratch;
    zk_for(k, zk_pieces(M, a.rows), layer_bwd_task, &a);
    if (dw || db) zk_for(k, zk_pieces(C, WIDE), layer_columns_task, &a);
}

/* ---- RMS norm of one run of C elements at element `at` */
static float rms_fwd_run(const norm *a, const real *w, int64_t at)
{
    v16 square = set16(0);
    for (int64_t c = 0; c < a->C; c += 16) {
        v16 x = zk_get(a->x, at + c, a->dtype, a->C - c);
        square = fma16(x, x, square);
    }
    float r = 1.0f / __builtin_sqrtf(sum16(square) / (float)a->C + a->eps);
    for (int64_t c = 0; c < a->C; c += LANES) {
        int64_t n = a->C - c;
        lanes hat = lanes_get(a->x, at + c, a->dtype, n) * lanes_set(r);
        lanes_put(a->y, at + c, a->dtype, hat * factors(a, w, c), n);
    }
    return r;
}

/* dx = r * (g - hat * mean(g * hat)), g = dy * w */
static void rms_bwd_run(const norm *a, const real *w, int64_t at, float r)
{
    v16 dot = set16(0);
    for (int64_t c = 0; c < a->C; c += 16) {
        int64_t n = a->C - c;
        v16 g = zk_get(a->dy, at + c, a->dtype, n) * factors16(a, w, c);
        dot = fma16(g, zk_get(a->x, at + c, a->dtype, n) * set16(r), dot);
    }
    lanes g_dot = lanes_set(-(sum16(dot) / (float)a->C));
    for (int64_t c = 0; c < a->C; c += LANES) {
        int64_t n = a->C - c;
        lanes g = lanes_get(a->dy, at + c, a->dtype, n) * factors(a, w, c);
        lanes hat = lanes_get(a->x, at + c, a->dtype, n) * lanes_set(r);
        lanes_put(a->y, at + c, a->dtype, lanes_fma(hat, g_dot, g) * lanes_set(r), n);
    }
}

static void rms_columns_task(void *arg, int64_t task, int thread)
{
    const norm *a = arg;
    int64_t from = task * a->span, to = zk_least(from + a->span, a->C);
    lanes dw[WIDE / LANES] = {0};
    (void)thread;
    for (int64_t i = 0; i < a->M * a->heads; i++) {
        int64_t m = i / a->heads, h = i % a->heads, at = m * a->stride + a->at + h * a->C;
        lanes r = lanes_set(a->stat[m * a->stats + a->first + h]);
        for (int64_t c = from; c < to; c += LANES) {
            lanes hat = lanes_get(a->x, at + c, a->dtype, to - c) * r;
            lanes dy = lanes_get(a->dy, at + c, a->dtype, to - c);
            dw[(c - from) / LANES] = lanes_fma(dy, hat, dw[(c - from) / LANES]);
        }
    }
    for (int64_t c = from; c < to; c += LANES)
        lanes_put(a->dw, c, a->dtype, dw[(c - from) / LANES], to - c);
}

static void rms_fwd_task(void *arg, int64_t task, int thread)
{
    const norm *a = arg;
    (void)thread;
    for (int64_t m = task * a->rows; m < zk_least((task + 1) * a->rows, a->M); m++) {
        if (a->more) add_row(a, a->sum, a->left, m * a->C);
        a->stat[m] = rms_fwd_run(a, a->w, m * a->C);
    }
}

static void rms_bwd_task(void *arg, int64_t task, int thread)
{
    const norm *a = arg;
    (void)thread;
    for (int64_t m = task * a->rows; m < zk_least((task + 1) * a->rows, a->M); m++) {
        rms_bwd_run(a, a->w, m * a->C, a->stat[m]);
        if (a->more) add_row(a, a->y, a->y, m * a->C);
    }
}

static void rms_fwd(zk *k, const zk_launch *L, real *y, float *stat, real *sum, const real *x,
                    const real *more, const real *w, int64_t M, int64_t C, float eps, int one_plus)
{
    norm a = {.dtype = k->dtype,
              .y = y,
              .stat = stat,
              .sum = sum,
              .x = more ? sum : x,
              .left = x,
              .more = more,
              .w = w,
              .M = M,
              .C = C,
              .rows = zk_tile(k, L, 0, ROWS),
              .eps = eps,
              .one_plus = one_plus};
    zk_for(k, zk_pieces(M, a.rows), rms_fwd_task, &a);
}

static void rms_bwd(zk *k, const zk_launch *L, real *dx, real *dw, const real *dy, const real *more,
                    const real *x, const float *stat, const real *w, int64_t M, int64_t C,
                    int one_plus)
{
    norm a = {.dtype = k->dtype,
              .y = dx,
              .dw = dw,
              .stat = (float *)stat,
              .x = x,
              .dy = dy,
              .more = more,
              .w = w,
              .M = M,
              .C = C,
              .rows = zk_tile(k, L, 0, ROWS),
              .stride = C,
              .heads = 1,
              .stats = 1,
              .span = WIDE,
              .one_plus = one_plus};
    zk_for(k, zk_pieces(M, a.rows), rms_bwd_task, &a);
    if (dw) zk_for(k, zk_pieces(C, WIDE), rms_columns_task, &a);
}

void ZK(zk_rmsnorm_fwd)(zk *k, const zk_launch *L, real *y, float *stat, real *sum, const real *x,
                        const real *more, const real *w, int64_t M, int64_t C, float eps)
{
    rms_fwd(k, L, y, stat, sum, x, more, w, M, C, eps, 0);
}

void ZK(zk_rmsnorm_bwd)(zk *k, const zk_launch *L, real *dx, real *dw, const real *dy,
                        const real *more, const real *x, const float *stat, const real *w,
                        float *scratch, int64_t M, int64_t C)
{
    (void)scratch;
    rms_bwd(k, L, dx, dw, dy, more, x, stat, w, M, C, 0);
}

void ZK(zk_rmsnorm1_fwd)(zk *k, const zk_launch *L, real *y, float *stat, real *sum, const real *x,
                         const real *more, const real *w, int64_t M, int64_t C, float eps)
{
    rms_fwd(k, L, y, stat, sum, x, more, w, M, C, eps, 1);
}

void ZK(zk_rmsnorm1_bwd)(zk *k, const zk_launch *L, real *dx, real *dw, const real *dy,
                         const real *more, const real *x, const float *stat, const real *w,
                         float *scratch, int64_t M, int64_t C)
{
    (void)scratch;
    rms_bwd(k, L, dx, dw, dy, more, x, stat, w, M, C, 1);
}

/* ---- RMS norm of query and of key heads: two norms over rows that hold q, k and v. Values, as
 * many as keys, are copied. */
static void copy_values(const norm *keys, int64_t m, const real *from)
{
    int64_t size = keys->dtype == ZK_F32 ? 4 : 2, n = keys->heads * keys->C;
    int64_t at = m * keys->stride + keys->at + n;
    memcpy((char *)keys->y + at * size, (const char *)from + at * size, (size_t)(n * size));
}

static void heads_fwd_task(void *arg, int64_t task, int thread)
{
    const norm *both = arg;
    (void)thread;
    for (int64_t m = task * both->rows; m < zk_least((task + 1) * both->rows, both->M); m++) {
        for (const norm *a = both; a < both + 2; a++)
            for (int64_t h = 0; h < a->heads; h++)
                a->stat[m * a->stats + a->first + h] =
                    rms_fwd_run(a, a->w, m * a->stride + a->at + h * a->C);
        copy_values(both + 1, m, both->x);
    }
}

static void heads_bwd_task(void *arg, int64_t task, int thread)
{
    const norm *both = arg;
    (void)thread;
    for (int64_t m = task * both->rows; m < zk_least((task + 1) * both->rows, both->M); m++) {
        for (const norm *a = both; a < both + 2; a++)
            for (int64_t h = 0; h < a->heads; h++)
                rms_bwd_run(a, a->w, m * a->stride + a->at + h * a->C,
                            a->stat[m * a->stats + a->first + h]);
        copy_values(both + 1, m, both->dy);
    }
}

/* Describe both norms: H runs of Q elements with w and dw, then G runs of K
 * elements with wk and dwk. */
static void lie(norm *both, int64_t H, int64_t Q, int64_t G, int64_t K, const real *wk, real *dwk)
{
    both->stride = H * Q + 2 * G * K;
    both->stats = H + G;
    both->heads = H;
    both->C = Q;
    both[1] = both[0];
    both[1].w = wk;
    both[1].dw = dwk;
    both[1].at = H * Q;
    both[1].first = H;
    both[1].heads = G;
    both[1].C = K;
}

static void heads_fwd(zk *k, const zk_launch *L, real *y, float *stat, const real *in,
                      const real *wq, const real *wk, int64_t M, int64_t H, int64_t Q, int64_t G,
                      int64_t K, float eps, int one_plus)
{
    norm both[2] = {{.dtype = k->dtype,
                     .y = y,
                     .stat = stat,
                     .x = in,
                     .w = wq,
                     .M = M,
                     .rows = zk_tile(k, L, 0, ROWS),
                     .eps = eps,
                     .one_plus = one_plus}};
    lie(both, H, Q, G, K, wk, NULL);
    zk_for(k, zk_pieces(M, both->rows), heads_fwd_task, both);
}

static void heads_bwd(zk *k, const zk_launch *L, real *din, real *dwq, real *dwk, const real *dy,
                      const real *in, const float *stat, const real *wq, const real *wk, int64_t M,
                      int64_t H, int64_t Q, int64_t G, int64_t K, int64_t span, int one_plus)
{
    norm both[2] = {{.dtype = k->dtype,
                     .y = din,
                     .dw = dwq,
                     .stat = (float *)stat,
                     .x = in,
                     .dy = dy,
                     .w = wq,
                     .M = M,
                     .rows = zk_tile(k, L, 0, ROWS),
                     .span = span,
                     .one_plus = one_plus}};
    lie(both, H, Q, G, K, wk, dwk);
    zk_for(k, zk_pieces(M, both->rows), heads_bwd_task, both);
    for (norm *a = both; a < both + 2; a++)
        if (a->dw) zk_for(k, zk_pieces(a->C, span), rms_columns_task, a);
}

void ZK(zk_qknorm_fwd)(zk *k, const zk_launch *L, real *y, float *stat, const real *in,
                       const real *wq, const real *wk, int64_t M, int64_t H, int64_t G, int64_t D,
                       float eps)
{
    heads_fwd(k, L, y, stat, in, wq, wk, M, H, D, G, D, eps, 0);
}

void ZK(zk_qknorm_bwd)(zk *k, const zk_launch *L, real *din, real *dwq, real *dwk, const real *dy,
                       const real *in, const float *stat, const real *wq, const real *wk,
                       float *scratch, int64_t M, int64_t H, int64_t G, int64_t D)
{
    (void)scratch;
    heads_bwd(k, L, din, dwq, dwk, dy, in, stat, wq, wk, M, H, D, G, D, HEAD, 0);
}

void ZK(zk_qknorm1_fwd)(zk *k, const zk_launch *L, real *y, float *stat, const real *in,
                        const real *wq, const real *wk, int64_t M, int64_t H, int64_t G, int64_t D,
                        float eps)
{
    heads_fwd(k, L, y, stat, in, wq, wk, M, H, D, G, D, eps, 1);
}

void ZK(zk_qknorm1_bwd)(zk *k, const zk_launch *L, real *din, real *dwq, real *dwk, const real *dy,
                        const real *in, const float *stat, const real *wq, const real *wk,
                        float *scratch, int64_t M, int64_t H, int64_t G, int64_t D)
{
    (void)scratch;
    heads_bwd(k, L, din, dwq, dwk, dy, in, stat, wq, wk, M, H, D, G, D, HEAD, 1);
}

void ZK(zk_qknorm_whole_fwd)(zk *k, const zk_launch *L, real *y, float *stat, const real *in,
                             const real *wq, const real *wk, int64_t M, int64_t H, int64_t G,
                             int64_t D, float eps)
{
    heads_fwd(k, L, y, stat, in, wq, wk, M, 1, H * D, 1, G * D, eps, 0);
}

void ZK(zk_qknorm_whole_bwd)(zk *k, const zk_launch *L, real *din, real *dwq, real *dwk,
                             const real *dy, const real *in, const float *stat, const real *wq,
                             const real *wk, int64_t M, int64_t H, int64_t G, int64_t D)
{
    heads_bwd(k, L, din, dwq, dwk, dy, in, stat, wq, wk, M, 1, H * D, 1, G * D, WIDE, 0);
}
