/* weights.c -- mutants of safetensors files, also of a checkpoint, of their index and of the
 * config.json beside them; see mutate.h.
 *
 * An input that begins with 'C' is a config.json, which gets another type of weights. One with 'I'
 * is an index, beside intact files. One with 'R' is a raw file. Any other is the text of a header,
 * to which its length and DATA bytes of data are added.
 */
#include "mutate.h"
#include "zr_file.h"
#include "zr_grace.h"
#include "zr_memory.h"
#include "zr_progress.h"
#include "zr_save.h"
#include "zr_weights.h"
#include <sys/stat.h>

enum { DATA = 88, ARENA = 128 };

/* One flat of 32 elements on 2 ranks: a [4, 3], and b [5] of two layers. */
static const zr_state states[] = {{.what = "master", .at = 16, .shard = 16, .n = 16, .count = 1}};
static const zr_tensor tensors[] = {
    {.name = "a", .offset = 0, .shape = {4, 3}, .ndim = 2, .count = 1},
    {.name = "h.%d.b", .offset = 13, .offset_step = 6, .shape = {5}, .ndim = 1, .count = 2},
};
static const zr_group all = {"all", 2};
static const zr_program program = {.name = "n",
                                   .plan = "p",
                                   .layout = "l",
                                   .ranks = 2,
                                   .groups = &all,
                                   .ngroups = 1,
                                   .states = states,
                                   .nstates = 1,
                                   .tensors = tensors,
                                   .ntensors = 2};

// clang-format off
#define ENTRY(name, dtype, shape, place) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" place "]}"
#define GOOD "{\"__metadata__\":{\"format\":\"pt\"}," \
    ENTRY("a", "BF16", "4,3", "0,24") "," ENTRY("h.0.b", "F32", "5", "24,44") "," \
    ENTRY("transformer.h.1.b", "F16", "5", "44,54") "," \
    ENTRY("h.0.attn.bias", "U8", "1,1,2,17", "54,88") "}  "
#define FIRST "{" ENTRY("a", "F32", "4,3", "0,48") "," \
    "\"\\u006f\":{\"shape\":[2,20],\"data_offsets\":[48,88],\"dtype\":\"I8\"}}"
#define SECOND "{" ENTRY("h.0.b", "F32", "5", "0,20") "," ENTRY("h.1.b", "F32", "5", "20,40") "," \
    ENTRY("x", "F64", "6,1", "40,88") "}"
#define STATE "{" ENTRY("a", "F32", "4,3", "0,48") "," ENTRY("h.0.b", "F32", "5", "48,68") "," \
    ENTRY("h.1.b", "F32", "5", "68,88") "}"
#define INDEX "I{\"metadata\":{\"total_size\":128,\"deep\":[[[{}]],-1.5e3,true,null]}," \
    "\"weight_map\":{\"a\":\"1.st\",\"h.0.b\":\"2.st\",\"h.1.b\":\"2.st\",\"x\":\"2.st\"}}"
#define CONFIG "C{\"model_type\": \"llama\", \"dt\\u0079pe\": null, \"rope\": {\"dtype\": [1e-5]}," \
    " \"torch_dtype\": \"float32\"}\n"
// clang-format on

/* The parts of a rank that loading needs. */
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

/* u64 N, the header, DATA bytes */
static void fill_parts(int fd, const uint8_t *header, size_t n)
{
    static uint8_t file[8 + LARGEST + DATA];
    uint64_t N = n;
    memcpy(file, &N, 8);
    memcpy(file + 8, header, n);
    for (int i = 0; i < DATA; i++) file[8 + n + (size_t)i] = (uint8_t)(37 * i);
    fill_file(fd, file, 8 + n + DATA);
}

static int single, indexed, config; /* files in memory */
static char single_dir[ZR_FILE - 64], indexed_dir[ZR_FILE - 64], config_dir[ZR_FILE - 64];

/* Makes dir/single with model.safetensors, and dir/indexed with an index and two files. */
static void prepare(void)
{
    char file[ZR_FILE];
    snprintf(single_dir, sizeof single_dir, "%.2000s/single", workplace);
    snprintf(indexed_dir, sizeof indexed_dir, "%.2000s/indexed", workplace);
    mkdir(single_dir, 0777);
    mkdir(indexed_dir, 0777);
    snprintf(file, sizeof file, "%s/1.st", indexed_dir);
    fill_parts(make_file(file), (const uint8_t *)FIRST, sizeof FIRST - 1);
    snprintf(file, sizeof file, "%s/2.st", indexed_dir);
    fill_parts(make_file(file), (const uint8_t *)SECOND, sizeof SECOND - 1);
    snprintf(file, sizeof file, "%s/model.safetensors.index.json", indexed_dir);
    indexed = make_file(file);
    snprintf(file, sizeof file, "%s/model.safetensors", single_dir);
    single = make_file(file);
    snprintf(config_dir, sizeof config_dir, "%.2000s/config", workplace);
    mkdir(config_dir, 0777);
    snprintf(file, sizeof file, "%s/config.json", config_dir);
    config = make_file(file);
}

/* Checks that an accepted file has the type once, and its stated length. */
static int one_config(const uint8_t *data, size_t size)
{
    char why[ZR_WHY], note[ZR_WHY];
    zr_saving s;
    fill_file(config, data, size);
    if (zr_save_open(&s, &program, 0, "out", config_dir, 0, ZR_BF16, NULL, 100, note, why))
        return 0;
    const struct zr_saved *f = &s.file[s.n - 1];
    if (strcmp(f->name, "config.json") || strlen(f->h.text) != (size_t)f->h.n) abort();
    if (!strstr(f->h.text, " \"bfloat16\"")) abort();
    zr_save_close(&s);
    return 1;
}

static int one(const uint8_t *data, size_t size)
{
    char why[ZR_WHY], note[ZR_WHY];
    zr z = {malloc(ARENA)}; /* on the heap: the sanitizer sees its ends */
    const char *dir = single_dir;
    if (size > LARGEST) size = LARGEST;
    if (!single) prepare();
    if (size && data[0] == 'C') {
        free(z.arena);
        return one_config(data + 1, size - 1);
    }
    if (size && data[0] == 'I') {
        fill_file(indexed, data + 1, size - 1);
        dir = indexed_dir;
    } else if (size && data[0] == 'R') {
        fill_file(single, data + 1, size - 1);
    } else {
        fill_parts(single, data, size);
    }
    memset(z.arena, 0x55, ARENA);
    int good = !zr_load(&program, &z, 0, dir, 1, note, why) &&
               !zr_load(&program, &z, 1, dir, 0, note, why);
    if (dir == single_dir) /* as a state of a checkpoint */
        for (int rank = 0; rank < 2; rank++) {
            uint64_t *sums = calloc(3, sizeof *sums);
            good |= !zr_stored_read(&z, &program, &zr_masters, rank, dir, sums, why);
            free(sums);
        }
    /* the bytes before the flat must not change */
    for (int i = 0; i < 16; i++)
        if (z.arena[i] != 0x55) abort();
    free(z.arena);
    return good;
}

#ifndef LIBFUZZER
int main(int argc, char **argv)
{
    static const bytes seeds[] = {BYTES(GOOD),  BYTES(INDEX),  BYTES("R\x02\0\0\0\0\0\0\0{}"),
                                  BYTES(STATE), BYTES(CONFIG), BYTES(GOOD)};
    // clang-format off
    static const bytes words[] = {
        BYTES("{"), BYTES("}"), BYTES("["), BYTES("]"), BYTES(","), BYTES(":"), BYTES("\""),
        BYTES("\\"), BYTES(" "), BYTES("0"), BYTES("1"), BYTES("-1"), BYTES("9223372036854775807"),
        BYTES("18446744073709551615"), BYTES("4294967296"), BYTES("1.0"), BYTES("1e9"),
        BYTES("\\u0000"), BYTES("\\ud83d\\ude00"), BYTES("\\ud800"), BYTES("\xc3\xa4"),
        BYTES("\xed\xa0\x80"), BYTES("\xff"), BYTES("\"a\":"), BYTES("\"dtype\":\"F64\","),
        BYTES("\"shape\":[],"), BYTES("\"data_offsets\":[0,0],"),
        BYTES("\"x\":{\"dtype\":\"F4\",\"shape\":[0],\"data_offsets\":[0,0]},"), BYTES("null"),
        BYTES("true"), BYTES("[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["), BYTES("../../etc/passwd"),
        BYTES("transformer."), BYTES("\"weight_map\":"), BYTES("1.st"), BYTES("nowhere.st"),
        BYTES("\"q\":[{}],"), BYTES("\"dtype\":"), BYTES("\"torch_dtype\": 1,"), BYTES("1,1,1,1,1,1,1,1,")};
    // clang-format on
    return fuzz(argc, argv, seeds, sizeof seeds / sizeof *seeds, words,
                sizeof words / sizeof *words);
}
#endif
