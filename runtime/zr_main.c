/* zr_main.c -- the whole run: options, then on every rank kernels, data, arena, steps, results.
 *
 * Invariants
 *  1. Every rank takes the same path through this file; only printing and files differ by rank.
 *  2. Errors that can be found before the first step are found then: options, files, memory, the
 *     launcher. Of the tokens after the first 64 MiB only a sample is checked; the rest are checked
 *     as they are read.
 */
#define _GNU_SOURCE
#include "zr_batch.h"
#include "zr_best.h"
#include "zr_checkpoint.h"
#include "zr_choices.h"
#include "zr_clock.h"
#include "zr_data.h"
#include "zr_disk.h"
#include "zr_eval.h"
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_groups.h"
#include "zr_handshake.h"
#include "zr_log.h"
#include "zr_memory.h"
#include "zr_mix.h"
#include "zr_net.h"
#include "zr_options.h"
#include "zr_order.h"
#include "zr_probe.h"
#include "zr_products.h"
#include "zr_profile.h"
#include "zr_progress.h"
#include "zr_queue.h"
#include "zr_range.h"
#include "zr_rank.h"
#include "zr_ranks.h"
#include "zr_save.h"
#include "zr_seats.h"
#include "zr_shared.h"
#include "zr_verify.h"
#include "zr_watch.h"
#include "zr_weights.h"
#include "zr_writer.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PROMPT = 16, STACK_KIB = 128 };
/* Bytes of tensors in a file of weights: transformers' default. */
static const int64_t shard_bytes = 5000000000;

int zr_rank(const zr *z) { return z->rank; }

void zr_wait_n(zr *z, int queue, int n, const int *event)
{
    for (int i = 0; i < n; i++) zr_wait(z, queue, event[i]);
}

/* ---- tokens */

static void open_tokens(zr *z, zr_mix *to, const zr_given *given, int n, const char *name)
{
    char why[ZR_WHY];
    const char *type = z->o->tokens;
    int64_t end = z->p->packed ? z->p->end : -1;
    zr_form form = {z->p->sequence, z->p->vocab, z->p->ignore, end, 0, 0};
    if (type) form.width = strcmp(type, "uint16") ? 4 : 2;
    if (zr_mix_open(to, given, n, name, &form, why))
        zr_fail(z, ZR_USER, "%s %s", zr_option_of(z, to), why);
}

/* Set the steps of --epochs, before ranks start. */
static void settle_steps(zr *z, zr_options *o)
{
    zr_mix m = {0};
    if (!o->epochs) return;
    open_tokens(z, &m, o->data, o->ndata, "train.bin");
    int64_t samples = zr_samples(&m), step = zr_step_samples(z);
    zr_mix_close(&m);
    if (o->epochs > INT64_MAX / samples || (o->epochs * samples + step - 1) / step > ZR_MOST_STEPS)
        zr_fail(z, ZR_USER, "--epochs %" PRId64 ": more than %d steps", o->epochs, ZR_MOST_STEPS);
    o->steps = (o->epochs * samples + step - 1) / step;
}

/* used: number of samples that the run reads. */
static void check_tokens(zr *z, const zr_mix *m, int64_t used)
{
    char why[ZR_WHY];
    if (zr_mix_check(m, used, z->rank, z->ranks, why))
        zr_fail(z, ZR_USER, "%s %s", zr_option_of(z, m), why);
}

/* Open --data and --val. Validation uses the first samples of one file. */
static void open_data(zr *z)
{
    const char *file = z->o->val;
    const zr_given val = {file, ZR_WEIGHT, file ? (int)strlen(file) : 0};
    open_tokens(z, z->train, z->o->data, z->o->ndata, "train.bin");
    open_tokens(z, z->val, &val, z->o->val != NULL, "val.bin");
    z->train->shuffle = z->p->shuffle;
    z->train->seed = z->p->seed;
    if (zr_blocks(z->p) > 1) z->whole = zr_get(z, 3 * z->p->sequence, sizeof *z->whole);
    if (z->val->n && z->o->val_tokens)
        z->val->of->data.samples =
            zr_least(z->val->of->data.samples, z->o->val_tokens / z->p->sequence);
}

/* Read the last tokens of --prompt-tokens, as many as the model's sequence holds. */
static void open_prompt(zr *z)
{
    char beyond[ZR_BEYOND], why[ZR_WHY];
    struct stat s;
    const char *path = z->o->prompt;
    if (!path) return;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &s))
        zr_fail(z, ZR_USER, "--prompt-tokens %s: %s", path, strerror(errno));
    if (!S_ISREG(s.st_mode) || s.st_size == 0 || s.st_size % 4)
        zr_fail(z, ZR_USER,
                "--prompt-tokens %s: must be a file of at least one token, of 4 bytes each", path);
    const zr_data file = {.path = path, .fd = fd, .vocab = z->p->vocab, .part = 1};
    if (zr_looks(&file, s.st_size, 4, why)) zr_fail(z, ZR_USER, "--prompt-tokens %s", why);
    int64_t all = s.st_size / 4, n = all < z->p->sequence ? all : z->p->sequence;
    int32_t *context = z->prompt = zr_get(z, 2 * z->p->sequence, sizeof *context);
    if (zr_read_at(fd, context, 4 * n, 4 * (all - n)))
        zr_fail(z, ZR_USER, "--prompt-tokens %s: %s", path, strerror(errno));
    close(fd);
    for (int64_t i = 0; i < n; i++)
        if ((uint32_t)context[i] >= z->p->vocab)
            zr_fail(z, ZR_USER, "--prompt-tokens %s: token %" PRId64 " is %" PRIu32 "; %s", path,
                    all - n + i, (uint32_t)context[i],
                    zr_beyond(beyond, (uint32_t)context[i], 4, z->p->vocab));
    z->nprompt = n;
}

/* ---- start of a rank */

static void open_kernels(zr *z)
{
    const char *why = "";
    for (int queue = 0; queue < ZR_QUEUES; queue++) {
        if (!zr_queues[queue].kernels || (queue == ZR_HOST && !zr_uses(z, queue))) continue;
        int threads = queue == ZR_SUM ? 1 : z->threads;
        void *workspace = queue == ZR_MAIN ? z->workspace : NULL;
        zr_queue *q = &z->queue[queue];
        q->k = z->p->open(queue, q->stream, workspace, z->pinned_scratch, z->column, threads, &why);
        if (!q->k) zr_fail(z, ZR_ENVIRONMENT, "%s", why);
    }
}

/* Use or make the table of a GPU's algorithms (zk_gemms). */
static void gemms(zr *z, int what)
{
    char why[ZR_WHY];
    if (!z->o->gemms) return;
    int told = z->p->gemms(what, z->o->gemms, why, sizeof why);
    if (told < 0) zr_fail(z, what == ZR_END ? ZR_ENVIRONMENT : ZR_USER, "--gemms %s", why);
    if (told > 0) zr_print(z, STDERR_FILENO, "--gemms %s\n", why);
}

/* Return the number of tensors in a file of weights. */
static int64_t tensors(const zr *z)
{
    int64_t n = 0;
    for (int k = 0; k < z->p->ntensors; k++) n += z->p->tensors[k].count;
    return n;
}

/* Check the tensors in --load, which a resumed run reads at its end, if at all. Return the type of
 * each, unless --save-dtype gives another; else NULL. */
static const uint8_t *loaded_types(zr *z)
{
    char why[ZR_WHY];
    if (!z->o->load) return NULL;
    uint8_t *types = zr_get(z, tensors(z), 1);
    if (zr_stored_types(z->p, &zr_masters, z->o->load, types, why))
        zr_fail(z, ZR_USER, "--load %s", why);
    return z->o->save_type >= 0 ? NULL : types;
}

/* Create the files of --save with all their space, so that training does not
 * end without space for them. */
static void begin_save(zr *z)
{
    char why[ZR_WHY], note[ZR_WHY], path[ZR_FILE];
    int64_t most = zr_setting(z, "ZR_SHARD_BYTES", INT64_MAX);
    if (!z->o->save) return;
    if (zr_save_open(z->saving, z->p, z->rank, z->o->save, z->o->load, z->o->merge, z->o->save_type,
                     loaded_types(z), most ? most : shard_bytes, note, why) ||
        zr_save_temp(path, z->o->save, why))
        zr_fail(z, ZR_USER, "--save %s", why);
    if (z->rank != 0) return;
    if (*note) zr_print(z, STDERR_FILENO, "--save %s\n", note);
    zr_temp(z, ZR_SAVING, path); /* it is removed only if this run holds its lock: clear_temps() */
    errno = 0;
    if (zr_save_begin(z->saving, why)) zr_fail(z, zr_code_of(errno), "--save %s", why);
}

/* Set the masters: resume, or initialise, load weights and load adapters. --load without rows to
 * draw reads all masters, so it needs no initialisation of the zeroed arena. */
static void first_weights(zr *z)
{
    char why[ZR_WHY], note[ZR_WHY] = "";
    if (z->checkpoints->from) {
        zr_checkpoint_load(z);
        return;
    }
    if (!z->o->load || z->p->adapter || z->p->vocab_drawn) { /* adapters and drawn rows have */
        z->p->init(z);
        zr_drain(z);
    }
    if (!z->o->load && z->p->adapter)
        zr_print(z, STDERR_FILENO, "without --load the base of the adapters is random%s\n",
                 z->p->formats ? ", and its quantized weights are 0" : "");
    if (!z->o->load && !z->o->adapter) return;
    errno = 0;
    int differs = z->rank == 0 && z->o->load ? zr_config_differs(z->p, z->o->load, note, why) : 0;
    if (differs < 0) zr_fail(z, zr_code_of(errno), "--load %s", why);
    if (differs) zr_print(z, STDERR_FILENO, "--load %s\n", note);
    *note = 0;
    int64_t n = z->o->load ? zr_stored_names(z->p, &zr_masters, NULL, NULL) : 0;
    n += z->o->adapter ? zr_stored_names(z->p, &zr_adapters, NULL, NULL) : 0;
    zr_progress(z, "load", "tensor", n);
    errno = 0;
    if (z->o->load && zr_load(z->p, z, z->rank, z->o->load, z->o->drop_unknown, note, why))
        zr_fail(z, zr_code_of(errno), "--load %s", why);
    if (*note) zr_print(z, STDERR_FILENO, "%s\n", note);
    *note = 0;
    if (z->o->adapter && zr_load_adapters(z->p, z, z->rank, z->o->adapter, z->o->load, note, why))
        zr_fail(z, zr_code_of(errno), "--adapter %s", why);
    if (*note) zr_print(z, STDERR_FILENO, "--adapter %s\n", note);
    zr_barrier(z); /* no log records the run before all ranks have their weights */
}

/* Meet the other ranks, check that all have the same program, and open the device and kernels. */
static void meet(zr *z)
{
    zr_progress(z, "start", NULL, 0);
    if (z->far) zr_meet(z);
    zr_same_program(z);
    zr_groups_open(z);
    zr_open(z);
    zr_check_states(z);
    open_kernels(z);
}

/* Run --check-launch: allocate arenas, connect queues, and print a line for each rank, in order. */
static void tell_launch(zr *z)
{
    enum { ROUNDS = 10 };
    char host[ZR_HOST_NAME] = "";
    int near = z->far ? z->net->neighbours : z->ranks, local = z->rank - z->lowest;
    zr_arena(z);
    zr_queues_start(z);
    zr_barrier(z);
    double begun = zr_now();
    for (int i = 0; i < ROUNDS; i++) zr_barrier(z);
    double seconds = (zr_now() - begun) / ROUNDS;
    gethostname(host, sizeof host - 1);
    zr_print(z, STDOUT_FILENO, "plan %s, %d ranks\n", z->p->plan, z->ranks);
    if (z->p->local)
        zr_print(z, STDOUT_FILENO, "hosts of %d rank%s in a row, as the plan has them\n",
                 z->p->local, &"s"[z->p->local == 1]);
    if (z->far && z->rank == 0)
        zr_print(z, STDOUT_FILENO, "rank 0 is at %s, port %d\n", z->net->host, z->net->port);
    for (int r = 0; r < z->ranks; r++) {
        zr_barrier(z);
        if (r != z->rank) continue;
        printf("rank %d: host %s, %d of %d there, %d threads, kernels %s; to rank 0 and back "
               "%.0f us\n",
               r, host, (z->far ? z->net->local : 0) + local, near, z->threads, z->p->object(),
               1e6 * seconds);
        fflush(stdout);
    }
    zr_barrier(z);
    zr_queues_stop(z);
}

static void begin(zr *z)
{
    gemms(z, z->o->tune ? ZR_TIME : ZR_TAKE);
    open_data(z);
    open_prompt(z);
    zr_eval_open(z);
    zr_handshake(z);
    check_tokens(z, z->train, z->o->steps * zr_step_samples(z));
    check_tokens(z, z->val, INT64_MAX);
    zr_checkpoint_find(z);
    zr_settle_order(z);
    zr_checkpoint_open(z);
    zr_verify_open(z);
    zr_log_open(z);
    zr_profile_open(z);
    begin_save(z);
    zr_disk_open(z);
    zr_barrier(z); /* no rank allocates memory for a run that will not start */
    zr_arena(z);
    zr_queues_start(z);
    zr_profile_start(z);
    zr_barrier(z);
    z->ready = zr_now();
    zr_lives(z, ZR_BETWEEN);
    first_weights(z);
    zr_log_begin(z);
    zr_show_start(z);
    z->p->publish(z);
    zr_drain(z);
    zr_barrier(z);
    zr_progress(z, NULL, NULL, 0);
}

/* ---- validation */

static int tracks(const zr *z) { return z->o->keep_best || z->o->patience; }

/* Return whether the validation after a step has been noted before. */
static int tracked(const zr *z, int64_t step)
{
    return tracks(z) && step > 0 && step == z->checkpoints->best.at;
}

/* Validate: evaluate each whole sample of the file once, in order. step: steps done. */
static void validate(zr *z, int64_t step)
{
    int64_t turn = zr_eval_samples(z);
    double valid, begun = zr_now();
    if (!z->o->val || tracked(z, step)) return;
    int64_t samples = z->val->of->data.samples;
    int64_t turns = (samples + turn - 1) / turn;
    zr_progress(z, "validation", "micro-batch", turns * zr_own_blocks(z->p));
    zr_lives(z, ZR_STEPS);
    zr_call(z, ZR_MAIN, z->p->clear, 0);
    for (int64_t first = 0; first < samples; first += turn) {
        zr_batch_eval(z, first);
        zr_replay(z, ZR_EVAL, z->p->eval);
        zr_all_dead(z);
    }
    zr_barrier(z); /* so that rank 0 names a rank that is slow in its own work */
    double loss = zr_mean(z, &valid);
    zr_lives(z, ZR_BETWEEN);
    zr_progress(z, NULL, NULL, 0);
    zr_show_validated(z, step, zr_now() - begun);
    zr_log_val(z, step, loss, valid);
    if (tracks(z)) zr_best_note(z, loss);
}

/* ---- training */

/* moved += times * the bytes and collectives so far of this rank's training steps, counted as in
 * the plan. All queues must be empty. */
static void count_moved(const zr *z, int64_t moved[ZR_MOVED], int64_t times)
{
    for (int queue = 0; queue < ZR_QUEUES; queue++) {
        moved[ZR_WIRE] += times * z->queue[queue].bytes;
        moved[ZR_MESSAGES] += times * z->queue[queue].messages;
        moved[ZR_FAR] += times * z->queue[queue].far;
        int what = zr_queues[queue].to == ZR_FILED ? ZR_STORES : ZR_LOADS;
        moved[what] += times * zr_disk_moved(z, queue);
    }
}

/* Run a training step and return its seconds. apart: wait for all its work. */
static double train_step(zr *z, double *report, int apart)
{
    double begun = zr_now();
    atomic_store(&z->shared->seat[z->rank].step, z->step + 1);
    zr_lives(z, ZR_STEPS);
    zr_progress(z, "step", "micro-batch", z->p->micro_batches);
    zr_step_begin(z);
    zr_profile_step(z, 1);
    z->p->step(z);
    if (apart) zr_drain(z);
    zr_step_end(z);
    zr_profile_step(z, 0);
    zr_call(z, ZR_MAIN, z->p->report, zr_address(report));
    zr_finish(z, ZR_MAIN);
    if (report[ZR_VALID] == 0) report[ZR_LOSS] = NAN; /* the mean over nothing */
    zr_lives(z, ZR_BETWEEN);
    zr_progress(z, NULL, NULL, 0);
    return zr_now() - begun;
}

/* Count the steps skipped in a row, without those that only lower the loss scale. Fails, with the
 * same report on every rank, if there are too many or the scale cannot drop further. */
static void go_on(zr *z, const double *report)
{
    int why = (int)report[ZR_SKIPPED];
    int64_t skips = z->skips = why == ZR_APPLIED ? 0 : z->skips + (why == ZR_FAULTY);
    /* so that rank 0 has logged the step */
    if (why == ZR_LOWEST || skips >= z->p->skips) zr_barrier(z);
    if (why == ZR_LOWEST)
        zr_fail(z, ZR_HOPELESS,
                "the gradient of step %" PRId64 " was not finite, and its loss scale, %g, is the "
                "minimum; lower the learning rate or train.loss_scale.min, or use bf16",
                z->step + 1, report[ZR_SCALE]);
    if (skips >= z->p->skips)
        zr_fail(z, ZR_HOPELESS,
                "the gradients of %" PRId64 " steps in a row, up to step %" PRId64
                ", were not finite or had no targets; lower the learning rate%s, "
                "or check the data",
                skips, z->step + 1, report[ZR_SCALE] > 0 ? " or the loss scale" : "");
}

/* Verify, validate and save after z->step steps, as asked. */
static void between(zr *z, int last, int verifies, int validates, int saves,
                    int64_t moved[ZR_MOVED])
{
    if (!verifies && !validates && !saves) return;
    count_moved(z, moved, 1);
    if (verifies) zr_verify(z); /* first, so that damaged weights are not saved */
    if (saves && !tracks(z)) {  /* before a validation, which may take long */
        zr_checkpoint_save(z, !last);
        saves = 0;
    }
    if (validates) validate(z, z->step);
    if (tracked(z, z->step)) { /* by the validation above */
        last |= zr_best_was_long_ago(z);
        saves |= z->o->checkpoints && last;
        saves |= z->o->keep_best && z->checkpoints->best.step == z->step;
    }
    if (saves) zr_checkpoint_save(z, !last);
    count_moved(z, moved, -1);
}

/* Return whether a checkpoint is saved after this number of steps. */
static int saves_after(const zr_options *o, int64_t steps)
{
    return o->checkpoints && (steps == o->steps || (o->save_every && steps % o->save_every == 0));
}

static int is_done(const zr *z) { return z->step >= z->o->steps || zr_best_was_long_ago(z); }

/* Train. Returns whether the run exits early: it was asked to, and steps are left
 * or the last are not saved. */
static int train(zr *z, double *report, int64_t moved[ZR_MOVED])
{
    int64_t every = z->o->val_every;
    int asked;
    if (z->o->val || z->o->eval || z->o->sample) zr_ready(z, ZR_EVAL, z->p->eval);
    z->first = zr_now();
    count_moved(z, moved, -1);
    while (!(asked = zr_asked_to_leave(z)) && !is_done(z)) {
        int last = z->step + 1 == z->o->steps;
        int due = last ? tracks(z) : every && (z->step + 1) % every == 0;
        int saves = saves_after(z->o, z->step + 1), verifies = zr_verify_due(z, z->step + 1);
        int apart = last || verifies || due || saves || zr_profile_apart(z);
        zr_leave_if_stopped(z);
        double seconds = train_step(z, report, apart);
        zr_checkpoint_end(z);
        zr_log_step(z, report, seconds);
        zr_show_step(z, report);
        zr_profile_end(z);
        go_on(z, report);
        z->step++;
        between(z, last, verifies, due, saves, moved);
    }
    zr_checkpoint_end(z);
    zr_drain(z);
    count_moved(z, moved, 1);
    return asked && (!is_done(z) || z->checkpoints->late);
}

/* Save a checkpoint if there is something new and time for it; the run then exits with code 75 and
 * can be resumed. */
static void save_and_leave(zr *z)
{
    zr_checkpoints *c = z->checkpoints;
    int is_new = z->step > c->from;
    if (is_new && !zr_checkpoint_save(z, 0) && !c->late) {
        zr_checkpoint_close(z);
        zr_barrier(z); /* so that no rank ends the others with its failure */
        zr_fail(z, ZR_ENVIRONMENT, "the run was asked to stop but could not save its checkpoint");
    }
    const char *saved = c->late  ? "its checkpoint is incomplete"
                        : is_new ? "its checkpoint is saved"
                                 : "its checkpoint was saved before";
    zr_print(z, STDERR_FILENO, "%s: stops after step %" PRId64 "; %s\n", z->p->name,
             (int64_t)z->step, saved);
    if (c->late && c->last > 0)
        zr_print(z, STDERR_FILENO, "the newest checkpoint is of step %" PRId64 "\n", c->last);
    else if (c->late) zr_print(z, STDERR_FILENO, "there is no checkpoint\n");
    zr_barrier(z);
    atomic_store(&z->shared->left, 1);
}

/* Fail if the last checkpoint is missing, because a caller that takes the run for complete could
 * not resume it. */
static void check_saved(zr *z)
{
    const zr_checkpoints *c = z->checkpoints;
    if (!z->o->checkpoints || z->step == c->from || c->last == z->step) return;
    zr_fail(z, ZR_ENVIRONMENT, "the last checkpoint, of step %" PRId64 ", could not be saved",
            (int64_t)z->step);
}

/* Fail unless the bytes and collectives counted are the plan's, so that a faulty program or runtime
 * does not end like a correct run. */
static void check_moved(zr *z, const int64_t moved[ZR_MOVED])
{
    static const char *const what[] = {"bytes received", "collectives",
                                       "bytes received from other hosts",
                                       "bytes read from the file", "bytes written to the file"};
    _Static_assert(sizeof what / sizeof *what == ZR_MOVED, "words for all that is counted");
    const int64_t plan[] = {z->p->wire, z->p->messages, z->p->far, z->p->loads, z->p->stores};
    for (int i = 0; i < ZR_MOVED; i++)
        if (moved[i] != plan[i] * (z->step - z->checkpoints->from))
            zr_fail(z, ZR_MISCOUNTED,
                    "%" PRId64 " %s in %" PRId64 " steps; the plan says %" PRId64
                    " a step; regenerate the program, and report it if that does not help",
                    moved[i], what[i], z->step - z->checkpoints->from, plan[i]);
}

/* ---- results */

static void say_token(zr *z, int32_t token)
{
    if (z->p->vocab > 256 || z->o->prompt) zr_print(z, STDOUT_FILENO, "%" PRId32 " ", token);
    else {
        int text = (token >= ' ' && token != 0x7f) || token == '\n' || token == '\t';
        zr_print_byte(z, text ? (char)token : '.');
    }
}

/* Return the token that the ranks with the last token's block have drawn. All groups that share a
 * sample draw the same one; the first group's counts. */
static int32_t told_token(zr *z, int draws, int32_t token)
{
    uint64_t sum[2] = {draws && z->rank < zr_context(z->p) ? (uint64_t)token : 0};
    zr_total(z, sum);
    return (int32_t)sum[0];
}

/* Return the next token: context int32 [n] is evaluated, and the logits of its last token are
 * sampled. */
static int32_t next_token(zr *z, const int32_t *context, int64_t n, uint64_t *state)
{
    int64_t N = zr_context(z->p), rows = z->p->sequence / N;
    int draws = z->rank % N == (n - 1) / rows;
    zr_arrays to = zr_batch_alone(z);
    memcpy(to.tokens, context, (size_t)n * sizeof *context);
    to.targets[n - 1] = 0;
    zr_batch_alone_filled(z);
    zr_call(z, ZR_MAIN, z->p->clear, 0);
    zr_replay(z, ZR_EVAL, z->p->eval);
    double u = (double)(zr_random(state) >> 11) * 0x1p-53;
    zr_draw draw = {z->o->heat, z->o->share, u, (int32_t)z->o->top_k, 0};
    if (draws) zr_call(z, ZR_MAIN, z->p->sample, zr_address(&draw));
    zr_all_dead(z);
    return N > 1 ? told_token(z, draws, draw.token) : draw.token;
}

/* Read the first tokens of a sample into context, and print them. */
static int64_t begin_of_data(zr *z, int32_t *context)
{
    char why[ZR_WHY];
    int64_t T = z->p->sequence, n = T < PROMPT ? T : PROMPT;
    const zr_mix *from = z->o->val ? z->val : z->train;
    if (zr_data_read(&from->of->data, 0, 1, context, context + T, why))
        zr_fail(z, ZR_USER, "%s %s", zr_option_of(z, from), why);
    for (int64_t i = 0; i < n; i++) say_token(z, context[i]);
    return n;
}

/* Sample --sample tokens. Every rank draws the same ones, from the same
 * logits and random numbers. */
static void sample(zr *z)
{
    int64_t T = z->p->sequence;
    uint64_t state = z->o->sample_seed < 0 ? 0 : (uint64_t)z->o->sample_seed;
    if (!z->o->sample) return;
    /* [T], followed by targets that are not used */
    int32_t *context = z->prompt ? z->prompt : zr_get(z, 2 * T, sizeof *context);
    int64_t n = z->prompt ? z->nprompt : begin_of_data(z, context);
    for (int64_t i = 0; i < z->o->sample; i++) {
        int32_t token = next_token(z, context, n, &state);
        say_token(z, token);
        if (n == T) memmove(context, context + 1, (size_t)--n * sizeof *context);
        context[n++] = token;
    }
    zr_print(z, STDOUT_FILENO, "\n");
    free(context);
}

static void save(zr *z)
{
    char why[ZR_WHY];
    if (!z->o->save) return;
    zr_progress(z, "save", "tensor", tensors(z));
    if (zr_save_adapters(z->saving, z, z->rank, why)) zr_fail(z, ZR_ENVIRONMENT, "--save %s", why);
    if (z->o->merge) zr_barrier(z);
    if (zr_save_part(z->saving, z, z->rank, why)) zr_fail(z, ZR_ENVIRONMENT, "--save %s", why);
    zr_barrier(z);
    if (z->rank == 0) {
        zr_temp(z, ZR_SAVING, NULL); /* they are complete */
        if (zr_save_end(z->saving, 1, why)) zr_fail(z, ZR_ENVIRONMENT, "--save %s", why);
    }
    zr_save_close(z->saving);
    zr_barrier(z);
    zr_progress(z, NULL, NULL, 0);
    atomic_store(&z->shared->saved, 1);
}

static void hash(zr *z)
{
    uint64_t sum[2];
    if (!z->o->hash) return;
    zr_hash_weights(z, sum);
    zr_print(z, STDOUT_FILENO, "weights %016" PRIx64 "%016" PRIx64 "\n", sum[0], sum[1]);
}

static void run_rank(zr *z)
{
    double report[ZR_REPORT] = {0};
    int64_t moved[ZR_MOVED] = {0};
    meet(z);
    if (z->o->check_launch) {
        tell_launch(z);
        return;
    }
    if (z->o->check_gpus) {
        zr_check_gpus(z);
        return;
    }
    begin(z);
    int leaves = train(z, report, moved);
    if (leaves) save_and_leave(z);
    zr_checkpoint_close(z);
    if (!leaves) {
        zr_show_stopped(z);
        int64_t step = zr_best_load(z);
        save(z); /* before anything that may fail or be interrupted */
        validate(z, z->step);
        zr_eval(z, step);
    }
    zr_log_end(z, report, moved);
    zr_epilogue(z);
    if (z->rank == 0) gemms(z, ZR_END);
    if (!leaves) {
        sample(z);
        hash(z);
    }
    zr_lives(z, ZR_SILENT);
    zr_queues_stop(z);
    for (int queue = 0; queue < ZR_QUEUES; queue++)
        if (z->queue[queue].k) z->p->close(queue, z->queue[queue].k);
    check_moved(z, moved);
    if (!leaves) check_saved(z);
    zr_log_close(z);
}

/* Open /dev/null for closed stdin, stdout and stderr. Otherwise a file could get one of their
 * numbers, and output would be written into it. */
static void hold_places(void)
{
    int fd = open("/dev/null", O_RDONLY);
    while (fd >= 0 && fd <= STDERR_FILENO) fd = dup(fd);
    if (fd >= 0) close(fd);
}

/* Check the limit of the stack: a rank and each of its threads has some tens of KiB of arrays, and
 * would crash without a message. */
static void check_stack(zr *z)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_STACK, &limit) || limit.rlim_cur >= STACK_KIB << 10) return;
    zr_fail(z, ZR_ENVIRONMENT, "the stack limit is %d KiB, but %d KiB are needed (ulimit -s)",
            (int)(limit.rlim_cur >> 10), STACK_KIB);
}

int zr_main(int argc, char **argv, const zr_program *p)
{
    zr_options o;
    zr z = {.p = p,
            .o = &o,
            .rank = -1,
            .ranks = p->ranks,
            .here = p->ranks,
            .started = zr_now(),
            .net = &(zr_net){.rank = zr_launched(p->ranks), .sharing = p->ranks},
            .train = &(zr_mix){0},
            .val = &(zr_mix){0},
            .choices = &(zr_choices){0},
            .log = &(zr_log){.file = -1, .tty = isatty(STDERR_FILENO)},
            .profile = &(zr_profile){0},
            .checkpoints = &(zr_checkpoints){0},
            .saving = &(zr_saving){0},
            .writer = &(zr_writer){0},
            .watch = &(zr_watch){.lock = PTHREAD_MUTEX_INITIALIZER},
            .queue = (zr_queue[ZR_QUEUES]){{0}}};
    hold_places();
    check_stack(&z);
    if (p->abi != ZR_ABI)
        zr_fail(&z, ZR_DISAGREE, "made for runtime %u, but this is %d; rebuild it", p->abi, ZR_ABI);
    zr_parse(&z, &o, argc, argv);
    if (o.help) zr_help(&z, argv[0]);
    else if (o.version) zr_version(&z);
    if (o.help || o.version) return z.log->lost[ZR_TO_STDOUT] ? ZR_ENVIRONMENT : ZR_OK;
    signal(SIGXFSZ, SIG_IGN); /* so that a file too large is an error of write */
    signal(SIGPIPE, SIG_IGN); /* and a pipe without a reader too */
    if (!o.check_launch && !o.check_gpus) settle_steps(&z, &o);
    zr_prepare(&z);
    int code = zr_ranks(&z, run_rank);
    free(z.t);
    return code;
}
