/* stream.c -- the base of a GPU's files: CUDA's results, the streams of queues, events on them, and
 * the times of --profile. */
#include "cuda.h"
#include "../zr_clock.h"
#include "../zr_fail.h"
#include "../zr_memory.h"
#include "../zr_options.h"
#include "../zr_queue.h"
#include "../zr_rank.h"
#include "../zr_watch.h"
#include <inttypes.h>

const int zr_is_gpu = 1;

void zr_cuda(zr *z, cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    zr_fail(z, ZR_ENVIRONMENT, "step %" PRId64 ": %s: %s", z->step + 1, what,
            cudaGetErrorString(error));
}

/* ---- streams */

cudaStream_t zr_on(zr *z, int queue, const char *what)
{
    zr_target *t = z->t;
    unsigned bit = 1u << queue;
    zr_issued(z, queue, what);
    if (t->recording) return t->stream[queue];
    if (t->behind & bit)
        zr_cuda(z, cudaStreamWaitEvent(t->stream[queue], t->played, 0), "waiting for a graph");
    t->behind &= ~bit;
    t->loose |= bit;
    return t->stream[queue];
}

void zr_mark(zr *z, cudaEvent_t event, int queue)
{
    zr_cuda(z, cudaEventRecord(event, z->t->stream[queue]), "recording an event");
}

void zr_poison(zr *z, int queue, int64_t at, int64_t bytes)
{
    cudaStream_t stream = zr_on(z, queue, "poison"); /* NaN in f32, bf16 and f16 */
    zr_cuda(z, cudaMemsetAsync(z->t->arena + at, 0xff, (size_t)bytes, stream), "poisoning");
}

/* ---- --profile: events around each command, timed from an event at the start of the step */

void zr_clocks_start(zr *z, int64_t n)
{
    zr_target *t = z->t;
    int64_t steps = z->o->profile_last - z->o->profile_first + 1;
    t->clock = zr_get(z, 2 * n, sizeof *t->clock);
    t->origin = zr_get(z, steps, sizeof *t->origin);
    t->origin_at = zr_get(z, steps, sizeof *t->origin_at);
    for (int64_t i = 0; i < 2 * n + steps; i++)
        zr_cuda(z, cudaEventCreate(i < 2 * n ? &t->clock[i] : &t->origin[i - 2 * n]),
                "making an event for --profile");
}

void zr_clocks_step(zr *z)
{
    int64_t i = z->step + 1 - z->o->profile_first;
    z->t->origin_at[i] = zr_now();
    zr_mark(z, z->t->origin[i], ZR_MAIN);
}

void zr_clock(zr *z, zr_note *note, int end)
{
    zr_mark(z, z->t->clock[2 * (note - z->profile->note) + end], note->queue);
}

void zr_clocks_end(zr *z)
{
    zr_target *t = z->t;
    for (int64_t i = 0; i < 2 * z->profile->used; i++) {
        zr_note *note = &z->profile->note[i / 2];
        int64_t step = note->step + 1 - z->o->profile_first;
        float ms;
        zr_cuda(z, cudaEventElapsedTime(&ms, t->origin[step], t->clock[i]), "reading a time");
        *(i % 2 ? &note->end : &note->begin) = (int64_t)(1e9 * t->origin_at[step] + 1e6 * ms);
    }
}
