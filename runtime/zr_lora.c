/* zr_lora.c -- adapters of low rank: whether a folder's are the program's; adding them to weights
 * (--merge).
 *
 * Invariants
 *  1. w + scale * B A: each element's products are summed in ascending order in doubles and rounded
 *     once, so the bits depend on no rank.
 *  2. A merge needs no memory but what zr_merge_new gets.
 */
#define _GNU_SOURCE
#include "zr_json.h"
#include "zr_safetensors.h"
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NAME = 256 };
static const char ends[2][16] = {".lora_A.weight", ".lora_B.weight"}, weight[] = ".weight";
static const char whole[] = "base_model.model.", head[] = "lm_head.", own[] = ".base_layer.weight";

static int ends_in(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return n >= m && !strcmp(name + n - m, end);
}

int zr_is_adapter(const char *name) { return ends_in(name, ends[0]) || ends_in(name, ends[1]); }

static int of_head(const char *name) { return !strncmp(name, head, strlen(head)); }

int zr_adapter_lead(const zr_program *p, const char *name)
{
    return (int)strlen(of_head(name) ? whole : p->lead);
}

int zr_adapter_base(char *to, const char *name)
{
    size_t lead = strlen(whole);
    if (strncmp(name, whole, lead) || !ends_in(name, own)) return 0;
    int bare = (int)(strlen(name) - lead - strlen(own));
    return snprintf(to, NAME, "%.*s%s", bare, name + lead, weight) < NAME;
}

/* ---- adapter_config.json */

/* Are linears [in,out], as GPT-2's? */
static int turned(const zr_program *p)
{
    return strstr(p->adapter, "\"fan_in_fan_out\": true") != NULL;
}

/* Keys that do not change what is added to weights; of any other but those below the value must be
 * empty. Which linears have adapters the tensors say. */
static const char *const harmless[] = {"auto_mapping",
                                       "base_model_name_or_path",
                                       "ensure_weight_tying",
                                       "exclude_modules",
                                       "inference_mode",
                                       "layers_pattern",
                                       "lora_dropout",
                                       "megatron_core",
                                       "peft_version",
                                       "qalora_group_size",
                                       "revision",
                                       "target_modules",
                                       "task_type"};

/* And those that may have some values alone. */
static const struct {
    const char *key, *values[3];
} limited[] = {
    {"bias", {"\"none\""}},
    {"init_lora_weights", {"true", "false", "\"gaussian\""}}, /* others change the base */
    {"peft_type", {"\"LORA\""}},
};

/* What a file has there; of a string what it says, decoded */
typedef struct value {
    const char *at;
    size_t n;
    int quoted;
} value;

static value read_value(zr_json *j)
{
    int quoted = zr_json_peek(j) == '"';
    const char *at = j->at;
    if (quoted) at = zr_json_text(j);
    else zr_json_skip(j);
    if (j->error) return (value){"", 0, 0};
    return (value){at, quoted ? strlen(at) : (size_t)(j->at - at), quoted};
}

/* text: as JSON has it */
static int is(value v, const char *text)
{
    if (!text) return 0;
    if (v.quoted) return *text == '"' && strlen(text) == v.n + 2 && !memcmp(text + 1, v.at, v.n);
    return strlen(text) == v.n && !memcmp(text, v.at, v.n);
}

/* null, false, "", {}, [] */
static int is_empty(value v)
{
    if (v.quoted) return v.n == 0;
    int open = *v.at == '{' || *v.at == '[';
    return is(v, "null") || is(v, "false") || (open && strspn(v.at + 1, " \t\n\r") == v.n - 2);
}

static int is_one(const char *key, const char *const *of, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(key, of[i])) return 1;
    return 0;
}

/* r and lora_alpha; PEFT's own where they are not there */
typedef struct ranks {
    double r, alpha;
} ranks;

/* May it have this key? If not, `allowed` says what is. */
static int takes(const zr_program *p, const char *key, value v, ranks *of, const char **allowed)
{
    *allowed = "null, false or nothing in it";
    if (!strcmp(key, "r")) of->r = strtod(v.at, NULL);
    else if (!strcmp(key, "lora_alpha")) of->alpha = strtod(v.at, NULL);
    else if (!strcmp(key, "fan_in_fan_out")) {
        *allowed = turned(p) ? "true" : "false";
        return is(v, *allowed);
    } else {
        for (size_t i = 0; i < sizeof limited / sizeof *limited; i++) {
            if (strcmp(key, limited[i].key)) continue;
            *allowed = limited[i].values[0];
            for (int k = 0; k < 3; k++)
                if (is(v, limited[i].values[k])) return 1;
            return 0;
        }
        return is_empty(v) || is_one(key, harmless, sizeof harmless / sizeof *harmless);
    }
    return 1;
}

static int read_config(const zr_program *p, zr_json *j, const char *file, ranks *of, char *why)
{
    const char *allowed, *text = j->at;
    for (int64_t i = 0; zr_json_more(j, '{', &i);) {
        const char *key = zr_json_key(j);
        value v = read_value(j);
        const char *quote = v.quoted ? "\"" : "";
        if (!j->error && !takes(p, key, v, of, &allowed))
            return zr_why(why, "%s: %.60s: %s%.*s%s is not supported; allowed: %s", file, key,
                          quote, (int)zr_least((int64_t)v.n, 60), v.at, quote, allowed);
    }
    if (!j->error && !zr_json_end(j)) return 0;
    return zr_why(why, "%s: byte %" PRId64 ": %s", file, (int64_t)(j->at - text), j->error);
}

int zr_adapter_fits(const zr_program *p, const char *dir, char *why)
{
    char file[ZR_FILE];
    int64_t n = 0;
    ranks of = {8, 8};
    if (zr_path(file, dir, ZR_ADAPTER_CONFIG, why)) return -1;
    char *text = zr_file_text(file, &n, why);
    if (!text) return -1;
    zr_json j = {text, text + n, NULL};
    int bad = read_config(p, &j, file, &of, why);
    free(text);
    if (bad || of.alpha / of.r == p->lora) return bad;
    return zr_why(why, "%s: lora_alpha / r is %.9g; the program has %.9g", file, of.alpha / of.r,
                  p->lora);
}

/* ---- merging */
struct zr_merge {
    zr_table table; /* of the adapters' file */
    const zr_program *p;
    int turned;
    float *of[2];          /* A [rank,in], B [out,rank] */
    int64_t room[2];       /* bytes of these, at most */
    int64_t rank, in, out; /* of the tensor that is taken */
};

static int64_t most(const zr_program *p, const char *end)
{
    int64_t n = 1;
    for (const zr_tensor *t = p->tensors; t < p->tensors + p->ntensors; t++)
        if (ends_in(t->name, end) && n < t->shape[0] * t->shape[1]) n = t->shape[0] * t->shape[1];
    return n;
}

zr_merge *zr_merge_new(const zr_program *p)
{
    zr_merge *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->p = p;
    for (int i = 0; i < 2; i++) {
        m->room[i] = 4 * most(p, ends[i]);
        m->of[i] = malloc((size_t)m->room[i]);
    }
    if (m->of[0] && m->of[1]) return m;
    zr_merge_close(m);
    return NULL;
}

int zr_merge_open(zr_merge *m, const char *path, char *why)
{
    char dir[ZR_FILE];
    const char *slash = strrchr(path, '/');
    snprintf(dir, sizeof dir, "%.*s", (int)(slash - path), path);
    return zr_table_open_file(&m->table, dir, slash + 1, why);
}

void zr_merge_close(zr_merge *m)
{
    if (!m) return;
    if (m->table.nfiles) zr_table_close(&m->table);
    for (int i = 0; i < 2; i++) free(m->of[i]);
    free(m);
}

int zr_merge_take(zr_merge *m, const char *name)
{
    char full[2 * NAME];
    const zr_entry *e[2];
    if (!ends_in(name, weight)) return 0;
    for (int i = 0; i < 2; i++) {
        int bare = (int)(strlen(name) - strlen(weight));
        snprintf(full, sizeof full, "%.*s%.*s%s", zr_adapter_lead(m->p, name), m->p->lead, bare,
                 name, ends[i]);
        if (!(e[i] = zr_table_find(&m->table, full))) return 0;
        int fd = m->table.files[e[i]->file].fd;
        int64_t bytes = e[i]->end - e[i]->begin;
        errno = EINVAL; /* it is not what was written there */
        if (bytes > m->room[i] || zr_read_at(fd, m->of[i], bytes, e[i]->begin)) return -1;
    }
    m->turned = turned(m->p) && !of_head(name); /* which is [V,C] in every family */
    m->rank = e[0]->shape[0];
    m->in = e[0]->shape[1];
    m->out = e[1]->shape[0];
    return 1;
}

void zr_merge_add(const zr_merge *m, float *w, int64_t first, int64_t n)
{
    int64_t row = m->turned ? m->out : m->in;
    for (int64_t i = 0; i < n; i++) {
        int64_t a = (first + i) / row, b = (first + i) % row;
        int64_t in = m->turned ? a : b, out = m->turned ? b : a;
        double sum = 0;
        for (int64_t j = 0; j < m->rank; j++)
            sum += (double)m->of[1][out * m->rank + j] * m->of[0][j * m->in + in];
        w[i] = (float)(w[i] + m->p->lora * sum);
    }
}
