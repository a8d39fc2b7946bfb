/* rope.c -- rotary position embedding: the table of cosines and sines, and the rotation of query
 * and key heads.
 *
 *   y1 = x1 cos(a) - x2 sin(a); y2 = x2 cos(a) + x1 sin(a); a = position * freq[i]
 *   x1, x2: elements i and i + D/2 of a head
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
    float sign;
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

static void row(const rope *a, int64_t m, int thread)
{
    int64_t size = a->k->dtype == ZK_F32 ? 4 : 2, room = (a->half + 15) / 16 * 16;
    int64_t at = m * (a->H + 2 * a->G) * a->D, values = at + (a->H + a->G) * a->D;
    int64_t position = a->position ? a->position[m] : m % a->T;
    const float *table = a->table + position * a->half * 2; /* [half, 2] */
    float *cosine = zk_scratch(a->k, thread), *sine = cosine + room;
    for (int64_t i = 0; i < a->half; i++) {
        cosine[i] = table[2 * i];
        sine[i] = a->sign * table[2 * i + 1];
    }
    for (int64_t h = 0; h < a->H + a->G; h++) turn(a, at + h * a->D, cosine, sine);
    if (a->y != a->in)
        memcpy((char *)a->y + values * size, (const char *)a->in + values * size,
               (size_t)(a->G * a->D * size));
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
              .sign = (float)sign};
    zk_for(k, (B * T + a.rows - 1) / a.rows, rows_task, &a);
}

void ZK(zk_rope)(zk *k, const zk_launch *L, real *y, const real *in, const float *table, int64_t B,
                 int64_t T, int64_t H, int64_t G, int64_t D, int sign)
{
    ZK(zk_rope_packed)(k, L, y, in, table, NULL, B, T, H, G, D, sign);
}
