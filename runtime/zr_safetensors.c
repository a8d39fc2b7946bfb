/* zr_safetensors.c -- reads the headers of safetensors files; see zr_safetensors.h.
 *
 * Invariants
 *  1. A file that is accepted is also accepted by the format's own library: names are unique, every
 *     byte of data belongs to exactly one tensor, sizes equal dtype times shape.
 *  2. Every entry of an open table lies within its file as it was when opened.
 */
#include "zr_file.h"
#include "zr_json.h"
#include "zr_safetensors.h"
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct {
    const char *name;
    int bits;
} dtypes[] = {
    {"F32", 32},    {"BF16", 16},   {"F16", 16},        {"F64", 64},        {"BOOL", 8},
    {"U8", 8},      {"I8", 8},      {"I16", 16},        {"U16", 16},        {"I32", 32},
    {"U32", 32},    {"I64", 64},    {"U64", 64},        {"C64", 64},        {"F8_E5M2", 8},
    {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"F6_E2M3", 6},
    {"F6_E3M2", 6}, {"F4", 4},
};
enum { DTYPES = sizeof dtypes / sizeof *dtypes };

const char *zr_dtype_name(int dtype) { return dtypes[dtype].name; }

const char *const zr_copied[] = {
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.json",
    "chat_template.jinja",
    NULL,
};

int zr_is_shard(const char *name)
{
    int n = 0;
    sscanf(name, "model-%*5[0-9]-of-%*5[0-9].safetensors%n", &n);
    return n == 32 && !name[n];
}

static int is_among(const char *const *names, const char *name)
{
    while (*names && strcmp(*names, name)) names++;
    return *names != NULL;
}

int zr_is_saved(const char *name)
{
    static const char *const own[] = {
        ZR_CONFIG, ZR_SINGLE, ZR_INDEX, ZR_ADAPTER_CONFIG, ZR_ADAPTER_MODEL, NULL,
    };
    return !strncmp(name, ZR_PART, strlen(ZR_PART)) || zr_is_shard(name) || is_among(own, name) ||
           is_among(zr_copied, name);
}

char *zr_shape_text(char *text, int n, const int64_t *shape, int ndim)
{
    int at = snprintf(text, (size_t)n, "[");
    for (int i = 0; i < ndim && at < n; i++)
        at += snprintf(text + at, (size_t)(n - at), "%s%" PRId64, i ? ", " : "", shape[i]);
    if (at < n) snprintf(text + at, (size_t)(n - at), "]");
    return text;
}

/* ---- one header */
/* Return the bytes of a tensor; -1 if they are not an integer below 2^63. */
static int64_t bytes(const zr_entry *e)
{
    int64_t n = 1;
    for (int i = 0; i < e->ndim; i++)
        if (__builtin_mul_overflow(n, e->shape[i], &n)) return -1;
    if (__builtin_mul_overflow(n, dtypes[e->dtype].bits, &n) || n % 8) return -1;
    return n / 8;
}

static int read_dtype(zr_json *j, zr_entry *e, char *why, const char *file)
{
    const char *s = zr_json_text(j);
    if (!s) return -1;
    for (e->dtype = 0; e->dtype < DTYPES; e->dtype++)
        if (!strcmp(s, dtypes[e->dtype].name)) return 0;
    return zr_why(why, "%s: tensor %.200s: unknown dtype %.40s", file, e->name, s);
}

static int read_shape(zr_json *j, zr_entry *e, char *why, const char *file)
{
    for (int64_t i = 0; zr_json_more(j, '[', &i);) {
        if (i > ZR_DIMS)
            return zr_why(why, "%s: tensor %.200s: more than %d dimensions", file, e->name,
                          ZR_DIMS);
        e->shape[i - 1] = zr_json_count(j);
        e->ndim = (int32_t)i;
    }
    return j->error ? -1 : 0;
}

static int read_offsets(zr_json *j, zr_entry *e, char *why, const char *file)
{
    int64_t at[2] = {0, 0}, i = 0;
    while (zr_json_more(j, '[', &i)) {
        if (i > 2) break;
        at[i - 1] = zr_json_count(j);
    }
    if (!j->error && (i != 2 || at[0] > at[1]))
        return zr_why(why, "%s: tensor %.200s: data_offsets are not [begin, end]", file, e->name);
    e->begin = at[0];
    e->end = at[1];
    return j->error ? -1 : 0;
}

/* Read {dtype, shape, data_offsets}. Returns -1 with j->error or with why set. */
static int read_entry(zr_json *j, zr_entry *e, char *why, const char *file)
{
    int seen = 0;
    for (int64_t i = 0; zr_json_more(j, '{', &i);) {
        const char *key = zr_json_key(j);
        int bit = !key                           ? 0
                  : !strcmp(key, "dtype")        ? 1
                  : !strcmp(key, "shape")        ? 2
                  : !strcmp(key, "data_offsets") ? 4
                                                 : 0;
        if (seen & bit) return zr_why(why, "%s: tensor %.200s: %s twice", file, e->name, key);
        seen |= bit;
        if (bit == 1   ? read_dtype(j, e, why, file)
            : bit == 2 ? read_shape(j, e, why, file)
            : bit == 4 ? read_offsets(j, e, why, file)
                       : 0)
            return -1;
        if (!bit) zr_json_skip(j);
    }
    if (j->error) return -1;
    if (seen != 7)
        return zr_why(why, "%s: tensor %.200s: dtype, shape or data_offsets is missing", file,
                      e->name);
    char shape[200];
    if (e->end - e->begin != bytes(e))
        return zr_why(why, "%s: tensor %.200s: %" PRId64 " bytes of data do not make %s %s", file,
                      e->name, e->end - e->begin, dtypes[e->dtype].name,
                      zr_shape_text(shape, sizeof shape, e->shape, e->ndim));
    return 0;
}

/* Return a list of n elements with space for one more; it grows when n reaches a power of two.
 * NULL: out of memory; the list is unchanged. */
static void *grown(void *list, int64_t n, size_t size)
{
    return n & (n - 1) ? list : realloc(list, (n ? 2 * (size_t)n : 1) * size);
}

/* Read metadata, a map of strings. safetensors' save_model notes there, for each tensor that it
 * leaves out, the tensor that shares its memory; other entries are possible. */
static int read_metadata(zr_table *t, zr_json *j)
{
    for (int64_t i = 0; zr_json_more(j, '{', &i);) {
        const char *name = zr_json_key(j), *kept = name ? zr_json_text(j) : NULL;
        if (!kept) break;
        struct zr_alias *more = grown(t->aliases, t->naliases, sizeof *more);
        if (!more) return -1;
        t->aliases = more;
        t->aliases[t->naliases++] = (struct zr_alias){name, kept, t->nfiles - 1};
    }
    return 0;
}

static zr_entry *add(zr_table *t)
{
    zr_entry *more = grown(t->entries, t->n, sizeof *more);
    if (!more) return NULL;
    t->entries = more;
    memset(&t->entries[t->n], 0, sizeof(zr_entry));
    return &t->entries[t->n++];
}

static int read_entries(zr_table *t, zr_json *j, char *why, const char *file)
{
    int metadata = 0;
    for (int64_t i = 0; zr_json_more(j, '{', &i);) {
        const char *name = zr_json_key(j);
        if (name && !strcmp(name, "__metadata__")) {
            if (metadata++) return zr_why(why, "%s: __metadata__ twice", file);
            if (read_metadata(t, j)) return zr_why(why, "%s: out of memory for its metadata", file);
        } else if (name) {
            zr_entry *e = add(t);
            if (!e) return zr_why(why, "%s: out of memory for its table of tensors", file);
            e->name = name;
            e->file = (int32_t)(t->nfiles - 1);
            if (read_entry(j, e, why, file)) return -1;
        }
    }
    return zr_json_end(j);
}

static int by_place(const void *a, const void *b)
{
    const zr_entry *x = a, *y = b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* Check that entries [first, n) of a table fill the `size` bytes from file offset `start` on
 * without holes, and make their offsets count from the start of the file. */
static int check_places(zr_table *t, int64_t first, int64_t start, int64_t size, char *why,
                        const char *file)
{
    int64_t at = 0;
    zr_entry *e = t->entries;
    if (t->n > first) qsort(e + first, (size_t)(t->n - first), sizeof *e, by_place);
    for (int64_t i = first; i < t->n; at = e[i++].end)
        if (e[i].begin != at)
            return zr_why(why,
                          "%s: tensor %.200s: its data begin at %" PRId64
                          ", the tensor before ends at %" PRId64,
                          file, e[i].name, e[i].begin, at);
    if (at != size)
        return zr_why(why,
                      "%s: the header describes %" PRId64
                      " bytes of data, but the file has %" PRId64 "%s",
                      file, at, size, at > size ? " (truncated?)" : "");
    for (int64_t i = first; i < t->n; i++) {
        e[i].begin += start;
        e[i].end += start;
    }
    return 0;
}

/* ---- files */
/* Read the n bytes of a header, followed by a 0. Returns NULL on failure, with why set. */
static char *slurp(int fd, int64_t n, char *why, const char *file)
{
    char *text = malloc((size_t)n + 1);
    if (!text) {
        zr_why(why, "%s: out of memory for %" PRId64 " bytes", file, n);
        return NULL;
    }
    text[n] = 0;
    if (!zr_read_at(fd, text, n, 8)) return text;
    zr_why(why, "%s: %s", file, strerror(errno));
    free(text);
    return NULL;
}

/* Open a regular file and get its size. Returns -1 on failure, with why set. */
static int open_file(const char *file, int64_t *size, char *why)
{
    struct stat s;
    int fd = open(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return zr_why(why, "%s: %s", file, strerror(errno));
    if (!fstat(fd, &s) && S_ISREG(s.st_mode)) {
        *size = s.st_size;
        return fd;
    }
    close(fd);
    return zr_why(why, "%s: not a regular file", file);
}

/* Read the header of the table's last file. */
static int read_header(zr_table *t, int64_t size, char *why, const char *file)
{
    struct zr_source *f = &t->files[t->nfiles - 1];
    int64_t first = t->n, n = 0;
    if (size < 8)
        return zr_why(why, "%s: %" PRId64 " bytes are not a safetensors file", file, size);
    if (zr_read_at(f->fd, &n, 8, 0)) return zr_why(why, "%s: %s", file, strerror(errno));
    if (n < 2 || n > ZR_HEADER_MAX)
        return zr_why(why, "%s: not a safetensors file (a header of %" PRIu64 " bytes)", file,
                      (uint64_t)n);
    if (n > size - 8)
        return zr_why(why, "%s: truncated: a header of %" PRId64 " bytes in a file of %" PRId64,
                      file, n, size);
    f->header = slurp(f->fd, n, why, file);
    if (!f->header) return -1;
    zr_json j = {f->header, f->header + n, f->header[0] == '{' ? NULL : "expected an object"};
    int bad = read_entries(t, &j, why, file);
    if (j.error)
        return zr_why(why, "%s: header, byte %" PRId64 ": %s", file, (int64_t)(j.at - f->header),
                      j.error);
    return bad ? bad : check_places(t, first, 8 + n, size - 8 - n, why, file);
}

/* Report the kind of a file whose header could not be read, if it is known. */
static int say_foreign(int fd, int64_t size, char *why, const char *file)
{
    char begin[32] = "";
    int64_t n = zr_least(size, sizeof begin);
    const char *is = zr_read_at(fd, begin, n, 0) ? NULL : zr_foreign(begin, n);
    return is && begin[8] != '{' ? zr_why(why, "%s: is %s", file, is) : -1;
}

/* Add a file; `name` must live as long as t. */
static int add_file(zr_table *t, const char *dir, const char *name, char *why)
{
    char file[4096];
    int64_t size = 0;
    if (snprintf(file, sizeof file, "%s/%s", dir, name) >= (int)sizeof file)
        return zr_why(why, "%.200s: the path is too long", dir);
    struct zr_source *more = realloc(t->files, (size_t)(t->nfiles + 1) * sizeof *more);
    if (!more) return zr_why(why, "%s: out of memory", file);
    t->files = more;
    int fd = open_file(file, &size, why);
    if (fd < 0) return -1;
    t->files[t->nfiles++] = (struct zr_source){.name = name, .fd = fd};
    return read_header(t, size, why, file) ? say_foreign(fd, size, why, file) : 0;
}

char *zr_file_text(const char *file, int64_t *n, char *why)
{
    return zr_read_whole(file, ZR_HEADER_MAX, "too long for a file beside weights", n, why);
}

static int add_mapped(zr_table *t, const char *name, int64_t file)
{
    struct zr_mapped *more = grown(t->map, t->nmap, sizeof *more);
    if (!more) return -1;
    t->map = more;
    t->map[t->nmap++] = (struct zr_mapped){name, file};
    return 0;
}

static int is_there(const char *dir, const char *name)
{
    char file[4096];
    struct stat s;
    snprintf(file, sizeof file, "%s/%s", dir, name);
    return !stat(file, &s) || errno != ENOENT;
}

/* Report why a file of the index could not be opened. */
static int say_missing(const char *dir, const char *name, char *why)
{
    if (is_there(dir, name)) return -1;
    return zr_why(why,
                  "%.300s/%.200s: " ZR_INDEX " lists it, but it does not exist; is the download "
                  "complete?",
                  dir, name);
}

/* Read weight_map: {tensor: file}; each file is opened at its first mention. */
static int read_map(zr_table *t, zr_json *j, const char *dir, char *why, const char *index)
{
    for (int64_t i = 0; zr_json_more(j, '{', &i);) {
        int64_t k = 0;
        const char *tensor = zr_json_key(j), *name = tensor ? zr_json_text(j) : NULL;
        if (!name) return -1;
        /* no path may lead out of the folder */
        if (strchr(name, '/') || !*name)
            return zr_why(why, "%s: %.200s is not a file name", index, name);
        while (k < t->nfiles && strcmp(t->files[k].name, name)) k++;
        if (k == t->nfiles && add_file(t, dir, name, why)) return say_missing(dir, name, why);
        if (add_mapped(t, tensor, k)) return zr_why(why, "%s: out of memory", index);
    }
    return j->error ? -1 : 0;
}

static int read_index(zr_table *t, const char *dir, char *why, const char *file)
{
    int64_t size;
    int maps = 0;
    t->index = zr_file_text(file, &size, why);
    if (!t->index) return -1;
    zr_json j = {t->index, t->index + size, NULL};
    for (int64_t i = 0; zr_json_more(&j, '{', &i);) {
        const char *key = zr_json_key(&j);
        int map = key && !strcmp(key, "weight_map");
        maps += map;
        if (!map) zr_json_skip(&j);
        else if (read_map(t, &j, dir, why, file) && !j.error) return -1;
    }
    if (zr_json_end(&j))
        return zr_why(why, "%s: byte %" PRId64 ": %s", file, (int64_t)(j.at - t->index), j.error);
    return maps == 1 ? 0 : zr_why(why, "%s: must have one weight_map, but has %d", file, maps);
}

/* Report why a folder has no weights that can be read: the first of these
 * patterns that it matches. */
static int say_other(const char *dir, char *why)
{
    static const struct {
        const char *pattern, *is;
    } kinds[] = {
        {"pytorch_model*.bin*",
         "pytorch_model.bin is not read, because it may contain code; if you trust it, run in its "
         "folder: "
         "python -c \"from transformers import AutoModelForCausalLM as M; "
         "M.from_pretrained('.', torch_dtype='auto').save_pretrained('.')\""},
        {ZR_ADAPTER_CONFIG, "these are adapters: --adapter names their folder, --load the base's"},
        {"run.json",
         "this is a checkpoint: --checkpoints with the folder above it resumes from it"},
        {"step-*/run.json", "these are checkpoints: --checkpoints resumes from them"},
        {"snapshots/*/" ZR_CONFIG, "the model lies in a folder below snapshots: name that"},
        {"zero_to_fp32.py", "this is a checkpoint of DeepSpeed; run there: python zero_to_fp32.py "
                            ". . --safe_serialization"},
        {"*.distcp", "this is a distributed checkpoint of PyTorch: save the whole state dict"},
        {"model-*-of-*.safetensors", "it has shards, and their " ZR_INDEX " is missing"},
        {"consolidated*", "this is the model in its author's own format: its folder in "
                          "transformers' format is needed"},
        {"*.gguf", "GGUF files are llama.cpp's: the model's own folder is needed"},
        {"*.safetensors", "another name of a file is not read"},
    };
    char pattern[ZR_FILE + 64];
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        glob_t found;
        snprintf(pattern, sizeof pattern, "%s/%s", dir, kinds[i].pattern);
        int none = glob(pattern, GLOB_NOSORT, NULL, &found);
        if (!none) globfree(&found);
        if (!none) return zr_why(why, "%.200s: %s", dir, kinds[i].is);
    }
    return zr_why(why, "%s: has neither " ZR_SINGLE " nor " ZR_INDEX, dir);
}

/* Read the single file, or else the index. */
static int read_files(zr_table *t, const char *dir, char *why)
{
    char file[4096];
    struct stat s;
    if (snprintf(file, sizeof file, "%s/%s", dir, ZR_INDEX) >= (int)sizeof file)
        return zr_why(why, "%.200s: the path is too long", dir);
    if (stat(dir, &s)) return zr_why(why, "%s: %s", dir, strerror(errno));
    if (is_there(dir, ZR_SINGLE)) return add_file(t, dir, ZR_SINGLE, why);
    if (is_there(dir, ZR_INDEX)) return read_index(t, dir, why, file);
    return say_other(dir, why);
}

/* ---- the table */
static int by_name(const void *a, const void *b)
{
    return strcmp(((const zr_entry *)a)->name, ((const zr_entry *)b)->name);
}

/* Check that every tensor of the index is in its file. */
static int check_map(const zr_table *t, const char *dir, char *why)
{
    for (const struct zr_mapped *m = t->map; m < t->map + t->nmap; m++) {
        const zr_entry *e = zr_table_find(t, m->name);
        if (!e || e->file != m->file)
            return zr_why(why, "%s/%s: does not have tensor %.200s, which the index lists", dir,
                          t->files[m->file].name, m->name);
    }
    return 0;
}

/* Find a name among the first n entries, which are sorted. */
static zr_entry *find_among(const zr_table *t, int64_t n, const char *name)
{
    zr_entry key = {.name = name};
    return n ? bsearch(&key, t->entries, (size_t)n, sizeof key, by_name) : NULL;
}

static void sort(zr_table *t)
{
    if (t->n) qsort(t->entries, (size_t)t->n, sizeof *t->entries, by_name);
}

/* Add an entry for each tensor that shares its memory with another of the same file. */
static int add_aliases(zr_table *t, const char *dir, char *why)
{
    int64_t named = t->n;
    for (const struct zr_alias *a = t->aliases; a < t->aliases + t->naliases; a++) {
        const zr_entry *kept = find_among(t, named, a->kept);
        if (!kept || kept->file != a->file || find_among(t, named, a->name)) continue;
        zr_entry same = *kept, *e = add(t);
        if (!e) return zr_why(why, "%s: out of memory for its table of tensors", dir);
        *e = same;
        e->name = a->name;
    }
    sort(t);
    return 0;
}

/* Sort by name, and refuse duplicates. bad: reading has failed. */
static int order(zr_table *t, int bad, const char *dir, char *why)
{
    if (!bad) sort(t);
    for (int64_t i = 1; !bad && i < t->n; i++)
        if (!strcmp(t->entries[i - 1].name, t->entries[i].name))
            bad = zr_why(why, "%s/%s: tensor %.200s twice", dir, t->files[t->entries[i].file].name,
                         t->entries[i].name);
    if (!bad) bad = add_aliases(t, dir, why) || check_map(t, dir, why);
    if (bad) zr_table_close(t);
    return bad;
}

int zr_table_open(zr_table *t, const char *dir, char *why)
{
    *t = (zr_table){0};
    return order(t, read_files(t, dir, why), dir, why);
}

int zr_table_open_file(zr_table *t, const char *dir, const char *name, char *why)
{
    *t = (zr_table){0};
    return order(t, add_file(t, dir, name, why), dir, why);
}

void zr_table_close(zr_table *t)
{
    for (int64_t i = 0; i < t->nfiles; i++) {
        close(t->files[i].fd);
        free(t->files[i].header);
    }
    free(t->files);
    free(t->entries);
    free(t->index);
    free(t->map);
    free(t->aliases);
    free(t->packed);
    *t = (zr_table){0};
}

zr_entry *zr_table_find(const zr_table *t, const char *name) { return find_among(t, t->n, name); }

enum { EQUAL = 16384 }; /* bytes read at a time */

int zr_table_equal(const zr_table *t, const zr_entry *a, const zr_table *u, const zr_entry *b)
{
    char x[EQUAL], y[EQUAL];
    int64_t n = a->end - a->begin;
    if (a->packed || b->packed || a->dtype != b->dtype || a->ndim != b->ndim ||
        memcmp(a->shape, b->shape, sizeof a->shape))
        return 0;
    for (int64_t i = 0; i < n; i += EQUAL) {
        int64_t some = n - i < EQUAL ? n - i : EQUAL;
        if (zr_read_at(t->files[a->file].fd, x, some, a->begin + i) ||
            zr_read_at(u->files[b->file].fd, y, some, b->begin + i) || memcmp(x, y, (size_t)some))
            return 0;
    }
    return 1;
}
