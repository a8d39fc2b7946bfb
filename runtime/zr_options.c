/* zr_options.c -- the command line and settings in the environment.
 *
 * Invariants
 *  1. Errors in options alone are found here, before anything else is done; exit code 2.
 */
#define _GNU_SOURCE
#include "zr_cores.h"
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_handshake.h"
#include "zr_log.h"
#include "zr_memory.h"
#include "zr_mix.h"
#include "zr_net.h"
#include "zr_options.h"
#include "zr_rank.h"
#include "zr_shared.h"
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_STEPS = ZR_MOST_STEPS, MOST_THREADS = 1024, MOST_TIMEOUT = 1000000 };
enum { MOST_TIME = 1000000000 }; /* seconds */

/* Kinds of operands. All ranks must be given the same value; of a PATH it only matters whether it
 * is given; OWN: each rank may have its own. */
enum { TEXT, NUMBER, TIME, FLAG, PATH, SOURCE, OWN_TEXT, OWN_NUMBER };

#define AT(field) offsetof(zr_options, field)
static const struct option {
    const char *name, *operand, *help;
    int kind;
    size_t at; /* offset in zr_options */
    int64_t least, most;
} options[] = {
    {"--data", "FILE", "training tokens; repeat as FILE:WEIGHT for a mixture", SOURCE, AT(data), 0,
     0},
    {"--steps", "N", "total number of training steps; 0: no training", NUMBER, AT(steps), 0,
     MOST_STEPS},
    {"--epochs", "N", "instead of --steps: as many as N passes through --data take", NUMBER,
     AT(epochs), 1, MOST_STEPS},
    {"--val", "FILE", "validation tokens: print the loss on them after training", PATH, AT(val), 0,
     0},
    {"--val-every", "N", "validate every N steps, too", NUMBER, AT(val_every), 1, MOST_STEPS},
    {"--patience", "N", "stop after N validations in a row that are not better than the best",
     NUMBER, AT(patience), 1, MOST_STEPS},
    {"--val-tokens", "N", "validate on the first N tokens, in whole samples (default: all)", NUMBER,
     AT(val_tokens), 1, INT64_MAX},
    {"--eval", "FILE", "multiple-choice questions in llm.c's format: print the accuracy", PATH,
     AT(eval), 0, 0},
    {"--verify-every", "N", "every N steps, check that ranks agree and log the weights' hash",
     NUMBER, AT(verify_every), 1, MOST_STEPS},
    {"--load", "DIR", "initial weights: a folder with safetensors", PATH, AT(load), 0, 0},
    {"--adapter", "DIR", "initial adapters: a PEFT folder (train.lora)", PATH, AT(adapter), 0, 0},
    {"--save", "DIR", "write the weights to DIR at the end; with train.lora the adapters", PATH,
     AT(save), 0, 0},
    {"--merge", NULL, "with --save: write the weights with the adapters merged into them", FLAG,
     AT(merge), 0, 0},
    {"--save-dtype", "TYPE", "type of saved weights: f32, bf16, f16 (default: --load's, or f32)",
     TEXT, AT(save_dtype), 0, 0},
    {"--checkpoints", "DIR", "save checkpoints to DIR/step-N, resume from the newest one", PATH,
     AT(checkpoints), 0, 0},
    {"--save-every", "N", "save every N steps, not only at the end", NUMBER, AT(save_every), 1,
     MOST_STEPS},
    {"--keep", "K", "keep the newest K checkpoints (default: 3)", NUMBER, AT(keep), 1, MOST_STEPS},
    {"--keep-every", "N", "and all checkpoints whose step is a multiple of N", NUMBER,
     AT(keep_every), 1, MOST_STEPS},
    {"--keep-best", NULL, "and the checkpoint with the best validation; --save writes its weights",
     FLAG, AT(keep_best), 0, 0},
    {"--resume", "HOW", "auto (from the newest checkpoint, the default), no, or a step", TEXT,
     AT(resume), 0, 0},
    {"--max-time", "TIME", "save and exit before this time is over (90s, 45m, 3h50m, 1d)", TIME,
     AT(max_time), 1, MOST_TIME},
    {"--grace", "TIME", "after a signal, exit this soon even if the checkpoint is unfinished", TIME,
     AT(grace), 1, MOST_TIME},
    {"--accept-change", "KEYS", "keys of the recipe that may differ from the checkpoint's", TEXT,
     AT(accept_change), 0, 0},
    {"--log", "FILE", "append JSON lines: one for the run and one for each step", OWN_TEXT, AT(log),
     0, 0},
    {"--threads", "N", "threads per rank (default: its share of the allowed cores)", OWN_NUMBER,
     AT(threads), 1, MOST_THREADS},
    {"--isa", "NAME",
     "CPU kernels: avx2, avx512, avx512bf16, amx (default: the fastest); same bits", OWN_TEXT,
     AT(isa), 0, 0},
    {"--products", "ORDER", "order of bf16 sums in a new run: pairs or tiles (default: the faster)",
     TEXT, AT(products), 0, 0},
    {"--queue", "MODE", "for tests: order of commands: eager, late or shuffled:SEED", TEXT,
     AT(queue), 0, 0},
    {"--sample", "N", "generate N tokens that continue the first ones of --val or --data", NUMBER,
     AT(sample), 1, MOST_STEPS},
    {"--prompt-tokens", "FILE",
     "the prompt as uint32 tokens; prints the generated tokens as numbers", PATH, AT(prompt), 0, 0},
    {"--temperature", "X", "sampling temperature; 0: the most likely token (default: 0.8)", TEXT,
     AT(temperature), 0, 0},
    {"--top-k", "K", "sample from the K most likely tokens (default: all)", NUMBER, AT(top_k), 1,
     INT32_MAX},
    {"--top-p", "X", "sample from the likeliest tokens whose shares add up to X (default: 1)", TEXT,
     AT(top_p), 0, 0},
    {"--sample-seed", "N", "seed of sampling (default: 0)", NUMBER, AT(sample_seed), 0, INT64_MAX},
    {"--nvme", "DIR", "folder of the offload file (default: nvme_path of the spec)", OWN_TEXT,
     AT(nvme), 0, 0},
    {"--hash", NULL, "print a hash of the weights at the end, `weights HEX`", FLAG, AT(hash), 0, 0},
    {"--check-launch", NULL, "print the location of every rank and exit; needs no other option",
     FLAG, AT(check_launch), 0, 0},
    {"--version", NULL, "print the versions of this program and exit", FLAG, AT(version), 0, 0},
    {"--help", NULL, "or -h: print this help and exit", FLAG, AT(help), 0, 0},
    {"--profile", "FILE", "time the commands of some steps: a table, and FILE for ui.perfetto.dev",
     PATH, AT(profile), 0, 0},
    {"--profile-steps", "A-B", "steps to profile, counted from 1 (default: 2-4)", TEXT,
     AT(profile_steps), 0, 0},
    {"--tokens", "TYPE", "uint16 or uint32: type of --data and --val if the files do not tell",
     TEXT, AT(tokens), 0, 0},
    {"--drop-unknown", NULL, "ignore tensors of --load that the model does not have", FLAG,
     AT(drop_unknown), 0, 0},
    {"--no-graph", NULL, "do not use CUDA graphs", FLAG, AT(no_graph), 0, 0},
    {"--gemms", "FILE", "GEMM algorithms that --tune has found for this GPU", OWN_TEXT, AT(gemms),
     0, 0},
    {"--check-gpus", NULL, "measure every rank's GPU beside the others, and exit", FLAG,
     AT(check_gpus), 0, 0},
    {"--tune", NULL, "run a step, time GEMM algorithms, write the best to --gemms, exit", FLAG,
     AT(tune), 0, 0},
};

/* OF_GPUS: the number of options, at the end of the table, that are only for GPUs. */
enum { ALL = sizeof options / sizeof *options, OF_GPUS = 4 };

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

/* Return the seconds of a time: days, hours, minutes and seconds, each at
 * most once, in this order. */
static int64_t time_of(zr *z, const struct option *o, const char *text)
{
    static const struct {
        char name;
        int64_t seconds;
    } unit[] = {{'d', 86400}, {'h', 3600}, {'m', 60}, {'s', 1}};
    int64_t sum = 0;
    const char *at = text;
    for (size_t u = 0; u < sizeof unit / sizeof *unit; u++) {
        size_t digits = strspn(at, "0123456789");
        if (!digits || digits > 9 || at[digits] != unit[u].name) continue;
        sum += strtoll(at, NULL, 10) * unit[u].seconds;
        at += digits + 1;
    }
    if (*at || sum < o->least || sum > o->most)
        zr_fail(z, ZR_USER, "%s %s: a time such as 90s, 45m, 3h50m or 1d is needed", o->name, text);
    return sum;
}

static int smaller(int a, int b) { return a < b ? a : b; }

/* Return the number of letters to change, remove and add between a[n] and
 * b; LONG if a is too long. */
enum { LONG = 32 };

static int distance(const char *a, size_t n, const char *b)
{
    int row[LONG];
    if (n >= LONG) return LONG;
    for (size_t i = 0; i <= n; i++) row[i] = (int)i;
    for (int k = 1; *b; b++, k++) {
        int before = row[0];
        row[0] = k;
        for (size_t i = 1; i <= n; i++) {
            int changed = before + (a[i - 1] != *b);
            before = row[i];
            row[i] = smaller(changed, 1 + smaller(row[i - 1], row[i]));
        }
    }
    return row[n];
}

/* Return an option that differs in at most two letters and less than half, preferably with the same
 * first letter; or NULL. */
static const char *nearest_option(const char *name, size_t length)
{
    const char *found = NULL;
    int least = smaller(6, (int)length);
    for (size_t i = 0; i < offered(); i++) {
        int other = strncmp(name, options[i].name, strlen("--x")) != 0;
        int far = 2 * distance(name, length, options[i].name) + other;
        if (far >= least) continue;
        found = options[i].name;
        least = far;
    }
    return found;
}

/* Find the row of a word: -h, --NAME or --NAME=VALUE. value: the text after the =, or NULL. */
static const struct option *find_option(zr *z, const char *word, const char **value)
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
    const char *near = nearest_option(name, length);
    zr_fail(z, ZR_USER, "%s: no such option; %s%s%ssee --help", word, near ? "did you mean " : "",
            near ? near : "", near ? "? " : "");
}

/* Return a weight in 1/ZR_WEIGHT: digits with at most four after a point. 0: out of
 * range; -1: not a number. */
static int64_t weight_of(const char *text)
{
    size_t whole = strspn(text, "0123456789"), behind = 0;
    int64_t weight = 0;
    if (text[whole] == '.') behind = 1 + strspn(text + whole + 1, "0123456789");
    if (text[whole + behind] || whole + behind < 1 + (behind > 0)) return -1;
    if (whole > 4 || behind > 5) return 0;
    for (size_t i = 0; i < whole; i++) weight = 10 * weight + (text[i] - '0');
    for (size_t i = 1; i < 5; i++) weight = 10 * weight + (i < behind ? text[whole + i] - '0' : 0);
    return weight <= 1000 * ZR_WEIGHT ? weight : 0;
}

/* Take FILE[:WEIGHT]; a file whose name is all of it is preferred. */
static void take_source(zr *z, zr_options *to, const char *text)
{
    const char *colon = strrchr(text, ':');
    int64_t weight = colon && access(text, F_OK) ? weight_of(colon + 1) : -1;
    if (to->ndata == ZR_SOURCES)
        zr_fail(z, ZR_USER, "--data %s: more than %d sources", text, ZR_SOURCES);
    if (!weight)
        zr_fail(z, ZR_USER,
                "--data %s: a weight from 0.0001 to 1000 with at most four decimals is needed",
                text);
    size_t length = weight < 0 ? strlen(text) : (size_t)(colon - text);
    to->data[to->ndata++] = (zr_given){text, weight < 0 ? ZR_WEIGHT : weight, (int)length};
}

/* Take one option and its operand; returns the number of words. */
static int take_option(zr *z, zr_options *to, char **argv)
{
    const char *joined, *value;
    const struct option *o = find_option(z, argv[0], &joined);
    void *at = (char *)to + o->at;
    if (o->kind == FLAG) {
        if (joined) zr_fail(z, ZR_USER, "%s takes no value; see --help", o->name);
        *(int *)at = 1;
        return 1;
    }
    value = joined ? joined : argv[1];
    if (!value || !*value) zr_fail(z, ZR_USER, "%s needs %s; see --help", o->name, o->operand);
    if (o->kind == NUMBER || o->kind == OWN_NUMBER) *(int64_t *)at = number(z, o, value);
    else if (o->kind == TIME) *(int64_t *)at = time_of(z, o, value);
    else if (o->kind == SOURCE) take_source(z, to, value);
    else *(const char **)at = value;
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

static void set_save_type(zr *z, zr_options *o)
{
    static const char *const types[] = {"f32", "bf16", "f16"};
    o->save_type = -1;
    if (!o->save_dtype) return;
    for (int i = 0; i < 3; i++)
        if (!strcmp(o->save_dtype, types[i])) o->save_type = i;
    if (o->save_type < 0)
        zr_fail(z, ZR_USER, "--save-dtype %s: f32, bf16 or f16 is needed", o->save_dtype);
    if (!o->save) zr_fail(z, ZR_USER, "--save-dtype needs --save DIR");
}

int64_t zr_setting(zr *z, const char *name, int64_t most)
{
    const struct option o = {.name = name, .most = most};
    const char *text = getenv(name);
    return text && *text ? number(z, &o, text) : 0;
}

/* Return a number from 0 to `most`, or `usual` without a text. */
static double real_number(zr *z, const char *name, const char *text, double most, double usual)
{
    char *end = "";
    double x = text && *text ? strtod(text, &end) : usual;
    if (*end || !(x >= 0 && x <= most))
        zr_fail(z, ZR_USER, "%s %s: a number from 0 to %g is needed", name, text, most);
    return x;
}

static double peak(zr *z)
{
    return real_number(z, "ZR_PEAK_GFLOPS", getenv("ZR_PEAK_GFLOPS"), 1e15, 0);
}

static void set_sample(zr *z, zr_options *o)
{
    const struct {
        const char *name;
        int given;
    } with[] = {
        {"--prompt-tokens", o->prompt != NULL},
        {"--temperature", o->temperature != NULL},
        {"--top-k", o->top_k != 0},
        {"--top-p", o->top_p != NULL},
        {"--sample-seed", o->sample_seed >= 0},
    };
    for (size_t i = 0; i < sizeof with / sizeof *with; i++)
        if (with[i].given && !o->sample) zr_fail(z, ZR_USER, "%s needs --sample N", with[i].name);
    o->heat = real_number(z, "--temperature", o->temperature, 1000, 0.8);
    o->share = real_number(z, "--top-p", o->top_p, 1, 1);
}

/* Set up --tune, which runs one step without graphs; its result is discarded. */
static void set_tune(zr *z, zr_options *o)
{
    if (!o->tune) return;
    if (!o->gemms || !o->ndata || o->steps >= 0 || o->epochs || o->val || o->eval || o->load ||
        o->save || o->sample || o->hash || o->profile || o->checkpoints)
        zr_fail(z, ZR_USER,
                "--tune trains nothing: it needs --data FILE and --gemms FILE, and excludes "
                "--steps, --val, --eval, --load, --save, --sample, --hash, --profile or "
                "--checkpoints");
    o->steps = 1;
    o->no_graph = 1;
}

/* Set the defaults of checkpoints, and the step of --resume. */
static void set_checkpoints(zr *z, zr_options *o)
{
    const struct option step = {.name = "--resume", .least = 1, .most = MOST_STEPS};
    if (o->checkpoints && !o->keep) o->keep = 3;
    if (o->resume && strcmp(o->resume, "auto") && strcmp(o->resume, "no"))
        o->resume_step = number(z, &step, o->resume);
}

static void check_checkpoints(zr *z, const zr_options *o)
{
    const struct {
        const char *name;
        int given;
    } with[] = {
        {"--save-every", o->save_every != 0}, {"--keep", o->keep != 0},
        {"--keep-every", o->keep_every != 0}, {"--keep-best", o->keep_best},
        {"--resume", o->resume != NULL},      {"--max-time", o->max_time != 0},
        {"--grace", o->grace != 0},           {"--accept-change", o->accept_change != NULL},
    };
    for (size_t i = 0; i < sizeof with / sizeof *with; i++)
        if (with[i].given && !o->checkpoints)
            zr_fail(z, ZR_USER, "%s needs --checkpoints DIR", with[i].name);
    if (o->checkpoints && !o->ndata) zr_fail(z, ZR_USER, "--checkpoints needs --data FILE");
    if (o->load && o->resume && strcmp(o->resume, "auto") && strcmp(o->resume, "no"))
        zr_fail(z, ZR_USER, "--load and --resume STEP both say where to begin; give one of them");
}

/* Check combinations of options. */
static void check_options(zr *z, const zr_options *o)
{
    if (o->check_launch || o->check_gpus) return;
    if (o->steps < 0 && !o->epochs)
        zr_fail(z, ZR_USER, "--steps N is needed (0 trains nothing), or --epochs N; see --help");
    if (o->steps >= 0 && o->epochs)
        zr_fail(z, ZR_USER, "--steps and --epochs both say how long to train; give one of them");
    if (o->profile && o->epochs) zr_fail(z, ZR_USER, "--profile needs --steps N");
    if ((o->steps > 0 || o->epochs) && !o->ndata)
        zr_fail(z, ZR_USER, "--data FILE is needed to train; see --help");
    if (o->tokens && strcmp(o->tokens, "uint16") && strcmp(o->tokens, "uint32"))
        zr_fail(z, ZR_USER, "--tokens %s: uint16 or uint32 is needed", o->tokens);
    if (o->tokens && !o->ndata && !o->val)
        zr_fail(z, ZR_USER, "--tokens needs --data FILE or --val FILE");
    if (o->products && strcmp(o->products, "pairs") && strcmp(o->products, "tiles"))
        zr_fail(z, ZR_USER, "--products %s: pairs or tiles is needed", o->products);
    if (o->drop_unknown && !o->load) zr_fail(z, ZR_USER, "--drop-unknown needs --load DIR");
    if ((o->adapter || o->merge) && !z->p->adapter)
        zr_fail(z, ZR_USER, "%s: the program has no adapters; a spec with train.lora has",
                o->adapter ? "--adapter" : "--merge");
    if (o->merge && !o->save) zr_fail(z, ZR_USER, "--merge needs --save DIR");
    check_checkpoints(z, o);
    if ((o->keep_best || o->patience) && !o->val_every)
        zr_fail(z, ZR_USER, "%s needs --val-every N", o->keep_best ? "--keep-best" : "--patience");
    if (o->val_every && !o->val) zr_fail(z, ZR_USER, "--val-every needs --val FILE");
    if (o->val_tokens && !o->val) zr_fail(z, ZR_USER, "--val-tokens needs --val FILE");
    if (o->val_tokens && o->val_tokens < z->p->sequence)
        zr_fail(z, ZR_USER, "--val-tokens %" PRId64 ": a sample has %" PRId64 " tokens",
                o->val_tokens, z->p->sequence);
    if (o->sample && !o->val && !o->ndata && !o->prompt)
        zr_fail(z, ZR_USER, "--sample needs --val FILE, --data FILE or --prompt-tokens FILE");
}

/* Set the profiled steps; the default is 2 to 4, as far as they exist. */
static void set_profile(zr *z, zr_options *o)
{
    int64_t *first = &o->profile_first, *last = &o->profile_last;
    const char *text = o->profile_steps;
    int end = 0;
    if (!o->profile && text) zr_fail(z, ZR_USER, "--profile-steps needs --profile FILE");
    if (!o->profile) return;
    if (o->steps == 0) zr_fail(z, ZR_USER, "--profile needs a training step, but --steps is 0");
    *last = o->steps < 4 ? o->steps : 4;
    *first = *last < 2 ? *last : 2;
    if (!text) return;
    if (sscanf(text, "%9" SCNd64 "-%9" SCNd64 "%n", first, last, &end) != 2 || text[end] ||
        *first < 1 || *last < *first || *last > o->steps)
        zr_fail(z, ZR_USER, "--profile-steps %s: must be A-B, with 1 <= A <= B <= %" PRId64, text,
                o->steps);
}

/* Select kernels through the environment, which the kernels of a CPU, and of
 * the host of a GPU, read. */
static void set_isa(zr *z, const zr_options *o)
{
    if (!o->isa) return;
    setenv("ZK_ISA", o->isa, 1);
    if (!zr_is_gpu && strcmp(z->p->object(), o->isa))
        zr_fail(z, ZR_USER,
                "--isa %s: no kernels of this name run here; "
                "allowed where the processor runs them: avx2, avx512, avx512bf16, amx",
                o->isa);
}

void zr_parse(zr *z, zr_options *o, int argc, char **argv)
{
    *o = (zr_options){.steps = -1, .sample_seed = -1, .words = argv};
    for (int i = 1; i < argc;) i += take_option(z, o, argv + i);
    set_isa(z, o);
    set_mode(z, o);
    set_tune(z, o);
    z->peak = peak(z);
    z->timeout = zr_setting(z, "ZR_TIMEOUT_S", MOST_TIMEOUT);
    if (o->help || o->version) return;
    check_options(z, o);
    set_checkpoints(z, o);
    set_profile(z, o);
    set_save_type(z, o);
    set_sample(z, o);
}

void zr_choose_threads(zr *z)
{
    zr_cpus allowed;
    int64_t part = zr_cpus_allowed(&allowed) ? 1 : zr_cores("", &allowed) / z->net->sharing;
    if (part < 1) part = 1;
    if (part > MOST_THREADS) part = MOST_THREADS;
    z->cores = (int)part;
    z->threads = (int)(z->o->threads ? z->o->threads : part);
}

/* ---- the program's description of itself */

/* Write " --steps 3" to to[n], or "" if the option is not given or may differ between ranks. */
static void write_option(const zr_options *from, const struct option *o, char *to, size_t n)
{
    const void *at = (const char *)from + o->at;
    const char *text = o->kind == TEXT || o->kind == PATH ? *(char *const *)at : NULL;
    *to = 0;
    if ((o->kind == NUMBER || o->kind == TIME) && *(const int64_t *)at >= o->least)
        snprintf(to, n, " %s %" PRId64, o->name, *(const int64_t *)at);
    if ((o->kind == FLAG && *(const int *)at) || (o->kind == PATH && text))
        snprintf(to, n, " %s", o->name);
    if (o->kind == SOURCE && from->ndata) snprintf(to, n, " %s", o->name);
    if (o->kind == SOURCE && from->ndata > 1)
        snprintf(to, n, " %s of %d sources", o->name, from->ndata);
    if (o->kind == TEXT && text) snprintf(to, n, " %s %s", o->name, text);
}

void zr_options_text(const zr *z, char *text, size_t n)
{
    char one[ZR_TOLD];
    *text = 0;
    for (size_t i = 0; i < ALL; i++) {
        size_t used = strlen(text);
        write_option(z->o, &options[i], one, sizeof one);
        snprintf(text + used, n - used, "%s", one);
    }
}

void zr_help(zr *z, const char *program)
{
    zr_print(z, STDOUT_FILENO,
             "usage: %s --data FILE[:WEIGHT] --steps N [options], also as --option=VALUE\n\n"
             "Trains %s on %d ranks of this host.\n\n",
             program, z->p->name, z->ranks);
    for (size_t i = 0; i < offered(); i++)
        zr_print(z, STDOUT_FILENO, "  %-15s %-5s %s\n", options[i].name,
                 options[i].operand ? options[i].operand : "", options[i].help);
    zr_print(
        z, STDOUT_FILENO,
        "\nexit codes\n"
        "  0  done\n"
        "  2  an option or an input file is wrong, or another run writes to the same place\n"
        "  3  the host is unsuitable: memory, disk, processor or device; --verify-every has\n"
        "     found a rank that differs from the others; or stdout cannot be written, but an\n"
        "     option needs it (--hash, --sample, --steps 0, --version, --help)\n"
        "  4  ranks disagree about sources, plan, train.c, kernels, NCCL, options, data,\n"
        "     algorithms of products or the number of ranks; or a checkpoint has another\n"
        "     recipe or other data;\n"
        "     or a command of a modified program accesses memory outside its arena\n"
        "  5  a rank died\n"
        "  6  training cannot go on: %" PRId64 " steps in a row were\n"
        "     skipped, apart from those that lower the loss scale, or a gradient is not finite\n"
        "     at the smallest loss scale\n"
        "  7  a rank or a device hangs: a step has made no progress for too long\n"
        "     (ZR_TIMEOUT_S=N: N seconds), or NCCL reported an error\n"
        "  8  the counted bytes or collectives differ from the plan's\n"
        "  75  stopped by SIGTERM, SIGINT, SIGUSR1 or --max-time; the run has saved a\n"
        "     checkpoint (--checkpoints), unless --grace was too short: the same\n"
        "     command resumes from the newest one\n"
        "  128 + N  ended by signal N (SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM,\n"
        "     SIGTERM); signals ignored at the start stay ignored, except SIGTERM\n",
        z->p->skips);
}

void zr_version(zr *z)
{
    char text[17];
    zr_text_hash(z->p->text, z->p->text_end, text);
    zr_print(z, STDOUT_FILENO,
             "%s, %d ranks\nversion %s\nplan %s\nlayout %s\ntrain.c %s\nsources %s\n"
             "kernels %s\nmemory %s\n",
             z->p->name, z->ranks, zr_release, z->p->plan, z->p->layout, text, zr_digest,
             z->p->object(), z->p->memory);
    if (z->p->margin) zr_print(z, STDOUT_FILENO, "sm_margin %d\n", z->p->margin);
}
