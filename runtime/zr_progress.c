/* zr_progress.c -- output on stderr: the start block, lines for steps, progress of long tasks.
 *
 * Rank 0 notes its current task in shared memory, and its parent shows tasks that take long. So a
 * rank that waits for a kernel, a disk or a peer is shown too, and needs no thread for that.
 *
 * Invariants
 *  1. The parent never waits for a reader of stderr: if the pipe is full it shows nothing.
 *  2. On a terminal the next line overwrites a line of progress, but progress does not overwrite
 *     the line of a step: rank 0 and the parent write in turns.
 *  3. Nothing is allocated.
 */
#include "zr_batch.h"
#include "zr_best.h"
#include "zr_checkpoint.h"
#include "zr_data.h"
#include "zr_fail.h"
#include "zr_log.h"
#include "zr_memory.h"
#include "zr_mix.h"
#include "zr_options.h"
#include "zr_products.h"
#include "zr_progress.h"
#include "zr_rank.h"
#include "zr_seats.h"
#include "zr_shared.h"
#include <inttypes.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SHORT = 32, LINE = 256 };
/* Seconds between two lines of progress, on a terminal and in a file or pipe; the same for two
 * lines of steps. */
static const double soon = 2, late = 10, steps_soon = 0.1, steps_late = 2;
/* Bytes per second assumed for saving in the estimated time. */
static const double saving = 1e9;

/* Usual GFLOP/s of a thread, if a step is not predicted and no peak is given. avx512: reached by
 * GPT-2 124M, rounded down (docs/performance.md); avx2: a step took 1.4 times as long on a busy
 * machine. */
static const struct {
    const char *object;
    double gflops, bf16;
} usual[] = {
    {"amx", 80, 240},        /* about three times as much in bf16 with tiles */
    {"avx512bf16", 80, 160}, /* about twice as much in bf16 */
    {"avx512", 80, 80},
    {"avx2", 55, 55},
};

/* ---- numbers as text */

/* Format as m:ss, or h:mm:ss from an hour on. */
static const char *clock_text(char text[SHORT], double seconds)
{
    int64_t s = seconds > 0 ? (int64_t)(seconds < 1e15 ? seconds : 1e15) : 0;
    int m = (int)(s / 60 % 60), rest = (int)(s % 60);
    if (s < 3600) snprintf(text, SHORT, "%d:%02d", m, rest);
    else snprintf(text, SHORT, "%" PRId64 ":%02d:%02d", s / 3600, m, rest);
    return text;
}

static const char *bytes_text(char text[SHORT], int64_t bytes)
{
    int large = bytes >= 1 << 30;
    snprintf(text, SHORT, "%.1f %s", (double)bytes / (large ? 1 << 30 : 1 << 20),
             large ? "GiB" : "MiB");
    return text;
}

/* ---- the task of rank 0 */

/* Return the commands that rank 0's queues have completed; a GPU counts none. */
static uint32_t ended(zr *z)
{
    uint32_t n = 0;
    for (int q = 0; q < ZR_QUEUES; q++)
        n += atomic_load_explicit(&z->shared->seat[0].pulse[q].ended, memory_order_relaxed);
    return n;
}

void zr_progress(zr *z, const char *what, const char *unit, int64_t parts)
{
    zr_task *t = &z->shared->task;
    if (z->rank != 0) return;
    atomic_store(&t->what, NULL);
    atomic_store(&t->unit, unit);
    atomic_store(&t->part, 0);
    atomic_store(&t->parts, parts);
    atomic_store(&t->before, ended(z));
    atomic_store(&t->since, zr_now());
    atomic_store(&t->what, what);
}

static _Thread_local int beside; /* this thread's work is not rank 0's task */

void zr_progress_beside(void) { beside = 1; }

int zr_is_beside(void) { return beside; }

void zr_progress_next(zr *z)
{
    if (z->rank == 0 && !beside)
        atomic_fetch_add_explicit(&z->shared->task.part, 1, memory_order_relaxed);
}

/* ---- the remaining time */

/* Return the number of validations after step `from` and later, including the last one. */
static double validations(const zr *z, int64_t from)
{
    int64_t every = z->o->val_every, last = z->o->steps - 1;
    if (!z->o->val || from > z->o->steps) return 0;
    return (double)(1 + (every ? last / every - (from - 1) / every : 0));
}

/* Estimate the seconds to evaluate micro-batches: from the last validation, or, before there is
 * one, as the forward pass of a step, a third of its time. */
static double evaluation_seconds(const zr *z, double step, int64_t micro_batches)
{
    int64_t B = zr_eval_samples(z), turns = (zr_samples(z->val) + B - 1) / B;
    double each = z->log->validated > 0
                      ? z->log->validated / (double)turns
                      : step / 3 / (double)zr_step_samples(z) * (double)zr_eval_samples(z);
    return each * (double)micro_batches;
}

static double validation_seconds(const zr *z, double step)
{
    int64_t B = zr_eval_samples(z), turns = (zr_samples(z->val) + B - 1) / B;
    return evaluation_seconds(z, step, turns);
}

/* Estimate the end of the run. steps: steps done; from: first step whose
 * validation is still to come. */
static void foresee(zr *z, int64_t steps, int64_t from)
{
    double step = zr_rate(z->log->busy, (double)(steps - z->checkpoints->from));
    double all = step * (double)(z->o->steps - steps) +
                 validations(z, from) * validation_seconds(z, step) +
                 evaluation_seconds(z, step, z->tries) +
                 (z->o->save ? 4 * (double)zr_parameters(z->p) / saving : 0);
    atomic_store(&z->shared->task.end, zr_now() + all);
}

static double left(const zr *z, double now)
{
    double end = atomic_load(&z->shared->task.end);
    return end > now ? end - now : 0;
}

/* ---- before the first step */

static void show_data(zr *z)
{
    const zr_mix *m = z->train;
    int64_t samples = zr_step_samples(z) * z->o->steps;
    int64_t taken[ZR_SOURCES] = {0}, sum = 0;
    zr_mix_taken(m, samples, taken);
    for (int k = 0; k < m->n; k++) sum += m->of[k].weight;
    for (int k = 0; k < m->n; k++) {
        const zr_data *d = &m->of[k].data;
        double share = (double)m->of[k].weight / (double)sum;
        zr_print(z, STDERR_FILENO,
                 "%s: %" PRId64 " tokens, %.*f a step; --steps %" PRId64 " is %.3g epochs\n",
                 d->path, d->count, m->n > 1, share * zr_step_tokens(z), z->o->steps,
                 (double)taken[k] / (double)d->samples);
    }
    if (z->o->epochs)
        zr_print(z, STDERR_FILENO,
                 "--epochs %" PRId64 ": %" PRId64 " steps of %" PRId64 " samples\n", z->o->epochs,
                 z->o->steps, samples / z->o->steps);
}

/* Return the number of a key of the recipe; -1: it is missing or null. */
static double recipe_number(const zr_program *p, const char *key)
{
    size_t n = strlen(key);
    for (int i = 0; i < p->nrecipe; i++) {
        const char *line = p->recipe[i];
        char *end;
        if (strncmp(line, key, n) || strncmp(line + n, ": ", 2)) continue;
        double x = strtod(line + n + 2, &end);
        return end > line + n + 2 ? x : -1;
    }
    return -1;
}

/* Return the step at which the learning rate reaches its last value; 0: none. */
static int64_t schedule_end(const zr_program *p)
{
    double steps = recipe_number(p, "train.schedule.steps"),
           total = recipe_number(p, "train.schedule.total_num_steps"),
           rise = recipe_number(p, "train.schedule.cycle_first_step_size"),
           fall = recipe_number(p, "train.schedule.cycle_second_step_size");
    if (steps > 0 || total > 0) return (int64_t)(steps > 0 ? steps : total);
    int decays = recipe_number(p, "train.schedule.decay_step_size") > 0 &&
                 recipe_number(p, "train.schedule.decay_lr_rate") > 0;
    if (rise < 0 || decays) return 0;
    return (int64_t)(rise + (fall < 0 ? rise : fall));
}

static void show_schedule(zr *z)
{
    int64_t end = schedule_end(z->p), steps = z->o->steps;
    if (!end || end == steps) return;
    zr_print(z, STDERR_FILENO,
             "the learning rate's schedule ends at step %" PRId64 ": --steps %" PRId64 " %s\n", end,
             steps, steps < end ? "ends before that" : "continues at the last learning rate");
}

/* Print a rank's memory; the file arena is reported when it is made. */
static void show_memory(zr *z)
{
    char arena[SHORT], host[SHORT], beside[2 * SHORT] = "";
    if (z->p->hosted)
        snprintf(beside, sizeof beside, ", on the host %s", bytes_text(host, z->p->hosted));
    zr_print(z, STDERR_FILENO, "memory of a rank: arena %s%s\n",
             bytes_text(arena, z->p->columns[z->column].arena), beside);
}

static void show_estimate(zr *z)
{
    char from[LINE] = "", time[SHORT];
    double gflop = 1e-9 * z->p->flops, step = z->p->columns[z->column].predicted;
    int64_t steps = z->o->steps - z->checkpoints->from;
    const char *object = z->p->object();
    if (step > 0) snprintf(from, sizeof from, "predicted for cluster.device");
    else if (z->peak > 0) {
        step = gflop / z->peak;
        snprintf(from, sizeof from, "at a peak of %.4g GFLOP/s; a step takes longer", z->peak);
    }
    for (size_t i = 0; step == 0 && i < sizeof usual / sizeof *usual; i++) {
        if (strcmp(object, usual[i].object)) continue;
        double pace = z->p->type == ZR_BF16 ? usual[i].bf16 : usual[i].gflops;
        step = gflop / pace / z->ranks / (z->threads < z->cores ? z->threads : z->cores);
        snprintf(from, sizeof from, "roughly: %g GFLOP/s a thread are usual with %s", pace, object);
    }
    if (step > 0)
        zr_print(z, STDERR_FILENO,
                 "a step is %.3g GFLOP: estimated %.3g s, %" PRId64 " steps %s (%s)\n", gflop, step,
                 steps, clock_text(time, step * (double)steps), from);
    else zr_print(z, STDERR_FILENO, "a step is %.3g GFLOP\n", gflop);
}

void zr_show_start(zr *z)
{
    int unordered = z->order < 0 || zr_is_gpu;
    zr_print(z, STDERR_FILENO,
             "%s: %" PRId64 " parameters; %s\nranks x threads %d x %d, kernels %s%s%s\n",
             z->p->name, zr_parameters(z->p), z->p->summary, z->ranks, z->threads, z->p->object(),
             unordered ? "" : ", products by ", unordered ? "" : zr_order_name(z->order));
    show_memory(z);
    if (z->threads > z->cores)
        zr_print(
            z, STDERR_FILENO,
            "--threads %d: a rank's share of the allowed cores is %d; more threads are slower\n",
            z->threads, z->cores);
    if (z->o->steps == 0) return;
    if (z->o->steps == z->checkpoints->from) {
        zr_print(z, STDERR_FILENO, "nothing to train: all --steps %" PRId64 " are done\n",
                 z->o->steps);
        return;
    }
    if (zr_best_was_long_ago(z)) return;
    show_data(z);
    show_schedule(z);
    show_estimate(z);
}

void zr_show_stopped(zr *z)
{
    const zr_best *b = &z->checkpoints->best;
    if (!zr_best_was_long_ago(z)) return;
    if (!b->step)
        zr_print(z, STDERR_FILENO,
                 "--patience %" PRId64 ": stops after step %" PRId64 " of %" PRId64
                 ": no validation had a finite loss\n",
                 z->o->patience, (int64_t)z->step, z->o->steps);
    else
        zr_print(z, STDERR_FILENO,
                 "--patience %" PRId64 ": stops after step %" PRId64 " of %" PRId64
                 ": no validation was better than that of step %" PRId64 "\n",
                 z->o->patience, (int64_t)z->step, z->o->steps, b->step);
}

/* ---- after a step */

static void show(zr *z, const double *report, double now)
{
    zr_log *l = z->log;
    char share[48] = "", scale[SHORT] = "", time[SHORT], loss[ZR_LOSS_TEXT], line[LINE];
    int64_t step = z->step + 1;
    double steps = (double)(step - l->shown_step), busy = l->busy - l->shown_busy;
    double gflops = 1e-9 * zr_rate(steps * z->p->flops, busy);
    if (report[ZR_SCALE] > 0) snprintf(scale, sizeof scale, "  scale %g", report[ZR_SCALE]);
    if (z->peak > 0 && gflops <= z->peak)
        snprintf(share, sizeof share, " (%.0f%% of peak)", 100 * gflops / z->peak);
    snprintf(line, sizeof line,
             "step %" PRId64 "/%" PRId64 "  loss %s  %s left  norm %.3g  lr %.2e%s  "
             "%.0f tokens/s  %.1f GFLOP/s%s",
             step, z->o->steps, zr_loss_text(loss, 4, report[ZR_LOSS], report[ZR_VALID]),
             clock_text(time, left(z, now)), report[ZR_NORM], report[ZR_LR], scale,
             zr_rate(steps * zr_step_tokens(z), busy), gflops, share);
    zr_show(z, ZR_RESULT, line);
    l->shown_busy = l->busy;
    l->shown_step = step;
    l->shown = now;
}

void zr_show_step(zr *z, const double report[ZR_REPORT])
{
    char time[SHORT];
    int64_t steps = z->step + 1;
    double now = zr_now();
    if (z->rank != 0) return;
    foresee(z, steps, steps);
    int first = steps == z->checkpoints->from + 1;
    if (first) z->log->shown_step = z->step;
    if (first && z->o->steps > steps)
        zr_print(z, STDERR_FILENO, "the first step took %.3g s (measured), about %s are left\n",
                 z->log->busy, clock_text(time, left(z, now)));
    if (first || steps == z->o->steps ||
        now - z->log->shown > (z->log->tty ? steps_soon : steps_late))
        show(z, report, now);
}

void zr_show_validated(zr *z, int64_t steps, double seconds)
{
    z->log->validated = seconds;
    if (z->rank == 0) foresee(z, steps, steps + 1);
}

/* ---- the parent: progress of rank 0 */

static void progress_line(zr *z, char line[LINE], const char *what, double now)
{
    zr_task *t = &z->shared->task;
    char name[2 * SHORT], part[2 * SHORT] = "", share[SHORT] = "", rest[2 * SHORT] = "";
    char time[SHORT];
    const char *unit = atomic_load(&t->unit);
    int64_t at = atomic_load(&t->part), parts = unit ? atomic_load(&t->parts) : 0;
    double since = now - atomic_load(&t->since);
    double done = zr_rate((double)(ended(z) - atomic_load(&t->before)), (double)z->p->commands);
    zr_seat *seat = &z->shared->seat[0];
    int in_step = !strcmp(what, "step"), group;
    int awaits = atomic_load(&seat->life) == ZR_STEPS ? -1 : zr_awaited(seat, &group);
    snprintf(name, sizeof name, "%s", what);
    if (in_step)
        snprintf(name, sizeof name, "step %" PRId64 "/%" PRId64, atomic_load(&seat->step),
                 z->o->steps);
    if (at < 1) at = 1;
    if (at > parts) at = parts;
    if (parts > 0) snprintf(part, sizeof part, ": %s %" PRId64 " of %" PRId64, unit, at, parts);
    if (in_step && done > 0)
        snprintf(share, sizeof share, ", %.0f%% of the step's commands",
                 done < 1 ? 100 * done : 100);
    if (awaits > 0) snprintf(share, sizeof share, ", waits for rank %d", awaits);
    if (atomic_load(&t->end) > 0)
        snprintf(rest, sizeof rest, ", %s left", clock_text(time, left(z, now)));
    snprintf(line, LINE, "%s%s%s, %.0f s%s", name, part, share, since > 0 ? since : 0, rest);
}

void zr_progress_look(zr *z)
{
    char line[LINE];
    zr_task *t = &z->shared->task;
    double now = zr_now(), wait = z->log->tty ? soon : late;
    const char *what = atomic_load(&t->what);
    struct pollfd room = {STDERR_FILENO, POLLOUT, 0};
    if (z->lowest != 0 || !what || atomic_load(&z->shared->code)) return;
    if (now - atomic_load(&t->since) < wait || now - atomic_load(&z->shared->shown) < wait) return;
    progress_line(z, line, what, now);
    if (atomic_load(&t->what) != what || poll(&room, 1, 0) != 1 || !(room.revents & POLLOUT))
        return;
    zr_show(z, ZR_PROGRESS, line);
}
