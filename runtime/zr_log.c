/* zr_log.c -- output of a run: the terminal, its log of JSON lines, its summary.
 *
 * Invariants
 *  1. A line is written by one write, so no reader of the log sees half a line. From the first step
 *     on it is formatted on the stack: nothing is allocated.
 *  2. Numbers in the log have all their digits: equal lines mean equal bits.
 *  3. Existing lines of the log stay. Only a run that has passed all its checks writes to it.
 *  4. Output that fails never ends training: it is reported at once, and again at the end.
 */
#include "zr_batch.h"
#include "zr_checkpoint.h"
#include "zr_choices.h"
#include "zr_data.h"
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_handshake.h"
#include "zr_json.h"
#include "zr_log.h"
#include "zr_mix.h"
#include "zr_options.h"
#include "zr_products.h"
#include "zr_rank.h"
#include "zr_safetensors.h"
#include "zr_shared.h"
#include "zr_text.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
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
    z->log->lost[sink] = error;
    zr_print(z, STDERR_FILENO, "cannot write %s: %s%s\n", sink_name(z, sink), strerror(error),
             z->rank < 0 ? "" : "; the run continues without it");
}

/* Remove the written part of a line from a file again. */
static void take_back(int file, size_t n)
{
    struct stat s;
    off_t end = lseek(file, 0, SEEK_CUR);
    int bad = n == 0 || end < (off_t)n || fstat(file, &s) || !S_ISREG(s.st_mode) ||
              ftruncate(file, end - (off_t)n);
    (void)bad; /* on failure it stays */
}

/* Write all bytes. Returns 0, or errno. */
static int put_all(zr *z, int file, const char *text, size_t n)
{
    for (size_t at = 0; at < n;) {
        ssize_t done = write(file, text + at, n - at);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0 && file == STDERR_FILENO) return 0;
        if (done < 0 && errno == EAGAIN) { /* another user of the pipe made it non-blocking */
            poll(&(struct pollfd){file, POLLOUT, 0}, 1, -1);
            continue;
        }
        if (done < 0) {
            int error = errno;
            if (file == z->log->file) take_back(file, at);
            return error;
        }
        at += (size_t)done;
    }
    return 0;
}

static void put(zr *z, int file, const char *text, size_t n)
{
    int error = put_all(z, file, text, n);
    if (error) zr_lose(z, sink_of(file), error);
}

/* Begin to write to the terminal, which rank 0 and the parent share in turns. `live`, the kind of
 * its last line, is only valid in a turn. Returns 0 for the parent if it would have to wait. */
static int begin_turn(zr *z)
{
    while (z->shared && atomic_exchange(&z->shared->writing, 1)) {
        if (z->rank < 0) return 0;
        poll(NULL, 0, 1);
    }
    return 1;
}

static void end_turn(zr *z)
{
    if (z->shared) atomic_store(&z->shared->writing, 0);
}

/* Clear a progress line, or end the line of a step, before other output. */
static void make_room(zr *z)
{
    int live = z->shared ? atomic_exchange(&z->shared->live, ZR_NO_LINE) : ZR_NO_LINE;
    if (live == ZR_RESULT) put(z, STDERR_FILENO, "\n", 1);
    if (live == ZR_PROGRESS) put(z, STDERR_FILENO, "\r\033[K", 4);
}

void zr_show(zr *z, int kind, const char *line)
{
    char text[TEXT];
    if (!begin_turn(z)) return;
    if (z->log->tty && kind == ZR_PROGRESS && atomic_load(&z->shared->live) == ZR_RESULT)
        make_room(z);
    /* 7l, 7h: cut a line that is too long, as a wrapped line could not be overwritten */
    int n = snprintf(text, TEXT, z->log->tty ? "\r\033[?7l%s\033[K\033[?7h" : "%s\n", line);
    put(z, STDERR_FILENO, text, (size_t)n);
    atomic_store(&z->shared->live, z->log->tty ? kind : ZR_NO_LINE);
    atomic_store(&z->shared->shown, zr_now());
    end_turn(z);
}

static int ends_of_lines(const char *text)
{
    int n = 0;
    for (; (text = strchr(text, '\n')); text++) n++;
    return n;
}

/* Mask control codes, which names of users and files may contain. If an operand contains line ends,
 * mask all but the format's last. */
static void make_printable(char *text, const char *format)
{
    size_t n = strlen(text);
    int own = ends_of_lines(text) == ends_of_lines(format);
    zr_printable(text, own ? "\n\t" : "\t");
    if (n && format[strlen(format) - 1] == '\n') text[n - 1] = '\n';
}

static void put_in_turn(zr *z, int file, const char *text, size_t n)
{
    int turn = (file == STDOUT_FILENO || file == STDERR_FILENO) && begin_turn(z), error = 0;
    if (turn) make_room(z);
    if (file == STDERR_FILENO || !z->log->lost[sink_of(file)]) error = put_all(z, file, text, n);
    if (turn) end_turn(z);
    if (error) zr_lose(z, sink_of(file), error);
}

static void print(zr *z, int file, const char *format, va_list args)
{
    char text[TEXT];
    vsnprintf(text, TEXT, format, args);
    if (file == STDOUT_FILENO || file == STDERR_FILENO) make_printable(text, format);
    put_in_turn(z, file, text, strlen(text));
}

void zr_print_byte(zr *z, char byte)
{
    if (z->rank <= 0) put_in_turn(z, STDOUT_FILENO, &byte, 1);
}

void zr_print(zr *z, int file, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (z->rank <= 0 && file >= 0) print(z, file, format, args);
    va_end(args);
}

void zr_print_any(zr *z, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    print(z, STDERR_FILENO, format, args);
    va_end(args);
}

void zr_log_close(zr *z)
{
    for (int sink = 0; sink < ZR_SINKS; sink++)
        if (z->log->lost[sink])
            zr_print(z, STDERR_FILENO, "%s is incomplete: %s\n", sink_name(z, sink),
                     strerror(z->log->lost[sink]));
    if (z->log->lost[ZR_TO_STDOUT] && (z->o->hash || z->o->sample || !z->o->steps))
        zr_fail(z, ZR_ENVIRONMENT, "the requested output could not be written");
}

/* ---- start */

static int same(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

static int is_at(const struct stat *s, const char *path)
{
    struct stat file;
    return path && !stat(path, &file) && same(s, &file);
}

static int is_open(const struct stat *s, int fd)
{
    struct stat file;
    return fd >= 0 && !fstat(fd, &file) && same(s, &file);
}

/* Return whether it is a token file or a file that describes one. */
static int is_data(const struct stat *s, const zr_mix *m)
{
    char file[ZR_FILE];
    for (const zr_dataset *from = m->of; from < m->of + m->n; from++) {
        const zr_data *d = &from->data;
        if (is_open(s, d->fd) || is_open(s, d->labels)) return 1;
        if (!zr_meta_path(file, d->path) && is_at(s, file)) return 1;
        if (!zr_index_path(file, d->path) && is_at(s, file)) return 1;
    }
    return 0;
}

static int is_in(const struct stat *s, const char *dir, const char *name)
{
    char file[ZR_FILE], why[ZR_WHY];
    return !zr_path(file, dir, name, why) && is_at(s, file);
}

/* Return whether it is a file that --load opens or --save copies. If that cannot be determined,
 * loading will report the error. */
static int is_weights(const struct stat *s, const char *dir)
{
    char why[ZR_WHY];
    zr_table t;
    if (!dir) return 0;
    int found = is_in(s, dir, ZR_CONFIG) || is_in(s, dir, ZR_INDEX);
    for (const char *const *name = zr_copied; *name; name++) found |= is_in(s, dir, *name);
    if (found || zr_table_open(&t, dir, why)) return found;
    for (int64_t i = 0; i < t.nfiles; i++) found |= is_open(s, t.files[i].fd);
    zr_table_close(&t);
    return found;
}

/* Get the folder of a file. */
static int folder_of(const char *name, struct stat *s)
{
    char folder[ZR_FILE];
    const char *slash = strrchr(name, '/');
    snprintf(folder, sizeof folder, "%.*s/.", slash ? (int)(slash - name) : 1, slash ? name : ".");
    return stat(folder, s);
}

void zr_refuse_saved(zr *z, const char *option, const char *name)
{
    struct stat folder, save;
    const char *slash = strrchr(name, '/'), *file = slash ? slash + 1 : name;
    if (!z->o->save || folder_of(name, &folder) || stat(z->o->save, &save)) return;
    if (same(&folder, &save) && zr_is_saved(file))
        zr_fail(z, ZR_USER, "%s %s: is a file that --save writes; name another", option, name);
}

void zr_refuse_inputs(zr *z, const char *option, const char *name, const struct stat *s)
{
    const struct {
        const char *of;
        int is;
    } inputs[] = {
        {"--data", is_data(s, z->train)},
        {"--val", is_data(s, z->val)},
        {"--eval", is_open(s, z->choices->fd)},
        {"--load", is_weights(s, z->o->load)},
        {"--prompt-tokens", is_at(s, z->o->prompt)},
        {"--gemms", is_at(s, z->o->gemms)},
    };
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
        if (inputs[i].is)
            zr_fail(z, ZR_USER, "%s %s: is the input file of %s, which would be overwritten",
                    option, name, inputs[i].of);
}

/* Lock the log against other runs. */
static void lock(zr *z)
{
    if (!flock(z->log->file, LOCK_EX | LOCK_NB)) return;
    if (errno == EWOULDBLOCK)
        zr_fail(z, ZR_USER, "--log %s: another run is writing to it", z->o->log);
    zr_print(z, STDERR_FILENO,
             "--log %s: cannot be locked (%s): make sure that no other run writes to it\n",
             z->o->log, strerror(errno));
}

void zr_log_open(zr *z)
{
    struct stat s;
    if (z->rank != 0 || !z->o->log) return;
    zr_refuse_saved(z, "--log", z->o->log);
    z->log->file = open(z->o->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (z->log->file < 0 || fstat(z->log->file, &s))
        zr_fail(z, zr_code_of(errno), "--log %s: %s", z->o->log, strerror(errno));
    zr_refuse_inputs(z, "--log", z->o->log, &s);
    if (S_ISREG(s.st_mode)) lock(z);
}

/* ---- figures */

int64_t zr_parameters(const zr_program *p)
{
    int64_t n = 0;
    for (const zr_tensor *t = p->tensors; t < p->tensors + p->ntensors; t++)
        n += t->shape[0] * (t->ndim > 1 ? t->shape[1] : 1) * t->count;
    return n;
}

int64_t zr_samples(const zr_mix *m)
{
    int64_t n = 0;
    for (int k = 0; k < m->n; k++) n += m->of[k].data.samples;
    return n;
}

double zr_step_tokens(const zr *z) { return (double)zr_step_samples(z) * (double)z->p->sequence; }

const char *zr_loss_text(char text[ZR_LOSS_TEXT], int digits, double loss, double targets)
{
    if (targets > 0) snprintf(text, ZR_LOSS_TEXT, "%.*f", digits, loss);
    else strcpy(text, "none");
    return text;
}

/* Format a number as JSON, which has no NaN or infinities. */
static const char *number_text(char text[NUMBER], double x)
{
    if (isfinite(x)) snprintf(text, NUMBER, "%.17g", x);
    else strcpy(text, "null");
    return text;
}

/* ---- the log */

static void quoted(FILE *to, const char *name, const char *text)
{
    fprintf(to, "\"%s\": ", name);
    zr_json_quote(to, text);
    fprintf(to, ", ");
}

/* Write the list of the sources of --data. */
static void write_data_files(zr *z, FILE *to)
{
    const zr_mix *m = z->train;
    fprintf(to, "], \"data\": [");
    for (const zr_dataset *from = m->of; from < m->of + m->n; from++) {
        const zr_data *d = &from->data;
        fprintf(to, "%s{", from > m->of ? ", " : "");
        quoted(to, "file", d->path);
        fprintf(to,
                "\"type\": \"uint%d\", \"tokens\": %" PRId64 ", \"samples\": %" PRId64
                ", \"labels\": %s, \"weight\": %" PRId64 "}",
                8 * d->width, d->count, d->samples, d->labels >= 0 || d->mask ? "true" : "false",
                from->weight);
    }
}

/* Describe the run as a line of JSON. */
static void write_run(zr *z, FILE *to)
{
    char host[ZR_HOST_NAME] = "", now[NUMBER];
    time_t t = time(NULL);
    gethostname(host, sizeof host - 1);
    strftime(now, sizeof now, "%Y-%m-%dT%H:%M:%SZ", gmtime(&t));
    putc('{', to);
    quoted(to, "run", z->p->name);
    quoted(to, "time", now);
    quoted(to, "host", host);
    quoted(to, "version", zr_release);
    quoted(to, "plan", z->p->plan);
    quoted(to, "summary", z->p->summary);
    quoted(to, "kernels", z->p->object());
    fprintf(to, "\"arguments\": [");
    for (char **word = z->o->words; *word; word++) {
        if (word > z->o->words) fprintf(to, ", ");
        zr_json_quote(to, *word);
    }
    write_data_files(z, to);
    fprintf(to, "], \"recipe\": [");
    for (int i = 0; i < z->p->nrecipe; i++) {
        if (i) fprintf(to, ", ");
        zr_json_quote(to, z->p->recipe[i]);
    }
    if (zr_order_line(z)) {
        if (z->p->nrecipe) fprintf(to, ", ");
        zr_json_quote(to, zr_order_line(z));
    }
    fprintf(to,
            "], \"ranks\": %d, \"threads\": %d, \"parameters\": %" PRId64
            ", \"tokens_per_step\": %.0f, \"flops_per_step\": %.17g}\n",
            z->ranks, z->threads, zr_parameters(z->p), zr_step_tokens(z), z->p->flops);
}

/* End a line that another run left unfinished. */
static void end_line(zr *z)
{
    char last = '\n';
    struct stat s;
    int file = open(z->o->log, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) return;
    if (fstat(file, &s) == 0 && S_ISREG(s.st_mode) && s.st_size > 0 &&
        pread(file, &last, 1, s.st_size - 1) == 1 && last != '\n')
        put(z, z->log->file, "\n", 1);
    close(file);
}

void zr_log_begin(zr *z)
{
    char *text = NULL;
    size_t n = 0;
    if (z->log->file < 0) return;
    end_line(z);
    FILE *to = open_memstream(&text, &n);
    if (to) write_run(z, to);
    if (!to || fclose(to)) zr_fail(z, ZR_ENVIRONMENT, "out of memory");
    put(z, z->log->file, text, n);
    free(text);
}

void zr_log_step(zr *z, const double report[ZR_REPORT], double seconds)
{
    zr_log *l = z->log;
    char loss[NUMBER], norm[NUMBER], lr[NUMBER], scale[2 * NUMBER] = "", share[2 * NUMBER] = "";
    int skipped = report[ZR_SKIPPED] != ZR_APPLIED;
    double steps = (double)(z->step + 1), pace = zr_rate(z->p->flops, seconds);
    l->busy += seconds;
    l->skipped += skipped;
    if (report[ZR_VALID] == 0 && !l->untargeted++)
        zr_print(
            z, STDERR_FILENO,
            "step %.0f has no target: it has no loss and changes nothing; further such steps are "
            "only counted, and reported at the end\n",
            steps);
    if (report[ZR_SCALE] > 0) snprintf(scale, sizeof scale, ", \"scale\": %.17g", report[ZR_SCALE]);
    if (z->peak > 0)
        snprintf(share, sizeof share, ", \"share_of_peak\": %.6g", 1e-9 * pace / z->peak);
    zr_print(z, l->file,
             "{\"step\": %.0f, \"loss\": %s, \"norm\": %s, \"lr\": %s, \"tokens\": %.0f, "
             "\"valid\": %.0f, \"skipped\": %d%s, \"epoch\": %.17g, \"seconds\": %.9g, "
             "\"tokens_per_second\": %.9g%s}\n",
             steps, number_text(loss, report[ZR_LOSS]), number_text(norm, report[ZR_NORM]),
             number_text(lr, report[ZR_LR]), steps * zr_step_tokens(z), report[ZR_VALID], skipped,
             scale, steps * (double)zr_step_samples(z) / (double)zr_samples(z->train), seconds,
             zr_rate(zr_step_tokens(z), seconds), share);
}

void zr_log_val(zr *z, int64_t step, double loss, double tokens)
{
    char text[NUMBER];
    zr_print(z, z->log->file, "{\"step\": %" PRId64 ", \"val_loss\": %s, \"val_tokens\": %.0f}\n",
             step, number_text(text, loss), tokens);
    if (tokens > 0) zr_print(z, STDOUT_FILENO, "val loss %.6f over %.0f targets\n", loss, tokens);
    else zr_print(z, STDOUT_FILENO, "val loss none: %s has no target\n", z->o->val);
}

void zr_log_eval(zr *z, int64_t step, int64_t right, int64_t examples)
{
    double accuracy = (double)right / (double)examples;
    zr_print(z, z->log->file,
             "{\"step\": %" PRId64 ", \"eval_right\": %" PRId64 ", \"eval_examples\": %" PRId64
             ", \"eval_accuracy\": %.17g}\n",
             step, right, examples, accuracy);
    zr_print(z, STDOUT_FILENO, "eval %s: %" PRId64 " of %" PRId64 " (%.4f)\n", z->o->eval, right,
             examples, accuracy);
}

void zr_log_checkpoint(zr *z, int64_t step, double seconds, double pause)
{
    zr_print(z, z->log->file, "{\"step\": %" PRId64 ", \"checkpoint\": %.9g, \"pause\": %.9g}\n",
             step, seconds, pause);
}

void zr_log_verified(zr *z, int64_t step, const uint64_t sum[2], double seconds)
{
    zr_print(z, z->log->file,
             "{\"step\": %" PRId64 ", \"weights\": \"%016" PRIx64 "%016" PRIx64
             "\", \"verification\": %.9g}\n",
             step, sum[0], sum[1], seconds);
}

/* ---- summary */

static void end_of_training(zr *z, const double *report, const int64_t moved[ZR_MOVED])
{
    const zr_program *p = z->p;
    const int64_t N = z->step - z->checkpoints->from;
    double steps = (double)N, busy = z->log->busy;
    char loss[ZR_LOSS_TEXT];
    zr_print(z, STDOUT_FILENO, "loss %s\n",
             zr_loss_text(loss, 6, report[ZR_LOSS], report[ZR_VALID]));
    if (z->log->untargeted)
        zr_print(z, STDOUT_FILENO, "%" PRId64 " steps of %" PRId64 " had no target\n",
                 z->log->untargeted, N);
    if (z->log->skipped)
        zr_print(z, STDOUT_FILENO, "%" PRId64 " steps of %" PRId64 " skipped\n", z->log->skipped,
                 (int64_t)z->step);
    zr_print(z, STDOUT_FILENO, "%.3f s of training, %.0f tokens/s, %.1f GFLOP/s\n", busy,
             zr_rate(steps * zr_step_tokens(z), busy), 1e-9 * zr_rate(steps * z->p->flops, busy));
    zr_print(z, STDOUT_FILENO,
             "wire %" PRId64 " bytes and %" PRId64 " collectives per rank and step\n",
             moved[ZR_WIRE] / N, moved[ZR_MESSAGES] / N);
    if (p->local && p->local < z->ranks)
        zr_print(z, STDOUT_FILENO,
                 "hosts of %d rank%s: %" PRId64
                 " of these bytes are from other hosts; a host sends "
                 "%" PRId64 " to others in a step\n",
                 p->local, &"s"[p->local == 1], moved[ZR_FAR] / N, moved[ZR_FAR] / N * p->local);
    if (p->filed)
        zr_print(z, STDOUT_FILENO,
                 "file %" PRId64 " bytes read and %" PRId64 " written per rank and step\n",
                 moved[ZR_LOADS] / N, moved[ZR_STORES] / N);
}

void zr_log_end(zr *z, const double report[ZR_REPORT], const int64_t moved[ZR_MOVED])
{
    int64_t steps = z->step - z->checkpoints->from, N = steps ? steps : 1;
    if (steps > 0) end_of_training(z, report, moved);
    zr_print(z, STDOUT_FILENO, "start %.3f s to arenas in place, %.3f s to the first step\n",
             z->ready - z->started, z->first - z->started);
    zr_print(z, z->log->file,
             "{\"end\": %" PRId64 ", \"skipped\": %" PRId64 ", \"seconds\": %.9g"
             ", \"wire\": %" PRId64 ", \"collectives\": %" PRId64 ", \"arena\": %" PRId64
             ", \"started\": %.9f, \"start_arena\": %.9g, \"start_step\": %.9g, "
             "\"plan\": \"%s\"}\n",
             (int64_t)z->step, z->log->skipped, z->log->busy, moved[ZR_WIRE] / N,
             moved[ZR_MESSAGES] / N, z->p->columns[z->column].arena, z->started,
             z->ready - z->started, z->first - z->started, z->p->plan);
}
