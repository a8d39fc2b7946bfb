/* zr_log.c -- what a run says while it trains: a progress line, a JSONL log, a summary.
 *
 * Invariants
 *  1. A line is put together on the stack and written by one write: nothing is allocated, and no
 *     reader of the log meets half a line.
 *  2. Numbers in the log have all their digits: equal lines are equal bits.
 *  3. What was in the log is lost only when the run has passed all its checks.
 *  4. Output that fails never ends training: it is said at once, and again at the end.
 */
#include "zr_int.h"
#include "zr_safetensors.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TEXT = 4096, NUMBER = 32 };

/* ---- writing */

static int sink_of(int file) { return file == STDOUT_FILENO ? ZR_TO_STDOUT : ZR_TO_LOG; }

static const char *sink_name(const zr *z, int sink)
{
    return sink == ZR_TO_STDOUT ? "standard output" : sink == ZR_TO_LOG ? z->o->log : z->o->profile;
}

void zr_lose(zr *z, int sink, int error)
{
    z->log.lost[sink] = error;
    zr_print(z, STDERR_FILENO, "%swriting %s: %s%s\n", z->log.live ? "\n" : "",
             sink_name(z, sink), strerror(error),
             z->rank < 0 ? "" : "; the run goes on without it");
    z->log.live = 0;
}

/* Takes the part of a line that was written out of a file again. */
static void take_back(int file, size_t n)
{
    struct stat s;
    off_t end = lseek(file, 0, SEEK_CUR);
    int bad = n == 0 || end < (off_t)n || fstat(file, &s) || !S_ISREG(s.st_mode) ||
              ftruncate(file, end - (off_t)n);
    (void)bad;                            /* then it stays */
}

static void put(zr *z, int file, const char *text, size_t n)
{
    for (size_t at = 0; at < n;) {
        ssize_t done = write(file, text + at, n - at);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0 && file == STDERR_FILENO) return;
        if (done < 0 && errno == EAGAIN) {        /* others of the pipe want no waits */
            poll(&(struct pollfd){file, POLLOUT, 0}, 1, -1);
            continue;
        }
        if (done < 0) {
            int error = errno;
            if (file == z->log.file) take_back(file, at);
            zr_lose(z, sink_of(file), error);
            return;
        }
        at += (size_t)done;
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
    if (file == STDERR_FILENO || !z->log.lost[sink_of(file)])
        put(z, file, text, (size_t)(n < TEXT ? n : TEXT - 1));
}

void zr_log_close(zr *z)
{
    for (int sink = 0; sink < ZR_SINKS; sink++)
        if (z->log.lost[sink])
            zr_print(z, STDERR_FILENO, "not all was written to %s: %s\n", sink_name(z, sink),
                     strerror(z->log.lost[sink]));
    if (z->log.lost[ZR_TO_STDOUT] && (z->o->hash || z->o->sample || !z->o->steps))
        zr_fail(z, ZR_ENVIRONMENT, "what was asked for could not be written");
}

/* ---- begin */

static int same(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

static int is_data(const zr_data *d, const struct stat *s)
{
    struct stat data;
    return d->count && !fstat(d->fd, &data) && same(s, &data);
}

/* Is it a file that --load opens? Where that cannot be told, loading will say what is wrong. */
static int is_weights(zr *z, const struct stat *s)
{
    char why[ZR_WHY], index[ZR_FILE];
    struct stat file;
    zr_table t;
    if (!z->o->load || zr_table_open(&t, z->o->load, why)) return 0;
    snprintf(index, sizeof index, "%s/model.safetensors.index.json", z->o->load);
    int found = t.index && !stat(index, &file) && same(s, &file);
    for (int64_t i = 0; i < t.nfiles; i++)
        found |= !fstat(t.files[i].fd, &file) && same(s, &file);
    zr_table_close(&t);
    return found;
}

/* The folder that a file lies in */
static int folder_of(const char *name, struct stat *s)
{
    char folder[ZR_FILE];
    const char *slash = strrchr(name, '/');
    snprintf(folder, sizeof folder, "%.*s/.", slash ? (int)(slash - name) : 1, slash ? name : ".");
    return stat(folder, s);
}

void zr_refuse_saved(zr *z, const char *option, const char *name)
{
    static const char *const files[] = {"model.safetensors", ".model.safetensors.part"};
    struct stat folder, save;
    const char *slash = strrchr(name, '/'), *file = slash ? slash + 1 : name;
    if (!z->o->save || folder_of(name, &folder) || stat(z->o->save, &save)) return;
    for (int i = 0; i < 2; i++)
        if (same(&folder, &save) && !strcmp(file, files[i]))
            zr_fail(z, ZR_USER, "%s %s: is the file of --save; name another", option, name);
}

void zr_refuse_inputs(zr *z, const char *option, const char *name, const struct stat *s)
{
    const char *of = is_data(&z->train, s) ? "--data" : is_data(&z->val, s) ? "--val"
                     : is_weights(z, s) ? "--load" : NULL;
    if (of) zr_fail(z, ZR_USER, "%s %s: is the file of %s, which would be written over", option,
                    name, of);
}

/* Two runs must not write one log. */
static void lock(zr *z)
{
    if (!flock(z->log.file, LOCK_EX | LOCK_NB)) return;
    if (errno == EWOULDBLOCK)
        zr_fail(z, ZR_ENVIRONMENT, "--log %s: another run writes it", z->o->log);
    zr_print(z, STDERR_FILENO, "--log %s: cannot be locked (%s): let no other run write it\n",
             z->o->log, strerror(errno));
}

void zr_log_open(zr *z)
{
    struct stat s;
    z->log = (zr_log){.file = -1, .tty = isatty(STDERR_FILENO)};
    if (z->rank != 0 || !z->o->log) return;
    zr_refuse_saved(z, "--log", z->o->log);
    z->log.file = open(z->o->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (z->log.file < 0 || fstat(z->log.file, &s))
        zr_fail(z, ZR_USER, "--log %s: %s", z->o->log, strerror(errno));
    zr_refuse_inputs(z, "--log", z->o->log, &s);
    if (S_ISREG(s.st_mode)) lock(z);
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
    int64_t seconds = (int64_t)rate(l->busy * (double)left, (double)step);
    if (report[ZR_SCALE] > 0) snprintf(scale, sizeof scale, "  scale %g", report[ZR_SCALE]);
    if (z->peak > 0) snprintf(share, sizeof share, " (%.0f%% of peak)", 100 * gflops / z->peak);
    int n = snprintf(line, sizeof line,
                     "step %" PRId64 "/%" PRId64 "  loss %.4f  norm %.3g  lr %.2e%s  "
                     "%.0f tokens/s  %.1f GFLOP/s%s  "
                     "%" PRId64 ":%02d left",
                     step, z->o->steps, report[ZR_LOSS], report[ZR_NORM], report[ZR_LR], scale,
                     rate(steps * step_tokens(z), busy), gflops, share, seconds / 60,
                     (int)(seconds % 60));
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
