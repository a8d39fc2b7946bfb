/* zr_log.c -- what a run says while it trains: a progress line, a JSONL log, a summary.
 *
 * Invariants
 *  1. A line is put together on the stack and written by one write: nothing is allocated, and no
 *     reader of the log meets half a line.
 *  2. Numbers in the log have all their digits: equal lines are equal bits.
 *  3. What was in the log is lost only when the run has passed all its checks.
 */
#include "zr_int.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TEXT = 4096, NUMBER = 32 };

static void put(zr *z, int file, const char *text, size_t n)
{
    while (n > 0) {
        ssize_t done = write(file, text, n);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0 && file == STDERR_FILENO) return;
        if (done < 0)
            zr_fail(z, ZR_ENVIRONMENT, "writing %s: %s",
                    file == STDOUT_FILENO ? "standard output" : z->o->log, strerror(errno));
        text += done;
        n -= (size_t)done;
    }
}

void zr_print(zr *z, int file, const char *format, ...)
{
    char text[TEXT];
    if (z->rank > 0 || file < 0) return;
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, TEXT, format, args);
    va_end(args);
    if (file == STDOUT_FILENO && z->log.live) {
        put(z, STDERR_FILENO, "\n", 1);
        z->log.live = 0;
    }
    put(z, file, text, (size_t)(n < TEXT ? n : TEXT - 1));
}

static void refuse_data(zr *z, const struct stat *log, const zr_data *d, const char *option)
{
    struct stat s;
    if (d->count && !fstat(d->fd, &s) && s.st_dev == log->st_dev && s.st_ino == log->st_ino)
        zr_fail(z, ZR_USER, "--log %s: is the file of %s; the log would be written over it",
                z->o->log, option);
}

void zr_log_open(zr *z)
{
    struct stat log;
    z->log = (zr_log){.file = -1, .tty = isatty(STDERR_FILENO)};
    if (z->rank != 0 || !z->o->log) return;
    z->log.file = open(z->o->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (z->log.file < 0 || fstat(z->log.file, &log))
        zr_fail(z, ZR_USER, "--log %s: %s", z->o->log, strerror(errno));
    refuse_data(z, &log, &z->train, "--data");
    refuse_data(z, &log, &z->val, "--val");
}

void zr_log_begin(zr *z)
{
    struct stat s;
    if (z->log.file < 0 || fstat(z->log.file, &s) || !S_ISREG(s.st_mode)) return;
    if (ftruncate(z->log.file, 0))
        zr_fail(z, ZR_ENVIRONMENT, "--log %s: %s", z->o->log, strerror(errno));
}

/* ---- figures */

static double grains(const zr *z) { return (double)z->p->grains * (double)z->ranks; }
static double step_tokens(const zr *z)
{
    return grains(z) * (double)(z->p->batch * z->p->sequence);
}
static double rate(double n, double seconds) { return seconds > 0 ? n / seconds : 0; }

/* A number as JSON: NaN and infinities have none. */
static const char *number(char text[NUMBER], double x)
{
    if (isfinite(x)) snprintf(text, NUMBER, "%.17g", x);
    else strcpy(text, "null");
    return text;
}

/* ---- progress */

static void show(zr *z, const double *report)
{
    zr_log *l = &z->log;
    char share[48] = "", scale[32] = "", line[256];
    int64_t step = z->step + 1, left = z->o->steps - step;
    double steps = (double)(step - l->shown_step), busy = l->busy - l->shown_busy;
    double gflops = 1e-9 * rate(steps * z->p->flops, busy);
    double seconds = rate(l->busy * (double)left, (double)step);
    if (report[ZR_SCALE] > 0) snprintf(scale, sizeof scale, "  scale %g", report[ZR_SCALE]);
    if (z->peak > 0) snprintf(share, sizeof share, " (%.0f%% of peak)", 100 * gflops / z->peak);
    int n = snprintf(line, sizeof line,
                     "step %" PRId64 "/%" PRId64 "  loss %.4f  norm %.3g  lr %.2e%s  "
                     "%.0f tokens/s  %.1f GFLOP/s%s  "
                     "%d:%02d left",
                     step, z->o->steps, report[ZR_LOSS], report[ZR_NORM], report[ZR_LR], scale,
                     rate(steps * step_tokens(z), busy), gflops, share, (int)(seconds / 60),
                     (int)seconds % 60);
    if (n >= (int)sizeof line) n = sizeof line - 1;
    zr_print(z, STDERR_FILENO, l->tty ? "\r%.*s\033[K" : "%.*s\n", n, line);
    l->live = l->tty;
    l->shown = zr_now();
    l->shown_busy = l->busy;
    l->shown_step = step;
}

void zr_log_step(zr *z, const double report[ZR_REPORT], double seconds)
{
    zr_log *l = &z->log;
    char loss[NUMBER], norm[NUMBER], lr[NUMBER], scale[2 * NUMBER] = "";
    int skipped = report[ZR_SKIPPED] != ZR_APPLIED;
    l->busy += seconds;
    l->skipped += skipped;
    if (report[ZR_SCALE] > 0)
        snprintf(scale, sizeof scale, ", \"scale\": %.17g", report[ZR_SCALE]);
    zr_print(z, l->file,
             "{\"step\": %" PRId64 ", \"loss\": %s, \"norm\": %s, \"lr\": %s, \"tokens\": %.0f, "
             "\"valid\": %.0f, "
             "\"skipped\": %d%s, \"seconds\": %.9g}\n",
             z->step + 1, number(loss, report[ZR_LOSS]), number(norm, report[ZR_NORM]),
             number(lr, report[ZR_LR]), (double)(z->step + 1) * step_tokens(z), report[ZR_VALID],
             skipped, scale, l->busy);
    if (z->step + 1 == z->o->steps || zr_now() - l->shown > (l->tty ? 0.1 : 2)) show(z, report);
}

void zr_log_val(zr *z, int64_t step, double loss, double tokens)
{
    char text[NUMBER];
    if (tokens == 0) loss = NAN;          /* the mean over nothing */
    zr_print(z, z->log.file, "{\"step\": %" PRId64 ", \"val_loss\": %s, \"val_tokens\": %.0f}\n",
             step, number(text, loss), tokens);
    if (tokens > 0) zr_print(z, STDOUT_FILENO, "val loss %.6f\n", loss);
    else zr_print(z, STDOUT_FILENO, "val loss none: %s has no target\n", z->o->val);
}

/* ---- summary */

static void end_of_training(zr *z, const double *report, const int64_t moved[ZR_MOVED])
{
    const zr_program *p = z->p;
    const int64_t N = z->o->steps;
    double steps = (double)z->o->steps, busy = z->log.busy;
    zr_print(z, STDOUT_FILENO, "loss %.6f\n", report[ZR_LOSS]);
    if (z->log.skipped)
        zr_print(z, STDOUT_FILENO, "%" PRId64 " steps of %" PRId64 " skipped\n", z->log.skipped,
                 z->o->steps);
    zr_print(z, STDOUT_FILENO, "%.3f s of training, %.0f tokens/s, %.1f GFLOP/s\n", busy,
             rate(steps * step_tokens(z), busy), 1e-9 * rate(steps * z->p->flops, busy));
    zr_print(z, STDOUT_FILENO,
             "wire %" PRId64 " bytes and %" PRId64 " collectives per rank and step\n",
             moved[ZR_WIRE] / N, moved[ZR_MESSAGES] / N);
    if (p->filed)
        zr_print(z, STDOUT_FILENO, "file %" PRId64 " bytes read and %" PRId64 " written per rank "
                 "and step\n", moved[ZR_LOADS] / N, moved[ZR_STORES] / N);
}

void zr_log_end(zr *z, const double report[ZR_REPORT], const int64_t moved[ZR_MOVED])
{
    int64_t N = z->o->steps ? z->o->steps : 1;
    if (z->o->steps > 0) end_of_training(z, report, moved);
    zr_print(z, STDOUT_FILENO, "start %.3f s to arenas in place, %.3f s to the first step\n",
             z->ready - z->started, z->first - z->started);
    zr_print(z, z->log.file,
             "{\"end\": %" PRId64 ", \"skipped\": %" PRId64 ", \"seconds\": %.9g"
             ", \"wire\": %" PRId64
             ", \"collectives\": %" PRId64 ", \"arena\": %" PRId64
             ", \"started\": %.9f, \"start_arena\": %.9g, \"start_step\": %.9g, "
             "\"plan\": \"%s\"}\n",
             z->o->steps, z->log.skipped, z->log.busy, moved[ZR_WIRE] / N,
             moved[ZR_MESSAGES] / N, z->p->columns[z->column].arena, z->started,
             z->ready - z->started, z->first - z->started, z->p->plan);
}
