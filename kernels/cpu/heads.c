/* heads.c -- sorts heads by the rank of a context group that they go to, and back.
 *
 * A key or value head that several ranks read is copied for each of them, and its gradient is the
 * sum of theirs, rounded once.
 *
 * Invariants
 *  1. Copies are added in ascending order in f32, so no result depends on threads.
 */
#include "lanes.h"
#include "part.h"

enum { ROWS = 16 }; /* rows of a task by default */

typedef struct heads {
    char *y;
    const char *x;
    int64_t M, H, G, D, ranks, copies, rows;
    int64_t size; /* bytes of an element */
    int dtype;
    int apart; /* 1: y is sorted by rank, 0: x is */
} heads;

/* Heads of one kind: n of a row from its head `first` on; their copies begin at head `place` of a
 * rank's row. */
typedef struct some {
    int64_t first, n, place, copies;
} some;

/* Return the bytes before copy v of a row's heads where these are sorted by rank. */
static int64_t part_head(const heads *a, const some *s, int64_t m, int64_t v)
{
    int64_t own = (a->H + 2 * a->G * a->copies) / a->ranks, count = s->n * s->copies / a->ranks;
    return ((v / count * a->M + m) * own + s->place + v % count) * a->D * a->size;
}

static int64_t whole_head(const heads *a, const some *s, int64_t m, int64_t h)
{
    return (m * (a->H + 2 * a->G) + s->first + h) * a->D * a->size;
}

/* Copy heads between the orders, those that are neighbours in both at once. */
static void copy_heads(const heads *a, const some *s, int64_t m)
{
    int64_t count = s->copies == 1 ? s->n / a->ranks : 1;
    for (int64_t v = 0; v < s->n * s->copies; v += count) {
        int64_t part = part_head(a, s, m, v), whole = whole_head(a, s, m, v / s->copies);
        memcpy(a->y + (a->apart ? part : whole), a->x + (a->apart ? whole : part),
               (size_t)(count * a->D * a->size));
    }
}

/* Write the sum of each head's copies. */
static void add(const heads *a, const some *s, int64_t m)
{
    for (int64_t h = 0; h < s->n; h++)
        for (int64_t i = 0; i < a->D; i += LANES) {
            lanes sum = lanes_get(a->x + part_head(a, s, m, h * s->copies), i, a->dtype, a->D - i);
            for (int64_t v = h * s->copies + 1; v < (h + 1) * s->copies; v++)
                sum += lanes_get(a->x + part_head(a, s, m, v), i, a->dtype, a->D - i);
            lanes_put(a->y + whole_head(a, s, m, h), i, a->dtype, sum, a->D - i);
        }
}

static void heads_task(void *arg, int64_t task, int thread)
{
    const heads *a = arg;
    int64_t h = a->H / a->ranks, g = a->G * a->copies / a->ranks;
    const some kinds[] = {
        {0, a->H, 0, 1}, {a->H, a->G, h, a->copies}, {a->H + a->G, a->G, h + g, a->copies}};
    (void)thread;
    for (int64_t m = task * a->rows; m < zk_least((task + 1) * a->rows, a->M); m++)
        for (int i = 0; i < (a->G ? 3 : 1); i++)
            (a->apart || kinds[i].copies == 1 ? copy_heads : add)(a, kinds + i, m);
}

static void move_heads(zk *k, const zk_launch *L, heads a)
{
    a.dtype = k->dtype;
    a.size = k->dtype == ZK_F32 ? 4 : 2;
    a.rows = zk_tile(k, L, 0, ROWS);
    zk_for(k, (a.M + a.rows - 1) / a.rows, heads_task, &a);
}

void ZK(zk_cut_heads_fwd)(zk *k, const zk_launch *L, real *y, const real *x, int64_t M, int64_t H,
                          int64_t G, int64_t D, int64_t ranks, int64_t copies)
{
    move_heads(k, L, (heads){y, x, M, H, G, D, ranks, .copies = copies, .apart = 1});
}

void ZK(zk_cut_heads_bwd)(zk *k, const zk_launch *L, real *dx, const real *dy, int64_t M, int64_t H,
                          int64_t G, int64_t D, int64_t ranks, int64_t copies)
{
    move_heads(k, L, (heads){dx, dy, M, H, G, D, ranks, .copies = copies});
}

void ZK(zk_join_heads)(zk *k, const zk_launch *L, real *y, const real *x, int64_t M, int64_t H,
                       int64_t D, int64_t ranks, int sign)
{
    move_heads(k, L, (heads){y, x, M, H, 0, D, ranks, .copies = 1, .apart = sign < 0});
}
