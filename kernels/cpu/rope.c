/* rope.c -- rotary position embedding: the table of cosines and sines, and the rotation of query
 * and key heads.
 *
 *   y1 = x1 cos(a) - x2 sin(a); y2 = x2 cos(a) + x1 sin(a); a = position * freq[i]
 *   x1, x2: elements i and i + D/2 of a head; zk_rope_part: of its first W, or 2i and 2i + 1
 *
 * Invariants
 *  1. Angles are products position * frequency in f64; only their sine and cosine are rounded to
 *     f32.
 *  2. A task has whole rows (b, t), so y may be `in`.
 */
#include "part.h"

enum { ROWS = 16 }; /* rows of a task by default */

typedef struct rope {
    zk *k;
    real *y;                 /* [B*T, (H + 2*G) * D] */
    const real *in;          /* the same */
    float *table;            /* [T, half, 2] */
    const double *freq;      /* [half] */
    const int32_t *position; /* [B*T], or NULL: each row's position in its sample */
    int64_t rows, M, T, H, G, D, half;
    float sign, factor;
    int pairs;
} rope;

static void table_task(void *arg, int64_t task, int thread)
{
    const rope *a = arg;
    (void)thread;
    for (int64_t t = task * a->rows; t < zk_least((task + 1) * a->rows, a->T); t++)
        for (int64_t i = 0; i < a->half; i++) {
            double angle = (double)t * a->freq[i];
            a->table[2 * (t * a->half + i)] = (float)zk_cos(angle);
            a->table[2 * (t * a->half + i) + 1] = (float)zk_sin(angle);
        }
}

void ZK(zk_rope_table)(zk *k, const zk_launch *L, float *table, const double *freq, int64_t T,
                       int64_t D)
{
    rope a = {.k = k,
              .table = table,
              .freq = freq,
              .T = T,
              .half = D / 2,
              .rows = zk_tile(k, L, 0, ROWS)};
    zk_for(k, (T + a.rows - 1) / a.rows, table_task, &a);
}

/* Rotate one head of a row at element `at`. cosine, sine: [half rounded up to 16]. */
static void turn(const rope *a, int64_t at, const float *cosine, const float *sine)
{
    int dtype = a->k->dtype;
    for (int64_t i = 0; i < a->half; i += LANES) {
        int64_t n = a->half - i;
        lanes c = lanes_load(cosine + i), s = lanes_load(sine + i);
        lanes x1 = lanes_get(a->in, at + i, dtype, n);
        lanes x2 = lanes_get(a->in, at + a->half + i, dtype, n);
        lanes_put(a->y, at + i, dtype, lanes_fma(x1, c, -(x2 * s)), n);
        lanes_put(a->y, at + a->half + i, dtype, lanes_fma(x2, c, x1 * s), n);
    }
}

/* The same for pairs of neighbours: their two elements lie side by side. */
static void turn_adjacent(const rope *a, int64_t at, const float *cosine, const float *sine)
{
    float both[2 * LANES], x1[LANES], x2[LANES];
    int dtype = a->k->dtype;
    for (int64_t i = 0; i < a->half; i += LANES) {
        int64_t n = zk_least(a->half - i, LANES), first = at + 2 * i;
        lanes c = lanes_load(cosine + i), s = lanes_load(sine + i);
        lanes_store(both, lanes_get(a->in, first, dtype, 2 * n));
        if (2 * n > LANES)
            lanes_store(both + LANES, lanes_get(a->in, first + LANES, dtype, 2 * n - LANES));
        for (int j = 0; j < LANES; j++) x1[j] = j < n ? both[2 * j] : 0;
        for (int j = 0; j < LANES; j++) x2[j] = j < n ? both[2 * j + 1] : 0;
        lanes u = lanes_load(x1), v = lanes_load(x2);
        lanes_store(x1, lanes_fma(u, c, -(v * s)));
        lanes_store(x2, lanes_fma(v, c, u * s));
        for (int j = 0; j < LANES; j++) both[2 * j] = x1[j], both[2 * j + 1] = x2[j];
        lanes_put(a->y, first, dtype, lanes_load(both), 2 * n);
        if (2 * n > LANES)
            lanes_put(a->y, first + LANES, dtype, lanes_load(both + LANES), 2 * n - LANES);
    }
}

/* Copy elements [at, at + n). */
static void copy_part(const rope *a, int64_t at, int64_t n)
{
    int64_t size = a->k->dtype == ZK_F32 ? 4 : 2;
    if (a->y != a->in && n)
        memcpy((char *)a->y + at * size, (const char *)a->in + at * size, (size_t)(n * size));
}

static void row(const rope *a, int64_t m, int thread)
{
    int64_t room = (a->half + 15) / 16 * 16, W = 2 * a->half;
    int64_t at = m * (a->H + 2 * a->G) * a->D, values = at + (a->H + a->G) * a->D;
    int64_t position = a->position ? a->position[m] : m % a->T;
    const float *table = a->table + position * a->half * 2; /* [half, 2] */
    float *cosine = zk_scratch(a->k, thread), *sine = cosine + room;
    for (int64_t i = 0; i < a->half; i++) {
        cosine[i] = a->factor * table[2 * i];
        sine[i] = a->sign * (a->factor * table[2 * i + 1]);
    }
    for (int64_t h = 0; h < a->H + a->G; h++) {
        int64_t head = at + h * a->D;
        if (a->pairs == ZK_ADJACENT) turn_adjacent(a, head, cosine, sine);
        else turn(a, head, cosine, sine);
        copy_part(a, head + W, a->D - W);
    }
    copy_part(a, values, a->G * a->D);
}

static void rows_task(void *arg, int64_t task, int thread)
{
    const rope *a = arg;
    for (int64_t m = task * a->rows; m < zk_least((task + 1) * a->rows, a->M); m++)
        row(a, m, thread);
}

void ZK(zk_rope_packed)(zk *k, const zk_launch *L, real *y, const real *in, const float *table,
                        const int32_t *position, int64_t B, int64_t T, int64_t H, int64_t G,
                        int64_t D, int sign)
{
    rope a = {.k = k,
              .y = y,
              .in = in,
              .table = (float *)table,
              .position = position,
              .M = B * T,
              .T = T,
              .H = H,
              .G = G,
              .D = D,
              .half = D / 2,
              .rows = zk_tile(k, L, 0, ROWS),
              .sign = (float)sign,
              .factor = 1};
    zk_for(k, (B * T + a.rows - 1) / a.rows, rows_task, &a);
}

void ZK(zk_rope_part)(zk *k, const zk_launch *L, real *y, const real *in, const float *table,
                      const float *table2, const int32_t *position, int64_t B, int64_t T, int64_t H,
                      int64_t G, int64_t D, int64_t W, int pairs, int which, float factor,
                      float factor2, int sign)
{
    rope a = {.k = k,
              .y = y,
              .in = in,
              .table = (float *)(which == 2 ? table2 : table),
              .position = position,
              .M = B * T,
              .T = T,
              .H = H,
              .G = G,
              .D = D,
              .half = which ? W / 2 : 0,
              .rows = zk_tile(k, L, 0, ROWS),
              .sign = (float)sign,
              .factor = which == 2 ? factor2 : factor,
              .pairs = pairs};
    zk_for(k, (B * T + a.rows - 1) / a.rows, rows_task, &a);
}

void ZK(zk_rope)(zk *k, const zk_launch *L, real *y, const real *in, const float *table, int64_t B,
                 int64_t T, int64_t H, int64_t G, int64_t D, int sign)
{
    ZK(zk_rope_packed)(k, L, y, in, table, NULL, B, T, H, G, D, sign);
}
