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

/* Return the bytes before copy v of a row's heads, of which rank p has `count` from its head
 * `place` on. */
static int64_t part(const heads *a, int64_t m, int64_t v, int64_t place, int64_t count)
{
    int64_t own = (a->H + 2 * a->G * a->copies) / a->ranks;
    return ((v / count * a->M + m) * own + place + v % count) * a->D * a->size;
}

/* Write the sum of a head's copies. */
static void add(const heads *a, int64_t m, int64_t whole, int64_t v, int64_t place, int64_t count)
{
    for (int64_t i = 0; i < a->D; i += LANES) {
        lanes sum = lanes_get(a->x + part(a, m, v, place, count), i, a->dtype, a->D - i);
        for (int64_t c = 1; c < a->copies; c++)
            sum += lanes_get(a->x + part(a, m, v + c, place, count), i, a->dtype, a->D - i);
        lanes_put(a->y + whole, i, a->dtype, sum, a->D - i);
    }
}

/* Move the `n` heads of a row from its head `first` on, each with its copies. */
static void move(const heads *a, int64_t m, int64_t first, int64_t n, int64_t place, int64_t copies)
{
    int64_t head = a->D * a->size, count = n * copies / a->ranks;
    for (int64_t h = 0; h < n; h++) {
        int64_t whole = (m * (a->H + 2 * a->G) + first + h) * head;
        if (!a->apart && copies > 1) add(a, m, whole, h * copies, place, count);
        for (int64_t c = 0; a->apart && c < copies; c++)
            memcpy(a->y + part(a, m, h * copies + c, place, count), a->x + whole, (size_t)head);
        if (!a->apart && copies == 1)
            memcpy(a->y + whole, a->x + part(a, m, h, place, count), (size_t)head);
    }
}

static void heads_task(void *arg, int64_t task, int thread)
{
    const heads *a = arg;
    int64_t h = a->H / a->ranks, g = a->G * a->copies / a->ranks;
    (void)thread;
    for (int64_t m = task * a->rows; m < zk_least((task + 1) * a->rows, a->M); m++) {
        move(a, m, 0, a->H, 0, 1);
        move(a, m, a->H, a->G, h, a->copies);
        move(a, m, a->H + a->G, a->G, h + g, a->copies);
    }
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
