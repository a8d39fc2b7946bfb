/* weights.c -- saves and loads weights as the ranks of a program would, for test_weights.py.
 *
 *   weights PROGRAM save DIR ARENA...      one arena file per rank; the ranks are processes
 *   weights PROGRAM begin DIR              the first step of a save, then waits for stdin's end
 *   weights PROGRAM load DIR RANK ARENA [drop]
 *                                          fills the arena file in place; the note goes to stdout
 *   weights PROGRAM table DIR...           a line for each: ok, or the error
 *
 * PROGRAM has lines `arena BYTES RANKS`, `type ZR_F32..`, `flat AT STRIDE SHARD COUNT WHOLE` and
 * `tensor NAME OFFSET OFFSET_STEP NDIM SHAPE0 SHAPE1 FLAT FLAT_STEP COUNT FIRST`.
 */
#include "zr_file.h"
#include "zr_grace.h"
#include "zr_memory.h"
#include "zr_progress.h"
#include "zr_safetensors.h"
#include "zr_save.h"
#include "zr_weights.h"
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 64 };

typedef struct model {
    zr_program p;
    zr_group all;
    int64_t arena;
    zr_state states[2 * MOST];
    zr_tensor tensors[MOST];
    char names[MOST][200];
} model;

/* The parts of a rank that saving and loading need. */
struct zr {
    char *arena;
};

void zr_progress_next(zr *z) { (void)z; }
int zr_wrote(zr *z, int fd, int64_t bytes) { return (void)z, (void)fd, (void)bytes, 0; }

void zr_read(zr *z, int queue, void *to, int64_t at, int64_t bytes)
{
    (void)queue;
    memcpy(to, z->arena + at, (size_t)bytes);
}

void zr_write(zr *z, int queue, int64_t at, const void *from, int64_t bytes)
{
    (void)queue;
    memcpy(z->arena + at, from, (size_t)bytes);
}

char *zr_reach(const zr *z, int queue, int64_t at) { return (void)queue, z->arena + at; }

static void need(int good, const char *what)
{
    if (good) return;
    perror(what);
    exit(99); /* a fault of the test itself */
}

static void read_line(model *m, const char *line)
{
    zr_state *s = &m->states[m->p.nstates];
    int32_t whole;
    zr_tensor *t = &m->tensors[m->p.ntensors];
    char *name = m->names[m->p.ntensors];
    if (sscanf(line, "arena %" SCNd64 " %" SCNd32, &m->arena, &m->p.ranks) == 2) {
        m->all = (zr_group){"all", m->p.ranks};
        m->p.groups = &m->all;
        return;
    }
    if (sscanf(line, "type %" SCNd32, &m->p.type) == 1) return;
    if (sscanf(line, "flat %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd32 " %" SCNd32, &s->at,
               &s->stride, &s->shard, &s->count, &whole) == 5) {
        s->what = "master";
        s->n = s->shard;
        s->flat = m->p.nstates / 2;
        s->over = whole ? -1 : 0;
        s[1] = *s;
        s[1].what = "m"; /* no file of weights has this state */
        s[1].at = INT64_MIN / 2;
        m->p.nstates += 2;
        return;
    }
    need(sscanf(line,
                "tensor %199s %" SCNd64 " %" SCNd64 " %" SCNd32 " %" SCNd64 " %" SCNd64 " %" SCNd32
                " %" SCNd32 " %" SCNd32 " %" SCNd32,
                name, &t->offset, &t->offset_step, &t->ndim, &t->shape[0], &t->shape[1], &t->flat,
                &t->flat_step, &t->count, &t->first) == 10,
         line);
    t->name = name;
    m->p.ntensors++;
}

static void read_program(model *m, const char *file)
{
    char line[1000];
    FILE *f = fopen(file, "r");
    need(f != NULL, file);
    *m = (model){.p = {.name = "bench", .plan = "feed", .layout = "beef", .tensors = m->tensors}};
    m->p.states = m->states;
    while (fgets(line, sizeof line, f)) read_line(m, line);
    fclose(f);
}

static int report(const char *why)
{
    fprintf(stderr, "%s\n", why);
    return 2;
}

/* Returns a copy on the heap, where the sanitizer sees its ends. */
static char *arena(const model *m, const char *file)
{
    size_t n = (size_t)m->arena;
    char *a = malloc(n);
    int fd = open(file, O_RDONLY);
    need(a && fd >= 0 && read(fd, a, n) == (ssize_t)n, file);
    close(fd);
    return a;
}

/* FROM, TYPE and MOST of `save` and `begin` from the environment */
static int open_saving(zr_saving *s, const model *m, const char *dir, int rank, char *note)
{
    char why[ZR_WHY];
    const char *most = getenv("MOST"), *type = getenv("TYPE"), *from = getenv("FROM");
    static uint8_t types[MOST * MOST];
    int own = from && !type;
    if (own && zr_stored_types(&m->p, &zr_masters, from, types, why)) return report(why);
    int bad = zr_save_open(s, &m->p, rank, dir, from, 0, type ? atoi(type) : -1, own ? types : NULL,
                           most ? atoll(most) : INT64_MAX, note, why);
    return bad ? report(why) : 0;
}

static int save(const model *m, const char *dir, char **files)
{
    char why[ZR_WHY], note[ZR_WHY];
    int ok = 1, status;
    zr_saving s;
    if (open_saving(&s, m, dir, 0, note)) return 2;
    if (*note) puts(note);
    int bad = zr_save_begin(&s, why) ? report(why) : 0;
    const char *taken = getenv("TAKEN"); /* a name that a folder takes meanwhile */
    if (!bad && taken) need(!unlink(taken) && !mkdir(taken, 0777), taken);
    fflush(stdout);
    for (int rank = 0; !bad && rank < m->p.ranks; rank++)
        if (fork() == 0) {
            zr z = {arena(m, files[rank])};
            zr_saving own;
            if (open_saving(&own, m, dir, rank, note)) _exit(2);
            _exit(zr_save_part(&own, &z, rank, why) ? report(why) : 0);
        }
    while (wait(&status) > 0) ok &= WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (!bad) bad = zr_save_end(&s, ok, why) ? report(why) : ok ? 0 : 2;
    zr_save_close(&s);
    return bad;
}

static int begin(const model *m, const char *dir)
{
    char why[ZR_WHY], note[ZR_WHY], c;
    zr_saving s;
    if (open_saving(&s, m, dir, 0, note)) return 2;
    int bad = zr_save_begin(&s, why) ? report(why) : 0;
    if (!bad) {
        puts("begun");
        fflush(stdout);
        while (read(0, &c, 1) > 0) continue;
        bad = zr_save_end(&s, 0, why) ? report(why) : 0;
    }
    zr_save_close(&s);
    return bad;
}

static int load(const model *m, const char *dir, int rank, const char *file, int drop)
{
    char why[ZR_WHY], note[ZR_WHY];
    zr z = {arena(m, file)};
    int bad = zr_load(&m->p, &z, rank, dir, drop, note, why);
    int fd = open(file, O_WRONLY);
    need(fd >= 0 && write(fd, z.arena, (size_t)m->arena) == m->arena && !close(fd), file);
    free(z.arena);
    if (bad) return report(why);
    if (*note) puts(note);
    return 0;
}

static int table(int n, char **dirs)
{
    char why[ZR_WHY];
    zr_table t;
    for (int i = 0; i < n; i++) {
        if (zr_table_open(&t, dirs[i], why)) {
            puts(why);
            continue;
        }
        puts("ok");
        zr_table_close(&t);
    }
    return 0;
}

int main(int argc, char **argv)
{
    static model m;
    need(argc > 3, "arguments");
    read_program(&m, argv[1]);
    if (!strcmp(argv[2], "save") && argc == 4 + m.p.ranks) return save(&m, argv[3], argv + 4);
    if (!strcmp(argv[2], "begin")) return begin(&m, argv[3]);
    if (!strcmp(argv[2], "load") && argc >= 6)
        return load(&m, argv[3], atoi(argv[4]), argv[5], argc > 6);
    if (!strcmp(argv[2], "table")) return table(argc - 3, argv + 3);
    need(0, argv[2]);
}
