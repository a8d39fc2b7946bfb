/* watch.c -- the watchdog of a rank on a GPU: ends a run that hangs, saying where.
 *
 * A device that waits for a peer that is gone waits for ever, and so does the host that waits for
 * the device. So a thread looks several times a second whether the run was stopped, whether NCCL
 * has met an error, and whether the rank has waited longer than it should.
 *
 * Invariants
 *  1. The thread ends the process, or does nothing.
 *  2. What it reads is written under its lock, but for `what` and `queue`: those change with
 *     everything that is issued, are words, and are only told.
 */
#define _GNU_SOURCE
#include "cuda.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- how long is too long */

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Seconds that the queues may take. */
static double limit(const zr *z)
{
    const zr_watch *w = &z->t->watch;
    double sorted[ZR_RECENT];
    int64_t n = w->steps < ZR_RECENT ? w->steps : ZR_RECENT;
    if (z->timeout) return (double)z->timeout;
    if (!n) return ZR_FIRST_S;
    memcpy(sorted, w->recent, sizeof sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, compare);
    double enough = ZR_TIMES * sorted[n / 2];
    return enough > ZR_LEAST_S ? enough : ZR_LEAST_S;
}

void zr_expect(zr *z)
{
    zr_watch *w = &z->t->watch;
    pthread_mutex_lock(&w->lock);
    if (w->deadline == 0) {
        w->limit = limit(z);
        w->deadline = zr_now() + w->limit;
    }
    pthread_mutex_unlock(&w->lock);
}

void zr_met(zr *z)
{
    zr_watch *w = &z->t->watch;
    pthread_mutex_lock(&w->lock);
    w->deadline = 0;
    pthread_mutex_unlock(&w->lock);
}

void zr_measure(zr *z, double seconds)
{
    zr_watch *w = &z->t->watch;
    w->recent[w->steps++ % ZR_RECENT] = seconds;
}

/* ---- looking */

/* A question ends a call that went on by itself, which two threads must not do at once: while the
 * rank's own thread is within NCCL, it asks. */
static void look_at_nccl(zr *z)
{
    if (pthread_mutex_trylock(&z->t->watch.nccl)) return;
    for (int queue = 0; queue <= ZR_REDUCE; queue++) {
        ncclResult_t state = ncclSuccess;
        ncclResult_t asked = ncclCommGetAsyncError(z->t->comm[queue], &state);
        if (asked == ncclSuccess && (state == ncclSuccess || state == ncclInProgress)) continue;
        zr_fail(z, ZR_STUCK, "step %" PRId64 ", queue %s: NCCL: %s", z->step + 1,
                zr_queue_name(queue), ncclGetErrorString(asked == ncclSuccess ? state : asked));
    }
    pthread_mutex_unlock(&z->t->watch.nccl);
}

static void look_at_clock(zr *z)
{
    zr_watch *w = &z->t->watch;
    if (w->deadline == 0 || zr_now() < w->deadline) return;
    zr_fail(z, ZR_STUCK,
            "step %" PRId64 " has not ended in %.0f s (ZR_TIMEOUT_S); the last that was issued is "
            "%s on queue %s; look for a rank or a device that hangs", z->step + 1, w->limit,
            w->what ? w->what : "nothing", zr_queue_name(w->queue));
}

static void *watch(void *arg)
{
    zr *z = arg;
    zr_watch *w = &z->t->watch;
    const struct timespec pause = {0, 100000000};
    int quit = 0;
    while (!quit) {
        nanosleep(&pause, NULL);
        zr_leave_if_stopped(z);
        zr_plane_look(z);
        pthread_mutex_lock(&w->lock);
        if (w->communicators) look_at_nccl(z);
        look_at_clock(z);
        quit = w->quit;
        pthread_mutex_unlock(&w->lock);
    }
    return NULL;
}

/* ---- begin and end */

void zr_watch_start(zr *z)
{
    zr_watch *w = &z->t->watch;
    pthread_mutex_init(&w->lock, NULL);
    pthread_mutex_init(&w->nccl, NULL);
    int error = pthread_create(&w->thread, NULL, watch, z);
    if (error) zr_fail(z, ZR_ENVIRONMENT, "starting a thread: %s", strerror(error));
}

void zr_watch_stop(zr *z)
{
    zr_watch *w = &z->t->watch;
    pthread_mutex_lock(&w->lock);
    w->quit = 1;
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
}
