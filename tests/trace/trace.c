/* trace.c -- a runtime that does nothing and prints a line for each call: start, one training step
 * and an evaluation, as rank 1 would see them. */
#include "trace.h"
#include <inttypes.h>
#include <stdio.h>

static void line(const char *what, int queue, int n, const int64_t *i)
{
    printf("%s %d", what, queue);
    for (int k = 0; k < n; k++) printf(" %" PRId64, i[k]);
    putchar('\n');
}

#define LINE(what, queue, ...)                                                                     \
    line(what, queue, (int)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)),             \
         (const int64_t[]){__VA_ARGS__})

void trace_call(int queue, const char *fn, int n, const int64_t *i) { line(fn, queue, n, i); }

void zr_wait(zr *z, int queue, int event)
{
    (void)z;
    LINE("wait", queue, event);
}

void zr_wait_n(zr *z, int queue, int n, const int *event)
{
    for (int i = 0; i < n; i++) zr_wait(z, queue, event[i]);
}

void zr_record(zr *z, int queue, int event)
{
    (void)z;
    LINE("rec", queue, event);
}

void zr_replay(zr *z, int graph, void (*issue)(zr *z))
{
    (void)graph;
    issue(z);
}

int zr_rank(const zr *z)
{
    (void)z;
    return 1;
}

void zr_gather(zr *z, int queue, int group, int64_t from, int64_t from_step, int64_t to,
               int64_t to_step, int64_t bytes)
{
    (void)z;
    LINE("gather", queue, group, from, from_step, to, to_step, bytes);
}

void zr_alltoall(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to, int64_t bytes)
{
    (void)z;
    LINE("alltoall", queue, group, at, step, to, bytes);
}

void zr_reducescatter(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to,
                      int64_t bytes, int type)
{
    int64_t width = type == ZR_F32 ? 4 : 2;
    (void)z;
    LINE("reducescatter", queue, group, at, step, to, bytes, width);
}

void zr_done(zr *z, int queue, int group, int64_t to, int64_t at)
{
    (void)z;
    LINE("done", queue, group, to, at);
}

void zr_allreduce(zr *z, int queue, int group, int64_t from, int64_t to, int64_t n)
{
    (void)z;
    LINE("allreduce", queue, group, from, to, n);
}

void zr_copy(zr *z, int queue, int64_t from, int64_t to, int64_t bytes)
{
    (void)z;
    LINE("copy", queue, from, to, bytes);
}

void zr_batch(zr *z, int64_t micro_batch)
{
    (void)z;
    LINE("batch", 0, micro_batch);
}

void zr_batch_at(zr *z, int64_t micro_batch, int64_t at)
{
    (void)z;
    LINE("batch", 0, micro_batch, at);
}

int zr_main(int argc, char **argv, const zr_program *p)
{
    (void)argc, (void)argv;
    p->init(NULL);
    p->publish(NULL);
    p->step(NULL);
    p->eval(NULL);
    return 0;
}
