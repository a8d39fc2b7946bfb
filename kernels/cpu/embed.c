/* embed.c -- token and position embedding, forward and backward.
 *
 *   y[m] = w[token[m]] + p[position[m]]; dw[v] = sum of dy[m] over m with token[m] = v
 *
 * Invariants
 *  1. A row of a gradient is written once, by one task. Its terms are added in f32 in token order
 *     (batch order for positions), and the sum is rounded once.
 */
#include "part.h"

enum { ROWS = 16, WORDS = 64 }; /* rows of a task by default: of tokens, of the vocabulary */

typedef struct embed {
    real *y;                 /* [M,C] forward, [V,C] or [P,C] backward */
    const real *w, *p;       /* [V,C], [T,C] */
    const real *dy;          /* [M,C] */
    const int32_t *token;    /* [M] */
    const int32_t *position; /* [M], or NULL: each row's position in its sample */
    /* [V]: ends of the tokens' runs in `place`; [M]: rows sorted by token */
    const int32_t *end, *place;
    int64_t B, T, P, M, V, C, rows;
    int dtype, add;
} embed;

/* ---- forward */
static void fwd_task(void *arg, int64_t task, int thread)
{
    const embed *a = arg;
    int64_t C = a->C;
    (void)thread;
    for (int64_t m = task * a->rows; m < zk_least((task + 1) * a->rows, a->M); m++) {
        int64_t position = a->position ? a->position[m] : m % a->T;
        for (int64_t c = 0; c < C; c += LANES) {
            lanes y = lanes_get(a->w, a->token[m] * C + c, a->dtype, C - c);
            if (a->p) y += lanes_get(a->p, position * C + c, a->dtype, C - c);
            lanes_put(a->y, m * C + c, a->dtype, y, C - c);
        }
    }
}

static void forward(zk *k, const zk_launch *L, embed *a)
{
    a->rows = zk_tile(k, L, 0, ROWS);
    a->dtype = k->dtype;
    zk_for(k, zk_pieces(a->M, a->rows), fwd_task, a);
}

void ZK(zk_embed_fwd)(zk *k, const zk_launch *L, real *y, const int32_t *token, const real *w,
                      const real *p, int64_t B, int64_t T, int64_t C)
{
    forward(k, L, &(embed){.y = y, .w = w, .p = p, .token = token, .T = T, .M = B * T, .C = C});
}

void ZK(zk_embed_packed_fwd)(zk *k, const zk_launch *L, real *y, const int32_t *token,
                             const int32_t *position, const real *w, const real *p, int64_t M,
                             int64_t C)
{
    embed a = {.y = y, .w = w, .p = p, .token = token, .position = position, .M = M, .C = C};
    forward(k, L, &a);
}

/* ---- backward */

/* Counting sort: fill place[M] with the rows in order of token, then of row. Afterwards the rows of
 * token v end at end[v] and begin where those of token v-1 end. end: [V + 1]. */
static void sort(int32_t *end, int32_t *place, const int32_t *token, int64_t M, int64_t V)
{
    memset(end, 0, (V + 1) * sizeof *end);
    for (int64_t m = 0; m < M; m++) end[token[m] + 1]++;
    for (int64_t v = 0; v < V; v++) end[v + 1] += end[v];
    for (int64_t m = 0; m < M; m++) place[end[token[m]]++] = (int32_t)m;
}

static void bwd_task(void *arg, int64_t task, int thread)
{
    const embed *a = arg;
    int dtype = a->add ? ZK_F32 : a->dtype;
    (void)thread;
    for (int64_t v = task * a->rows; v < zk_least((task + 1) * a->rows, a->V); v++) {
        int32_t from = v ? a->end[v - 1] : 0;
        if (a->add && from == a->end[v]) continue;
        for (int64_t c = 0; c < a->C; c += LANES) {
            int64_t n = a->C - c;
            lanes sum = a->add ? lanes_get(a->y, v * a->C + c, dtype, n) : lanes_set(0);
            for (int32_t i = from; i < a->end[v]; i++)
                sum += lanes_get(a->dy, a->place[i] * a->C + c, a->dtype, n);
            lanes_put(a->y, v * a->C + c, dtype, sum, n);
        }
    }
}

void ZK(zk_embed_bwd)(zk *k, const zk_launch *L, void *dw, const real *dy, const int32_t *token,
                      int32_t *index, int64_t M, int64_t V, int64_t C, int add)
{
    embed a = {.y = dw,
               .dy = dy,
               .end = index,
               .place = index + V + 1,
               .V = V,
               .C = C,
               .rows = zk_tile(k, L, 0, WORDS),
               .dtype = k->dtype,
               .add = add};
    sort(index, index + V + 1, token, M, V);
    zk_for(k, zk_pieces(V, a.rows), bwd_task, &a);
}

static void position_task(void *arg, int64_t task, int thread)
{
    const embed *a = arg;
    (void)thread;
    for (int64_t t = task * a->rows; t < zk_least((task + 1) * a->rows, a->P); t++)
        for (int64_t c = 0; c < a->C; c += LANES) {
            lanes sum = lanes_set(0);
            for (int64_t b = 0; b < a->B && t < a->T; b++)
                sum += lanes_get(a->dy, (b * a->T + t) * a->C + c, a->dtype, a->C - c);
            lanes_put(a->y, t * a->C + c, a->dtype, sum, a->C - c);
        }
}

void ZK(zk_position_bwd)(zk *k, const zk_launch *L, real *dp, const real *dy, int64_t B, int64_t T,
                         int64_t C, int64_t P)
{
    embed a = {.y = dp,
               .dy = dy,
               .B = B,
               .T = T,
               .P = P,
               .C = C,
               .rows = zk_tile(k, L, 0, ROWS),
               .dtype = k->dtype};
    zk_for(k, zk_pieces(P, a.rows), position_task, &a);
}

void ZK(zk_position_packed_bwd)(zk *k, const zk_launch *L, real *dp, const real *dy,
                                const int32_t *position, int32_t *index, int64_t M, int64_t C,
                                int64_t P)
{
    ZK(zk_embed_bwd)(k, L, dp, dy, position, index, M, P, C, 0);
}
