/* zr_packed.c -- reads weights that bitsandbytes has quantized; see zr_packed.h.
 *
 * The formulas are those of bitsandbytes 0.50; tests/reference/packed.py compares. */
#define _GNU_SOURCE
#include "zr_file.h"
#include "zr_float.h"
#include "zr_json.h"
#include "zr_packed.h"
#include "zr_safetensors.h"
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    NAME = 512,
    RUN = 8192,
    FACTORS = RUN / 32 + 2,
    KEEP = 16384 /* weights that are kept at once: a multiple of zk_host_keep's */
};

/* The tensor that is read, for messages. */
typedef struct place {
    const zr_table *t;
    const char *dir, *name;
    char *why;
} place;

/* ---- the tensors beside a weight */
#define STATE ".quant_state."
static const char *const beside4[] = {".absmax", ".quant_map", ".nested_absmax",
                                      ".nested_quant_map"};
static const char *const beside8[] = {".SCB", ".weight_format"};
static const char weight[] = ".weight";

/* Types of 4 bits, and the FNV-1a hashes of their levels' bytes. */
enum { NF4, FP4, TYPES };
static const char *const type_names[TYPES] = {"nf4", "fp4"};
static const uint64_t level_hashes[TYPES] = {0x38e10558c37c2c71, 0x34e98e13e945d335};
static const uint64_t dynamic_hash = 0xd677f22a96665bc4;

static int is_one_of(const char *end, const char *const *ends, size_t n)
{
    size_t i = 0;
    while (i < n && strcmp(end, ends[i])) i++;
    return i < n;
}

/* Write the name of the weight to which a tensor belongs, of 4 or 8 bits. Returns the bits, or 0 if
 * it belongs to none. */
static int belongs(char to[NAME], const char *name)
{
    const char *end = strstr(name, ".weight."), *dot = strrchr(name, '.');
    if (end) {
        end += strlen(weight);
        snprintf(to, NAME, "%.*s", (int)(end - name), name);
        if (!strncmp(end, STATE, strlen(STATE))) return 4;
        return is_one_of(end, beside4, sizeof beside4 / sizeof *beside4) ? 4 : 0;
    }
    if (!dot || !is_one_of(dot, beside8, sizeof beside8 / sizeof *beside8)) return 0;
    snprintf(to, NAME, "%.*s%s", (int)(dot - name), name, weight);
    return 8;
}

static const zr_entry *find(const place *at, int bare, const char *end)
{
    char name[2 * NAME];
    snprintf(name, sizeof name, "%.*s%s", bare, at->name, end);
    return zr_table_find(at->t, name);
}

static int wrong(const place *at, const char *what)
{
    const zr_entry *e = zr_table_find(at->t, at->name);
    return zr_why(at->why, "%.200s/%.100s: tensor %.200s: %s", at->dir, at->t->files[e->file].name,
                  at->name, what);
}

/* Copy to *to the entry NAME's with this end, which must have n elements of a type. The name up to
 * `bare` is the weight's. */
static int need(const place *at, zr_entry *to, int bare, const char *end, const char *dtype,
                int64_t n)
{
    char what[200];
    const zr_entry *e = find(at, bare, end);
    int64_t has = 1;
    for (int i = 0; e && i < e->ndim; i++) has *= e->shape[i];
    if (e) *to = *e;
    if (e && !strcmp(zr_dtype_name(e->dtype), dtype) && has == n) return 0;
    if (!e) snprintf(what, sizeof what, "%s is missing beside it", end + 1);
    else
        snprintf(what, sizeof what,
                 "%s is %s with %" PRId64 " elements; %s with %" PRId64 " is needed", end + 1,
                 zr_dtype_name(e->dtype), has, dtype, n);
    return wrong(at, what);
}

static int read_bytes(const zr_table *t, const zr_entry *e, void *to, int64_t n, int64_t at)
{
    return zr_read_at(t->files[e->file].fd, to, n, e->begin + at);
}

static uint64_t hash_of(const void *from, size_t n)
{
    uint64_t hash = ZR_HASH;
    zr_add_hash(&hash, from, n);
    return hash;
}

/* ---- 4 bits */
/* Content of the JSON. */
typedef struct state {
    int64_t shape[ZR_DIMS], ndim, block, nested;
    double mean;
    int type, dtype; /* numbers; -1: none or unknown */
} state;

static int nth_word(const char *text, const char *const *known, int n)
{
    int i = 0;
    while (i < n && (!text || strcmp(text, known[i]))) i++;
    return i < n ? i : -1;
}

/* Read a value of the JSON. */
static void read_key(zr_json *j, const char *key, state *s)
{
    static const char *const dtypes[] = {[F32] = "float32", [BF16] = "bfloat16", [F16] = "float16"};
    if (!strcmp(key, "quant_type")) s->type = nth_word(zr_json_text(j), type_names, TYPES);
    else if (!strcmp(key, "dtype")) s->dtype = nth_word(zr_json_text(j), dtypes, 3);
    else if (!strcmp(key, "blocksize")) s->block = zr_json_count(j);
    else if (!strcmp(key, "nested_blocksize")) s->nested = zr_json_count(j);
    else if (!strcmp(key, "nested_offset")) {
        char first = zr_json_peek(j);
        const char *from = j->at;
        zr_json_skip(j);
        s->mean = first == '-' || (first >= '0' && first <= '9') ? strtod(from, NULL) : NAN;
    } else if (!strcmp(key, "shape")) {
        for (int64_t i = 0; zr_json_more(j, '[', &i); s->ndim = i) {
            int64_t n = zr_json_count(j);
            if (i <= ZR_DIMS) s->shape[i - 1] = n;
        }
    } else zr_json_skip(j);
}

static int read_state(const place *at, const zr_entry *e, state *s)
{
    char text[4096], what[200];
    int64_t n = e->end - e->begin;
    if (n >= (int64_t)sizeof text) return wrong(at, "quant_state is too long for its JSON");
    if (read_bytes(at->t, e, text, n, 0)) return wrong(at, strerror(errno));
    text[n] = 0;
    *s = (state){.mean = NAN, .type = -1, .dtype = -1};
    zr_json j = {text, text + n, NULL};
    for (int64_t i = 0; zr_json_more(&j, '{', &i);) {
        const char *key = zr_json_key(&j);
        if (key) read_key(&j, key, s);
    }
    if (!zr_json_end(&j)) return 0;
    snprintf(what, sizeof what, "quant_state, byte %d: %s", (int)(j.at - text), j.error);
    return wrong(at, what);
}

/* Return whether it is a power of two from 32 to 4096, as all blocks of bitsandbytes. */
static int is_block(int64_t n) { return n >= 32 && n <= 4096 && !(n & (n - 1)); }

/* Check the JSON of a weight, of the type with this number by its name. */
static int check_state(const place *at, const zr_entry *w, const state *s, int type)
{
    char what[200], shape[100];
    int64_t n = 0, has = w->end - w->begin;
    if (s->type != type) return wrong(at, "quant_state: quant_type contradicts the tensor's name");
    if (s->dtype < 0) return wrong(at, "quant_state: dtype must be float32, bfloat16 or float16");
    if (!is_block(s->block) || (s->nested && !is_block(s->nested)))
        return wrong(at, "quant_state: a block must have 32, 64, 128 ... or 4096 elements");
    if (s->nested && !isfinite((float)s->mean))
        return wrong(at, "quant_state: nested_offset must be a number");
    if (s->ndim != 2 || __builtin_mul_overflow(s->shape[0], s->shape[1], &n))
        return wrong(at, "quant_state: shape must be [rows, columns]");
    if (has == n / 2 + n % 2) return 0;
    snprintf(what, sizeof what,
             "quant_state: shape %s has %" PRId64 " elements of 4 bits, but "
             "the tensor has %" PRId64 " bytes",
             zr_shape_text(shape, sizeof shape, s->shape, 2), n, has);
    return wrong(at, what);
}

/* Read the map of a type, f32 numbers, from a tensor that must have n of them. */
static int read_levels(const place *at, int bare, const char *end, float *to, int64_t n)
{
    zr_entry e;
    if (need(at, &e, bare, end, "F32", n)) return -1;
    return read_bytes(at->t, &e, to, 4 * n, 0) ? wrong(at, strerror(errno)) : 0;
}

static int pack4(const place *at, zr_entry *w, zr_packed *q)
{
    char end[64];
    const zr_entry *e = NULL;
    int bare = (int)strlen(at->name), type = TYPES;
    state s;
    while (!e && type-- > 0) {
        snprintf(end, sizeof end, STATE "bitsandbytes__%s", type_names[type]);
        e = find(at, bare, end);
    }
    if (!e) return wrong(at, "quant_state.bitsandbytes__nf4 (or fp4) is missing beside it");
    if (read_state(at, e, &s) || check_state(at, w, &s, type)) return -1;
    int64_t n = s.shape[0] * s.shape[1], blocks = (n + s.block - 1) / s.block;
    if (s.nested && !find(at, bare, ".nested_absmax"))
        return wrong(at, "nested_absmax is missing beside it");
    if (!s.nested && find(at, bare, ".nested_absmax"))
        return wrong(at, "quant_state: nested_blocksize is missing");
    if (need(at, &q->factors, bare, ".absmax", s.nested ? "U8" : "F32", blocks) ||
        read_levels(at, bare, ".quant_map", q->levels, 16))
        return -1;
    if (hash_of(q->levels, sizeof q->levels) != level_hashes[type])
        return wrong(at, "quant_map does not have the levels of its type");
    if (type == FP4) q->levels[8] = -0.0f; /* a sign and 0, as bitsandbytes' kernels have it */
    if (s.nested &&
        (need(at, &q->scales, bare, ".nested_absmax", "F32", (blocks + s.nested - 1) / s.nested) ||
         read_levels(at, bare, ".nested_quant_map", q->dynamic, 256)))
        return -1;
    int same = s.nested && hash_of(q->dynamic, sizeof q->dynamic) == dynamic_hash;
    q->block = s.block;
    q->nested = s.nested;
    q->mean = (float)s.mean;
    q->format = same && type == NF4 ? ZR_NF4 : 0;
    w->dtype = s.dtype;
    w->ndim = 2;
    memcpy(w->shape, s.shape, sizeof w->shape);
    return 0;
}

/* ---- 8 bits */
static int pack8(const place *at, zr_entry *w, zr_packed *q)
{
    int bare = (int)(strlen(at->name) - strlen(weight));
    uint8_t order = 0;
    zr_entry e;
    if (w->ndim != 2 || strcmp(zr_dtype_name(w->dtype), "I8"))
        return wrong(at, "SCB is beside it, so it must be I8 [rows, columns]");
    if (need(at, &q->factors, bare, ".SCB", "F32", w->shape[0])) return -1;
    if (find(at, bare, ".weight_format") &&
        (need(at, &e, bare, ".weight_format", "U8", 1) || read_bytes(at->t, &e, &order, 1, 0)))
        return -1;
    if (order) return wrong(at, "weight_format must be 0, which is row by row");
    q->block = w->shape[1];
    q->format = ZR_INT8;
    w->dtype = F32;
    return 0;
}

/* ---- folders */
/* Describe the weight to which a tensor belongs as one that is packed. */
static int pack(zr_table *t, const zr_entry *beside, const char *dir, char *why)
{
    char name[NAME];
    int bits = belongs(name, beside->name);
    zr_entry *w = bits ? zr_table_find(t, name) : NULL;
    place at = {t, dir, w ? name : beside->name, why};
    if (!bits || (w && w->packed && w->packed->bits == bits)) return 0;
    if (!w) return wrong(&at, "the weight to which it belongs is missing");
    if (w->packed) return wrong(&at, "has the tensors of 8 bits and of 4 bits beside it");
    zr_packed *q = &t->packed[t->npacked++];
    q->codes = *w;
    if (bits == 4 ? pack4(&at, w, q) : pack8(&at, w, q)) return -1;
    q->bits = bits;
    w->packed = q;
    return 0;
}

static int pack_all(zr_table *t, const char *dir, char *why)
{
    char name[NAME];
    int64_t n = 0, left = 0;
    for (int64_t i = 0; i < t->n; i++) n += belongs(name, t->entries[i].name) != 0;
    if (!n) return 0;
    t->packed = calloc((size_t)n, sizeof *t->packed);
    if (!t->packed) return zr_why(why, "%s: out of memory for its packed weights", dir);
    for (int64_t i = 0; i < t->n; i++)
        if (pack(t, &t->entries[i], dir, why)) return -1;
    for (int64_t i = 0; i < t->n; i++)
        if (!belongs(name, t->entries[i].name)) t->entries[left++] = t->entries[i];
    t->n = left;
    return 0;
}

int zr_folder_open(zr_table *t, const char *dir, char *why)
{
    if (zr_table_open(t, dir, why)) return -1;
    if (!pack_all(t, dir, why)) return 0;
    zr_table_close(t);
    return -1;
}

/* ---- elements */
/* Read the factors of n blocks, at most FACTORS. */
static int read_factors(const zr_table *t, const zr_packed *q, int64_t first, int64_t n, float *to)
{
    uint8_t codes[FACTORS];
    float scale = 0;
    if (!q->nested) return read_bytes(t, &q->factors, to, 4 * n, 4 * first);
    if (read_bytes(t, &q->factors, codes, n, first)) return -1;
    for (int64_t i = 0; i < n; i++) {
        int64_t block = first + i;
        if ((i == 0 || block % q->nested == 0) &&
            read_bytes(t, &q->scales, &scale, 4, 4 * (block / q->nested)))
            return -1;
        float product = q->dynamic[codes[i]] * scale;
        to[i] = product + q->mean;
    }
    return 0;
}

/* Write elements of one block. codes: those from the block's element `first` on, 4 bits from the
 * whole byte on that has it. */
static void unpack(const zr_packed *q, const uint8_t *codes, int64_t first, int64_t n, float factor,
                   int dtype, void *to)
{
    float whole[16];
    uint16_t half[16];
    for (int i = 0; i < 16; i++) whole[i] = q->levels[i] * factor;
    if (dtype != F32) zr_narrow(half, whole, 16, dtype);
    for (int64_t i = 0; i < n; i++) {
        int64_t at = first + i;
        int code = codes[at / 2 - first / 2] >> (at % 2 ? 0 : 4) & 15;
        if (dtype == F32) ((float *)to)[i] = whole[code];
        else ((uint16_t *)to)[i] = half[code];
    }
}

/* Read at most RUN elements, of at most FACTORS blocks. */
static int read_run(const zr_table *t, const zr_entry *e, char *to, int64_t first, int64_t n)
{
    const zr_packed *q = e->packed;
    uint8_t codes[RUN];
    float factors[FACTORS];
    int64_t width = e->dtype == F32 ? 4 : 2, per = 8 / q->bits, end = first + n, some;
    int64_t begin = first / per, block = first / q->block;
    if (read_bytes(t, &q->codes, codes, (end + per - 1) / per - begin, begin) ||
        read_factors(t, q, block, (end - 1) / q->block - block + 1, factors))
        return -1;
    for (int64_t at = first; at < end; at += some) {
        float factor = factors[at / q->block - block];
        some = zr_least(end, (at / q->block + 1) * q->block) - at;
        char *into = to + width * (at - first);
        if (q->bits == 4) unpack(q, codes + (at / 2 - begin), at, some, factor, e->dtype, into);
        else
            for (int64_t i = 0; i < some; i++) {
                float x = (float)(int8_t)codes[at - first + i] * factor;
                ((float *)(void *)into)[i] = x * (float)7.874015718698502e-3;
            }
    }
    return 0;
}

int zr_elements(const zr_table *t, const zr_entry *e, void *to, int64_t first, int64_t n)
{
    int64_t width = e->dtype == F32 ? 4 : 2, some;
    if (!e->packed) return read_bytes(t, e, to, width * n, width * first);
    int64_t most = zr_least(RUN, (FACTORS - 1) * e->packed->block);
    for (int64_t i = 0; i < n; i += some) {
        some = zr_least(n - i, most);
        if (read_run(t, e, (char *)to + width * i, first + i, some)) return -1;
    }
    return 0;
}

/* ---- numbers that a run keeps */
int zr_packed_fits(const zr_packed *q, const zr_program *p, int format)
{
    return q->format == format && p->keeps(format, q->block, q->nested);
}

/* Read the codes of n weights from `first` on, which share a scale, with the factors of their
 * blocks and the scale. */
static int read_stored(const zr_table *t, const zr_packed *q, uint8_t *codes, uint8_t *factors,
                       float *scale, int64_t first, int64_t n)
{
    if (q->format == ZR_NF4)
        return read_bytes(t, &q->codes, codes, (n + 1) / 2, first / 2) ||
               read_bytes(t, &q->factors, factors, (n + q->block - 1) / q->block,
                          first / q->block) ||
               read_bytes(t, &q->scales, scale, 4, 4 * (first / (q->block * q->nested)));
    int bad = read_bytes(t, &q->codes, codes, n, first) ||
              read_bytes(t, &q->factors, scale, 4, 4 * (first / q->block));
    *scale *= (float)7.874015718698502e-3;
    return bad;
}

int64_t zr_packed_keep(const zr_table *t, const zr_packed *q, const zr_program *p, uint8_t *to,
                       int64_t first, int64_t n)
{
    uint8_t codes[KEEP], factors[KEEP / 32];
    float scale[2] = {0, q->mean};
    int64_t shared = q->block * (q->format == ZR_NF4 ? q->nested : 1), at = 0, some;
    for (int64_t i = 0; i < n; i += some) {
        int64_t place = first + i;
        some = zr_least(zr_least(n - i, shared - place % shared), KEEP);
        if (read_stored(t, q, codes, factors, scale, place, some)) return -1;
        at += p->keep(to + at, codes, factors, scale, some, q->format);
    }
    return at;
}
