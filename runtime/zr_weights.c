/* zr_weights.c -- writes and reads states of a program as safetensors files: the masters as
 * model.safetensors, or each state of a checkpoint.
 *
 * Invariants
 *  1. The contents of a file depend on the state, the plan and the layout, not on time. Its length
 *     and the offset of every element follow from zr_program alone, so each rank can compute its
 *     own.
 *  2. Elements [r*shard, (r+1)*shard) of a flat are written by the rank at place r of p->owners;
 *     together the ranks cover a flat once.
 *  3. 8 + N is a multiple of 4096, so that the data can be mapped or read past the page cache.
 */
#define _GNU_SOURCE
#include "zr_file.h"
#include "zr_float.h"
#include "zr_grace.h"
#include "zr_groups.h"
#include "zr_grow.h"
#include "zr_lora.h"
#include "zr_marks.h"
#include "zr_memory.h"
#include "zr_names.h"
#include "zr_packed.h"
#include "zr_progress.h"
#include "zr_quantized.h"
#include "zr_rows.h"
#include "zr_safetensors.h"
#include "zr_sum.h"
#include "zr_weights.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* CHUNK: elements that are read or written at once, a multiple of zk_host_quantize's 16384 */
enum { PAGE = 4096, CHUNK = 131072, NAME = 256 };

const zr_stored zr_masters = {.file = "model", .what = "master", .part = ZR_BASE};
const zr_stored zr_adapters = {.file = "adapter_model", .what = "master", .part = ZR_ADAPTERS};
const zr_stored zr_low = {.file = "adapter_model", .what = "master", .part = ZR_LOW};

/* ---- places of elements */
/* states and files number types alike */
_Static_assert((int)F32 == ZR_F32 && (int)BF16 == ZR_BF16 && (int)F16 == ZR_F16, "types");

/* A rank's part of a tensor instance: n elements from its element `skip`
 * on, at `at` in the arena. */
typedef struct piece {
    int64_t at, skip, n;
} piece;

/* A tensor's shape in a file. Checkpoints have quantized tensors as they are stored, in one row. */
typedef struct form {
    int64_t shape[2];
    int ndim;
} form;

static form form_of(const zr_program *p, const zr_stored *f, const zr_tensor *t)
{
    if (zr_format(p, t) && !f->part) return (form){{zr_stored_elements(p, t), 1}, 1};
    return (form){{t->shape[0], t->shape[1]}, t->ndim};
}

static int64_t elements(const form *x)
{
    return x->ndim == 1 ? x->shape[0] : x->shape[0] * x->shape[1];
}

/* Return the order of a tensor's rows in a file. */
static zr_rows rows_of(const zr_program *p, const zr_stored *f, const zr_tensor *t)
{
    return zr_format(p, t) && !f->part ? (zr_rows){0, 0} : zr_rows_of(p, t);
}

/* Return the next row of a tensor's state after s, or the first if s is NULL. A row comes again for
 * every slice of the tensor, an instance of the flat. NULL: there are no more. */
static const zr_state *row(const zr_program *p, const zr_stored *f, const zr_tensor *t,
                           const zr_state *s, int *slice)
{
    if (s && ++*slice < t->flat_step) return s;
    *slice = 0;
    for (s = s ? s + 1 : p->states; s < p->states + p->nstates; s++)
        if (s->flat == t->flat && !strcmp(s->what, f->what) && (!f->alone || s->type == f->type))
            return s;
    return NULL;
}

/* Return how often a file has this tensor: its instances, and once more under its second name. */
static int times(const zr_program *p, const zr_stored *f, const zr_tensor *t)
{
    int slice = 0, low = zr_is_adapter(t->name), mark = zr_marks_of(p, t);
    if (f->part == ZR_BASE && low) return 0;
    if (f->part > ZR_BASE && !low && (f->part == ZR_LOW || !(mark & ZR_WHOLE))) return 0;
    if (!row(p, f, t, NULL, &slice)) return 0;
    return t->count + (f->part == ZR_ADAPTERS && mark & ZR_TIED);
}

/* Return the part of a tensor instance in a row: with all = 1 the part in this rank's
 * memory, with 0 the part that it owns. Consecutive shards are `shard` elements apart,
 * whatever part of each the row has. */
static piece part(const zr_program *p, const zr_tensor *t, const zr_state *s, int i, int slice,
                  int rank, int all)
{
    i %= t->count; /* the second name has the same elements */
    int64_t begin = t->offset + i * t->offset_step - slice * p->ranks * s->shard;
    int64_t end = begin + zr_stored_elements(p, t);
    int from = zr_first_part(p, s, rank), to = from + zr_parts(p, s) - 1; /* its shards */
    int own = zr_place_of(p, p->owners, rank);
    int64_t held = from * s->shard + s->first; /* first element in memory */
    int64_t lo = (all ? from : own) * s->shard + s->first;
    int64_t hi = (all ? to : own) * s->shard + s->first + s->n;
    lo = lo < begin ? begin : lo;
    hi = hi > end ? end : hi;
    int64_t instance = (int64_t)i * t->flat_step + slice;
    int64_t at = s->at + instance * s->stride + zr_width(s) * (lo - held);
    return (piece){at, lo - begin, hi > lo ? hi - lo : 0};
}

/* Write the name of instance i in a file to to[NAME] and return it. */
static char *instance(char *to, const zr_program *p, const zr_stored *f, const zr_tensor *t, int i)
{
    const char *name = i < t->count ? t->name : p->second;
    const char *lead = f->part > ZR_BASE ? p->lead : "";
    int own = *lead ? zr_adapter_lead(p, name) : 0;
    const char *layer = t->count > 1 ? strstr(name, "%d") : NULL;
    int before = layer ? (int)(layer - name) : 0;
    if (layer) snprintf(to, NAME, "%.*s%.*s%d%s", own, lead, before, name, t->first + i, layer + 2);
    else snprintf(to, NAME, "%.*s%s", own, lead, name);
    return to;
}

/* A buffer for elements, which is too large for a small stack (ulimit -s). */
struct zr_chunk {
    float whole[CHUNK];
    uint16_t half[CHUNK];
    /* When loading for training: smallest magnitude, as bits of an f32, that is refused (0: none);
     * the element that has it, and its value */
    uint32_t limit;
    int64_t beyond;
    float value;
};

zr_chunk *zr_chunk_new(void)
{
    zr_chunk *c = malloc(sizeof *c);
    if (c) c->limit = 0;
    return c;
}

static int64_t width_of(int type) { return type == ZR_F32 ? 4 : 2; }

/* Return the part of a chunk for elements of a type. */
static void *elements_of(zr_chunk *c, int type)
{
    return type == ZR_F32 ? (void *)c->whole : (void *)c->half;
}

/* Convert elements from one type to another; between two 16-bit types they are widened first. */
static void convert(zr_chunk *c, int from, int to, int64_t n)
{
    if (from == to) return;
    if (from != ZR_F32) zr_widen(c->whole, c->half, n, from);
    if (to != ZR_F32) zr_narrow(c->half, c->whole, n, to);
}

/* ---- saving */
static void put_string(FILE *f, const char *s)
{
    fputc('"', f);
    for (; *s; s++) {
        if (*s == '"' || *s == '\\') fputc('\\', f);
        fputc(*s, f);
    }
    fputc('"', f);
}

/* Return the type in which the n-th of a file's tensors is stored. */
static int type_of(const zr_stored *f, int64_t n) { return f->types ? f->types[n] : f->type; }

/* Write the n-th tensor's entry. Returns 0 if the file would then have more
 * than `most` bytes of data. */
static int put_entry(FILE *to, zr_header *h, const zr_program *p, const zr_stored *f, int64_t n,
                     const zr_tensor *t, int i, int64_t most)
{
    char name[NAME], shape[64];
    int type = type_of(f, n);
    form x = form_of(p, f, t);
    int64_t bytes = width_of(type) * elements(&x);
    if (h->tensors && bytes > most - h->data) return 0;
    fputc(',', to);
    put_string(to, instance(name, p, f, t, i));
    fprintf(to, ":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%" PRId64 ",%" PRId64 "]}",
            zr_dtype_name(type), zr_shape_text(shape, sizeof shape, x.shape, x.ndim), h->data,
            h->data + bytes);
    h->data += bytes;
    h->tensors++;
    return 1;
}

static void put_entries(FILE *to, zr_header *h, const zr_program *p, const zr_stored *f,
                        int64_t most)
{
    int64_t n = 0;
    for (int k = 0; k < p->ntensors; k++)
        for (int i = 0; i < times(p, f, &p->tensors[k]); i++, n++)
            if (n >= h->first && !put_entry(to, h, p, f, n, &p->tensors[k], i, most)) return;
}

int zr_stored_open(zr_header *h, const zr_program *p, const zr_stored *f, int64_t first,
                   int64_t most)
{
    size_t length = 0;
    *h = (zr_header){.first = first};
    FILE *to = open_memstream(&h->text, &length);
    if (!to) return -1;
    fprintf(to, "%8s{\"__metadata__\":{\"format\":\"pt\",\"plan\":", "");
    put_string(to, p->plan);
    fprintf(to, ",\"layout\":");
    put_string(to, p->layout);
    fputc('}', to);
    put_entries(to, h, p, f, most);
    fputc('}', to);
    while (ftell(to) % PAGE) fputc(' ', to);
    if (fclose(to)) {
        free(h->text);
        return -1;
    }
    h->n = (int64_t)length;
    uint64_t N = length - 8;
    memcpy(h->text, &N, 8);
    return 0;
}

int zr_stored_begin(const zr_header *h, const char *file, char *why)
{
    int fd = open(file, O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0) return zr_why(why, "%s: %s", file, strerror(errno));
    if (zr_lock(fd, file, why)) { /* another run has it */
        close(fd);
        return -1;
    }
    int bad = zr_reserve(fd, h->n + h->data, file, why);
    if (!bad && zr_write_at(fd, h->text, h->n, 0))
        bad = zr_why(why, "%s: %s", file, strerror(errno));
    if (!bad) return fd;
    unlink(file);
    close(fd);
    return -1;
}

/* Read n elements of a state, at `at` of its arena, into a chunk in the file's type, and return
 * their address. merge: adapters to add to the tensor's elements from `first` on, or NULL. */
static const void *made_of(zr *z, const zr_state *s, int64_t at, zr_chunk *c, int type,
                           const zr_merge *merge, int64_t first, int64_t n)
{
    zr_read(z, s->queue, elements_of(c, s->type), at, zr_width(s) * n);
    convert(c, s->type, merge ? ZR_F32 : type, n);
    if (merge) {
        zr_merge_add(merge, c->whole, first, n);
        convert(c, ZR_F32, type, n);
    }
    return elements_of(c, type);
}

/* Write a piece of a state to its tensor in the file, whose data begin at `at`, are of `type` and
 * in order o. It is written from the arena if it needs no conversion. merge: see made_of; sum: see
 * zr_sum.h. */
static int write_piece(int fd, zr *z, int type, const zr_state *s, piece q, int64_t at, zr_rows o,
                       zr_chunk *c, const zr_merge *merge, uint64_t *sum)
{
    int64_t width = width_of(type), some, first;
    const char *lies = type == s->type && !merge ? zr_reach(z, s->queue, q.at) : NULL;
    for (int64_t i = 0; i < q.n; i += some) {
        some = zr_run_of(o, q.skip + i, zr_least(q.n - i, CHUNK), &first);
        int64_t bytes = width * some, to = at + width * first;
        const void *from = lies
                               ? lies + width * i
                               : made_of(z, s, q.at + zr_width(s) * i, c, type, merge, first, some);
        if (sum) *sum += zr_sum_of(from, width, first, some);
        if (zr_write_at(fd, from, bytes, to)) return -1;
        /* errors are reported by the later sync */
        sync_file_range(fd, to, bytes, SYNC_FILE_RANGE_WRITE);
        if (sum && zr_wrote(z, fd, bytes)) return -1; /* only checkpoints have sums */
    }
    return 0;
}

static int read_floats(const zr_table *table, const zr_entry *e, zr_chunk *c, zr_rows o,
                       int64_t first, int64_t n);

/* Write weights of --load's folder, where `e` is their entry, in place of a quantized piece: the
 * runs of CHUNK weights that begin in it, of n in the tensor. */
static int write_loaded(int fd, const zr_program *p, const zr_stored *f, const zr_entry *e,
                        int type, piece q, int format, int64_t n, int64_t at, zr_rows o,
                        zr_chunk *c, const zr_merge *merge)
{
    int64_t width = width_of(p->type), bytes = p->quantized(format, CHUNK), run, place;
    int64_t lo = width * q.skip, hi = lo + width * q.n;
    int64_t first = (lo + bytes - 1) / bytes * CHUNK;
    int64_t end = q.n ? zr_least(n, (hi + bytes - 1) / bytes * CHUNK) : 0;
    for (; first < end; first += run) {
        run = zr_run_of(o, first, zr_least(CHUNK, end - first), &place);
        int64_t to = at + width_of(type) * place;
        if (read_floats(f->loaded, e, c, o, first, run)) return -1;
        if (merge) zr_merge_add(merge, c->whole, place, run);
        convert(c, ZR_F32, type, run);
        if (zr_write_at(fd, elements_of(c, type), width_of(type) * run, to)) return -1;
    }
    return 0;
}

/* Write this rank's part of instance i of a tensor. */
static int write_tensor(zr *z, const zr_program *p, const zr_stored *f, int type, int rank, int fd,
                        int64_t at, const zr_tensor *t, int i, zr_chunk *c, uint64_t *sum)
{
    char name[NAME];
    int slice = 0, adds = f->merge ? zr_merge_take(f->merge, instance(name, p, f, t, i)) : 0;
    const zr_merge *merge = adds ? f->merge : NULL;
    if (adds < 0) return -1;
    int format = f->part ? zr_format(p, t) : 0;
    zr_rows o = rows_of(p, f, t);
    const zr_entry *e = format ? zr_locate_for(p, f->loaded, instance(name, p, f, t, i)) : NULL;
    errno = EINVAL; /* the folder has changed since it was loaded */
    if (format && !e) return -1;
    for (const zr_state *s = row(p, f, t, NULL, &slice); s; s = row(p, f, t, s, &slice)) {
        piece q = part(p, t, s, i, slice, rank, 0);
        if (format ? write_loaded(fd, p, f, e, type, q, format, t->shape[0] * t->shape[1], at, o, c,
                                  merge)
                   : write_piece(fd, z, type, s, q, at, o, c, merge, sum))
            return -1;
    }
    return 0;
}

/* Write this rank's part of every tensor of a file. */
static int write_pieces(zr *z, const zr_program *p, const zr_stored *f, const zr_header *h,
                        int rank, int fd, zr_chunk *c, uint64_t *sums)
{
    int64_t n = 0, at = h->n;
    for (int k = 0; k < p->ntensors; k++) {
        const zr_tensor *t = &p->tensors[k];
        for (int i = 0; i < times(p, f, t); i++, n++) {
            int64_t nth = n - h->first;
            if (nth < 0 || nth >= h->tensors) continue;
            zr_progress_next(z);
            if (write_tensor(z, p, f, type_of(f, n), rank, fd, at, t, i, c,
                             sums ? &sums[nth] : NULL))
                return -1;
            form x = form_of(p, f, t);
            at += width_of(type_of(f, n)) * elements(&x);
        }
    }
    return 0;
}

int zr_stored_write(zr *z, const zr_program *p, const zr_stored *f, const zr_header *h, int rank,
                    const char *file, zr_chunk *c, uint64_t *sums, char *why)
{
    int fd = open(file, O_WRONLY | O_CLOEXEC);
    int bad = fd < 0 || write_pieces(z, p, f, h, rank, fd, c, sums) || fsync(fd);
    if (bad) zr_why(why, "%s: %s", file, strerror(errno));
    if (fd >= 0 && close(fd) && !bad) bad = zr_why(why, "%s: %s", file, strerror(errno));
    return bad ? -1 : 0;
}

/* ---- loading */
/* Return -1 if one of n elements of a tensor, from `first` on, may not be loaded; c then has it. */
static int check_finite(zr_chunk *c, const char *from, int type, int64_t first, int64_t n)
{
    int64_t i = 0, width = width_of(type);
    if (!zr_any_beyond(from, type, n, c->limit)) return 0;
    while (!zr_any_beyond(from + width * i, type, 1, c->limit)) i++;
    c->beyond = first + i;
    if (type == ZR_F32) memcpy(&c->value, from + width * i, 4);
    else zr_widen(&c->value, (const uint16_t *)(const void *)(from + width * i), 1, type);
    errno = ERANGE;
    return -1;
}

/* Read a piece of a state from its tensor in the file, which is in order o. It is read into the
 * arena if it needs no conversion. own: the part of the piece that this rank owns; sum: its
 * checksum, see zr_sum.h. */
static int read_piece(const zr_table *table, const zr_entry *e, zr *z, const zr_state *s, piece q,
                      zr_rows o, zr_chunk *c, piece own, uint64_t *sum)
{
    int type = e->dtype;
    int64_t width = width_of(type), some, place;
    char *lies = type == s->type ? zr_reach(z, s->queue, q.at) : NULL;
    /* read ahead from the disk while elements are converted */
    if (q.n > 0 && !o.heads && !e->packed) /* a length of 0 would mean the whole file */
        posix_fadvise(table->files[e->file].fd, e->begin + width * q.skip, width * q.n,
                      POSIX_FADV_WILLNEED);
    for (int64_t i = 0; i < q.n; i += some) {
        int64_t first = q.skip + i;
        some = zr_run_of(o, first, zr_least(q.n - i, CHUNK), &place);
        char *to = lies ? lies + width * i : elements_of(c, type);
        if (zr_elements(table, e, to, place, some)) return -1;
        if (c->limit && check_finite(c, to, type, place, some)) return -1;
        int64_t lo = own.skip > first ? own.skip - first : 0;
        int64_t hi = zr_least(own.skip + own.n - first, some);
        if (sum && lo < hi) *sum += zr_sum_of(to + width * lo, width, place + lo, hi - lo);
        if (lies) continue;
        convert(c, type, s->type, some);
        zr_write(z, s->queue, q.at + zr_width(s) * i, elements_of(c, s->type), zr_width(s) * some);
    }
    return 0;
}

/* Read n weights of a tensor of the file, which is in order o, from its element `first` on, into
 * the chunk as floats. */
static int read_floats(const zr_table *table, const zr_entry *e, zr_chunk *c, zr_rows o,
                       int64_t first, int64_t n)
{
    int64_t width = width_of(e->dtype), some, place;
    char *to = elements_of(c, e->dtype);
    for (int64_t i = 0; i < n; i += some) {
        some = zr_run_of(o, first + i, n - i, &place);
        if (zr_elements(table, e, to + width * i, place, some)) return -1;
        if (c->limit && check_finite(c, to + width * i, e->dtype, place, some)) return -1;
    }
    convert(c, e->dtype, ZR_F32, n);
    return 0;
}

/* Return whether a quantized tensor has the numbers that bitsandbytes stored in the file. */
static int is_kept(const zr_program *p, const zr_tensor *t, const zr_entry *e)
{
    int format = zr_format(p, t);
    return format && e->packed && zr_packed_fits(e->packed, p, format) && !zr_rows_of(p, t).heads;
}

/* Quantize the weights of a tensor of the file into a piece of its state. Runs of CHUNK weights at
 * the ends of the piece are made whole and written in part. */
static int quantize_piece(const zr_table *table, const zr_entry *e, zr *z, const zr_program *p,
                          const zr_tensor *t, const zr_state *s, piece q, zr_chunk *c)
{
    int format = zr_format(p, t), kept = is_kept(p, t, e);
    int64_t n = t->shape[0] * t->shape[1], width = zr_width(s);
    int64_t lo = width * q.skip, hi = lo + width * q.n, bytes = p->quantized(format, CHUNK);
    uint8_t *made = (uint8_t *)c->half;
    for (int64_t begin = lo / bytes * bytes; q.n && begin < hi; begin += bytes) {
        int64_t first = begin / bytes * CHUNK, some = zr_least(CHUNK, n - first);
        if (read_floats(table, e, c, zr_rows_of(p, t), first, some)) return -1;
        int64_t size = kept ? zr_packed_keep(table, e->packed, p, made, first, some)
                            : p->quantize(made, c->whole, some, format);
        int64_t end = begin + size, from = lo > begin ? lo : begin, to = zr_least(hi, end);
        if (size < 0) return -1;
        zr_write(z, s->queue, q.at + from - lo, made + (from - begin), to - from);
    }
    return 0;
}

/* Return the size of all tensors in a file. */
static zr_extent extent_of(const zr_program *p, const zr_stored *f)
{
    char name[NAME];
    zr_extent all = {0};
    for (int k = 0; k < p->ntensors; k++) {
        const zr_tensor *t = &p->tensors[k];
        form x = form_of(p, f, t);
        for (int i = 0; i < times(p, f, t); i++)
            zr_extent_add(&all, instance(name, p, f, t, i), x.shape, x.ndim);
    }
    return all;
}

/* Return whether an entry lacks the rows that --load adds. */
static int is_short(const zr_program *p, const zr_stored *f, const zr_tensor *t, const zr_entry *e)
{
    return f->part == ZR_BASE && zr_marks_of(p, t) & ZR_GROWN && e->shape[0] == p->vocab_from;
}

/* Return the entry of instance i; NULL and `why` if it is missing or has another shape or type. */
static zr_entry *match(const zr_program *p, const zr_stored *f, const zr_table *table,
                       const zr_tensor *t, int i, const char *dir, char *why)
{
    char name[NAME], found[200], wanted[64], more[80] = "", cause[ZR_WHY];
    zr_entry *e = zr_locate_for(p, table, instance(name, p, f, t, i));
    form x = form_of(p, f, t);
    zr_shape_text(wanted, sizeof wanted, x.shape, x.ndim);
    if (!e) {
        zr_tell_misfit(cause, p, extent_of(p, f), table, t, name, NULL);
        zr_why(why, "%.200s: tensor %s is missing; the model has it with shape %s%s", dir, name,
               wanted, cause);
        return NULL;
    }
    const char *file = table->files[e->file].name;
    int same = e->ndim == x.ndim;
    for (int k = 0; same && k < x.ndim; k++)
        same = e->shape[k] == x.shape[k] || (k == 0 && is_short(p, f, t, e));
    if (!same) {
        zr_tell_misfit(cause, p, extent_of(p, f), table, t, name, e);
        if (f->part == ZR_BASE && zr_marks_of(p, t) & ZR_GROWN)
            snprintf(more, sizeof more, ", of which a folder may lack the rows from %" PRId64 " on",
                     p->vocab_from);
        zr_why(why, "%.200s/%s: tensor %s has shape %s; the model has %s%s%s", dir, file, name,
               zr_shape_text(found, sizeof found, e->shape, e->ndim), wanted, more, cause);
    } else if (e->dtype > F16)
        zr_why(why, "%s/%s: tensor %s is %s; only F32, BF16 and F16 can be read", dir, file, name,
               zr_dtype_name(e->dtype));
    return same && e->dtype <= F16 ? e : NULL;
}

static int match_all(const zr_program *p, const zr_stored *f, const zr_table *table,
                     const char *dir, char *why)
{
    for (int k = 0; k < p->ntensors; k++)
        for (int i = 0; i < times(p, f, &p->tensors[k]); i++) {
            zr_entry *e = match(p, f, table, &p->tensors[k], i, dir, why);
            if (!e) return -1;
            e->used = 1;
        }
    return 0;
}

/* Return the elements of an entry. */
static int64_t entry_elements(const zr_entry *e)
{
    return elements(&(form){{e->shape[0], e->shape[1]}, e->ndim});
}

/* Fill the part of a piece that the file lacks with the mean of the rows there. *mean: that of an
 * earlier call, or NULL */
static int fill_piece(const zr_table *table, const zr_entry *e, zr *z, const zr_state *s, piece q,
                      zr_chunk *c, float **mean)
{
    int64_t columns = e->ndim == 1 ? 1 : e->shape[1], end = q.skip + q.n, some;
    int64_t begin = entry_elements(e) > q.skip ? entry_elements(e) : q.skip;
    if (begin >= end) return 0;
    if (!*mean) *mean = zr_mean_row(table, e, e->shape[0], columns);
    if (!*mean) return -1;
    for (int64_t i = begin; i < end; i += some) {
        some = zr_least(end - i, CHUNK);
        for (int64_t k = 0; k < some; k++) c->whole[k] = (*mean)[(i + k) % columns];
        convert(c, ZR_F32, s->type, some);
        int64_t at = q.at + zr_width(s) * (i - q.skip);
        zr_write(z, s->queue, at, elements_of(c, s->type), zr_width(s) * some);
    }
    return 0;
}

/* Read instance i of a tensor into all rows of its state. */
static int read_tensor(const zr_program *p, const zr_stored *f, const zr_table *table,
                       const zr_entry *e, zr *z, const zr_tensor *t, int i, int rank, zr_chunk *c,
                       uint64_t *sum)
{
    int slice = 0, quantized = f->part && zr_format(p, t), bad = 0;
    zr_rows o = rows_of(p, f, t);
    float *mean = NULL;
    for (const zr_state *s = row(p, f, t, NULL, &slice); s && !bad; s = row(p, f, t, s, &slice)) {
        piece q = part(p, t, s, i, slice, rank, 1), own = part(p, t, s, i, slice, rank, 0);
        piece there = {q.at, q.skip, zr_least(q.n, entry_elements(e) - q.skip)};
        bad = quantized ? quantize_piece(table, e, z, p, t, s, q, c)
                        : read_piece(table, e, z, s, there, o, c, own, sum) ||
                              (!p->vocab_drawn && fill_piece(table, e, z, s, q, c, &mean));
    }
    free(mean);
    return bad ? -1 : 0;
}

/* Report why a tensor was not read. */
static void say_unread(const zr_program *p, const zr_table *table, const zr_entry *e,
                       const zr_chunk *c, const char *dir, char *why)
{
    static const char *const types[] = {"f32", "bf16", "f16"};
    const char *file = table->files[e->file].name;
    char place[64];
    if (errno != ERANGE) {
        zr_why(why, "%s/%s: tensor %s: %s", dir, file, e->name,
               errno == ENODATA ? "the file has become shorter" : strerror(errno));
        return;
    }
    int64_t columns = e->ndim == 2 ? e->shape[1] : 1;
    int64_t at[] = {c->beyond / columns, c->beyond % columns};
    zr_why(why, "%.300s/%s: tensor %s: element %s is %g; it must be a finite %s number%s", dir,
           file, e->name, zr_shape_text(place, sizeof place, at, e->ndim), c->value, types[p->type],
           isfinite(c->value) ? "; or use another train.precision" : "");
    errno = ERANGE;
}

/* Read all tensors. sums: of each tensor; NULL: for training, so elements must be finite. */
static int read_all(const zr_program *p, const zr_stored *f, const zr_table *table, zr *z, int rank,
                    const char *dir, uint64_t *sums, char *why)
{
    char name[NAME];
    int bad = 0;
    zr_chunk *c = zr_chunk_new();
    if (!c) return zr_why(why, "%s: out of memory", dir);
    if (!sums) c->limit = zr_limits[p->type];
    for (int k = 0; k < p->ntensors; k++)
        for (int i = 0; !bad && i < times(p, f, &p->tensors[k]); i++) {
            zr_entry *e = zr_locate_for(p, table, instance(name, p, f, &p->tensors[k], i));
            zr_progress_next(z);
            bad = read_tensor(p, f, table, e, z, &p->tensors[k], i, rank, c, sums);
            if (bad) say_unread(p, table, e, c, dir, why);
            if (sums) sums++;
        }
    free(c);
    return bad;
}

/* ---- tensors that the model does not use */
/* Judge unused tensors: unless they are buffers or a tied head they are an error, because without
 * them it is another model. drop: leave them out. */
static int judge_unused(const zr_program *p, const zr_table *t, const char *dir, int drop,
                        char *note, char *why)
{
    int64_t buffers = 0, others = 0;
    const char *tied = NULL;
    char names[256] = "", cause[ZR_WHY];
    size_t at = 0;
    for (int64_t i = 0; i < t->n; i++) {
        const zr_entry *e = &t->entries[i];
        if (e->used || zr_is_used_as(t, e)) continue;
        if (zr_is_buffer(e->name)) buffers++;
        else if (zr_is_tied_head(t, e)) tied = e->name;
        else if (others++ < 4)
            at +=
                (size_t)snprintf(names + at, sizeof names - at, "%s%.50s", at ? ", " : "", e->name);
    }
    const char *more = others > 4 ? ", ..." : "";
    if (others && !drop) {
        zr_tell_misfit(cause, p, extent_of(p, &zr_masters), t, NULL, NULL, NULL);
        return zr_why(why,
                      "%.150s: the model lacks %" PRId64 " of the tensors: %s%s; "
                      "use a spec that has them, or --drop-unknown%s",
                      dir, others, names, more, cause);
    }
    if (others)
        zr_why(note,
               "%.150s: warning: ignored, as they are not in the model: %" PRId64
               " of the tensors: %s%s",
               dir, others, names, more);
    else if (buffers || tied)
        zr_why(note, "%.150s: not needed: %" PRId64 " buffers%s%.50s%s", dir, buffers,
               tied ? ", " : "", tied ? tied : "", tied ? " (the same as the embedding)" : "");
    return 0;
}

/* Add to the note that bitsandbytes has quantized some of the tensors, and how they are read. */
static void tell_packed(const zr_program *p, const zr_table *table, const char *dir, char *note)
{
    char name[NAME], before[ZR_WHY];
    int64_t kept = 0;
    if (!table->npacked) return;
    for (int k = 0; k < p->ntensors; k++)
        for (int i = 0; zr_format(p, &p->tensors[k]) && i < p->tensors[k].count; i++)
            kept += is_kept(p, &p->tensors[k],
                            zr_locate(table, instance(name, p, &zr_masters, &p->tensors[k], i)));
    snprintf(before, sizeof before, "%s", note);
    zr_why(note,
           "%.150s: bitsandbytes has quantized %" PRId64 " of the tensors; %" PRId64
           " keep their numbers, %" PRId64 " are dequantized%s%.500s",
           dir, table->npacked, kept, table->npacked - kept, *before ? "; " : "", before);
}

int zr_load(const zr_program *p, zr *z, int rank, const char *dir, int drop, char *note, char *why)
{
    zr_table table;
    *note = 0;
    if (zr_folder_open(&table, dir, why)) return -1;
    int bad = match_all(p, &zr_masters, &table, dir, why) ||
              (rank == 0 && judge_unused(p, &table, dir, drop, note, why)) ||
              read_all(p, &zr_masters, &table, z, rank, dir, NULL, why);
    if (!bad && rank == 0) tell_packed(p, &table, dir, note);
    zr_table_close(&table);
    return bad ? -1 : 0;
}

int zr_load_adapters(const zr_program *p, zr *z, int rank, const char *dir, const char *base,
                     char *note, char *why)
{
    zr_table table;
    *note = 0;
    if (zr_adapter_fits(p, dir, base, note, why) ||
        zr_table_open_file(&table, dir, ZR_ADAPTER_MODEL, why))
        return -1;
    int bad = match_all(p, &zr_adapters, &table, dir, why) ||
              zr_judge_adapters(p, &table, dir, base, why) ||
              read_all(p, &zr_adapters, &table, z, rank, dir, NULL, why);
    zr_table_close(&table);
    return bad ? -1 : 0;
}

/* ---- files of checkpoints */
/* Refuse tensors of another type than the one stored, and tensors that are not the model's. */
static int judge_stored(const zr_table *t, const zr_stored *f, const char *dir, char *why)
{
    for (int64_t i = 0; i < t->n; i++) {
        const zr_entry *e = &t->entries[i];
        const char *file = t->files[e->file].name;
        if (!e->used)
            return zr_why(why, "%s/%s: tensor %.200s is not in the model", dir, file, e->name);
        if (e->dtype != f->type)
            return zr_why(why, "%s/%s: tensor %.200s is %s; %s is needed", dir, file, e->name,
                          zr_dtype_name(e->dtype), zr_dtype_name(f->type));
    }
    return 0;
}

int zr_stored_read(zr *z, const zr_program *p, const zr_stored *f, int rank, const char *dir,
                   uint64_t *sums, char *why)
{
    char name[NAME];
    zr_table table;
    snprintf(name, sizeof name, "%s.safetensors", f->file);
    if (zr_table_open_file(&table, dir, name, why)) return -1;
    int bad = match_all(p, f, &table, dir, why) || judge_stored(&table, f, dir, why) ||
              read_all(p, f, &table, z, rank, dir, sums, why);
    zr_table_close(&table);
    return bad ? -1 : 0;
}

int zr_stored_types(const zr_program *p, const zr_stored *f, const char *dir, uint8_t *types,
                    char *why)
{
    zr_table table;
    if (zr_folder_open(&table, dir, why)) return -1;
    int bad = 0;
    for (int k = 0; k < p->ntensors; k++)
        for (int i = 0; !bad && i < times(p, f, &p->tensors[k]); i++) {
            zr_entry *e = match(p, f, &table, &p->tensors[k], i, dir, why);
            bad = !e;
            if (e) *types++ = (uint8_t)e->dtype;
        }
    zr_table_close(&table);
    return bad ? -1 : 0;
}

int zr_stored_names(const zr_program *p, const zr_stored *f,
                    void (*take)(void *to, const char *name), void *to)
{
    char name[NAME];
    int n = 0;
    for (int k = 0; k < p->ntensors; k++)
        for (int i = 0; i < times(p, f, &p->tensors[k]); i++, n++)
            if (take) take(to, instance(name, p, f, &p->tensors[k], i));
    return n;
}

void zr_stored_name(const zr_program *p, const zr_stored *f, int64_t n, char *to, size_t size)
{
    char name[NAME];
    for (int k = 0; k < p->ntensors; k++)
        for (int i = 0; i < times(p, f, &p->tensors[k]); i++)
            if (n-- == 0) snprintf(to, size, "%s", instance(name, p, f, &p->tensors[k], i));
}
