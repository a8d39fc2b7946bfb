/* queue.c -- the queues of one rank: streams and events, and the graphs captured from them.
 *
 * zr_call runs a function at once; its launches go to its queue's stream. Between the start and the
 * end of a capture all streams belong to the graph: the others fork from ZR_MAIN's and join it
 * again.
 *
 * Modes. late and shuffled differ from eager only in that dead slots are filled with NaN. The
 * device decides the order of execution.
 *
 * Invariants
 *  1. A wait for an event of another capture, or one never recorded, has no effect: graphs follow
 *     each other, and work issued outside of them waits for the last one (zr_on).
 */
#define _GNU_SOURCE
#include "cuda.h"
#include "nvtx.h"
#include "../zr_checkpoint.h"
#include "../zr_clock.h"
#include "../zr_disk.h"
#include "../zr_fail.h"
#include "../zr_handshake.h"
#include "../zr_options.h"
#include "../zr_profile.h"
#include "../zr_queue.h"
#include "../zr_range.h"
#include "../zr_rank.h"
#include "../zr_seats.h"
#include "../zr_watch.h"
#include "../zr_writer.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- streams */

static void follow(zr *z, int queue, cudaEvent_t event)
{
    zr_cuda(z, cudaStreamWaitEvent(z->t->stream[queue], event, 0), "waiting for an event");
}

/* Make ZR_MAIN wait for all work issued on these other queues. */
static void join(zr *z, unsigned queues)
{
    for (int queue = 0; queue < ZR_QUEUES; queue++) {
        if (queue == ZR_MAIN || !(queues >> queue & 1)) continue;
        zr_mark(z, z->t->joined[queue], queue);
        follow(z, ZR_MAIN, z->t->joined[queue]);
    }
}

/* ---- issuing */

/* A host function, which the stream calls in its turn. */
struct zr_work {
    zr *z;
    zr_fn *fn;
    int64_t i[ZR_OPERANDS];
};

static void CUDART_CB run_work(void *work)
{
    const zr_work *w = work;
    w->fn(w->z, w->z->queue[ZR_HOST].k, w->z->t->host, w->i);
}

/* Return the place for one more entry of a pool; entries never move. */
static zr_work *place(zr *z, zr_pool *pool)
{
    int64_t chunk = pool->used / ZR_CHUNK;
    if (chunk == ZR_CHUNKS)
        zr_fail(z, ZR_ENVIRONMENT,
                "more than %d host functions in a step; generate with a "
                "larger zero.sub_group_size",
                ZR_CHUNKS * ZR_CHUNK);
    if (!pool->chunk[chunk]) pool->chunk[chunk] = zr_get(z, ZR_CHUNK, sizeof(zr_work));
    return &pool->chunk[chunk][pool->used++ % ZR_CHUNK];
}

static void call_host(zr *z, int queue, const char *name, int kind, zr_fn *fn, int n,
                      const int64_t *i)
{
    zr_target *t = z->t;
    zr_work *w = place(z, t->recording ? &t->recorded : &t->issued[t->turn]);
    *w = (zr_work){z, fn, {0}};
    memcpy(w->i, i, (size_t)n * sizeof *i);
    cudaStream_t stream = zr_on(z, queue, name);
    zr_note *note = zr_note_begin(z, queue, name, kind);
    zr_cuda(z, cudaLaunchHostFunc(stream, run_work, w), "calling a host function");
    if (kind == ZR_MOVES) z->queue[queue].copied += i[2];
    zr_note_end(z, note);
}

/* Copy i[2] bytes between the file and the host arena: operands of zr_copy, and the queue. */
static void move_file(zr *z, void *k, void *a, const int64_t *i)
{
    int queue = (int)i[3], out = zr_queues[queue].to == ZR_FILED;
    (void)k;
    zr_disk_move(z, queue, (char *)a + i[!out], i[out], i[2]);
}

void zr_copy(zr *z, int queue, int64_t from, int64_t to, int64_t bytes)
{
    uint32_t last = zr_unmark(z, "copy", queue, &from, 1);
    zr_check_copy(z, queue, from, to, bytes);
    if (zr_queues[queue].from == ZR_FILED || zr_queues[queue].to == ZR_FILED) {
        const int64_t operands[] = {from, to, bytes, queue};
        call_host(z, queue, "copy", ZR_MOVES, move_file, 4, operands);
        return;
    }
    int to_arena = zr_queues[queue].to == ZR_ARENA, from_arena = zr_queues[queue].from == ZR_ARENA;
    char *there = from_arena ? z->t->arena : z->t->host,
         *here = to_arena ? z->t->arena : z->t->host;
    cudaStream_t stream = zr_on(z, queue, "a copy");
    zr_note *note = zr_note_begin(z, queue, "copy", ZR_MOVES);
    zr_cuda(z,
            cudaMemcpyAsync(here + to, there + from, (size_t)bytes,
                            !from_arena ? cudaMemcpyHostToDevice
                            : to_arena  ? cudaMemcpyDeviceToDevice
                                        : cudaMemcpyDeviceToHost,
                            stream),
            "copying");
    z->queue[queue].copied += bytes;
    zr_note_end(z, note);
    zr_dead(z, "copy", queue, &from, last, zr_poison);
}

void zr_push(zr *z, int queue, const zr_command *c)
{
    zr_note *note = zr_note_begin(z, queue, c->name, ZR_MOVES);
    c->run(z, queue, c);
    zr_note_end(z, note);
}

void zr_record(zr *z, int queue, int event)
{
    zr_check_event(z, "record", queue, event);
    zr_event *e = &z->t->event[event];
    zr_cuda(z, cudaEventRecord(e->mark, zr_on(z, queue, "an event")), "recording an event");
    e->recorded = z->t->recording;
    e->queue = queue;
}

void zr_wait(zr *z, int queue, int event)
{
    zr_check_event(z, "wait", queue, event);
    const zr_event *e = &z->t->event[event];
    if (e->recorded != z->t->recording) return;
    cudaStream_t stream = zr_on(z, queue, "a wait");
    zr_note *note = zr_note_begin(z, queue, "wait", e->queue);
    zr_cuda(z, cudaStreamWaitEvent(stream, e->mark, 0), "waiting for an event");
    zr_note_end(z, note);
}

void zr_call_n(zr *z, int queue, zr_fn *fn, const char *name, int n, const int64_t *i)
{
    const char *member = strrchr(name, '>'); /* z->p->report: a member of the program */
    if (member) name = member + 1;
    zr_check_call(z, name, queue, n);
    int64_t own[ZR_OPERANDS];
    memcpy(own, i, (size_t)n * sizeof *i);
    uint32_t last = zr_unmark(z, name, queue, own, n);
    if (queue == ZR_HOST) {
        call_host(z, queue, name, ZR_WORKS, fn, n, own);
        return;
    }
    zr_on(z, queue, name);
    zr_note *note = zr_note_begin(z, queue, name, ZR_WORKS);
    zr_begins(name);
    fn(z, z->queue[queue].k, z->t->arena, own);
    zr_ends();
    zr_note_end(z, note);
    zr_dead(z, name, queue, own, last, zr_poison);
}

/* ---- graphs */

/* Copy the counters of all queues into counts[3][ZR_QUEUES]. */
static void count(const zr *z, int64_t counts[3][ZR_QUEUES])
{
    for (int queue = 0; queue < ZR_QUEUES; queue++) {
        counts[0][queue] = z->queue[queue].bytes;
        counts[1][queue] = z->queue[queue].messages;
        counts[2][queue] = z->queue[queue].far;
    }
}

/* Move the counts since `before` to the graph, because its capture moved no data. */
static void take_counts(zr *z, zr_graph *g, int64_t before[3][ZR_QUEUES])
{
    for (int queue = 0; queue < ZR_QUEUES; queue++) {
        g->bytes[queue] = z->queue[queue].bytes - before[0][queue];
        g->messages[queue] = z->queue[queue].messages - before[1][queue];
        g->far[queue] = z->queue[queue].far - before[2][queue];
        z->queue[queue].bytes = before[0][queue];
        z->queue[queue].messages = before[1][queue];
        z->queue[queue].far = before[2][queue];
    }
}

static void record(zr *z, zr_graph *g, void (*issue)(zr *z))
{
    zr_target *t = z->t;
    cudaGraph_t graph;
    int64_t before[3][ZR_QUEUES];
    count(z, before);
    /* relaxed: NCCL launches, and may allocate, on threads of its own */
    zr_cuda(z, cudaStreamBeginCapture(t->stream[ZR_MAIN], cudaStreamCaptureModeRelaxed),
            "starting a CUDA graph");
    t->recording = ++t->recordings;
    zr_mark(z, t->fork, ZR_MAIN);
    for (int queue = 0; queue < ZR_QUEUES; queue++)
        if (queue != ZR_MAIN && zr_uses(z, queue)) follow(z, queue, t->fork);
    issue(z);
    join(z, z->p->queues);
    t->recording = 0;
    zr_cuda(z, cudaStreamEndCapture(t->stream[ZR_MAIN], &graph), "finishing a CUDA graph");
    /* nodes keep their stream's priority; otherwise all get that of the launching stream */
    zr_cuda(z, cudaGraphInstantiate(&g->ready, graph, cudaGraphInstantiateFlagUseNodePriority),
            "instantiating a CUDA graph");
    zr_cuda(z, cudaGraphDestroy(graph), "freeing a CUDA graph");
    take_counts(z, g, before);
}

static void play(zr *z, zr_graph *g)
{
    zr_target *t = z->t;
    join(z, t->loose);
    t->loose = 0;
    double begun = zr_now();
    zr_cuda(z, cudaGraphLaunch(g->ready, t->stream[ZR_MAIN]), "launching a CUDA graph");
    t->launch_seconds += zr_now() - begun;
    t->launches++;
    zr_mark(z, t->played, ZR_MAIN);
    t->behind = z->p->queues & ~(1u << ZR_MAIN);
    for (int queue = 0; queue < ZR_QUEUES; queue++) {
        z->queue[queue].bytes += g->bytes[queue];
        z->queue[queue].messages += g->messages[queue];
        z->queue[queue].far += g->far[queue];
    }
}

/* Return whether graphs are launched, except in profiled steps. */
static int plays(const zr *z) { return !z->o->no_graph && !zr_uses(z, ZR_HOST); }

void zr_ready(zr *z, int graph, void (*issue)(zr *z))
{
    zr_graph *g = &z->t->graph[graph];
    if (plays(z) && !g->ready) record(z, g, issue);
}

/* Compare the algorithms of a training step's products, before the first update. */
static void compare_algorithms(zr *z, int graph)
{
    if (z->algorithms) return;
    /* those of an evaluation, which may have more products and need not be issued before */
    if (graph == ZR_BEGIN) (void)z->p->algorithms(z->queue[ZR_MAIN].k);
    if (graph != ZR_UPDATE) return;
    zr_finish(z, ZR_MAIN);
    zr_same_algorithms(z);
}

void zr_replay(zr *z, int graph, void (*issue)(zr *z))
{
    static const char *const names[] = {"the graph of the start of a step",
                                        "the graph of a micro-batch", "the graph of the update",
                                        "the graph of an evaluation"};
    _Static_assert(sizeof names / sizeof *names == ZR_GRAPHS, "a name for every graph");
    zr_graph *g = &z->t->graph[graph];
    compare_algorithms(z, graph);
    if (graph == ZR_UPDATE && z->checkpoints->beside) {
        zr_finish(z, ZR_MAIN); /* so far the device need not wait for the writer */
        zr_writer_before_update(z);
    }
    zr_begins(names[graph]);
    if (!plays(z) || z->profile->on) {
        issue(z);
    } else {
        zr_ready(z, graph, issue);
        zr_on(z, ZR_MAIN, names[graph]);
        play(z, g);
    }
    zr_ends();
}

/* ---- waiting for the device */

void zr_drain(zr *z)
{
    zr_expect(z);
    for (int queue = 0; queue < ZR_QUEUES; queue++)
        zr_cuda(z, cudaStreamSynchronize(z->t->stream[queue]), "waiting for the device");
    z->t->issued[0].used = z->t->issued[1].used = 0;
    zr_batches(z, z->t->filled);
    zr_met(z);
}

void zr_finish(zr *z, int queue)
{
    zr_expect(z);
    zr_cuda(z, cudaStreamSynchronize(z->t->stream[queue]), "waiting for the device");
    zr_met(z);
}

void zr_step_begin(zr *z)
{
    char name[32];
    snprintf(name, sizeof name, "step %" PRId64, z->step + 1);
    zr_begins(name);
    z->t->begun = zr_now();
    zr_expect(z);
}

/* When the step before this one has ended on all queues, reuse the
 * entries of its host functions. */
static void take_turn(zr *z)
{
    zr_target *t = z->t;
    for (int queue = 0; queue < ZR_QUEUES; queue++) {
        zr_cuda(z, cudaEventSynchronize(t->ended[queue]), "waiting for the step before");
        zr_mark(z, t->ended[queue], queue);
    }
    t->turn = !t->turn;
    t->issued[t->turn].used = 0;
}

void zr_step_end(zr *z)
{
    size_t some, all;
    zr_batches(z, z->t->filled);
    take_turn(z);
    zr_finish(z, ZR_MAIN);
    zr_ends();
    zr_measure(z, zr_now() - z->t->begun);
    if (z->t->first) return;
    zr_cuda(z, cudaMemGetInfo(&some, &all), "querying the device's free memory");
    z->t->first = (int64_t)some;
}

/* ---- start and end */

static cudaEvent_t make_event(zr *z)
{
    cudaEvent_t event;
    zr_cuda(z, cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
    return event;
}

void zr_queues_start(zr *z)
{
    zr_target *t = z->t;
    t->event = zr_get(z, z->p->events, sizeof *t->event);
    for (int i = 0; i < z->p->events; i++) t->event[i] = (zr_event){make_event(z), -1, 0};
    t->read = zr_get(z, z->p->pinned_batches, sizeof(cudaEvent_t));
    for (int i = 0; i < z->p->pinned_batches; i++) t->read[i] = make_event(z);
    t->fork = make_event(z);
    t->played = make_event(z);
    for (int queue = 0; queue < ZR_QUEUES; queue++) {
        t->joined[queue] = make_event(z);
        t->ended[queue] = make_event(z);
    }
    t->sources = zr_get(z, (int64_t)z->p->inboxes * z->ranks, sizeof(void *));
    zr_watch_start(z);
    if (z->ranks == 1) return;
    size_t before, after, all;
    zr_cuda(z, cudaMemGetInfo(&before, &all), "querying the device's free memory");
    zr_communicators(z);
    zr_cuda(z, cudaMemGetInfo(&after, &all), "querying the device's free memory");
    t->nccl_took = (int64_t)before - (int64_t)after;
}

/* Destroy the graphs; NCCL cannot destroy a communicator that a graph refers to. */
static void drop_graphs(zr *z)
{
    for (zr_graph *g = z->t->graph; g < z->t->graph + ZR_GRAPHS; g++)
        if (g->ready) zr_cuda(z, cudaGraphExecDestroy(g->ready), "destroying a CUDA graph");
}

void zr_queues_stop(zr *z)
{
    zr_drain(z);
    drop_graphs(z);
    zr_watch_alone(z);
    zr_issued(z, ZR_MAIN, "NCCL's end");
    zr_expect(z);
    zr_barrier(z); /* so that no rank takes another's exit for a death */
    if (z->ranks > 1) zr_part(z);
    zr_met(z);
    zr_watch_stop(z);
}
