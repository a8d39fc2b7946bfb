/* zr_writer.c -- a thread that writes a checkpoint beside the next step, until its update.
 *
 * Only an update changes a run's states (the checker proves that for each plan), so between two
 * updates a thread may read them in place. The rank waits for the thread before it issues an
 * update, but not for ever: at the end of its patience the checkpoint is given up.
 *
 * Invariants
 *  1. While an update runs the thread reads nothing.
 *  2. The thread is started before the first step; later nothing is allocated.
 */
#define _GNU_SOURCE
#include "zr_checkpoint.h"
#include "zr_fail.h"
#include "zr_options.h"
#include "zr_progress.h"
#include "zr_rank.h"
#include "zr_seats.h"
#include "zr_shared.h"
#include "zr_watch.h"
#include "zr_writer.h"
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

enum { PATIENCE_S = 60, SLICE_MS = 100 };

static void *write_on(void *arg)
{
    zr *z = arg;
    zr_writer *w = z->writer;
    zr_progress_beside();
    pthread_mutex_lock(&w->lock);
    for (;;) {
        while (!w->busy && !w->quit) pthread_cond_wait(&w->moved, &w->lock);
        if (w->quit) break;
        pthread_mutex_unlock(&w->lock);
        int bad = w->work(z, w->why);
        pthread_mutex_lock(&w->lock);
        w->ended = zr_now();
        w->bad = bad;
        w->busy = 0;
        pthread_cond_broadcast(&w->moved);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

void zr_writer_start(zr *z)
{
    zr_writer *w = z->writer;
    pthread_condattr_t monotonic;
    int64_t patience = zr_setting(z, "ZR_SAVE_S", 1000000);
    w->patience = (double)(patience ? patience : PATIENCE_S);
    pthread_mutex_init(&w->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&w->moved, &monotonic);
    pthread_condattr_destroy(&monotonic);
    int error = pthread_create(&w->thread, NULL, write_on, z);
    if (error) zr_fail(z, ZR_ENVIRONMENT, "starting a thread: %s", strerror(error));
    w->there = 1;
}

void zr_writer_stop(zr *z)
{
    zr_writer *w = z->writer;
    if (!w->there) return;
    pthread_mutex_lock(&w->lock);
    w->quit = 1;
    pthread_cond_broadcast(&w->moved);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    w->there = 0;
}

void zr_writer_begin(zr *z, int (*work)(zr *z, char *why))
{
    zr_writer *w = z->writer;
    pthread_mutex_lock(&w->lock);
    w->work = work;
    w->why[0] = 0;
    w->busy = 1;
    pthread_cond_broadcast(&w->moved);
    pthread_mutex_unlock(&w->lock);
}

/* Wait a slice of time, or until the thread is done. */
static void wait_some(zr_writer *w)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += 1000000 * SLICE_MS;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&w->moved, &w->lock, &until);
}

double zr_writer_wait(zr *z)
{
    zr_writer *w = z->writer;
    double begun = zr_now();
    if (!w->there) return 0;
    pthread_mutex_lock(&w->lock);
    int waits = w->busy;
    while (w->busy) {
        if (zr_now() > begun + w->patience) atomic_store(&w->stop, 1);
        wait_some(w);
        pthread_mutex_unlock(&w->lock);
        zr_leave_if_stopped(z);
        pthread_mutex_lock(&w->lock);
    }
    pthread_mutex_unlock(&w->lock);
    return waits ? w->ended - begun : 0;
}

void zr_writer_before_update(zr *z)
{
    if (!z->checkpoints->beside) return;
    zr_met(z);
    zr_lives(z, ZR_BETWEEN);
    z->checkpoints->waited += zr_writer_wait(z);
    zr_lives(z, ZR_STEPS);
    zr_barrier(z); /* so that no peer's watchdog counts the wait either */
    zr_expect(z);
}
