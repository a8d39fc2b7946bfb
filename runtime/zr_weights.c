/* zr_weights.c -- the masters of a program as floats of model.safetensors, out and in.
 *
 * Invariants
 *  1. The file is a function of the weights, the plan and the layout, not of time. Its length and
 *     the place of every element follow from zr_program alone, so each rank finds its own.
 *  2. Elements [r*shard, (r+1)*shard) of a flat are written by rank r; all ranks cover it once.
 *  3. 8 + N is a multiple of 4096, so that the data can be mapped or read past the page cache.
 *  4. Whoever removes or renames zr_save_temp's file holds a lock on it.
 */
#define _GNU_SOURCE
#include "zr_file.h"
#include "zr_float.h"
#include "zr_safetensors.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PAGE = 4096, CHUNK = 16384, NAME = 256 };

/* ---- where things lie */
/* A state's type is told as a file's. */
_Static_assert((int)F32 == ZR_F32 && (int)BF16 == ZR_BF16 && (int)F16 == ZR_F16, "types");

/* What a rank holds of a tensor instance: n elements from its element `skip` on, at `at` in the
 * arena. */
typedef struct piece {
    int64_t at, skip, n;
} piece;

static int64_t elements(const zr_tensor *t)
{
    return t->ndim == 1 ? t->shape[0] : t->shape[0] * t->shape[1];
}

/* The row of a tensor's masters behind s, the first where s is NULL, each again for every slice of
 * the tensor, an instance of the flat; NULL: there is none. */
static const zr_state *row(const zr_program *p, const zr_tensor *t, const zr_state *s, int *slice)
{
    if (s && ++*slice < t->flat_step) return s;
    *slice = 0;
    for (s = s ? s + 1 : p->states; s < p->states + p->nstates; s++)
        if (s->flat == t->flat && !strcmp(s->what, "master")) return s;
    return NULL;
}

/* Of a row. all = 1: what lies in this rank's memory; 0: what it owns. Where every rank has all
 * shards, one begins `shard` elements behind the other, whatever a row has of each. */
static piece part(const zr_program *p, const zr_tensor *t, const zr_state *s, int i, int slice,
                  int rank, int all)
{
    int64_t begin = t->offset + i * t->offset_step - slice * p->ranks * s->shard;
    int64_t end = begin + elements(t);
    int from = s->over < 0 ? 0 : rank, to = s->over < 0 ? p->ranks - 1 : rank; /* its shards */
    int64_t held = from * s->shard + s->first; /* the first element in memory */
    int64_t lo = (all ? from : rank) * s->shard + s->first;
    int64_t hi = (all ? to : rank) * s->shard + s->first + s->n;
    lo = lo < begin ? begin : lo;
    hi = hi > end ? end : hi;
    int64_t instance = (int64_t)i * t->flat_step + slice;
    int64_t at = s->at + instance * s->stride + zr_width(s) * (lo - held);
    return (piece){at, lo - begin, hi > lo ? hi - lo : 0};
}

/* The name of instance i; returns to[NAME]. */
static char *instance(char *to, const zr_tensor *t, int i)
{
    const char *layer = t->count > 1 ? strstr(t->name, "%d") : NULL;
    int before = layer ? (int)(layer - t->name) : 0;
    if (layer) snprintf(to, NAME, "%.*s%d%s", before, t->name, t->first + i, layer + 2);
    else snprintf(to, NAME, "%s", t->name);
    return to;
}

/* Elements on their way: too much for a small stack (ulimit -s). */
typedef struct chunk {
    float whole[CHUNK];
    uint16_t half[CHUNK];
} chunk;

/* ---- saving */
int zr_save_temp(char *to, const char *dir, char *why)
{
    return zr_path(to, dir, ".model.safetensors.part", why);
}

static void put_string(FILE *f, const char *s)
{
    fputc('"', f);
    for (; *s; s++) {
        if (*s == '"' || *s == '\\') fputc('\\', f);
        fputc(*s, f);
    }
    fputc('"', f);
}

/* One tensor's entry; *at: where its data begin, moved on to their end. */
static void put_entry(FILE *f, const zr_tensor *t, int i, int64_t *at)
{
    char name[NAME], shape[64];
    int64_t end = *at + 4 * elements(t);
    fputc(',', f);
    put_string(f, instance(name, t, i));
    fprintf(f, ":{\"dtype\":\"F32\",\"shape\":%s,\"data_offsets\":[%" PRId64 ",%" PRId64 "]}",
            zr_shape_text(shape, sizeof shape, t->shape, t->ndim), *at, end);
    *at = end;
}

/* u64 N and N bytes of JSON: *n bytes in all; *data: bytes of all tensors. NULL: no memory. */
static char *make_header(const zr_program *p, int64_t *n, int64_t *data)
{
    char *text = NULL;
    size_t length = 0;
    FILE *f = open_memstream(&text, &length);
    if (!f) return NULL;
    *data = 0;
    fprintf(f, "%8s{\"__metadata__\":{\"format\":\"pt\",\"plan\":", "");
    put_string(f, p->plan);
    fprintf(f, ",\"layout\":");
    put_string(f, p->layout);
    fputc('}', f);
    for (int k = 0; k < p->ntensors; k++)
        for (int i = 0; i < p->tensors[k].count; i++) put_entry(f, &p->tensors[k], i, data);
    fputc('}', f);
    while (ftell(f) % PAGE) fputc(' ', f);
    if (fclose(f)) {
        free(text);
        return NULL;
    }
    *n = (int64_t)length;
    uint64_t N = length - 8;
    memcpy(text, &N, 8);
    return text;
}

/* A file of the final size that holds the header. It stays open: the lock goes with the process. */
static int begin_file(const zr_program *p, const char *file, char *why)
{
    int64_t n, data;
    if (zr_save_clear(file, why)) return -1;
    int fd = open(file, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) return zr_why(why, "%s: %s", file, strerror(errno));
    if (zr_lock(fd, file, why)) {
        close(fd);
        return -1;
    }
    char *header = make_header(p, &n, &data);
    int bad = header ? zr_reserve(fd, n + data, file, why)
                     : zr_why(why, "%s: no memory for its header", file);
    if (!bad && zr_write_at(fd, header, n, 0)) bad = zr_why(why, "%s: %s", file, strerror(errno));
    if (bad) {
        unlink(file);
        close(fd);
    }
    free(header);
    return bad;
}

int zr_save_begin(const zr_program *p, const char *dir, char *why)
{
    char file[ZR_FILE];
    return zr_make_dir(dir, why) || zr_save_temp(file, dir, why) ? -1 : begin_file(p, file, why);
}

/* The masters [n] of a row at `from` in its arena, to float[n] at file offset `at`. */
static int write_floats(int fd, zr *z, const zr_state *s, int64_t from, int64_t n, int64_t at)
{
    chunk *c = malloc(sizeof *c);
    int bad = !c;
    for (int64_t i = 0; !bad && i < n; i += CHUNK) {
        int64_t some = n - i < CHUNK ? n - i : CHUNK;
        if (s->type == ZR_F32) {
            zr_read(z, s->queue, c->whole, from + 4 * i, 4 * some);
        } else {
            zr_read(z, s->queue, c->half, from + 2 * i, 2 * some);
            zr_widen(c->whole, c->half, some, s->type);
        }
        bad = zr_write_at(fd, c->whole, 4 * some, at + 4 * i);
    }
    free(c);
    return bad ? -1 : 0;
}

/* This rank's pieces of every tensor, data at file offset `at`. */
static int write_pieces(const zr_program *p, zr *z, int rank, int fd, int64_t at)
{
    int slice = 0;
    for (int k = 0; k < p->ntensors; k++) {
        const zr_tensor *t = &p->tensors[k];
        for (int i = 0; i < t->count; i++, at += 4 * elements(t)) {
            zr_progress_next(z);
            for (const zr_state *s = row(p, t, NULL, &slice); s; s = row(p, t, s, &slice)) {
                piece q = part(p, t, s, i, slice, rank, 0);
                if (q.n && write_floats(fd, z, s, q.at, q.n, at + 4 * q.skip)) return -1;
            }
        }
    }
    return 0;
}

int zr_save_part(const zr_program *p, zr *z, int rank, const char *dir, char *why)
{
    char file[ZR_FILE];
    int64_t n, data;
    if (zr_save_temp(file, dir, why)) return -1;
    char *header = make_header(p, &n, &data);
    if (!header) return zr_why(why, "%s: no memory for its header", file);
    free(header); /* its length alone is wanted */
    int fd = open(file, O_WRONLY | O_CLOEXEC);
    int bad = fd < 0 || write_pieces(p, z, rank, fd, n) || fsync(fd);
    if (bad) zr_why(why, "%s: %s", file, strerror(errno));
    if (fd >= 0 && close(fd) && !bad) bad = zr_why(why, "%s: %s", file, strerror(errno));
    return bad ? -1 : 0;
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

int zr_save_end(const char *dir, int ok, char *why)
{
    char temp[ZR_FILE], file[ZR_FILE];
    if (zr_save_temp(temp, dir, why) || zr_path(file, dir, "model.safetensors", why)) return -1;
    if (ok && !sync_path(temp) && !rename(temp, file) && !sync_path(dir)) return 0;
    if (ok) zr_why(why, "%s: %s", file, strerror(errno));
    unlink(temp);
    return ok ? -1 : 0;
}

/* ---- loading */
/* n floats from file offset `at` */
static int read_chunk(int fd, chunk *to, int64_t n, int64_t at, int dtype)
{
    if (dtype == F32) return zr_read_at(fd, to->whole, 4 * n, at);
    if (zr_read_at(fd, to->half, 2 * n, at)) return -1;
    zr_widen(to->whole, to->half, n, dtype);
    return 0;
}

/* The masters [n] of a row at `to` in its arena, from file offset `at`. */
static int read_floats(int fd, zr *z, const zr_state *s, int64_t to, int64_t n, int64_t at,
                       int dtype)
{
    chunk *c = malloc(sizeof *c);
    int64_t width = dtype == F32 ? 4 : 2;
    int bad = !c;
    for (int64_t i = 0; !bad && i < n; i += CHUNK) {
        int64_t some = n - i < CHUNK ? n - i : CHUNK;
        bad = read_chunk(fd, c, some, at + width * i, dtype);
        if (bad) break;
        if (s->type == ZR_F32) {
            zr_write(z, s->queue, to + 4 * i, c->whole, 4 * some);
        } else {
            zr_narrow(c->half, c->whole, some, s->type);
            zr_write(z, s->queue, to + 2 * i, c->half, 2 * some);
        }
    }
    free(c);
    return bad ? -1 : 0;
}

static const char prefix[] = "transformer.";

static const char *unprefixed(const char *name)
{
    return strncmp(name, prefix, sizeof prefix - 1) ? name : name + sizeof prefix - 1;
}

/* A tensor as it is named, else with the prefix of GPT-2's files put on or taken off. */
static zr_entry *locate(const zr_table *t, const char *name)
{
    char with[NAME + sizeof prefix];
    zr_entry *e = zr_table_find(t, name);
    if (e) return e;
    snprintf(with, sizeof with, "%s%s", prefix, name);
    return zr_table_find(t, unprefixed(name) == name ? with : unprefixed(name));
}

/* The entry of instance i; NULL and `why` unless it is as the model needs it. */
static zr_entry *match(const zr_table *table, const zr_tensor *t, int i, const char *dir, char *why)
{
    char name[NAME], found[200], wanted[64];
    zr_entry *e = locate(table, instance(name, t, i));
    zr_shape_text(wanted, sizeof wanted, t->shape, t->ndim);
    if (!e) {
        zr_why(why, "%s: tensor %s is missing; the model needs it with shape %s", dir, name,
               wanted);
        return NULL;
    }
    const char *file = table->files[e->file].name;
    int same = e->ndim == t->ndim;
    for (int k = 0; same && k < t->ndim; k++) same = e->shape[k] == t->shape[k];
    if (!same)
        zr_why(why, "%s/%s: tensor %s has shape %s; the model needs %s", dir, file, name,
               zr_shape_text(found, sizeof found, e->shape, e->ndim), wanted);
    else if (e->dtype > F16)
        zr_why(why, "%s/%s: tensor %s is %s; F32, BF16 and F16 can be read", dir, file, name,
               zr_dtype_name(e->dtype));
    return same && e->dtype <= F16 ? e : NULL;
}

static int match_all(const zr_program *p, const zr_table *table, const char *dir, char *why)
{
    for (int k = 0; k < p->ntensors; k++)
        for (int i = 0; i < p->tensors[k].count; i++) {
            zr_entry *e = match(table, &p->tensors[k], i, dir, why);
            if (!e) return -1;
            e->used = 1;
        }
    return 0;
}

/* Instance i of a tensor, to all rows of its masters. */
static int read_tensor(const zr_program *p, const zr_table *table, const zr_entry *e, zr *z,
                       const zr_tensor *t, int i, int rank)
{
    int64_t width = e->dtype == F32 ? 4 : 2;
    int slice = 0;
    for (const zr_state *s = row(p, t, NULL, &slice); s; s = row(p, t, s, &slice)) {
        piece q = part(p, t, s, i, slice, rank, 1);
        if (q.n && read_floats(table->files[e->file].fd, z, s, q.at, q.n, e->begin + width * q.skip,
                               e->dtype))
            return -1;
    }
    return 0;
}

static int read_all(const zr_program *p, const zr_table *table, zr *z, int rank, const char *dir,
                    char *why)
{
    char name[NAME];
    for (int k = 0; k < p->ntensors; k++)
        for (int i = 0; i < p->tensors[k].count; i++) {
            zr_entry *e = locate(table, instance(name, &p->tensors[k], i));
            zr_progress_next(z);
            if (read_tensor(p, table, e, z, &p->tensors[k], i, rank))
                return zr_why(why, "%s/%s: tensor %s: %s", dir, table->files[e->file].name, name,
                              errno == ENODATA ? "the file has become shorter" : strerror(errno));
        }
    return 0;
}

/* ---- what the model does not use */
/* Attention masks and frequencies that older files carry: PREFIX N SUFFIX. */
static int is_buffer(const char *name)
{
    static const char *const known[][2] = {
        {"h.", ".attn.bias"},
        {"h.", ".attn.masked_bias"},
        {"model.layers.", ".self_attn.rotary_emb.inv_freq"},
    };
    name = unprefixed(name);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        size_t n = strlen(known[i][0]), digits = 0;
        if (!strncmp(name, known[i][0], n)) digits = strspn(name + n, "0123456789");
        if (digits && !strcmp(name + n + digits, known[i][1])) return 1;
    }
    return 0;
}

/* A head that repeats the embedding, as files of tied models may. */
static int is_tied(const zr_table *t, const zr_entry *e)
{
    static const char *const embedding[] = {"wte.weight", "model.embed_tokens.weight"};
    for (int i = 0; i < 2 && !strcmp(unprefixed(e->name), "lm_head.weight"); i++) {
        zr_entry *w = locate(t, embedding[i]);
        if (w && zr_table_equal(t, w, e)) return 1;
    }
    return 0;
}

/* What is no buffer and no tied head is an error, for a model without it is another one. drop: it
 * is left out. */
static int judge_unused(const zr_table *t, const char *dir, int drop, char *note, char *why)
{
    int64_t buffers = 0, tied = 0, others = 0;
    char names[ZR_WHY / 2] = "";
    size_t at = 0;
    for (int64_t i = 0; i < t->n; i++) {
        const zr_entry *e = &t->entries[i];
        if (e->used) continue;
        if (is_buffer(e->name)) buffers++;
        else if (is_tied(t, e)) tied++;
        else if (others++ < 4)
            at +=
                (size_t)snprintf(names + at, sizeof names - at, "%s%.50s", at ? ", " : "", e->name);
    }
    const char *more = others > 4 ? ", ..." : "";
    if (others && !drop)
        return zr_why(why,
                      "%.150s: the model has no place for %" PRId64 " of the tensors: %s%s; "
                      "needed: a spec that has them, or --drop-unknown",
                      dir, others, names, more);
    if (others)
        zr_why(note,
               "%.150s: warning: left out, for the model has no place for them: %" PRId64
               " of the tensors: %s%s",
               dir, others, names, more);
    else if (buffers + tied)
        zr_why(note, "%.150s: not needed: %" PRId64 " buffers%s", dir, buffers,
               tied ? ", lm_head.weight (the same as the embedding)" : "");
    return 0;
}

int zr_load(const zr_program *p, zr *z, int rank, const char *dir, int drop, char *note, char *why)
{
    zr_table table;
    *note = 0;
    if (zr_table_open(&table, dir, why)) return -1;
    int bad = match_all(p, &table, dir, why) ||
              (rank == 0 && judge_unused(&table, dir, drop, note, why)) ||
              read_all(p, &table, z, rank, dir, why);
    zr_table_close(&table);
    return bad ? -1 : 0;
}
