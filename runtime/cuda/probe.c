/* probe.c -- how fast a rank's GPU multiplies, copies and gathers, for --check-gpus.
 *
 * Invariants
 *  1. Everything happens in the arena in front of the kernels' workspace, which is in use.
 *  2. All ranks take part in the same number of gathers.
 */
#include "cuda.h"
#include "../zr_fail.h"
#include "../zr_order.h"
#include "../zr_probe.h"
#include "../zr_queue.h"
#include "../zr_rank.h"
#include "../zr_seats.h"
#include <string.h>

/* Most rows of a matrix; commands of a round; most rounds of a measurement, and the seconds that it
 * lasts about, so that a GPU reaches the clock that it can hold. */
enum { ROWS = 8192, TURNS = 8, ROUNDS = 200, SECONDS = 1 };
enum { PIECE = 256 << 20, UNIT = 1024 }; /* most bytes of a rank's piece; its unit */

typedef struct probe {
    int queue;
    void (*issue)(zr *z, const struct probe *p);
    int64_t n;     /* rows of a matrix, or bytes */
    double amount; /* FLOPs or bytes of one command */
} probe;

static int64_t width(const zr *z) { return z->p->type == ZR_F32 ? 4 : 2; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Fill the first bytes of the arena with random numbers of magnitudes from 1 to 2. Products of
 * zeros take less power, so a GPU that is too hot would seem fast. */
static void fill(zr *z, int64_t bytes)
{
    /* bits that are fixed, and bits that are random, of f32, bf16 and f16 */
    static const uint32_t fixed[] = {0x3f800000, 0x3f803f80, 0x3c003c00};
    static const uint32_t random[] = {0x807fffff, 0x807f807f, 0x83ff83ff};
    uint64_t state = 0;
    uint32_t *bounce = (uint32_t *)(z->t->host + z->p->host);
    for (int64_t i = 0; i < ZR_BOUNCE / 4; i++)
        bounce[i] = ((uint32_t)zr_random(&state) & random[z->p->type]) | fixed[z->p->type];
    for (int64_t at = 0; at < bytes; at += ZR_BOUNCE)
        zr_cuda(z,
                cudaMemcpyAsync(z->t->arena + at, bounce, (size_t)least(ZR_BOUNCE, bytes - at),
                                cudaMemcpyHostToDevice, zr_on(z, ZR_MAIN, "a copy")),
                "copying");
    zr_finish(z, ZR_MAIN);
}

static void multiply(zr *z, const probe *p)
{
    char *x = z->t->arena, *w = x + p->n * p->n * width(z), *y = w + p->n * p->n * width(z);
    (void)zr_on(z, ZR_MAIN, "a product");
    z->p->probe(z->queue[ZR_MAIN].k, y, x, w, p->n);
}

static void copy_within(zr *z, const probe *p)
{
    zr_cuda(z,
            cudaMemcpyAsync(z->t->arena + p->n, z->t->arena, (size_t)p->n, cudaMemcpyDeviceToDevice,
                            zr_on(z, ZR_MAIN, "a copy")),
            "copying");
}

static void gather(zr *z, const probe *p) { zr_gather(z, p->queue, 0, 0, p->n, 0, p->n, p->n); }

/* Return the seconds of a round on the device. */
static double round_of(zr *z, const probe *p, cudaEvent_t from, cudaEvent_t to)
{
    float ms = 0;
    (void)zr_on(z, p->queue, "a measurement");
    zr_mark(z, from, p->queue);
    for (int i = 0; i < TURNS; i++) p->issue(z, p);
    zr_mark(z, to, p->queue);
    zr_finish(z, p->queue);
    zr_cuda(z, cudaEventElapsedTime(&ms, from, to), "timing");
    return 1e-3 * (double)ms;
}

/* Return the rate of the second half of all rounds. The first round connects and loads; the next
 * one tells how many more there are, as rank 0 decides. */
static double measure(zr *z, const probe *p)
{
    cudaEvent_t from, to;
    double sum = 0;
    zr_cuda(z, cudaEventCreate(&from), "creating an event");
    zr_cuda(z, cudaEventCreate(&to), "creating an event");
    (void)round_of(z, p, from, to);
    double begun = zr_now();
    (void)round_of(z, p, from, to);
    double took = zr_now() - begun;
    int64_t half = took * ROUNDS > SECONDS ? 1 + (int64_t)(SECONDS / took) / 2 : ROUNDS / 2;
    zr_tell(z, &half, sizeof half);
    for (int64_t i = 0; i < half; i++) (void)round_of(z, p, from, to);
    for (int64_t i = 0; i < half; i++) sum += round_of(z, p, from, to);
    zr_cuda(z, cudaEventDestroy(from), "destroying an event");
    zr_cuda(z, cudaEventDestroy(to), "destroying an event");
    return sum > 0 ? (double)(TURNS * half) * p->amount / sum : 0;
}

/* Return a queue on which all ranks have a communicator, preferably one beside products: the first
 * one has fewer blocks. */
static int queue_of_all(const zr *z)
{
    static const int queues[] = {ZR_GATHER, ZR_REDUCE};
    for (int i = 0; i < 2; i++)
        if (z->t->comm[queues[i] * z->p->ngroups]) return queues[i];
    return ZR_MAIN;
}

double zr_probe(zr *z, int what)
{
    int64_t room = z->p->workspace, n = ROWS, half = least(room / 2, PIECE) / UNIT * UNIT;
    if (what == ZR_PRODUCT) {
        while (3 * n * n * width(z) > room) n -= 16;
        fill(z, 3 * n * n * width(z));
        return measure(z, &(probe){ZR_MAIN, multiply, n, 2.0 * (double)(n * n) * (double)n});
    }
    if (what == ZR_COPY)
        return measure(z, &(probe){ZR_MAIN, copy_within, half, 2.0 * (double)half});
    if (z->ranks == 1) return 0;
    int64_t piece = least(least(room, z->p->shared) / z->ranks, PIECE) / UNIT * UNIT;
    return measure(z, &(probe){queue_of_all(z), gather, piece, (z->ranks - 1.0) * (double)piece});
}
