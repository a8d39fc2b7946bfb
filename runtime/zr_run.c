/* zr_run.c -- run.json of a checkpoint: the recipe, the progress of the run, checksums.
 *
 * Invariants
 *  1. The text is formatted at the start; later only fields of fixed width change.
 *  2. No contents of a file are trusted.
 */
#define _GNU_SOURCE
#include "zr_checkpoint.h"
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_handshake.h"
#include "zr_json.h"
#include "zr_log.h"
#include "zr_memory.h"
#include "zr_options.h"
#include "zr_products.h"
#include "zr_rank.h"
#include "zr_safetensors.h"
#include "zr_sum.h"
#include "zr_weights.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FORMAT = 1, WIDTH = 32, HEX = 16 };

/* ---- formatting */

static void put_text(FILE *to, const char *name, const char *text)
{
    fprintf(to, "\"%s\": ", name);
    zr_json_quote(to, text);
    fprintf(to, ",\n");
}

/* Write space for a number, and return its offset. */
static int64_t put_field(FILE *to, const char *name, const char *end)
{
    fprintf(to, "\"%s\": ", name);
    int64_t at = ftell(to);
    fprintf(to, "%*s%s", WIDTH, "", end);
    return at;
}

typedef struct layout {
    FILE *to;
    zr_run *r;
    int64_t n; /* number of sums so far */
    const char *comma;
} layout;

static void put_sum(void *to, const char *name)
{
    layout *l = to;
    fprintf(l->to, "%s\n  ", l->comma);
    zr_json_quote(l->to, name);
    fprintf(l->to, ": \"");
    l->r->sum[l->n++] = ftell(l->to);
    fprintf(l->to, "%*s\"", HEX, "");
    l->comma = ",";
}

static void put_lines(FILE *to, const char *name, const char *const *line, int n)
{
    fprintf(to, "\"%s\": [", name);
    for (int i = 0; i < n; i++) {
        fprintf(to, "%s\n  ", i ? "," : "");
        zr_json_quote(to, line[i]);
    }
    fprintf(to, "],\n");
}

static int is_number(const zr_state *s) { return s->flat < 0; }

static void put_run(zr *z, layout *l)
{
    const zr_program *p = z->p;
    FILE *to = l->to;
    zr_checkpoints *c = z->checkpoints;
    char text[17];
    int at = 0;
    fprintf(to, "{\"format\": %d,\n", FORMAT);
    put_text(to, "name", p->name);
    put_text(to, "version", zr_release);
    put_text(to, "plan", p->plan);
    put_text(to, "layout", p->layout);
    zr_text_hash(p->text, p->text_end, text);
    put_text(to, "train.c", text);
    put_text(to, "sources", zr_digest);
    put_text(to, "kernels", p->object());
    if (zr_is_gpu) {
        fprintf(to, "\"algorithms\": \"");
        l->r->algorithms = ftell(to);
        fprintf(to, "%*s\",\n", HEX, "");
    }
    put_text(to, "data", c->data);
    put_text(to, "accepted", z->o->accept_change ? z->o->accept_change : "");
    put_lines(to, "recipe", c->recipe, c->nrecipe);
    l->r->number[at++] = put_field(to, "steps", ",\n");
    l->r->number[at++] = put_field(to, "skipped", ",\n");
    l->r->number[at++] = put_field(to, "skips", ",\n");
    l->r->number[at++] = put_field(to, "validated", ",\n");
    l->r->number[at++] = put_field(to, "best", ",\n");
    l->r->number[at++] = put_field(to, "worse", ",\n");
    l->r->loss = put_field(to, "best_loss", ",\n\"control\": {");
    for (const zr_state *s = p->states; s < p->states + p->nstates; s++)
        if (is_number(s)) l->r->number[at++] = put_field(to, s->what, ", ");
    fprintf(to, "\"end\": 0},\n\"sums\": {");
    for (int i = 0; i < c->nstored; i++) {
        fprintf(to, "%s\n \"%s\": {", i ? "," : "", c->stored[i].file);
        l->comma = "";
        zr_stored_names(p, &c->stored[i], put_sum, l);
        fprintf(to, "}");
    }
    fprintf(to, "},\n%*s", ZR_SEAL, "");
}

/* ---- the checksum of the text before it, at the end */

static void make_seal(char to[ZR_SEAL + 1], const char *text, int64_t n)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < n - ZR_SEAL; i++) sum += zr_sum_one(i, (unsigned char)text[i]);
    snprintf(to, ZR_SEAL + 1, "\"checksum\": \"%016" PRIx64 "\"}\n", sum);
}

void zr_run_seal(char *text, int64_t n)
{
    char seal[ZR_SEAL + 1];
    make_seal(seal, text, n);
    memcpy(text + n - ZR_SEAL, seal, ZR_SEAL);
}

static int is_sealed(const char *text, int64_t n)
{
    char seal[ZR_SEAL + 1];
    make_seal(seal, text, n);
    return n >= ZR_SEAL && !memcmp(text + n - ZR_SEAL, seal, ZR_SEAL);
}

void zr_run_open(zr *z, zr_run *r, int64_t sums)
{
    size_t n = 0;
    int numbers = 6;
    for (int i = 0; i < z->p->nstates; i++) numbers += is_number(&z->p->states[i]);
    r->number = zr_get(z, numbers, sizeof *r->number);
    r->sum = zr_get(z, sums, sizeof *r->sum);
    FILE *to = open_memstream(&r->text, &n);
    if (to) put_run(z, &(layout){.to = to, .r = r});
    if (!to || fclose(to)) zr_fail(z, ZR_ENVIRONMENT, "out of memory");
    r->n = (int64_t)n;
}

/* ---- fields that change */

static void set_text(zr_run *r, int64_t at, const char *text, int width)
{
    memset(r->text + at, ' ', (size_t)width);
    memcpy(r->text + at, text, strlen(text));
}

static void set_number(zr_run *r, int64_t at, int64_t n)
{
    char text[WIDTH];
    snprintf(text, sizeof text, "%" PRId64, n);
    set_text(r, at, text, WIDTH);
}

static void set_real(zr_run *r, int64_t at, double x)
{
    char text[WIDTH];
    snprintf(text, sizeof text, "\"%a\"", x);
    set_text(r, at, text, WIDTH);
}

static void set_hash(zr_run *r, int64_t at, uint64_t hash)
{
    char text[HEX + 1];
    snprintf(text, sizeof text, "%016" PRIx64, hash);
    set_text(r, at, text, HEX);
}

void zr_run_note(zr *z, zr_run *r)
{
    int at = 0;
    if (r->algorithms) set_hash(r, r->algorithms, z->algorithms);
    set_number(r, r->number[at++], z->step);
    set_number(r, r->number[at++], z->log->skipped);
    set_number(r, r->number[at++], z->skips);
    set_number(r, r->number[at++], z->checkpoints->best.at);
    set_number(r, r->number[at++], z->checkpoints->best.step);
    set_number(r, r->number[at++], z->checkpoints->best.worse);
    set_real(r, r->loss, z->checkpoints->best.loss);
    for (const zr_state *s = z->p->states; s < z->p->states + z->p->nstates; s++) {
        int64_t whole;
        double real;
        if (!is_number(s)) continue;
        zr_read(z, s->queue, s->type == ZR_F64 ? (void *)&real : (void *)&whole, s->at, 8);
        if (s->type == ZR_F64) set_real(r, r->number[at++], real);
        else set_number(r, r->number[at++], whole);
    }
}

int zr_run_write(zr_run *r, const uint64_t *sums, int64_t n, int fd)
{
    for (int64_t i = 0; i < n; i++) set_hash(r, r->sum[i], sums[i]);
    zr_run_seal(r->text, r->n);
    return zr_write_at(fd, r->text, r->n, 0);
}

/* ---- reading */

/* Return whether a line begins with `key: `. */
static int is_key(const char *line, const char *key, size_t n)
{
    return !strncmp(line, key, n) && line[n] == ':';
}

/* Return the position of key[n] in a list separated by commas; NULL: not there. */
static const char *key_in(const char *keys, const char *key, size_t n)
{
    while (keys && *keys) {
        size_t length = strcspn(keys, ",");
        if (length == n && !strncmp(keys, key, n)) return keys;
        keys += length + (keys[length] == ',');
    }
    return NULL;
}

static const char *accepted(const zr *z, const char *key, size_t n)
{
    return key_in(z->o->accept_change, key, n);
}

int zr_accepts(const zr *z, const char *key) { return !!accepted(z, key, strlen(key)); }

/* Return the number of this run's line with that key; nrecipe: it has none. */
static int line_of(const zr_checkpoints *c, const char *key, size_t n)
{
    int i = 0;
    while (i < c->nrecipe && !is_key(c->recipe[i], key, n)) i++;
    return i;
}

/* Return whether a line is the order of a CPU's products, which GPUs and
 * older programs did not write. */
static int is_order(const char *line) { return is_key(line, "train.products", 14); }

enum { OTHER = 1 };

/* key: the argument of --accept-change, or a line of the recipe that begins with it and a colon */
static int other(char *why, const char *file, const char *key, const char *of, const char *theirs,
                 const char *ours)
{
    zr_why(why,
           "%s: the checkpoint's run had %s%.150s, but this program has %.150s; if that is meant, "
           "--accept-change %.*s",
           file, of, theirs, ours, (int)zr_least((int64_t)strcspn(key, ":"), 100), key);
    return OTHER;
}

/* Check that every key of --accept-change belongs to this run, or to an earlier one, as a run is
 * often resumed with the same command. known: 1 where a key begins that the checkpoint has. */
static int check_accepted(const zr *z, const char *known, const zr_past *past, const char *file,
                          char *why)
{
    const zr_checkpoints *c = z->checkpoints;
    const char *keys = z->o->accept_change;
    for (size_t i = 0, n; keys && keys[i]; i += n + (keys[i + n] == ',')) {
        const char *key = keys + i;
        n = strcspn(key, ",");
        if (known[accepted(z, key, n) - keys] || line_of(c, key, n) < c->nrecipe ||
            key_in("data", key, n) || key_in(past->accepted, key, n))
            continue;
        return zr_why(why,
                      "--accept-change %.*s: neither this program nor the checkpoint has this "
                      "key; the keys are `data` and those of `recipe` in %s",
                      (int)zr_least((int64_t)n, 100), key, file);
    }
    return 0;
}

/* Compare the recipe's lines with this run's, in any order. seen[nrecipe + 1], known (see
 * check_accepted): 0 at first. */
static int read_lines(zr *z, zr_json *j, char *seen, char *known, const zr_past *past,
                      const char *file, char *why)
{
    const zr_checkpoints *c = z->checkpoints;
    int64_t n = 0;
    while (zr_json_more(j, '[', &n)) {
        const char *line = zr_json_text(j);
        if (!line) return -1;
        size_t length = strcspn(line, ":");
        int i = line_of(c, line, length);
        const char *ours = i < c->nrecipe ? c->recipe[i] : NULL, *at = accepted(z, line, length);
        seen[i] = 1;
        if (at) known[at - z->o->accept_change] = 1;
        if (!at && (ours ? strcmp(ours, line) != 0 : !is_order(line)))
            return other(why, file, line, "", line, ours ? ours : "no such key");
    }
    if (j->error) return -1;
    for (int i = 0; i < c->nrecipe; i++)
        if (!seen[i] && !is_order(c->recipe[i]) &&
            !accepted(z, c->recipe[i], strcspn(c->recipe[i], ":")))
            return other(why, file, c->recipe[i], "", "no such key", c->recipe[i]);
    return check_accepted(z, known, past, file, why);
}

static int read_recipe(zr *z, zr_json *j, const char *file, zr_past *to, char *why)
{
    const char *keys = z->o->accept_change;
    char *seen = zr_get(z, z->checkpoints->nrecipe + 1, 1);
    char *known = zr_get(z, keys ? (int64_t)strlen(keys) : 0, 1);
    int bad = read_lines(z, j, seen, known, to, file, why);
    free(known);
    free(seen);
    return bad;
}

static int read_data(zr *z, zr_json *j, const char *file, zr_past *to, char *why)
{
    (void)to;
    const char *text = zr_json_text(j), *ours = z->checkpoints->data;
    if (!text) return -1;
    if (!strcmp(text, ours) || accepted(z, "data", 4)) return 0;
    return other(why, file, "data", "data of ", text, ours);
}

static int read_control(zr *z, zr_json *j, const char *file, zr_past *to, char *why)
{
    const zr_state *s = z->p->states;
    int64_t n = 0;
    int states = z->p->nstates, missing = 0;
    while (zr_json_more(j, '{', &n)) {
        const char *key = zr_json_key(j);
        int i = 0;
        if (!key) return -1;
        while (i < states && !(is_number(&s[i]) && !strcmp(s[i].what, key))) i++;
        if (i == states) {
            zr_json_skip(j);
            continue;
        }
        to->control[i].given = 1;
        if (s[i].type == ZR_F64) {
            const char *text = zr_json_text(j);
            char *end = "";
            double x = text ? strtod(text, &end) : 0;
            if (text && (*end || end == text))
                return zr_why(why, "%s: %s: %.40s is not a number", file, key, text);
            memcpy(&to->control[i].bits, &x, 8);
        } else to->control[i].bits = (uint64_t)zr_json_count(j);
    }
    for (int i = 0; i < states; i++) missing |= is_number(&s[i]) && !to->control[i].given;
    if (!j->error && missing)
        return zr_why(why, "%s: control: numbers of the training state are missing", file);
    return j->error ? -1 : 0;
}

static int read_accepted(zr *z, zr_json *j, const char *file, zr_past *to, char *why)
{
    (void)z, (void)file, (void)why;
    to->accepted = zr_json_text(j);
    return to->accepted ? 0 : -1;
}

static int read_best_loss(zr *z, zr_json *j, const char *file, zr_past *to, char *why)
{
    (void)z;
    const char *text = zr_json_text(j);
    char *end = "";
    to->best.loss = text ? strtod(text, &end) : 0;
    if (text && (*end || end == text))
        return zr_why(why, "%s: best_loss: %.40s is not a number", file, text);
    return text ? 0 : -1;
}

static int read_kernels(zr *z, zr_json *j, const char *file, zr_past *to, char *why)
{
    (void)z, (void)file, (void)why;
    const char *text = zr_json_text(j);
    if (text) snprintf(to->kernels, sizeof to->kernels, "%s", text);
    return text ? 0 : -1;
}

static int read_algorithms(zr *z, zr_json *j, const char *file, zr_past *to, char *why)
{
    (void)z, (void)file, (void)why;
    const char *text = zr_json_text(j);
    to->algorithms = text ? strtoull(text, NULL, 16) : 0;
    return text ? 0 : -1;
}

typedef struct search {
    const char *name;
    int64_t n, found;
} search;

static void find_name(void *to, const char *name)
{
    search *s = to;
    if (!strcmp(name, s->name)) s->found = s->n;
    s->n++;
}

/* Read {FILE: {NAME: HEX}} into this program's order of sums. */
static int read_sums(zr *z, zr_json *j, const char *file, zr_past *to, char *why)
{
    zr_checkpoints *c = z->checkpoints;
    int64_t n = 0, first = 0;
    while (zr_json_more(j, '{', &n)) {
        const char *key = zr_json_key(j);
        int k = 0;
        first = 0;
        if (!key) return -1;
        while (k < c->nstored && strcmp(c->stored[k].file, key)) first += c->header[k++].tensors;
        if (k == c->nstored)
            return zr_why(why, "%s: sums: this program has no state %.40s", file, key);
        for (int64_t m = 0; zr_json_more(j, '{', &m);) {
            search s = {zr_json_key(j), 0, -1};
            if (!s.name) return -1;
            zr_stored_names(z->p, &c->stored[k], find_name, &s);
            const char *text = zr_json_text(j);
            if (!text) return -1;
            if (s.found < 0)
                return zr_why(why, "%s: sums: %.40s has no tensor %.150s in this program", file,
                              key, s.name);
            to->sums[first + s.found] = strtoull(text, NULL, 16);
        }
    }
    return j->error ? -1 : 0;
}

static int read_format(zr *z, zr_json *j, const char *file, zr_past *to, char *why)
{
    int64_t format = zr_json_count(j);
    (void)z, (void)to;
    if (j->error || format == FORMAT) return 0;
    return zr_why(why,
                  "%s: format %" PRId64 "; this program reads %d: resume with a program of the "
                  "version that wrote it",
                  file, format, FORMAT);
}

int zr_run_read(zr *z, const char *file, zr_past *to, char *why)
{
    const struct {
        const char *key;
        int64_t *count; /* destination of a number, or NULL with `read` */
        int (*read)(zr *z, zr_json *j, const char *file, zr_past *to, char *why);
    } fields[] = {
        {"format", NULL, read_format},
        {"steps", &to->steps, NULL},
        {"skipped", &to->skipped, NULL},
        {"skips", &to->skips, NULL},
        {"recipe", NULL, read_recipe},
        {"control", NULL, read_control},
        {"sums", NULL, read_sums},
        {"data", NULL, read_data},
        {"kernels", NULL, read_kernels},
        /* these may be missing */
        {"accepted", NULL, read_accepted},
        {"algorithms", NULL, read_algorithms},
        {"validated", &to->best.at, NULL},
        {"best", &to->best.step, NULL},
        {"worse", &to->best.worse, NULL},
        {"best_loss", NULL, read_best_loss},
    };
    enum { FIELDS = sizeof fields / sizeof *fields, ALL = (1 << (FIELDS - 6)) - 1 };
    int64_t length, n = 0;
    int seen = 0, bad = 0;
    char *text =
        zr_read_whole(file, ZR_HEADER_MAX, "not the run.json of a checkpoint", &length, why);
    if (!text) return -1;
    if (!is_sealed(text, length))
        bad = zr_why(why,
                     "%s: is damaged, or not the run.json of a checkpoint: its checksum is wrong",
                     file);
    zr_json j = {text, text + length, NULL};
    while (!bad && zr_json_more(&j, '{', &n)) {
        const char *key = zr_json_key(&j);
        int k = 0;
        if (!key) break;
        while (k < FIELDS && strcmp(key, fields[k].key)) k++;
        seen |= 1 << k;
        if (k == FIELDS) zr_json_skip(&j);
        else if (fields[k].count) *fields[k].count = zr_json_count(&j);
        else bad = fields[k].read(z, &j, file, to, why);
    }
    if (j.error || (!bad && zr_json_end(&j)))
        bad = zr_why(why, "%s: byte %" PRId64 ": %s", file, (int64_t)(j.at - text), j.error);
    else if (!bad && ((seen & ALL) != ALL || to->skips > to->skipped || to->skipped > to->steps ||
                      to->best.step > to->best.at || to->best.at > to->steps))
        bad = zr_why(why, "%s: is not the run.json of a checkpoint", file);
    free(text);
    return bad;
}

/* Ignores damage, which zr_run_read will report. */
int zr_run_order(const char *file, int *order, char *why)
{
    int64_t length, n = 0;
    int by_kernels = -1, bf16 = 0; /* for a record without a line on it */
    char *text =
        zr_read_whole(file, ZR_HEADER_MAX, "not the run.json of a checkpoint", &length, why);
    if (!text) return -1;
    zr_json j = {text, text + length, NULL};
    *order = -1;
    while (zr_json_more(&j, '{', &n)) {
        const char *key = zr_json_key(&j), *line;
        if (key && !strcmp(key, "recipe")) {
            for (int64_t m = 0; zr_json_more(&j, '[', &m);)
                if (!(line = zr_json_text(&j))) break;
                else if (!strcmp(line, "train.precision: \"bf16\"")) bf16 = 1;
                else if (is_order(line))
                    *order = strstr(line, zr_order_name(ZR_TILES)) ? ZR_TILES : ZR_PAIRS;
        } else if (key && !strcmp(key, "kernels")) {
            line = zr_json_text(&j);
            if (line && !strcmp(line, "amx")) by_kernels = ZR_TILES;
            else if (line && !strncmp(line, "avx", 3)) by_kernels = ZR_PAIRS;
        } else if (key) zr_json_skip(&j);
    }
    if (*order < 0 && bf16) *order = by_kernels;
    free(text);
    return 0;
}
