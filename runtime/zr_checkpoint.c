/* zr_checkpoint.c -- checkpoints: their folders, saving by all ranks, resuming. */
#define _GNU_SOURCE
#include "zr_checkpoint.h"
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_grace.h"
#include "zr_handshake.h"
#include "zr_log.h"
#include "zr_memory.h"
#include "zr_mix.h"
#include "zr_options.h"
#include "zr_products.h"
#include "zr_progress.h"
#include "zr_rank.h"
#include "zr_seats.h"
#include "zr_shared.h"
#include "zr_weights.h"
#include "zr_writer.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define TIME_IS_UP (UINT64_C(1) << 32)
enum { PATIENCE = 100, PATIENCE_MS = 100, SHORT = 64 };
static const double slow = 1e8; /* bytes/s of a disk, until a checkpoint has been timed */
static const char record[] = "run.json";
/* files that a program of any recipe may save */
static const char *const states[] = {"model", "master", "exp_avg", "exp_avg_sq", "momentum"};

/* ---- contents of a checkpoint */

static void add_stored(zr_checkpoints *c, zr_stored s)
{
    for (int i = 0; i < c->nstored; i++)
        if (!strcmp(c->stored[i].file, s.file)) return;
    if (c->nstored < ZR_STORED) c->stored[c->nstored++] = s;
}

/* List the files: the model in its type of computation; masters of another type; each state of the
 * optimizer in its own type. */
static void find_stored(zr *z, zr_checkpoints *c)
{
    const zr_program *p = z->p;
    add_stored(c, (zr_stored){.file = "model", .what = "master", .type = p->type});
    for (const zr_state *s = p->states; s < p->states + p->nstates; s++) {
        int master = !strcmp(s->what, "master");
        int kept = s->flat >= 0 && strcmp(s->what, "params");
        if (kept && (!master || s->type != p->type))
            add_stored(c, (zr_stored){s->what, s->what, s->type, .alone = master});
    }
    for (int i = 0; i < c->nstored; i++) {
        if (zr_stored_open(&c->header[i], p, &c->stored[i], 0, INT64_MAX))
            zr_fail(z, ZR_ENVIRONMENT, "out of memory");
        c->tensors += c->header[i].tensors;
        c->bytes += c->header[i].n + c->header[i].data;
    }
    c->sums = zr_get(z, c->tensors, sizeof *c->sums);
    c->chunk = zr_chunk_new();
    if (!c->chunk) zr_fail(z, ZR_ENVIRONMENT, "out of memory");
}

/* ---- folders */

/* to[ZR_FILE] = DIR/STEP, or DIR/STEP/NAME. kind: 0, or the suffix of a temporary name. */
static int path_of(zr *z, char *to, int64_t step, const char *kind, const char *name, char *why)
{
    char folder[SHORT + ZR_FILE / 2];
    snprintf(folder, sizeof folder, "%sstep-%08" PRId64 "%s%s%s", kind ? "." : "", step,
             kind ? kind : "", name ? "/" : "", name ? name : "");
    return zr_path(to, z->o->checkpoints, folder, why);
}

/* Return the rest of a folder's name after "step-00001000" or the like; NULL: not such a name. */
static const char *behind_step(const char *name)
{
    const char *digits = name + 5;
    size_t n = strncmp(name, "step-", 5) ? 0 : strspn(digits, "0123456789");
    return n < 8 || n > 10 ? NULL : digits + n;
}

/* Return the step of a folder's name; -1: not a checkpoint. */
static int64_t step_of(const char *name)
{
    const char *rest = behind_step(name);
    return !rest || *rest ? -1 : strtoll(name + 5, NULL, 10);
}

/* Return whether it is the name of a folder that a killed run leaves. */
static int is_left(const char *name)
{
    if (!strncmp(name, ".room-", 6)) return name[6] && !name[6 + strspn(name + 6, "0123456789")];
    const char *rest = *name == '.' ? behind_step(name + 1) : NULL;
    return rest && (!strcmp(rest, ".part") || !strcmp(rest, ".gone"));
}

static int remove_file(const char *folder, const char *name)
{
    char file[ZR_FILE], why[ZR_WHY];
    return zr_path(file, folder, name, why) ? -1 : unlink(file);
}

/* Return whether it is a folder, not a link to one; else errno is set. */
static int is_folder(const char *path)
{
    struct stat s;
    if (lstat(path, &s)) return 0;
    errno = ENOTDIR;
    return S_ISDIR(s.st_mode);
}

/* Remove a checkpoint's files, and its folder unless it holds other files too. Does not follow
 * links. Returns 0, or -1 and errno. */
static int remove_checkpoint(const char *folder)
{
    char name[SHORT];
    if (!is_folder(folder)) return -1;
    for (size_t i = 0; i < sizeof states / sizeof *states; i++) {
        snprintf(name, sizeof name, "%s.safetensors", states[i]);
        remove_file(folder, name);
    }
    remove_file(folder, record);
    return rmdir(folder);
}

int zr_checkpoint_is_there(zr *z, int64_t step)
{
    char file[ZR_FILE], why[ZR_WHY];
    struct stat s;
    return !path_of(z, file, step, NULL, record, why) && !stat(file, &s);
}

static int exempt(zr *z, int64_t step) { return z->o->keep_every && step % z->o->keep_every == 0; }

static int by_step(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

static void add_kept(zr *z, int64_t step)
{
    zr_checkpoints *c = z->checkpoints;
    c->kept = realloc(c->kept, (size_t)(c->nkept + z->o->keep + 3) * sizeof *c->kept);
    if (!c->kept) zr_fail(z, ZR_ENVIRONMENT, "out of memory");
    c->kept[c->nkept++] = step;
}

/* List the complete checkpoints by step, and remove unfinished ones. */
static void look_into(zr *z)
{
    char why[ZR_WHY], file[ZR_FILE];
    struct dirent *e;
    DIR *d = opendir(z->o->checkpoints);
    if (!d) zr_fail(z, ZR_ENVIRONMENT, "--checkpoints %s: %s", z->o->checkpoints, strerror(errno));
    while ((e = readdir(d))) {
        int64_t step = step_of(e->d_name);
        if (is_left(e->d_name) && !zr_path(file, z->o->checkpoints, e->d_name, why))
            remove_checkpoint(file);
        if (step < 0 || !zr_checkpoint_is_there(z, step)) continue;
        if (step > z->checkpoints->last) z->checkpoints->last = step;
        if (!exempt(z, step)) add_kept(z, step);
    }
    closedir(d);
    if (z->checkpoints->nkept)
        qsort(z->checkpoints->kept, (size_t)z->checkpoints->nkept, sizeof *z->checkpoints->kept,
              by_step);
}

/* Lock the folder against other runs; a run about to end gets time to do so. */
static void lock_folder(zr *z)
{
    char file[ZR_FILE], why[ZR_WHY];
    errno = 0;
    if (zr_make_dir(z->o->checkpoints, why) || zr_path(file, z->o->checkpoints, ".lock", why))
        zr_fail(z, zr_code_of(errno), "--checkpoints %s", why);
    int fd = open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) zr_fail(z, zr_code_of(errno), "--checkpoints %s: %s", file, strerror(errno));
    for (int i = 0; flock(fd, LOCK_EX | LOCK_NB); i++) {
        if (errno != EWOULDBLOCK) {
            zr_print(z, STDERR_FILENO,
                     "--checkpoints %s: cannot be locked (%s): make sure that no other run writes "
                     "there\n",
                     z->o->checkpoints, strerror(errno));
            return;
        }
        if (i == PATIENCE)
            zr_fail(z, ZR_USER, "--checkpoints %s: another run is writing there",
                    z->o->checkpoints);
        poll(NULL, 0, PATIENCE_MS);
    }
}

/* ---- reserved space: allocated files in folders .room-0 ...; a checkpoint takes the last */

/* Return the number of checkpoints still to write, without those that signals request. */
static int64_t still_to_save(const zr *z)
{
    int64_t every = z->o->save_every, at = z->checkpoints->at, steps = z->o->steps;
    int64_t most = z->o->keep_best ? steps / z->o->val_every - at / z->o->val_every : 0;
    if (at >= steps) return 0;
    return most + (every ? steps / every - at / every + (steps % every != 0) : 1);
}

/* Return how many will be written before an old checkpoint is deleted. */
static int64_t rooms_wanted(const zr *z)
{
    int64_t more = z->o->keep + z->o->keep_best + 1 - z->checkpoints->nkept;
    int64_t most = still_to_save(z);
    if (more < 1) more = 1;
    return more < most ? more : most;
}

static int room_path(zr *z, char *to, int64_t i, char *why)
{
    char name[SHORT];
    snprintf(name, sizeof name, ".room-%" PRId64, i);
    return zr_path(to, z->o->checkpoints, name, why);
}

/* Open the files of a folder as c->fd, creating them if needed, and allocate their space. */
static int open_files(zr *z, const char *folder, char *why)
{
    zr_checkpoints *c = z->checkpoints;
    char file[ZR_FILE], name[SHORT];
    for (int i = 0; i <= c->nstored; i++) c->fd[i] = -1;
    if (mkdir(folder, 0777) && (errno != EEXIST || !is_folder(folder)))
        return zr_why(why, "%s: %s", folder, strerror(errno));
    for (int i = 0; i < c->nstored; i++) {
        snprintf(name, sizeof name, "%s.safetensors", c->stored[i].file);
        if (zr_path(file, folder, name, why)) return -1;
        c->fd[i] = zr_stored_begin(&c->header[i], file, why);
        if (c->fd[i] < 0) return -1;
    }
    if (zr_path(file, folder, record, why)) return -1;
    int fd = c->fd[c->nstored] = open(file, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) return zr_why(why, "%s: %s", file, strerror(errno));
    return zr_reserve(fd, c->record.n, file, why);
}

static void close_files(zr_checkpoints *c)
{
    for (int i = 0; i <= c->nstored; i++) {
        if (c->fd[i] >= 0) close(c->fd[i]);
        c->fd[i] = -1;
    }
}

static int add_room(zr *z, char *why)
{
    zr_checkpoints *c = z->checkpoints;
    char folder[ZR_FILE];
    if (room_path(z, folder, c->rooms, why)) return -1;
    if (mkdir(folder, 0777))
        return zr_why(why, "%s: %s%s", folder, strerror(errno),
                      errno == EEXIST ? "; it has files that no run wrote: move it away" : "");
    int bad = open_files(z, folder, why), error = errno;
    close_files(c);
    if (bad) remove_checkpoint(folder);
    else c->rooms++;
    errno = error;
    return bad;
}

/* Reserve space again, after an old checkpoint was removed or one was given up. */
static void hold_room(zr *z)
{
    char why[ZR_WHY];
    while (z->checkpoints->rooms < rooms_wanted(z))
        if (add_room(z, why)) {
            zr_print(z, STDERR_FILENO, "no disk space is reserved for the next checkpoint: %s\n",
                     why);
            return;
        }
}

void zr_checkpoint_close(zr *z)
{
    zr_checkpoints *c = z->checkpoints;
    char folder[ZR_FILE], why[ZR_WHY];
    zr_writer_stop(z);
    for (; c->rooms > 0; c->rooms--)
        if (!room_path(z, folder, c->rooms - 1, why)) remove_checkpoint(folder);
}

/* Reserve space for all checkpoints to be kept, and one more being written. */
static void reserve_rooms(zr *z)
{
    zr_checkpoints *c = z->checkpoints;
    char why[ZR_WHY];
    struct statvfs v;
    int64_t more = rooms_wanted(z);
    int64_t room =
        statvfs(z->o->checkpoints, &v) ? INT64_MAX : (int64_t)v.f_bavail * (int64_t)v.f_frsize;
    if (more && room / more < c->bytes)
        zr_fail(z, ZR_ENVIRONMENT,
                "--checkpoints %s: %" PRId64 " more checkpoints of %" PRId64
                " bytes each are to be kept, but the "
                "disk has %" PRId64 " bytes free",
                z->o->checkpoints, more, c->bytes, room);
    while (c->rooms < more) {
        errno = 0;
        if (add_room(z, why)) zr_fail(z, zr_code_of(errno), "--checkpoints %s", why);
    }
}

/* Fail unless rank 0's reserved file exists for this rank: its host may have another folder. */
static void check_room(zr *z)
{
    char room[ZR_FILE], file[ZR_FILE], why[ZR_WHY];
    int64_t rooms = z->checkpoints->rooms;
    zr_tell(z, &rooms, sizeof rooms);
    if (z->rank == 0 || !rooms) return;
    if (room_path(z, room, 0, why) || zr_path(file, room, "model.safetensors", why))
        zr_fail(z, ZR_USER, "--checkpoints %s", why);
    int fd = open(file, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        zr_fail(z, zr_code_of(errno),
                "--checkpoints %s: %s; all ranks write into the folder that rank 0 creates", file,
                strerror(errno));
    close(fd);
}

/* Return the step to resume from; 0: none. */
static int64_t step_to_resume(zr *z)
{
    const char *resume = z->o->resume;
    int64_t last = z->checkpoints->last;
    if (resume && !strcmp(resume, "no")) {
        if (last >= 0)
            zr_fail(z, ZR_USER,
                    "--resume no: %s has a checkpoint of step %" PRId64 "; name another folder",
                    z->o->checkpoints, last);
        return 0;
    }
    int64_t step = z->o->resume_step ? z->o->resume_step : last < 0 ? 0 : last;
    if (step > z->o->steps)
        zr_fail(z, ZR_USER,
                "%s: %" PRId64 " steps, but the checkpoint in %s is of step %" PRId64
                "; steps count from the start of training: give that many or more",
                z->o->epochs ? "--epochs" : "--steps", z->o->steps, z->o->checkpoints, step);
    if (step && !zr_checkpoint_is_there(z, step))
        zr_fail(z, ZR_USER, "--resume %s: %s has no checkpoint of this step", resume,
                z->o->checkpoints);
    if (step && step < last)
        zr_fail(z, ZR_USER,
                "--resume %s: %s has a checkpoint of step %" PRId64
                ", which the run would write again; move it away",
                resume, z->o->checkpoints, last);
    return step;
}

int zr_past_order(zr *z)
{
    char why[ZR_WHY], file[ZR_FILE];
    int order = -1;
    if (z->rank == 0 && z->checkpoints->from &&
        (path_of(z, file, z->checkpoints->from, NULL, record, why) ||
         zr_run_order(file, &order, why)))
        zr_fail(z, ZR_USER, "--checkpoints %s", why);
    zr_tell(z, &order, sizeof order);
    return order;
}

/* Make the recipe: the program's lines and those that the command line adds. */
static void list_recipe(zr *z, zr_checkpoints *c)
{
    const zr_mix *m = z->train;
    char *line = NULL;
    size_t n = 0;
    const char **recipe = zr_get(z, z->p->nrecipe + 2, sizeof *recipe);
    if (z->p->nrecipe) memcpy(recipe, z->p->recipe, (size_t)z->p->nrecipe * sizeof *recipe);
    c->recipe = recipe;
    c->nrecipe = z->p->nrecipe;
    if (zr_order_line(z)) recipe[c->nrecipe++] = zr_order_line(z);
    if (m->n < 2) return;
    FILE *to = open_memstream(&line, &n);
    for (int k = 0; to && k < m->n; k++)
        fprintf(to, "%s%" PRId64, k ? ", " : "data.weights: [", m->of[k].weight);
    if (to) putc(']', to);
    if (!to || fclose(to)) zr_fail(z, ZR_ENVIRONMENT, "out of memory");
    recipe[c->nrecipe++] = line;
}

void zr_checkpoint_find(zr *z)
{
    zr_checkpoints *c = z->checkpoints;
    c->last = -1;
    if (!z->o->checkpoints) return;
    if (z->rank == 0) {
        lock_folder(z);
        look_into(z);
        c->from = c->at = step_to_resume(z);
    }
    zr_tell(z, &c->from, sizeof c->from);
}

void zr_checkpoint_open(zr *z)
{
    zr_checkpoints *c = z->checkpoints;
    if (!z->o->checkpoints) return;
    zr_data_text(z->train, c->data);
    list_recipe(z, c);
    find_stored(z, c);
    zr_run_open(z, &c->record, c->tensors);
    c->bytes += c->record.n;
    if (z->rank == 0) {
        reserve_rooms(z);
        if (!c->kept) c->kept = zr_get(z, z->o->keep + 3, sizeof *c->kept);
    }
    if (z->o->save_every) zr_writer_start(z);
    check_room(z);
    if (z->o->profile && z->o->profile_first <= c->from)
        zr_fail(z, ZR_USER,
                "--profile: the run resumes from step %" PRId64 "; give later --profile-steps",
                c->from);
    z->step = c->from;
    if (c->from) c->last = c->from;
}

/* ---- resuming */

/* Fail unless the sums over all ranks are those of the record. */
static void compare_sums(zr *z, const zr_past *past, const char *folder)
{
    zr_checkpoints *c = z->checkpoints;
    int64_t at = 0;
    for (int i = 0; i < c->nstored; i++)
        for (int64_t t = 0; t < c->header[i].tensors; t++, at++) {
            uint64_t sum[2] = {c->sums[at]};
            zr_total(z, sum);
            if (sum[0] == past->sums[at]) continue;
            char name[SHORT * 4];
            zr_stored_name(z->p, &c->stored[i], t, name, sizeof name);
            zr_fail(z, ZR_USER,
                    "%s/%s.safetensors: tensor %s is damaged: its checksum differs from "
                    "run.json's; move the folder away to resume from the checkpoint before it",
                    folder, c->stored[i].file, name);
        }
}

static void set_control(zr *z, const zr_past *past)
{
    const zr_program *p = z->p;
    for (const zr_state *s = p->states; s < p->states + p->nstates; s++)
        if (s->flat < 0) zr_write(z, s->queue, s->at, &past->control[s - p->states].bits, 8);
}

/* Return whether it is a CPU's kernel object: all of them give the same bits. */
static int is_cpus(const char *object)
{
    return !strncmp(object, "avx", 3) || !strcmp(object, "amx");
}

/* Load all states of the checkpoint of a step; the caller frees the arrays of `past`. */
static void load_step(zr *z, int64_t step, zr_past *past, char folder[ZR_FILE])
{
    char why[ZR_WHY], file[ZR_FILE];
    zr_checkpoints *c = z->checkpoints;
    uint64_t *sums = c->sums;
    past->sums = zr_get(z, c->tensors, sizeof *past->sums);
    past->control = zr_get(z, z->p->nstates, sizeof *past->control);
    if (path_of(z, folder, step, NULL, NULL, why) || path_of(z, file, step, NULL, record, why))
        zr_fail(z, ZR_USER, "--checkpoints %s", why);
    errno = 0;
    int bad = zr_run_read(z, file, past, why);
    if (bad) zr_fail(z, bad < 0 ? zr_code_of(errno) : ZR_DISAGREE, "%s", why);
    if (past->steps != step)
        zr_fail(z, ZR_USER, "%s: is a checkpoint of step %" PRId64, file, past->steps);
    memset(c->sums, 0, (size_t)c->tensors * sizeof *c->sums);
    /* masters follow the model, which has the parameters without masters */
    for (int i = 0; i < c->nstored; i++) {
        if (zr_stored_read(z, z->p, &c->stored[i], z->rank, folder, sums, why))
            zr_fail(z, zr_code_of(errno), "%s", why);
        sums += c->header[i].tensors;
    }
    compare_sums(z, past, folder);
    set_control(z, past);
}

static void forget(zr_past *past) { free(past->sums), free(past->control); }

void zr_checkpoint_load(zr *z)
{
    char folder[ZR_FILE];
    zr_checkpoints *c = z->checkpoints;
    zr_past past = {0};
    zr_progress(z, "resume", "tensor", c->tensors);
    load_step(z, c->from, &past, folder);
    z->skips = past.skips;
    z->log->skipped = past.skipped;
    c->best = past.best;
    forget(&past);
    zr_print(z, STDERR_FILENO, "resumes from step %" PRId64 ", %s\n", c->from, folder);
    if (strcmp(past.kernels, z->p->object()) && !(is_cpus(past.kernels) && !zr_is_gpu))
        zr_print(z, STDERR_FILENO,
                 "it was trained with kernels %s; kernels %s round differently, so bits change\n",
                 past.kernels, z->p->object());
    else c->algorithms = past.algorithms;
    zr_barrier(z);
}

void zr_checkpoint_read(zr *z, int64_t step)
{
    char folder[ZR_FILE];
    zr_past past = {0};
    zr_progress(z, "load the best", "tensor", z->checkpoints->tensors);
    load_step(z, step, &past, folder);
    forget(&past);
}

/* ---- saving */

/* Return whether no rank failed. Notes on all ranks whether one failed for lack of time. */
static int all_well(zr *z, int bad)
{
    uint64_t sum[2] = {bad != 0, bad && zr_late(z)};
    zr_total(z, sum);
    z->checkpoints->late |= sum[1] != 0;
    return sum[0] == 0;
}

/* Make the folder under its temporary name, and its files with all their space. */
static int begin_checkpoint(zr *z, char *why)
{
    zr_checkpoints *c = z->checkpoints;
    char part[ZR_FILE], room[ZR_FILE];
    if (path_of(z, part, c->at, ".part", NULL, why)) return -1;
    if (c->rooms && !room_path(z, room, c->rooms - 1, why) && !rename(room, part)) c->rooms--;
    return open_files(z, part, why);
}

static int write_states(zr *z, char *why)
{
    zr_checkpoints *c = z->checkpoints;
    uint64_t *sums = c->sums;
    char file[ZR_FILE], name[SHORT];
    memset(c->sums, 0, (size_t)c->tensors * sizeof *c->sums);
    for (int i = 0; i < c->nstored; i++) {
        snprintf(name, sizeof name, "%s.safetensors", c->stored[i].file);
        if (path_of(z, file, c->at, ".part", name, why) ||
            zr_stored_write(z, z->p, &c->stored[i], &c->header[i], z->rank, file, c->chunk, sums,
                            why))
            return -1;
        sums += c->header[i].tensors;
    }
    return 0;
}

static int sync_folder(const char *folder)
{
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int bad = fd < 0 || fsync(fd);
    if (fd >= 0) close(fd);
    return bad;
}

/* Write run.json, then give the folder the name that marks it complete. */
static int finish_checkpoint(zr *z, char *why)
{
    zr_checkpoints *c = z->checkpoints;
    char part[ZR_FILE], whole[ZR_FILE];
    int fd = c->fd[c->nstored];
    if (path_of(z, part, c->at, ".part", NULL, why) || path_of(z, whole, c->at, NULL, NULL, why))
        return -1;
    if (zr_run_write(&c->record, c->sums, c->tensors, fd) || fsync(fd) || sync_folder(part) ||
        rename(part, whole))
        return zr_why(why, "%s: %s", whole, strerror(errno));
    if (!sync_folder(z->o->checkpoints)) return 0;
    zr_why(why, "%s: %s", whole, strerror(errno));
    rename(whole, part); /* a checkpoint that is given up must not keep its final name */
    return -1;
}

/* Let the link `best` lead to the checkpoint of a step; gone: remove it if it does. */
static void name_best(zr *z, int64_t step, int gone)
{
    char folder[ZR_FILE], why[ZR_WHY];
    if (path_of(z, folder, step, NULL, NULL, why) ||
        (gone ? zr_unlink : zr_link)(z->o->checkpoints, "best", strrchr(folder, '/') + 1, why))
        zr_print(z, STDERR_FILENO, "%s\n", why);
}

/* Name the best, and remove checkpoints beyond --keep but it; each is first renamed, so that it no
 * longer counts. */
static void prune(zr *z)
{
    zr_checkpoints *c = z->checkpoints;
    char why[ZR_WHY], from[ZR_FILE], to[ZR_FILE];
    if (!exempt(z, c->at)) c->kept[c->nkept++] = c->at;
    if (z->o->keep_best && c->at == c->best.step) name_best(z, c->at, 0);
    for (;;) {
        int64_t i = z->o->keep_best && c->nkept > 0 && c->kept[0] == c->best.step;
        if (c->nkept - i <= z->o->keep) break;
        int64_t step = c->kept[i], *at = c->kept + i;
        memmove(at, at + 1, (size_t)(--c->nkept - i) * sizeof *at);
        name_best(z, step, 1);
        if (path_of(z, from, step, NULL, NULL, why) || path_of(z, to, step, ".gone", NULL, why) ||
            !zr_checkpoint_is_there(z, step) || rename(from, to) || remove_checkpoint(to))
            zr_print(z, STDERR_FILENO, "checkpoint of step %" PRId64 ": cannot be removed: %s\n",
                     step, strerror(errno));
    }
    hold_room(z);
}

static void add_sums(zr *z)
{
    zr_checkpoints *c = z->checkpoints;
    for (int64_t i = 0; i < c->tensors; i += 2) {
        uint64_t sum[2] = {c->sums[i], i + 1 < c->tensors ? c->sums[i + 1] : 0};
        zr_total(z, sum);
        c->sums[i] = sum[0];
        if (i + 1 < c->tensors) c->sums[i + 1] = sum[1];
    }
}

/* Remove rank 0's unfinished files, and report why. */
static void give_up(zr *z, const char *why)
{
    zr_checkpoints *c = z->checkpoints;
    char part[ZR_FILE], other[ZR_WHY], who[ZR_HOST_NAME];
    int gave_up = c->late || atomic_load(&z->writer->stop);
    if (z->rank && *why && !gave_up && atomic_exchange(&z->shared->said, c->at) != c->at)
        zr_print_any(z, "%s: %s\n", zr_who(z, z->rank, who), why);
    if (z->rank) return;
    zr_print(z, STDERR_FILENO, "no checkpoint of step %" PRId64 ": %s\n", c->at,
             c->late ? "the time of --grace has passed"
             : atomic_load(&z->writer->stop)
                 ? "the next update has waited for it too long (ZR_SAVE_S)"
             : *why ? why
                    : "another rank could not write its part");
    if (!path_of(z, part, c->at, ".part", NULL, other)) remove_checkpoint(part);
    hold_room(z);
}

/* Complete a checkpoint once all ranks have written: sums, then its name. well: no rank has failed
 * so far; bad: this rank has. */
static int end_saving(zr *z, int well, int bad, char *why)
{
    zr_checkpoints *c = z->checkpoints;
    if (well) well = all_well(z, bad);
    if (well) add_sums(z);
    if (well) well = all_well(z, z->rank == 0 && finish_checkpoint(z, why));
    if (z->rank == 0) close_files(c);
    if (!well) {
        give_up(z, why);
        return 0;
    }
    c->last = c->at;
    if (z->rank == 0) prune(z);
    return 1;
}

/* Count the pause of training since `begun`, and return its seconds. */
static double paused(zr_checkpoints *c, double begun)
{
    double seconds = zr_now() - begun;
    c->pause += seconds;
    c->saving += seconds;
    return seconds;
}

/* Report the end. whole: seconds that the checkpoint took before `begun`. */
static void told_end(zr *z, int well, double begun, double whole)
{
    zr_checkpoints *c = z->checkpoints;
    zr_progress(z, NULL, NULL, 0);
    whole += paused(c, begun);
    if (whole > c->save) c->save = whole;
    if (well) zr_log_checkpoint(z, c->at, whole, c->pause + c->waited);
}

int zr_checkpoint_save(zr *z, int beside)
{
    zr_checkpoints *c = z->checkpoints;
    char why[ZR_WHY] = "";
    if (!z->o->checkpoints || c->late) return 0;
    if (c->last == z->step) return 1;
    c->begun = zr_now();
    zr_progress(z, "checkpoint", "tensor", c->tensors);
    c->at = z->step;
    c->pause = c->waited = 0;
    zr_run_note(z, &c->record);
    int well = all_well(z, z->rank == 0 && begin_checkpoint(z, why));
    c->beside = well && beside && z->writer->there;
    if (c->beside) {
        zr_progress(z, NULL, NULL, 0);
        zr_writer_begin(z, write_states);
        paused(c, c->begun);
        return 1;
    }
    well = end_saving(z, well, well && write_states(z, why), why);
    told_end(z, well, c->begun, 0);
    return well;
}

void zr_checkpoint_end(zr *z)
{
    zr_checkpoints *c = z->checkpoints;
    if (!c->beside) return;
    double begun = zr_now();
    zr_progress(z, "checkpoint", NULL, 0);
    zr_writer_wait(z);
    c->beside = 0;
    int well = end_saving(z, 1, z->writer->bad, z->writer->why);
    double ended = z->writer->ended;
    told_end(z, well, begun, (ended < begun ? ended : begun) - c->begun);
    atomic_store(&z->writer->stop, 0); /* it was for this checkpoint */
}

/* Return whether too little time is left for another step and a checkpoint. Never before the first
 * step, so that a run restarted again and again makes progress. */
static int time_is_up(zr *z)
{
    zr_checkpoints *c = z->checkpoints;
    double now = zr_now(), left = z->started + (double)z->o->max_time - now;
    double turn = c->turned > 0 ? now - c->turned - c->saving : 0;
    if (turn > c->turn) c->turn = turn;
    c->turned = now;
    c->saving = 0;
    double save = c->save > 0 ? c->save : (double)c->bytes / slow;
    double step = c->beside && save > c->turn ? save : c->turn; /* its update waits */
    if (!z->o->max_time || c->turn == 0 || z->step == z->o->steps || left > step + save) return 0;
    zr_print(z, STDERR_FILENO,
             "--max-time: %.3g s are left; a step takes %.3g s, a checkpoint %.3g s\n", left, step,
             save);
    return 1;
}

/* Return whether a signal or --max-time asks to exit. Ranks without a signal adopt its time. */
int zr_asked_to_leave(zr *z)
{
    if (!z->o->checkpoints) return 0;
    double asked = atomic_load(&z->shared->asked), now = zr_now();
    uint64_t sum[2] = {asked > 0, asked > 0 ? (uint64_t)(1e3 * (now - asked)) : 0};
    if (z->rank == 0 && time_is_up(z)) sum[0] += TIME_IS_UP;
    zr_total(z, sum);
    uint64_t signals = sum[0] % TIME_IS_UP;
    if (signals) zr_ask(z->shared, now - 1e-3 * (double)(sum[1] / signals));
    return sum[0] != 0;
}
