/* queue.c -- the queues of one rank: the thread and the time of each command.
 *
 * A queue is a ring of commands and a thread that runs them in order. An event is a position in a
 * queue: zr_record notes how many commands that queue has been issued, and zr_wait makes a queue
 * wait until the other has finished that many. So a record runs no command, and an event may be
 * recorded again, on any queue, while older waits for it are pending.
 *
 * Modes. eager: ZR_MAIN's commands run at once on the rank's own thread, those of other queues as
 * soon as possible. late: inside a step every queue has its thread, and a command runs only when it
 * is demanded by a wait, a full ring or a drain. shuffled: a seeded coin decides for each command
 * whether it is held like that, a drain empties the queues in a seeded order, and threads pause at
 * random. In late and shuffled, dead slots are filled with NaN.
 *
 * Invariants
 *  1. Which commands are held and demanded depends only on the seed and the program, never on the
 *     rank or on time. One rank alone cannot block itself, and so ranks together cannot either.
 *  2. No queue's thread holds the lock while it runs a command.
 */
#define _GNU_SOURCE
#include "cpu.h"
#include "../zr_clock.h"
#include "../zr_disk.h"
#include "../zr_fail.h"
#include "../zr_options.h"
#include "../zr_order.h"
#include "../zr_profile.h"
#include "../zr_queue.h"
#include "../zr_range.h"
#include "../zr_rank.h"
#include "../zr_shared.h"
#include "../zr_writer.h"
#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

/* ---- demand */

/* Demand the first n commands of a queue and wait for them. The lock is held. */
static void demand(zr *z, zr_lane *q, int64_t n)
{
    if (q->demanded < n) {
        q->demanded = n;
        pthread_cond_signal(&q->todo);
    }
    while (q->finished < n) pthread_cond_wait(&q->done, &z->t->lock);
}

static void run_wait(zr *z, int queue, const zr_command *c)
{
    int64_t other = c->i[0], issued = c->i[1];
    (void)queue;
    pthread_mutex_lock(&z->t->lock);
    demand(z, &z->t->lane[other], issued);
    pthread_mutex_unlock(&z->t->lock);
}

void zr_finish(zr *z, int queue)
{
    zr_lane *q = &z->t->lane[queue];
    pthread_mutex_lock(&z->t->lock);
    demand(z, q, q->issued);
    pthread_mutex_unlock(&z->t->lock);
}

void zr_drain(zr *z)
{
#define ROW(queue, name, from, to, kernels, drained) [drained] = queue,
    int order[ZR_QUEUES] = {ZR_EACH_QUEUE(ROW)};
#undef ROW
    for (int i = ZR_QUEUES - 1; z->o->mode == ZR_SHUFFLED && i > 0; i--) {
        int j = (int)(zr_random(&z->t->order) % (uint64_t)(i + 1)), o = order[i];
        order[i] = order[j];
        order[j] = o;
    }
    for (int i = 0; i < ZR_QUEUES; i++) zr_finish(z, order[i]);
}

/* ---- issuing */

static void run(zr *z, int queue, const zr_command *c)
{
    int kind = c->fn ? ZR_WORKS : c->run == run_wait ? (int)c->i[0] : ZR_MOVES;
    zr_pulse *pulse = &z->shared->seat[z->rank].pulse[queue];
    zr_note *note = c->name ? zr_note_begin(z, queue, c->name, kind) : NULL;
    atomic_store_explicit(&pulse->held, kind >= 0, memory_order_relaxed);
    atomic_store_explicit(&pulse->doing, c->name, memory_order_relaxed);
    c->run(z, queue, c);
    atomic_store_explicit(&pulse->doing, NULL, memory_order_relaxed);
    atomic_fetch_add_explicit(&pulse->ended, 1, memory_order_relaxed);
    zr_note_end(z, note);
}

void zr_push(zr *z, int queue, const zr_command *c)
{
    zr_lane *q = &z->t->lane[queue];
    if (queue == ZR_MAIN && !z->t->ahead) {
        run(z, queue, c);
        return;
    }
    pthread_mutex_lock(&z->t->lock);
    if (q->issued - q->finished == ZR_RING) demand(z, q, q->issued - ZR_RING + 1);
    q->ring[q->issued++ % ZR_RING] = *c;
    pthread_cond_signal(&q->todo);
    pthread_mutex_unlock(&z->t->lock);
}

void zr_record(zr *z, int queue, int event)
{
    zr_check_event(z, "record", queue, event);
    z->t->event[event] = (zr_event){queue, z->t->lane[queue].issued};
}

void zr_wait(zr *z, int queue, int event)
{
    zr_check_event(z, "wait", queue, event);
    zr_event e = z->t->event[event];
    zr_push(z, queue, &(zr_command){run_wait, "wait", NULL, {e.queue, e.at}});
}

void zr_replay(zr *z, int graph, void (*issue)(zr *z))
{
    if (graph == ZR_UPDATE) zr_writer_before_update(z);
    issue(z); /* issuing costs little compared with the work */
}

void zr_ready(zr *z, int graph, void (*issue)(zr *z)) { (void)z, (void)graph, (void)issue; }

static void run_call(zr *z, int queue, const zr_command *c)
{
    c->fn(z, z->queue[queue].k, zr_arena_of(z, queue), c->i);
}

void zr_call_n(zr *z, int queue, zr_fn *fn, const char *name, int n, const int64_t *i)
{
    zr_command c = {run_call, name, fn, {0}};
    zr_check_call(z, name, queue, n);
    memcpy(c.i, i, (size_t)n * sizeof *i);
    uint32_t last = zr_unmark(z, name, queue, c.i, n);
    zr_push(z, queue, &c);
    zr_dead(z, name, queue, c.i, last, zr_poison);
}

static void run_poison(zr *z, int queue, const zr_command *c)
{
    int64_t at = c->i[0], bytes = c->i[1];
    memset(zr_arena_of(z, queue) + at, 0xff, (size_t)bytes); /* NaN in f32, bf16 and f16 */
}

void zr_poison(zr *z, int queue, int64_t at, int64_t bytes)
{
    zr_push(z, queue, &(zr_command){run_poison, NULL, NULL, {at, bytes}});
}

static void run_copy(zr *z, int queue, const zr_command *c)
{
    int64_t from = c->i[0], to = c->i[1], bytes = c->i[2];
    char *host = z->t->host, *arena = z->t->arena;
    const zr_queue_row *way = &zr_queues[queue];
    if (way->from == ZR_FILED) zr_disk_move(z, queue, host + to, from, bytes);
    else if (way->to == ZR_FILED) zr_disk_move(z, queue, host + from, to, bytes);
    else
        memcpy((way->to == ZR_ARENA ? arena : host) + to,
               (way->from == ZR_ARENA ? arena : host) + from, (size_t)bytes);
    z->queue[queue].copied += bytes;
}

void zr_copy(zr *z, int queue, int64_t from, int64_t to, int64_t bytes)
{
    uint32_t last = zr_unmark(z, "copy", queue, &from, 1);
    zr_check_copy(z, queue, from, to, bytes);
    zr_push(z, queue, &(zr_command){run_copy, "copy", NULL, {from, to, bytes}});
    zr_dead(z, "copy", queue, &from, last, zr_poison);
}

/* ---- a queue's thread */

static void pause_a_little(zr_lane *q)
{
    const struct timespec t = {0, (long)(zr_random(&q->pause) % 50000)};
    if (zr_random(&q->pause) % 4 == 0) nanosleep(&t, NULL);
}

/* Return whether the next command is held until it is demanded. */
static int held(zr *z, zr_lane *q)
{
    return z->o->mode == ZR_LATE || (z->o->mode == ZR_SHUFFLED && zr_random(&q->coin) % 2);
}

/* Run the next command. The lock is held before and after. */
static void run_next(zr *z, zr_lane *q)
{
    int hold = held(z, q);
    while (hold && q->demanded <= q->finished) pthread_cond_wait(&q->todo, &z->t->lock);
    const zr_command *c = &q->ring[q->finished % ZR_RING];
    pthread_mutex_unlock(&z->t->lock);
    if (z->o->mode == ZR_SHUFFLED) pause_a_little(q);
    run(z, (int)(q - z->t->lane), c);
    pthread_mutex_lock(&z->t->lock);
    q->finished++;
    pthread_cond_broadcast(&q->done);
}

static void *work(void *arg)
{
    zr_lane *q = arg;
    zr *z = q->z;
    pthread_mutex_lock(&z->t->lock);
    while (!q->quit) {
        if (q->finished < q->issued) run_next(z, q);
        else pthread_cond_wait(&q->todo, &z->t->lock);
    }
    pthread_mutex_unlock(&z->t->lock);
    return NULL;
}

/* ---- start and end */

static void start(zr *z, int queue)
{
    zr_lane *q = &z->t->lane[queue];
    q->z = z;
    q->ring = zr_get(z, ZR_RING, sizeof *q->ring);
    memset(q->ring, 0, ZR_RING * sizeof *q->ring); /* allocates its pages now */
    q->coin = z->o->seed * ZR_QUEUES + (uint64_t)queue;
    q->pause = q->coin ^ (uint64_t)(z->rank + 1) << 32;
    int error = pthread_create(&q->thread, NULL, work, q);
    if (error) zr_fail(z, ZR_ENVIRONMENT, "starting a thread: %s", strerror(error));
}

void zr_queues_start(zr *z)
{
    z->t->event = zr_get(z, z->p->events, sizeof *z->t->event);
    z->t->order = z->o->seed;
    pthread_mutex_init(&z->t->lock, NULL);
    z->t->sources = zr_get(z, (int64_t)z->p->inboxes * z->ranks, sizeof(void *));
    zr_join(z);
    for (int queue = 0; queue < ZR_QUEUES; queue++) {
        pthread_cond_init(&z->t->lane[queue].todo, NULL);
        pthread_cond_init(&z->t->lane[queue].done, NULL);
    }
    for (int queue = 0; queue < ZR_QUEUES; queue++)
        if (zr_uses(z, queue) && (queue != ZR_MAIN || z->o->mode != ZR_EAGER)) start(z, queue);
}

void zr_queues_stop(zr *z)
{
    zr_drain(z);
    pthread_mutex_lock(&z->t->lock);
    for (int queue = 0; queue < ZR_QUEUES; queue++) {
        z->t->lane[queue].quit = 1;
        pthread_cond_signal(&z->t->lane[queue].todo);
    }
    pthread_mutex_unlock(&z->t->lock);
    for (int queue = 0; queue < ZR_QUEUES; queue++)
        if (z->t->lane[queue].ring) pthread_join(z->t->lane[queue].thread, NULL);
    zr_part(z);
}

void zr_step_begin(zr *z) { z->t->ahead = z->o->mode != ZR_EAGER; }

void zr_step_end(zr *z)
{
    zr_finish(z, ZR_MAIN);
    z->t->ahead = 0;
}
