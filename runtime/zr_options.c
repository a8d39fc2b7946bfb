/* zr_options.c -- the command line and the settings in the environment.
 *
 * Invariants
 *  1. What is wrong with an option alone is found here, before anything is done; exit code 2.
 */
#define _GNU_SOURCE
#include "zr_int.h"
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_STEPS = 1000000000, MOST_THREADS = 1024 };

enum { TEXT, NUMBER, FLAG };

#define AT(field) offsetof(zr_options, field)
static const struct option {
    const char *name, *operand, *help;
    int kind;
    size_t at;                            /* in zr_options */
    int64_t least, most;
} options[] = {
    {"--data", "FILE", "tokens to train on: uint16, without a header or with llm.c's", TEXT,
     AT(data), 0, 0},
    {"--steps", "N", "training steps; 0 trains nothing", NUMBER, AT(steps), 0, MOST_STEPS},
    {"--val", "FILE", "tokens to measure the loss on after training", TEXT, AT(val), 0, 0},
    {"--val-every", "N", "and every N steps", NUMBER, AT(val_every), 1, MOST_STEPS},
    {"--load", "DIR", "start from the weights in DIR (safetensors)", TEXT, AT(load), 0, 0},
    {"--save", "DIR", "write the weights to DIR at the end", TEXT, AT(save), 0, 0},
    {"--log", "FILE", "write a JSON line for every step to FILE, which is made anew", TEXT,
     AT(log), 0, 0},
    {"--threads", "N", "threads of each rank (default: the cores here / ranks)", NUMBER,
     AT(threads), 1, MOST_THREADS},
    {"--queue", "MODE", "eager, late or shuffled:SEED: orders that must not matter, for tests",
     TEXT, AT(queue), 0, 0},
    {"--sample", "N", "write N tokens behind the first of --val or --data", NUMBER, AT(sample), 1,
     MOST_STEPS},
    {"--nvme", "DIR", "where the file of what is offloaded lies (default: the spec's nvme_path)",
     TEXT, AT(nvme), 0, 0},
    {"--hash", NULL, "end with a line `weights HEX`", FLAG, AT(hash), 0, 0},
    {"--version", NULL, "print what this program is and end", FLAG, AT(version), 0, 0},
    {"--help", NULL, "or -h: print this and end", FLAG, AT(help), 0, 0},
    {"--profile", "FILE", "time each command of some steps: a table, and FILE for ui.perfetto.dev",
     TEXT, AT(profile), 0, 0},
    {"--profile-steps", "A-B", "these steps, from 1 (default: 2-4)", TEXT, AT(profile_steps), 0,
     0},
    {"--no-graph", NULL, "launch everything anew in every step, without CUDA graphs", FLAG,
     AT(no_graph), 0, 0},
    {"--gemms", "FILE", "algorithms of matrix products, as --tune has found them on this GPU", TEXT,
     AT(gemms), 0, 0},
    {"--tune", NULL, "run a step, time algorithms, write the best to FILE of --gemms, and end",
     FLAG, AT(tune), 0, 0},
};

enum { ALL = sizeof options / sizeof *options, OF_GPUS = 3 };     /* the last ones */

static size_t offered(void) { return zr_is_gpu ? ALL : ALL - OF_GPUS; }

static int64_t number(zr *z, const struct option *o, const char *text)
{
    char *end;
    errno = 0;
    long long n = strtoll(text, &end, 10);
    if (errno || end == text || *end || n < o->least || n > o->most)
        zr_fail(z, ZR_USER, "%s %s: a whole number from %" PRId64 " to %" PRId64 " is needed",
                o->name, text, o->least, o->most);
    return n;
}

/* The row of a word, -h or --NAME or --NAME=VALUE; value: what stands behind the =, or NULL. */
static const struct option *find(zr *z, const char *word, const char **value)
{
    const char *name = strcmp(word, "-h") ? word : "--help";
    size_t length = strcspn(name, "=");
    *value = name[length] ? name + length + 1 : NULL;
    for (size_t i = 0; i < ALL; i++) {
        if (strncmp(name, options[i].name, length) || options[i].name[length]) continue;
        if (i >= offered())
            zr_fail(z, ZR_USER, "%s is an option of the program for GPUs (ninja out/train-cuda)",
                    options[i].name);
        return &options[i];
    }
    zr_fail(z, ZR_USER, "%s: no such option; see --help", word);
}

/* Takes one option and its operand; returns how many words that were. */
static int take(zr *z, zr_options *to, char **argv)
{
    const char *joined, *value;
    const struct option *o = find(z, argv[0], &joined);
    void *at = (char *)to + o->at;
    if (o->kind == FLAG) {
        if (joined) zr_fail(z, ZR_USER, "%s takes no value; see --help", o->name);
        *(int *)at = 1;
        return 1;
    }
    value = joined ? joined : argv[1];
    if (!value || !*value)
        zr_fail(z, ZR_USER, "%s needs %s behind it; see --help", o->name, o->operand);
    if (o->kind == TEXT) *(const char **)at = value;
    else *(int64_t *)at = number(z, o, value);
    return joined ? 1 : 2;
}

static void set_mode(zr *z, zr_options *o)
{
    const struct option seed = {.name = "--queue shuffled:", .most = INT64_MAX};
    if (!o->queue || !strcmp(o->queue, "eager")) o->mode = ZR_EAGER;
    else if (!strcmp(o->queue, "late")) o->mode = ZR_LATE;
    else if (!strncmp(o->queue, "shuffled:", 9)) {
        o->mode = ZR_SHUFFLED;
        o->seed = (uint64_t)number(z, &seed, o->queue + 9);
    } else zr_fail(z, ZR_USER, "--queue %s: eager, late or shuffled:SEED is needed", o->queue);
}

int64_t zr_setting(zr *z, const char *name, int64_t most)
{
    const struct option o = {.name = name, .most = most};
    const char *text = getenv(name);
    return text && *text ? number(z, &o, text) : 0;
}

static double peak(zr *z)
{
    const char *text = getenv("ZR_PEAK_GFLOPS");
    char *end = "";
    double x = text && *text ? strtod(text, &end) : 0;
    if (*end || !(x >= 0 && x < HUGE_VAL))
        zr_fail(z, ZR_USER, "ZR_PEAK_GFLOPS %s: a number of GFLOP/s is needed", text);
    return x;
}

/* --tune runs one step, launch by launch: what it computes is of no use. */
static void set_tune(zr *z, zr_options *o)
{
    if (!o->tune) return;
    if (!o->gemms || !o->data || o->steps >= 0 || o->val || o->load || o->save || o->sample ||
        o->hash || o->profile)
        zr_fail(z, ZR_USER, "--tune trains nothing: --data FILE and --gemms FILE go with it, and "
                "no --steps, --val, --load, --save, --sample, --hash or --profile");
    o->steps = 1;
    o->no_graph = 1;
}

/* What options must say together. */
static void check_options(zr *z, const zr_options *o)
{
    if (o->steps < 0) zr_fail(z, ZR_USER, "--steps N is needed (0 trains nothing); see --help");
    if (o->steps > 0 && !o->data) zr_fail(z, ZR_USER, "--data FILE is needed to train; see --help");
    if (o->val_every && !o->val) zr_fail(z, ZR_USER, "--val-every needs --val FILE");
    if (o->sample && !o->val && !o->data)
        zr_fail(z, ZR_USER, "--sample needs --val FILE or --data FILE");
}

/* Without --profile-steps: 2 to 4, or what there is of them. */
static void set_profile(zr *z, zr_options *o)
{
    int64_t *first = &o->profile_first, *last = &o->profile_last;
    const char *text = o->profile_steps;
    int end = 0;
    if (!o->profile && text) zr_fail(z, ZR_USER, "--profile-steps needs --profile FILE");
    if (!o->profile) return;
    if (o->steps == 0) zr_fail(z, ZR_USER, "--profile needs a step to look at; --steps is 0");
    *last = o->steps < 4 ? o->steps : 4;
    *first = *last < 2 ? *last : 2;
    if (!text) return;
    if (sscanf(text, "%9" SCNd64 "-%9" SCNd64 "%n", first, last, &end) != 2 || text[end] ||
        *first < 1 || *last < *first || *last > o->steps)
        zr_fail(z, ZR_USER, "--profile-steps %s: two steps A-B from 1 to %" PRId64 " are needed",
                text, o->steps);
}

static int64_t default_threads(const zr *z)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
    return n > z->ranks ? n / z->ranks : 1;
}

void zr_parse(zr *z, zr_options *o, int argc, char **argv)
{
    *o = (zr_options){.steps = -1, .threads = default_threads(z)};
    for (int i = 1; i < argc;) i += take(z, o, argv + i);
    set_mode(z, o);
    set_tune(z, o);
    z->peak = peak(z);
    if (o->help || o->version) return;
    check_options(z, o);
    set_profile(z, o);
}

/* ---- what a program says of itself */

void zr_help(zr *z, const char *program)
{
    zr_print(z, STDOUT_FILENO,
             "usage: %s --data FILE --steps N [options], also as --option=VALUE\n\n"
             "Trains %s on %d ranks of this host.\n\n", program, z->p->name, z->ranks);
    for (size_t i = 0; i < offered(); i++)
        zr_print(z, STDOUT_FILENO, "  %-15s %-5s %s\n", options[i].name,
                 options[i].operand ? options[i].operand : "", options[i].help);
    zr_print(z, STDOUT_FILENO, "\nexit codes\n"
             "  0  done\n"
             "  2  an option or an input file is wrong\n"
             "  3  this host will not do: memory, disk, processor or device\n"
             "  4  ranks disagree: another plan, other kernels, another number in the launcher\n"
             "  5  a rank died\n"
             "  6  training cannot go on: %" PRId64 " steps in a row changed\n"
             "     nothing, but for the search of a loss scale, or no lower scale is left\n"
             "  7  a device hangs: a step took too long, or NCCL met an error\n"
             "  129, 130, 143  ended by SIGHUP, SIGINT, SIGTERM\n", z->p->skips);
}

void zr_version(zr *z)
{
    zr_print(z, STDOUT_FILENO, "%s, %d ranks\nplan %s\nlayout %s\nkernels %s\nmemory %s\n",
             z->p->name, z->ranks, z->p->plan, z->p->layout, z->p->object(), z->p->memory);
}
