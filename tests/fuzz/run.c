/* run.c -- mutants of a checkpoint's run.json; see mutate.h. An input that begins with 'A' is read
 * by a run that accepts another seed and other data. Each input gets its checksum. */
#include "mutate.h"
#include "zr_checkpoint.h"
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_grace.h"
#include "zr_handshake.h"
#include "zr_json.h"
#include "zr_log.h"
#include "zr_memory.h"
#include "zr_options.h"
#include "zr_progress.h"
#include "zr_weights.h"
#include <fcntl.h>

static const char *const recipe[] = {"model.vocab: 256", "train.optimizer.lr: 0.001",
                                     "train.schedule.steps: 9", "train.seed: 1"};
static const zr_state states[] = {
    {.what = "step", .flat = -1, .type = ZR_I64},
    {.what = "master", .shard = 16, .n = 16, .count = 1},
    {.what = "exp_avg", .shard = 16, .n = 16, .count = 1},
    {.what = "scale", .flat = -1, .type = ZR_F64},
};
static const zr_tensor tensors[] = {
    {.name = "a", .offset = 0, .shape = {4, 3}, .ndim = 2, .count = 1},
    {.name = "h.%d.b", .offset = 13, .offset_step = 6, .shape = {5}, .ndim = 1, .count = 2},
};
static const char *object(void) { return "avx2"; }
static const zr_group all = {"all", 2};
static const zr_program program = {.name = "some",
                                   .plan = "p",
                                   .layout = "l",
                                   .ranks = 2,
                                   .groups = &all,
                                   .ngroups = 1,
                                   .object = object,
                                   .recipe = recipe,
                                   .nrecipe = 4,
                                   .states = states,
                                   .nstates = 4,
                                   .tensors = tensors,
                                   .ntensors = 2};

/* ---- the parts of a rank that run.json needs */
const char zr_digest[] = "d", zr_release[] = "r";
const int zr_is_gpu = 1; /* run.json has the algorithms of products, too */

void zr_progress_next(zr *z) { (void)z; }
int zr_wrote(zr *z, int fd, int64_t bytes) { return (void)z, (void)fd, (void)bytes, 0; }

void zr_read(zr *z, int queue, void *to, int64_t at, int64_t bytes)
{
    (void)z, (void)queue, (void)at;
    memset(to, 0, (size_t)bytes);
}

void zr_write(zr *z, int queue, int64_t at, const void *from, int64_t bytes)
{
    (void)z, (void)queue, (void)at, (void)from, (void)bytes;
}

char *zr_reach(const zr *z, int queue, int64_t at) { return (void)z, (void)queue, (void)at, NULL; }

void *zr_get(zr *z, int64_t n, size_t size)
{
    (void)z;
    return calloc((size_t)n, size);
}

void zr_fail(zr *z, int code, const char *format, ...)
{
    (void)z, (void)code, (void)format;
    abort();
}

static zr_options options[2] = {{.accept_change = NULL}, {.accept_change = "train.seed,data"}};
static zr_log lines;
static zr_checkpoints checkpoints;
static zr rank = {
    .p = &program, .o = &options[0], .step = 4, .log = &lines, .checkpoints = &checkpoints};

/* Makes the file of a run, from which mutants are made. */
static void prepare(void)
{
    zr_checkpoints *c = rank.checkpoints;
    static const zr_stored stored[] = {{"model", "master", ZR_F32, 0, NULL, ZR_ALL, NULL, NULL},
                                       {"exp_avg", "exp_avg", ZR_F32, 0, NULL, ZR_ALL, NULL, NULL}};
    c->recipe = recipe;
    c->nrecipe = program.nrecipe;
    strcpy(c->data, "1 file, 40000 bytes, samples 0d7090ecc3d64191");
    for (; c->nstored < 2; c->nstored++) {
        c->stored[c->nstored] = stored[c->nstored];
        zr_stored_open(&c->header[c->nstored], &program, &stored[c->nstored], 0, INT64_MAX);
        c->tensors += c->header[c->nstored].tensors;
    }
    rank.log->skipped = 2;
    rank.skips = 1;
    zr_run_open(&rank, &c->record, c->tensors);
}

static int has(const uint8_t *data, size_t size, const char *text)
{
    char quoted[64];
    FILE *to = fmemopen(quoted, sizeof quoted, "w");
    zr_json_quote(to, text);
    size_t n = (size_t)ftell(to);
    fclose(to);
    return memmem(data, size, quoted, n) != NULL;
}

/* Checks that an accepted file has this program's recipe and data, and consistent numbers. */
static void judge(const uint8_t *data, size_t size, const zr_past *past)
{
    if (past->steps < 0 || past->skips < 0 || past->skips > past->skipped ||
        past->skipped > past->steps)
        abort();
    if (rank.o->accept_change || memchr(data, '\\', size)) return;
    for (int i = 0; i < program.nrecipe; i++)
        if (!has(data, size, recipe[i])) abort();
    if (!has(data, size, rank.checkpoints->data)) abort();
}

static int one(const uint8_t *data, size_t size)
{
    static char file[ZR_FILE];
    static int fd = -1;
    char why[ZR_WHY] = "";
    if (fd < 0) {
        snprintf(file, sizeof file, "%s/run.json", workplace);
        fd = make_file(file);
        if (!rank.checkpoints->nstored) prepare();
    }
    int accepts = size && data[0] == 'A';
    rank.o = &options[accepts];
    data += accepts;
    size -= (size_t)accepts;
    char *sealed = malloc(size);
    memcpy(sealed, data, size);
    if (size >= ZR_SEAL) zr_run_seal(sealed, (int64_t)size);
    fill_file(fd, (const uint8_t *)sealed, size);
    free(sealed);
    /* on the heap: the sanitizer sees its ends */
    zr_past *past = calloc(1, sizeof *past);
    past->sums = calloc((size_t)rank.checkpoints->tensors, sizeof *past->sums);
    past->control = calloc((size_t)program.nstates, sizeof *past->control);
    int bad = zr_run_read(&rank, file, past, why);
    if (!bad) judge(data, size, past);
    else if (!*why) abort();
    free(past->sums);
    free(past->control);
    free(past);
    return !bad;
}

#ifndef LIBFUZZER
/* Returns a run.json as a run writes it, after `first`; its seed is `seed`. */
static bytes written(const char *first, char seed)
{
    static char text[2][4096];
    static int n;
    const uint64_t sums[6] = {0, 1, 2, 3, 4, UINT64_MAX};
    zr_run *r = &rank.checkpoints->record;
    int fd = open("/dev/null", O_WRONLY);
    zr_run_note(&rank, r);
    if (fd < 0 || zr_run_write(r, sums, rank.checkpoints->tensors, fd)) abort();
    close(fd);
    int length = snprintf(text[n], sizeof *text, "%s%.*s", first, (int)r->n, r->text);
    strstr(text[n], "train.seed: ")[12] = seed;
    return (bytes){text[n++], (size_t)length};
}

int main(int argc, char **argv)
{
    prepare();
    const bytes seeds[] = {written("", '1'), written("A", '2')};
    // clang-format off
    static const bytes words[] = {
        BYTES("{"), BYTES("}"), BYTES("["), BYTES("]"), BYTES(","), BYTES(":"), BYTES("\""),
        BYTES("\\"), BYTES(" "), BYTES("0"), BYTES("1"), BYTES("-1"), BYTES("9223372036854775807"),
        BYTES("9223372036854775808"), BYTES("1.0"), BYTES("1e9"), BYTES("\\u0000"),
        BYTES("\\ud83d\\ude00"), BYTES("\\u0061"), BYTES("\xff"), BYTES("null"), BYTES("true"),
        BYTES("\"format\": 1,"), BYTES("\"steps\": 1,"), BYTES("\"skips\": 9,"),
        BYTES("\"sums\": {},"), BYTES("\"control\": {},"), BYTES("\"recipe\": [],"),
        BYTES("\"model.vocab: 256\","), BYTES("\"train.seed: 1\","), BYTES("\"train.seed: 3\","),
        BYTES("\"data\": \"\","), BYTES("\"scale\": \"nan\","), BYTES("\"step\": 1,"),
        BYTES("\"model\": {},"), BYTES("\"exp_avg\": {},"), BYTES("\"a\": \"ff\","),
        BYTES("\"h.1.b\": \"zz\","), BYTES("[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["), BYTES("\"x\":{},")};
    // clang-format on
    return fuzz(argc, argv, seeds, 2, words, sizeof words / sizeof *words);
}
#endif
