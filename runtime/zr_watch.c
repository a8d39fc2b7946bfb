/* zr_watch.c -- timeouts, and a rank's watchdog, which ends a run that hangs and reports where.
 *
 * A rank that waits for a device, or for a peer that is gone, waits for ever. So if there is a
 * device, or a launcher has started the ranks, a thread checks several times a second whether the
 * run was stopped, whether a peer is gone, whether the target's own check fails, and whether the
 * rank has waited too long. On a CPU the parent checks how long ranks wait (zr_stall.c).
 *
 * Invariants
 *  1. The thread ends the process, or reports that the rank lives, or does nothing.
 *  2. It reads data written under its lock, except `what`, `queue` and the rank's `step` and
 *     `life`: these change with every command, are atomic, and only appear in messages.
 *  3. It sends bytes only under the lock, so that none gets into a message of the rank.
 */
#define _GNU_SOURCE
#include "zr_fail.h"
#include "zr_memory.h"
#include "zr_net.h"
#include "zr_range.h"
#include "zr_rank.h"
#include "zr_watch.h"
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- timeouts */

enum { FIRST_S = 600, LEAST_S = 60 };

double zr_limit(const zr *z, double usual)
{
    double enough = ZR_TIMES * usual;
    if (z->timeout) return (double)z->timeout;
    if (usual < 0) return FIRST_S;
    return enough > LEAST_S ? enough : LEAST_S;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Return the median of the last steps. */
static double usual_step(const zr_watch *w)
{
    double sorted[ZR_RECENT];
    int64_t n = w->steps < ZR_RECENT ? w->steps : ZR_RECENT;
    if (!n) return ZR_UNKNOWN;
    memcpy(sorted, w->recent, sizeof sorted);
    qsort(sorted, (size_t)n, sizeof *sorted, compare);
    return sorted[n / 2];
}

/* ---- the rank's own thread */

void zr_expect(zr *z)
{
    zr_watch *w = z->watch;
    if (!zr_is_gpu) return; /* the parent checks the clock */
    pthread_mutex_lock(&w->lock);
    if (w->deadline == 0) {
        w->limit = zr_limit(z, usual_step(w));
        w->deadline = zr_now() + w->limit;
    }
    pthread_mutex_unlock(&w->lock);
}

void zr_met(zr *z)
{
    zr_watch *w = z->watch;
    pthread_mutex_lock(&w->lock);
    w->deadline = 0;
    pthread_mutex_unlock(&w->lock);
}

void zr_measure(zr *z, double seconds)
{
    zr_watch *w = z->watch;
    w->recent[w->steps++ % ZR_RECENT] = seconds;
}

void zr_watch_also(zr *z, void (*look)(zr *z))
{
    pthread_mutex_lock(&z->watch->lock);
    z->watch->look = look;
    pthread_mutex_unlock(&z->watch->lock);
}

/* ---- the watchdog */

static void look_at_clock(zr *z)
{
    zr_watch *w = z->watch;
    if (w->deadline == 0 || zr_now() < w->deadline) return;
    const char *what = atomic_load_explicit(&w->what, memory_order_relaxed);
    zr_fail(z, ZR_STUCK,
            "step %" PRId64 " has not ended in %.0f s (ZR_TIMEOUT_S); the last issued command is "
            "%s on queue %s; check for a rank, a network or a device that hangs",
            z->step + 1, w->limit, what ? what : "nothing", zr_queue_name(w->queue));
}

/* Checks between two reports that this rank lives. The system buffers more than a day of these for
 * a peer that does not read. */
enum { EVERY = 5 };

static void *watch(void *arg)
{
    zr *z = arg;
    zr_watch *w = z->watch;
    const struct timespec pause = {0, 100000000};
    int quit = 0;
    for (int n = 0; !quit; n++) {
        nanosleep(&pause, NULL);
        zr_leave_if_stopped(z);
        pthread_mutex_lock(&w->lock);
        if (!w->alone) zr_plane_look(z);
        if (!w->alone && w->look) w->look(z);
        if (n % EVERY == 0) zr_plane_beat(z);
        look_at_clock(z);
        quit = w->quit;
        pthread_mutex_unlock(&w->lock);
    }
    return NULL;
}

/* ---- start and end */

void zr_watch_start(zr *z)
{
    zr_watch *w = z->watch;
    int error = pthread_create(&w->thread, NULL, watch, z);
    if (error) zr_fail(z, ZR_ENVIRONMENT, "starting a thread: %s", strerror(error));
}

void zr_watch_alone(zr *z)
{
    pthread_mutex_lock(&z->watch->lock);
    z->watch->alone = 1;
    pthread_mutex_unlock(&z->watch->lock);
}

void zr_watch_stop(zr *z)
{
    zr_watch *w = z->watch;
    pthread_mutex_lock(&w->lock);
    w->quit = 1;
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
}
