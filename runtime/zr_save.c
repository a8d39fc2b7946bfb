/* zr_save.c -- writes the folder of --save in the format of transformers: files of weights,
 * config.json, and the tokenizer's files.
 *
 * Invariants
 *  1. Every file is written under the name of zr_save_temp, followed by .1, .2 ... from the second
 *     on. When all are complete they are renamed, from the last to the first. So the remains of a
 *     save that was killed have no gap, and zr_save_clear finds all of them.
 *  2. Files of different saves never look like one save, neither by an index nor by their names.
 *  3. Only old files that are replaced, and shards that the old index names, are removed.
 *  4. A process that removes or renames zr_save_temp's file holds a lock on it.
 *  5. Complete weights are never removed: a file that cannot be renamed keeps its temporary name.
 */
#define _GNU_SOURCE
#include "zr_file.h"
#include "zr_json.h"
#include "zr_lora.h"
#include "zr_packed.h"
#include "zr_safetensors.h"
#include "zr_save.h"
#include "zr_weights.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- the files of a save */
/* Add a file with header h, which it owns. Returns NULL if out of memory. */
static struct zr_saved *add_saved(zr_saving *s, const char *name, zr_header h)
{
    struct zr_saved *more = realloc(s->file, (size_t)(s->n + 1) * sizeof *more);
    if (!more) {
        free(h.text);
        return NULL;
    }
    s->file = more;
    more += s->n++;
    *more = (struct zr_saved){.h = h};
    snprintf(more->name, sizeof more->name, "%s", name);
    return more;
}

/* State of writing the index: goes through the tensors of all shards in order. */
typedef struct walk {
    FILE *to;
    const zr_saving *s;
    int64_t n; /* number of tensors so far */
    int shard;
} walk;

static void put_place(void *of, const char *name)
{
    walk *w = of;
    const zr_header *h = &w->s->file[w->shard].h;
    if (w->n == h->first + h->tensors) w->shard++;
    fprintf(w->to, w->n++ ? ",\n    " : "\n    ");
    zr_json_quote(w->to, name);
    fprintf(w->to, ": \"%s\"", w->s->file[w->shard].name);
}

/* Make the index, the first of all files. */
static int add_index(zr_saving *s)
{
    size_t length = 0;
    zr_header h = {0};
    walk w = {open_memstream(&h.text, &length), s, 0, 0};
    int64_t total = 0;
    if (!w.to) return -1;
    for (int i = 0; i < s->n; i++) total += s->file[i].h.data;
    fprintf(w.to, "{\n  \"metadata\": {\n    \"total_size\": %" PRId64 "\n  },\n", total);
    fprintf(w.to, "  \"weight_map\": {");
    zr_stored_names(s->p, &s->stored, put_place, &w);
    fprintf(w.to, "\n  }\n}\n");
    int bad = fclose(w.to);
    h.n = (int64_t)length;
    if (bad || !add_saved(s, ZR_INDEX, h)) return -1;
    struct zr_saved index = s->file[s->n - 1];
    memmove(s->file + 1, s->file, (size_t)(s->n - 1) * sizeof index);
    s->file[0] = index;
    return 0;
}

static int add_shards(zr_saving *s, int64_t most)
{
    int64_t all = zr_stored_names(s->p, &s->stored, NULL, NULL), first = 0;
    do {
        zr_header h;
        if (zr_stored_open(&h, s->p, &s->stored, first, most) || !add_saved(s, ZR_SINGLE, h))
            return -1;
        first += h.tensors;
    } while (first < all);
    s->shards = s->n;
    if (s->n == 1) return 0;
    for (int i = 0; i < s->n; i++)
        snprintf(s->file[i].name, sizeof s->file[i].name, "model-%05d-of-%05d.safetensors", i + 1,
                 s->n);
    return add_index(s);
}

/* ---- adapters, as PEFT writes them */
static int add_adapters(zr_saving *s, const zr_stored *f, const char *name)
{
    zr_header h;
    return zr_stored_open(&h, s->p, f, 0, INT64_MAX) || !add_saved(s, name, h);
}

/* Write the program's text, with the base's folder as the value of a key that is null in it. */
static int add_adapter_config(zr_saving *s, const char *from)
{
    static const char key[] = "\"base_model_name_or_path\": ";
    size_t length = 0;
    zr_header h = {0};
    const char *text = s->p->adapter, *at = strstr(text, key) + strlen(key);
    FILE *to = open_memstream(&h.text, &length);
    if (!to) return -1;
    fprintf(to, "%.*s", (int)(at - text), text);
    if (from) zr_json_quote(to, from);
    fprintf(to, "%s", at + (from ? strlen("null") : 0));
    int bad = fclose(to);
    h.n = (int64_t)length;
    return bad || !add_saved(s, ZR_ADAPTER_CONFIG, h);
}

/* ---- config.json */
static const char *const type_names[] = {"float32", "bfloat16", "float16"};

/* Copy text[n] with a new value of its keys, or of the first of them if it has neither; NULL leaves
 * them out. copy: another copy to parse, as strings are decoded in place. Returns an error, or
 * NULL. */
static const char *put_value(FILE *to, const char *text, char *copy, int64_t n,
                             const char *const keys[2], const char *value)
{
    zr_json j = {copy, copy + n, NULL};
    int64_t at = 0, i = 0, end = 0; /* end: of the last entry that stays, or of the brace */
    int found = 0, stays = 0, comma = 0;
    while (zr_json_more(&j, '{', &i)) {
        if (i == 1) end = j.at - copy;
        if (comma) at = j.at - copy; /* that of the first entry goes with it */
        comma = 0;
        const char *key = zr_json_key(&j);
        int64_t begin = j.at - copy;
        int is = key && (!strcmp(key, keys[0]) || !strcmp(key, keys[1]));
        zr_json_skip(&j);
        if (j.error) break;
        found |= is;
        if (is) {
            int64_t until = value ? begin : end;
            if (until > at) fprintf(to, "%.*s", (int)(until - at), text + at);
            if (value) fprintf(to, " %s", value);
            at = j.at - copy;
            comma = !value && !stays;
        }
        if (!is || value) stays = 1, end = j.at - copy;
    }
    if (zr_json_end(&j)) return j.error;
    if (!found && value) {
        at = strchr(text, '{') + 1 - text;
        fprintf(to, "{\n  \"%s\": %s%s", keys[0], value, i ? "," : "");
    }
    fprintf(to, "%s", text + at);
    return NULL;
}

/* Return the text with a new value, see put_value, and free the old one. NULL: not JSON, or out of
 * memory. */
static char *revalued(char *text, int64_t *n, const char *const keys[2], const char *value,
                      const char *file, char *why)
{
    size_t length = 0;
    char *made = NULL, *copy = malloc((size_t)*n + 1);
    FILE *to = copy ? open_memstream(&made, &length) : NULL;
    const char *error = "out of memory";
    if (to) {
        memcpy(copy, text, (size_t)*n + 1);
        error = put_value(to, text, copy, *n, keys, value);
        if (fclose(to)) error = "out of memory";
    }
    free(copy);
    free(text);
    *n = (int64_t)length;
    if (!error) return made;
    free(made);
    zr_why(why, "%s: %s", file, error);
    return NULL;
}

static char *retyped(char *text, int64_t *n, int type, const char *file, char *why)
{
    static const char *const keys[2] = {"torch_dtype", "dtype"};
    char value[16];
    snprintf(value, sizeof value, "\"%s\"", type_names[type]);
    return revalued(text, n, keys, value, file, why);
}

static char *regrown(char *text, int64_t *n, int64_t vocab, const char *file, char *why)
{
    static const char *const keys[2] = {"vocab_size", "vocab_size"};
    char value[32];
    snprintf(value, sizeof value, "%" PRId64, vocab);
    return revalued(text, n, keys, value, file, why);
}

/* The weights are saved dequantized. */
#define QUANTIZED "quantization_config"
static char *dequantized(char *text, int64_t *n, const char *file, char *why)
{
    static const char *const keys[2] = {QUANTIZED, QUANTIZED};
    return revalued(text, n, keys, NULL, file, why);
}

/* Add the config.json of the loaded folder, or else the program's own. note: there is none. */
static int add_config(zr_saving *s, const char *from, int type, char *note, char *why)
{
    char file[ZR_FILE];
    zr_header h = {0};
    if (from && zr_path(file, from, ZR_CONFIG, why)) return -1;
    if (from && !access(file, F_OK)) {
        h.text = zr_file_text(file, &h.n, why);
        int64_t had = h.n;
        if (h.text && strstr(h.text, "\"" QUANTIZED "\""))
            h.text = dequantized(h.text, &h.n, file, why);
        if (h.text && h.n < had)
            zr_why(note, "%.200s gets the dequantized weights%s, and no " QUANTIZED, s->dir,
                   s->stored.merge ? " with the adapters added" : "");
        if (h.text && type >= 0) h.text = retyped(h.text, &h.n, type, file, why);
        if (h.text && s->p->vocab_from) h.text = regrown(h.text, &h.n, s->p->vocab, file, why);
    } else if (s->p->config) {
        h.text = strdup(s->p->config);
        h.n = (int64_t)strlen(s->p->config);
        type = s->stored.types ? s->stored.types[0] : s->stored.type;
        if (h.text) h.text = retyped(h.text, &h.n, type, ZR_CONFIG, why);
        else zr_why(why, "out of memory");
    } else {
        zr_why(note, "%.200s gets no config.json: transformers has no such model family", s->dir);
        return 0;
    }
    if (!h.text) return -1;
    return add_saved(s, ZR_CONFIG, h) ? 0 : zr_why(why, "out of memory");
}

static int add_copies(zr_saving *s, const char *from, char *why)
{
    char file[ZR_FILE];
    for (const char *const *name = zr_copied; *name; name++) {
        zr_header h = {0};
        if (zr_path(file, from, *name, why)) return -1;
        if (access(file, F_OK)) continue;
        h.text = zr_file_text(file, &h.n, why);
        if (!h.text) return -1;
        if (!add_saved(s, *name, h)) return zr_why(why, "out of memory");
    }
    return 0;
}

/* Refuse to save whole weights beside adapters, because loading the
 * folder would add these again. */
static int refuse_adapters(const zr_saving *s, char *why)
{
    char file[ZR_FILE];
    if (zr_path(file, s->dir, ZR_ADAPTER_CONFIG, why)) return -1;
    if (access(file, F_OK)) return 0;
    return zr_why(why,
                  "%s: a program that loads this folder would add its adapters to the saved "
                  "weights; move them away, or name another folder",
                  file);
}

static int add_all(zr_saving *s, int rank, const char *from, int type, int64_t most, char *note,
                   char *why)
{
    char temp[ZR_FILE];
    int alone = s->stored.part == ZR_ADAPTERS;
    if (zr_save_temp(temp, s->dir, why) || (!alone && refuse_adapters(s, why))) return -1;
    if (alone ? add_adapters(s, &s->stored, ZR_ADAPTER_MODEL) : add_shards(s, most))
        return zr_why(why, "%s: out of memory for its header", temp);
    if (s->stored.merge && add_adapters(s, &zr_low, ""))
        return zr_why(why, "%s: out of memory", s->dir);
    if (s->stored.merge) s->added = s->n - 1;
    if (!(s->chunk = zr_chunk_new())) return zr_why(why, "%s: out of memory", s->dir);
    if (rank != 0) return 0;
    if (alone) return add_adapter_config(s, from) ? zr_why(why, "out of memory") : 0;
    return add_config(s, from, type, note, why) || (from && add_copies(s, from, why)) ? -1 : 0;
}

int zr_save_open(zr_saving *s, const zr_program *p, int rank, const char *dir, const char *from,
                 int merge, int type, const uint8_t *types, int64_t most, char *note, char *why)
{
    int alone = p->adapter && !merge;
    *s = (zr_saving){.p = p, .dir = dir, .stored = alone ? zr_adapters : zr_masters};
    if (merge && p->formats && !from)
        return zr_why(why,
                      "%.300s: --merge needs --load DIR: adapters are added to the weights "
                      "there, as those of the run are quantized",
                      dir);
    if (merge && !(s->stored.merge = zr_merge_new(p))) return zr_why(why, "out of memory");
    if (merge && p->formats && zr_folder_open(&s->loaded, from, why)) {
        zr_save_close(s);
        return -1;
    }
    if (merge && p->formats) s->stored.loaded = &s->loaded;
    s->stored.types = alone ? NULL : types;
    if (type >= 0) s->stored.type = type;
    *note = 0;
    int bad = add_all(s, rank, from, type, most, note, why);
    if (bad) zr_save_close(s);
    return bad;
}

void zr_save_close(zr_saving *s)
{
    for (int i = 0; i < s->n; i++) free(s->file[i].h.text);
    free(s->file);
    free(s->chunk);
    zr_merge_close(s->stored.merge);
    if (s->stored.loaded) zr_table_close(&s->loaded);
    *s = (zr_saving){0};
}

/* ---- temporary names */
int zr_save_temp(char *to, const char *dir, char *why) { return zr_path(to, dir, ZR_PART, why); }

static int temp_of(char *to, const zr_saving *s, int i, char *why)
{
    char name[64];
    snprintf(name, sizeof name, ZR_PART ".%d", i);
    return i ? zr_path(to, s->dir, name, why) : zr_save_temp(to, s->dir, why);
}

/* ---- begin and write */
/* Create a file. The first stays open, so that its lock lasts as long as the process. */
static int begin_file(const zr_saving *s, int i, char *why)
{
    char temp[ZR_FILE];
    if (temp_of(temp, s, i, why)) return -1;
    int fd = zr_stored_begin(&s->file[i].h, temp, why);
    if (fd > 0 && i) close(fd);
    return fd < 0 ? -1 : 0;
}

/* Remove the files from `last` down; all are this run's. */
static void remove_temps(const zr_saving *s, int last)
{
    char temp[ZR_FILE], why[ZR_WHY];
    for (int i = last; i >= 0; i--)
        if (!temp_of(temp, s, i, why)) unlink(temp);
}

/* Refuse folders in the place of files before training, not at its end. */
static int refuse_folders(const zr_saving *s, char *why)
{
    char file[ZR_FILE];
    struct stat there;
    for (int i = 0; i < s->n; i++) {
        if (s->added && i == s->added) continue;
        if (zr_path(file, s->dir, s->file[i].name, why)) return -1;
        if (!lstat(file, &there) && S_ISDIR(there.st_mode))
            return zr_why(why, "%s: %s", file, strerror(EISDIR));
    }
    return 0;
}

/* Refuse an old index that cannot be read, because its shards would be left behind. */
static int refuse_index(const zr_saving *s, char *why)
{
    char index[ZR_FILE];
    int64_t n = 0;
    if (zr_path(index, s->dir, ZR_INDEX, why)) return -1;
    if (access(index, F_OK)) return 0;
    char *text = zr_file_text(index, &n, why);
    free(text);
    return text ? 0 : -1;
}

int zr_save_begin(const zr_saving *s, char *why)
{
    char temp[ZR_FILE];
    int bad = zr_make_dir(s->dir, why) || refuse_folders(s, why) || refuse_index(s, why) ||
              zr_save_temp(temp, s->dir, why) || zr_save_clear(temp, why);
    for (int i = 0; !bad && i < s->n; i++)
        if ((bad = begin_file(s, i, why)) && i) remove_temps(s, i - 1);
    return bad ? -1 : 0;
}

int zr_save_adapters(const zr_saving *s, zr *z, int rank, char *why)
{
    char temp[ZR_FILE];
    const zr_header *h = &s->file[s->added].h;
    if (!s->added) return 0;
    if (temp_of(temp, s, s->added, why)) return -1;
    return zr_stored_write(z, s->p, &zr_low, h, rank, temp, s->chunk, NULL, why);
}

int zr_save_part(zr_saving *s, zr *z, int rank, char *why)
{
    char temp[ZR_FILE];
    int bad =
        s->added && (temp_of(temp, s, s->added, why) || zr_merge_open(s->stored.merge, temp, why));
    for (int i = 0; !bad && i < s->n; i++) {
        const zr_header *h = &s->file[i].h;
        if (!h->tensors || (s->added && i == s->added)) continue;
        bad = temp_of(temp, s, i, why) ||
              zr_stored_write(z, s->p, &s->stored, h, rank, temp, s->chunk, NULL, why);
    }
    return bad ? -1 : 0;
}

/* ---- end */
static int is_saved(const zr_saving *s, const char *name)
{
    for (int i = 0; i < s->n; i++)
        if (!strcmp(s->file[i].name, name)) return 1;
    return 0;
}

/* Remove the shards that the old index, text[n], names and this save does not have. */
static void remove_shards(const zr_saving *s, char *text, int64_t n)
{
    char file[ZR_FILE], why[ZR_WHY];
    zr_json j = {text, text + n, NULL};
    for (int64_t i = 0; zr_json_more(&j, '{', &i);) {
        const char *key = zr_json_key(&j);
        if (!key || strcmp(key, "weight_map")) {
            zr_json_skip(&j);
            continue;
        }
        for (int64_t k = 0; zr_json_more(&j, '{', &k);) {
            const char *name = zr_json_key(&j) ? zr_json_text(&j) : NULL;
            if (name && zr_is_shard(name) && !is_saved(s, name) &&
                !zr_path(file, s->dir, name, why))
                unlink(file);
        }
    }
}

static int sync_path(const char *file)
{
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    int bad = fd < 0 || fsync(fd);
    int error = errno;
    if (fd >= 0) close(fd);
    errno = error;
    return bad;
}

/* Sync all files to the disk before one is renamed. */
static int sync_temps(const zr_saving *s, char *why)
{
    char temp[ZR_FILE];
    for (int i = 0; i < s->n; i++)
        if (temp_of(temp, s, i, why)) return -1;
        else if (sync_path(temp)) return zr_why(why, "%s: %s", temp, strerror(errno));
    return 0;
}

/* Rename the files. left: number of files not renamed yet. */
static int rename_temps(const zr_saving *s, int *left, char *why)
{
    char temp[ZR_FILE], file[ZR_FILE];
    for (; *left > 0; --*left) {
        const char *name = s->file[*left - 1].name;
        if (temp_of(temp, s, *left - 1, why) || zr_path(file, s->dir, name, why)) return -1;
        if (s->added && *left - 1 == s->added) unlink(temp);
        else if (rename(temp, file)) return zr_why(why, "%s: %s", file, strerror(errno));
    }
    return 0;
}

/* Replace the old files. index, other: paths in the folder. Shards may have the names of another
 * save until all are there. So an old index is removed first, and an old single file, which readers
 * prefer to an index, last. */
static int replace_old(const zr_saving *s, int *left, const char *index, const char *other,
                       char *why)
{
    char *old = NULL;
    int64_t n = 0;
    if (!access(index, F_OK)) old = zr_file_text(index, &n, why);
    if (s->shards > 1) unlink(index);
    int bad = rename_temps(s, left, why);
    if (!bad) unlink(other);
    if (!bad && old) remove_shards(s, old, n);
    free(old);
    return bad;
}

/* Add to the error in `why` which files are not renamed yet: the first `left`. */
static int say_left(const zr_saving *s, int left, char *why)
{
    char error[ZR_WHY], last[96] = "";
    snprintf(error, sizeof error, "%s", why);
    if (left > 1)
        snprintf(last, sizeof last, " to .part.%d (%s)", left - 1, s->file[left - 1].name);
    return zr_why(why, "%.300s; the weights are whole: rename " ZR_PART " (%s)%s beside it", error,
                  s->file[0].name, last);
}

int zr_save_end(const zr_saving *s, int ok, char *why)
{
    char index[ZR_FILE], file[ZR_FILE];
    int left = s->n;
    if (zr_path(index, s->dir, ZR_INDEX, why) || zr_path(file, s->dir, ZR_SINGLE, why)) return -1;
    int alone = s->stored.part == ZR_ADAPTERS; /* a base may lie beside them */
    int bad = ok && (sync_temps(s, why) ||
                     (alone ? rename_temps(s, &left, why)
                            : replace_old(s, &left, index, s->shards > 1 ? file : index, why)));
    if (ok && !bad && sync_path(s->dir)) bad = zr_why(why, "%s: %s", s->dir, strerror(errno));
    if (!ok) remove_temps(s, left - 1);
    return bad && left ? say_left(s, left, why) : bad ? -1 : 0;
}
