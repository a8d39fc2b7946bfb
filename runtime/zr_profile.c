/* zr_profile.c -- start and end of each command in some steps (--profile): a table and a file.
 *
 * A command of a queue (a function, a collective, a copy, a wait) makes a note in memory that is
 * allocated at the start: the plan gives the number of commands in a step. After the last of these
 * steps rank 0 prints a table of its own commands, and all ranks write their notes to one file, one
 * after the other: complete events in the JSON that Perfetto and chrome://tracing read, with a
 * process per rank and a thread per queue.
 *
 * Invariants
 *  1. Results do not change: without notes a queue does the same work in the same order.
 *  2. The file is written under a temporary name and renamed when complete. A failed write does not
 *     end training.
 */
#define _GNU_SOURCE
#include "zr_clock.h"
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_log.h"
#include "zr_memory.h"
#include "zr_options.h"
#include "zr_profile.h"
#include "zr_queue.h"
#include "zr_range.h"
#include "zr_rank.h"
#include "zr_seats.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TEXT = 1 << 13, LINE = 1024 };

static int64_t steps(const zr *z) { return z->o->profile_last - z->o->profile_first + 1; }

/* ---- at the start */

int64_t zr_profile_bytes(const zr *z)
{
    return z->o->profile ? z->p->commands * steps(z) * (int64_t)sizeof(zr_note) : 0;
}

static void part_name(const zr *z, char *path)
{
    snprintf(path, ZR_FILE, "%s.part", z->o->profile);
}

/* Create the temporary file, locked while this process lives. */
static void make_part(zr *z, const char *part)
{
    char why[ZR_WHY];
    errno = 0;
    if (zr_save_clear(part, why)) zr_fail(z, zr_code_of(errno), "--profile %s", why);
    zr_temp(z, ZR_PROFILING, part);
    int fd = open(part, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0 || (flock(fd, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK))
        zr_fail(z, zr_code_of(errno), "--profile %s: %s", z->o->profile, strerror(errno));
}

void zr_profile_open(zr *z)
{
    const char *file = z->o->profile;
    char part[ZR_FILE];
    struct stat s, log;
    if (!file || z->rank != 0) return;
    if (strlen(file) + sizeof ".part" > ZR_FILE)
        zr_fail(z, ZR_USER, "--profile: the file name is too long");
    zr_refuse_saved(z, "--profile", file);
    part_name(z, part);
    for (const char *name = file; name; name = name == file ? part : NULL) {
        if (stat(name, &s)) continue;
        if (!S_ISREG(s.st_mode)) zr_fail(z, ZR_USER, "--profile %s: is not a regular file", name);
        zr_refuse_inputs(z, "--profile", name, &s);
        if (z->log->file >= 0 && !fstat(z->log->file, &log) && s.st_dev == log.st_dev &&
            s.st_ino == log.st_ino)
            zr_fail(z, ZR_USER, "--profile %s: is the file of --log", name);
        if (access(name, W_OK))
            zr_fail(z, zr_code_of(errno), "--profile %s: %s", name, strerror(errno));
    }
    make_part(z, part);
}

void zr_profile_start(zr *z)
{
    zr_profile *f = z->profile;
    size_t bytes = (size_t)zr_profile_bytes(z);
    if (!z->o->profile) return;
    f->room = z->p->commands * steps(z);
    f->note = zr_get(z, f->room, sizeof *f->note);
    f->wall = zr_get(z, steps(z), sizeof *f->wall);
    f->row = zr_get(z, z->p->commands, sizeof *f->row);
    memset(f->note, 0, bytes); /* allocates its pages now */
    zr_clocks_start(z, f->room);
    zr_print(z, STDERR_FILENO,
             "profile: steps %" PRId64 " to %" PRId64 "%s; %zu bytes per rank for its records\n",
             z->o->profile_first, z->o->profile_last, zr_is_gpu ? ", without CUDA graphs" : "",
             bytes);
}

/* ---- in a step */

static int64_t moved(const zr_queue *q) { return q->bytes + q->copied; }

zr_note *zr_note_make(zr *z, int queue, const char *name, int kind)
{
    zr_profile *f = z->profile;
    int64_t n = atomic_fetch_add_explicit(&f->used, 1, memory_order_relaxed);
    if (n >= f->room)
        zr_fail(z, ZR_DISAGREE,
                "--profile: step %" PRId64 " has more than the %" PRId64 " commands of the plan",
                z->step + 1, z->p->commands);
    zr_note *note = &f->note[n];
    *note = (zr_note){.name = name,
                      .step = z->step,
                      .bytes = -moved(&z->queue[queue]),
                      .queue = queue,
                      .kind = kind};
    zr_clock(z, note, 0);
    return note;
}

void zr_note_done(zr *z, zr_note *note)
{
    zr_clock(z, note, 1);
    note->bytes += moved(&z->queue[note->queue]);
}

/* step: from 0. */
static int profiles(const zr *z, int64_t step)
{
    return z->profile->note && step + 1 >= z->o->profile_first && step + 1 <= z->o->profile_last;
}

static int profiled(const zr *z) { return profiles(z, z->step); }

int zr_profile_apart(const zr *z) { return profiled(z) || profiles(z, z->step + 1); }

void zr_profile_step(zr *z, int begins)
{
    if (!profiled(z)) return;
    z->profile->wall[z->step + 1 - z->o->profile_first][!begins] = zr_now();
    z->profile->on = begins;
    if (begins) zr_clocks_step(z);
}

/* ---- the table of rank 0 */

static const zr_function *function(const zr *z, const char *name)
{
    for (int i = 0; i < z->p->nfunctions; i++)
        if (!strcmp(z->p->functions[i].name, name)) return &z->p->functions[i];
    return NULL;
}

static double seconds(const zr_note *note) { return 1e-9 * (double)(note->end - note->begin); }

/* Return the row of a name, adding it if needed; a step has at most as many rows as commands. */
static zr_row *row_of(zr *z, const char *name, int queue)
{
    zr_profile *f = z->profile;
    for (zr_row *r = f->row; r < f->row + f->rows; r++)
        if (r->queue == queue && !strcmp(r->name, name)) return r;
    f->row[f->rows] = (zr_row){.name = name, .queue = queue};
    return &f->row[f->rows++];
}

static void print_row(zr *z, const zr_row *r, double wall)
{
    const zr_function *fn = function(z, r->name);
    char bytes[32] = "", rate[32] = "", work[32] = "", peak[32] = "", line[LINE];
    double n = (double)steps(z), flops = fn ? fn->flops * (double)r->calls : 0;
    double gflops = r->seconds > 0 ? 1e-9 * flops / r->seconds : 0;
    /* otherwise the pieces of an all-to-all are read later, by their users */
    int itself = !z->reads_peers || strcmp(r->name, "alltoall");
    if (r->bytes) snprintf(bytes, sizeof bytes, "%.0f", (double)r->bytes / n);
    if (r->bytes && itself && r->seconds > 0)
        snprintf(rate, sizeof rate, "%.2f", 1e-9 * (double)r->bytes / r->seconds);
    if (gflops > 0) snprintf(work, sizeof work, "%.1f", gflops);
    if (gflops > 0 && gflops * z->ranks <= z->peak)
        snprintf(peak, sizeof peak, "  %.0f%% of peak", 100 * gflops * z->ranks / z->peak);
    int end = snprintf(line, sizeof line, "  %-22s %8.0f %11.3f %6.1f %14s %8s %10s%s", r->name,
                       (double)r->calls / n, 1e3 * r->seconds / n, 100 * r->seconds / wall, bytes,
                       rate, work, peak);
    if (end >= LINE) end = LINE - 1;
    while (end > 0 && line[end - 1] == ' ') end--;
    zr_print(z, STDOUT_FILENO, "%.*s\n", end, line);
}

static int descending(const void *a, const void *b)
{
    const zr_row *x = a, *y = b;
    if (x->queue != y->queue) return x->queue - y->queue;
    return (x->seconds < y->seconds) - (x->seconds > y->seconds);
}

static void add_notes(zr *z, const char *(*name)(zr *z, const zr_note *note))
{
    z->profile->rows = 0;
    for (int64_t i = 0; i < z->profile->used; i++) {
        const zr_note *note = &z->profile->note[i];
        const char *as = name(z, note);
        if (!as) continue;
        zr_row *r = row_of(z, as, note->queue);
        r->calls++;
        r->waits = note->kind >= 0;
        r->seconds += seconds(note);
        r->bytes += note->bytes;
    }
    qsort(z->profile->row, (size_t)z->profile->rows, sizeof *z->profile->row, descending);
}

/* Print the totals of a queue above its rows. */
static void print_queue(zr *z, int queue, double wall)
{
    double sum[2] = {0}, n = (double)steps(z);
    for (const zr_row *r = z->profile->row; r < z->profile->row + z->profile->rows; r++)
        if (r->queue == queue) sum[r->waits] += r->seconds;
    zr_print(z, STDOUT_FILENO, "%-7s works %.3f ms (%.1f %%), waits %.3f ms (%.1f %%)\n",
             zr_queue_name(queue), 1e3 * sum[0] / n, 100 * sum[0] / wall, 1e3 * sum[1] / n,
             100 * sum[1] / wall);
}

/* Return the line of the table for a note; part_of_main: the line for ZR_MAIN's time. */
static const char *line_name(zr *z, const zr_note *note)
{
    (void)z;
    return note->kind < 0 ? note->name : zr_queues[note->kind].awaited;
}

static const char *part_of_main(zr *z, const zr_note *note)
{
    const zr_function *fn = function(z, note->name);
    if (note->queue != ZR_MAIN) return NULL;
    if (note->kind == ZR_WORKS) return fn ? fn->part : "step";
    return line_name(z, note);
}

static double wall_seconds(const zr *z)
{
    double sum = 0;
    for (int64_t i = 0; i < steps(z); i++) sum += z->profile->wall[i][1] - z->profile->wall[i][0];
    return sum;
}

static void print_table(zr *z)
{
    const zr_profile *f = z->profile;
    double wall = wall_seconds(z), n = (double)steps(z), rest = wall;
    zr_print(z, STDOUT_FILENO,
             "profile of rank 0, mean of steps %" PRId64 " to %" PRId64
             ": %.3f ms a step\n%-24s %8s %11s %6s\n",
             z->o->profile_first, z->o->profile_last, 1e3 * wall / n, "main: part of a step",
             "calls", "ms", "%");
    add_notes(z, part_of_main);
    for (const zr_row *r = f->row; r < f->row + f->rows; rest -= r++->seconds)
        zr_print(z, STDOUT_FILENO, "%-24s %8.0f %11.3f %6.1f\n", r->name, (double)r->calls / n,
                 1e3 * r->seconds / n, 100 * r->seconds / wall);
    zr_print(z, STDOUT_FILENO, "%-33s %11.3f %6.1f\n", "no command", 1e3 * rest / n,
             100 * rest / wall);
    zr_print(z, STDOUT_FILENO, "%-24s %8s %11s %6s %14s %8s %10s\n", "each queue: command", "calls",
             "ms", "%", "bytes", "GB/s", "GFLOP/s");
    add_notes(z, line_name);
    for (const zr_row *r = f->row; r < f->row + f->rows; r++) {
        if (r == f->row || r->queue != r[-1].queue) print_queue(z, r->queue, wall);
        print_row(z, r, wall);
    }
}

/* ---- the file */

struct out {
    int fd, error; /* errno of the first failed write; 0: none */
    int64_t at;
    int n;
    char text[TEXT];
};

static void flush(struct out *o)
{
    if (!o->error && zr_write_at(o->fd, o->text, o->n, o->at)) o->error = errno;
    o->at += o->n;
    o->n = 0;
}

__attribute__((format(printf, 2, 3))) static void emit(struct out *o, const char *format, ...)
{
    va_list args;
    if (o->n > TEXT - LINE) flush(o);
    va_start(args, format);
    o->n += vsnprintf(o->text + o->n, LINE, format, args);
    va_end(args);
}

/* Print nanoseconds as microseconds without rounding, so that events overlap in the
 * file only if they do here. */
#define US "%" PRId64 ".%03d"
#define OF_NS(ns) (ns) / 1000, (int)((ns) % 1000)

static void write_event(const zr *z, struct out *o, const char *name, int thread, int64_t begin,
                        int64_t end)
{
    emit(o, "{\"name\":\"%s\",\"ph\":\"X\",\"ts\":" US ",\"dur\":" US ",\"pid\":%d,\"tid\":%d",
         name, OF_NS(begin), OF_NS(end - begin), z->rank, thread);
}

static void write_names(const zr *z, struct out *o)
{
    emit(o, "%s{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"rank %d\"}}",
         z->rank ? ",\n" : "[\n", z->rank, z->rank);
    for (int t = 0; t <= ZR_QUEUES; t++)
        if (t == ZR_QUEUES || zr_uses(z, t))
            emit(o,
                 ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":"
                 "{\"name\":\"%s\"}}",
                 z->rank, t, t < ZR_QUEUES ? zr_queue_name(t) : "steps");
}

/* Write a function's name and, if it is called for several units, the number of the call's unit. */
static void unit_name(const zr *z, char name[LINE / 2], const zr_note *note, int64_t call)
{
    const zr_function *fn = function(z, note->name);
    snprintf(name, LINE / 2, "%s", note->name);
    if (!fn || !fn->units) return;
    int64_t n = fn->units < 0 ? -fn->units : fn->units, unit = call / fn->times % n;
    snprintf(name, LINE / 2, "%s %" PRId64, note->name, fn->units < 0 ? n - 1 - unit : unit);
}

static void write_notes(zr *z, struct out *o)
{
    zr_profile *f = z->profile;
    char name[LINE / 2];
    for (int64_t i = 0; i < steps(z); i++) {
        snprintf(name, sizeof name, "step %" PRId64, z->o->profile_first + i);
        emit(o, ",\n");
        write_event(z, o, name, ZR_QUEUES, (int64_t)(1e9 * f->wall[i][0]),
                    (int64_t)(1e9 * f->wall[i][1]));
        emit(o, "}");
    }
    for (const zr_note *note = f->note; note < f->note + f->used; note++) {
        if (note == f->note || note->step != note[-1].step) f->rows = 0;
        zr_row *calls = row_of(z, note->name, note->queue);
        emit(o, ",\n");
        unit_name(z, name, note, calls->calls);
        write_event(z, o, name, note->queue, note->begin, note->end);
        emit(o, ",\"args\":{\"step\":%" PRId64 ",\"call\":%" PRId64, note->step + 1,
             calls->calls++);
        if (note->kind >= 0) emit(o, ",\"for\":\"%s\"", zr_queue_name(note->kind));
        if (note->bytes) emit(o, ",\"bytes\":%" PRId64, note->bytes);
        emit(o, "}}");
    }
}

/* Write this rank's part after those of the ranks before it. Returns 0 or errno. */
static int write_part(zr *z, const char *part)
{
    struct out o = {.fd = open(part, O_WRONLY | O_CLOEXEC)};
    if (o.fd < 0) return errno;
    o.at = lseek(o.fd, 0, SEEK_END);
    write_names(z, &o);
    write_notes(z, &o);
    if (z->rank == z->ranks - 1) emit(&o, "\n]\n");
    flush(&o);
    return close(o.fd) && !o.error ? errno : o.error;
}

void zr_profile_end(zr *z)
{
    char part[ZR_FILE];
    uint64_t error[2] = {0}; /* errno of the first failure */
    if (!profiled(z) || z->step + 1 != z->o->profile_last) return;
    zr_clocks_end(z);
    print_table(z);
    part_name(z, part);
    for (int rank = 0; rank < z->ranks && !error[0]; rank++) {
        if (rank == z->rank) error[0] = (uint64_t)write_part(z, part);
        zr_total(z, error);
    }
    if (z->rank != 0) return;
    if (!error[0] && rename(part, z->o->profile)) error[0] = (uint64_t)errno;
    if (error[0]) unlink(part);
    if (error[0]) zr_lose(z, ZR_TO_PROFILE, (int)error[0]);
    zr_temp(z, ZR_PROFILING, NULL);
}
