/* zr_lora.c -- LoRA adapters: whether a folder's adapters are the program's; adding them to weights
 * (--merge).
 *
 *   w += scale * B A, scale = alpha / rank, or alpha / sqrt(rank) if use_rslora; A [rank,in],
 *   B [out,rank]; rank and alpha by PEFT's patterns of names
 *
 * Invariants
 *  1. The products of each element are summed in ascending order in doubles and rounded once, so
 *     the bits do not depend on ranks. An element to which 0 is added keeps its bits.
 *  2. A merge uses only the memory that zr_merge_new allocates.
 */
#define _GNU_SOURCE
#include "zr_file.h"
#include "zr_json.h"
#include "zr_lora.h"
#include "zr_marks.h"
#include "zr_names.h"
#include "zr_packed.h"
#include "zr_safetensors.h"
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NAME = 256 };
static const char ends[2][16] = {".lora_A.weight", ".lora_B.weight"}, weight[] = ".weight";
static const char whole[] = "base_model.model.", own[] = ".base_layer.weight";
static const char heads[2][16] = {"lm_head.", "embed_out."};

static int ends_in(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return n >= m && !strcmp(name + n - m, end);
}

int zr_is_adapter(const char *name) { return ends_in(name, ends[0]) || ends_in(name, ends[1]); }

static int of_head(const char *name)
{
    return !strncmp(name, heads[0], strlen(heads[0])) || !strncmp(name, heads[1], strlen(heads[1]));
}

int zr_adapter_lead(const zr_program *p, const char *name)
{
    return (int)strlen(of_head(name) ? whole : p->lead);
}

/* Return whether a tensor of the base has a row by token. */
static int is_by_token(const char *name)
{
    const char *dot = of_head(name) ? strchr(name, '.') : NULL;
    return zr_is_embedding(name) || (dot && !strchr(dot + 1, '.'));
}

/* to[NAME] = the base's tensor that PEFT keeps: a head's weight beside its adapter, or, of a model
 * that was resized, the embedding and the head. Returns 0 if there is none. */
static int base_of(char *to, const char *name)
{
    size_t lead = strlen(whole);
    if (strncmp(name, whole, lead)) return 0;
    int layer = ends_in(name, own), bare = (int)strlen(name + lead);
    if (!layer) return is_by_token(name + lead) && snprintf(to, NAME, "%s", name + lead) < NAME;
    bare -= (int)strlen(own);
    return snprintf(to, NAME, "%.*s%s", bare, name + lead, weight) < NAME;
}

/* ---- adapter_config.json */

/* Return whether linears are [in,out], as in GPT-2. */
static int turned(const zr_program *p) { return !!strstr(p->adapter, "\"fan_in_fan_out\": true"); }

/* Return whether the scale is alpha / sqrt(rank). */
static int has_root(const zr_program *p) { return !!strstr(p->adapter, "\"use_rslora\": true"); }

/* Return a number of the program's own configuration. key: with quotes, colon and blank */
static double own_number(const zr_program *p, const char *key)
{
    return strtod(strstr(p->adapter, key) + strlen(key), NULL);
}

/* Keys that do not change the sum added to weights. Other keys, except
 * those below, must be empty. */
static const char *const harmless[] = {"auto_mapping",  "inference_mode", "layers_pattern",
                                       "megatron_core", "peft_version",   "qalora_group_size",
                                       "revision"};

/* Keys that may have only these values. */
static const struct {
    const char *key, *values[3];
} limited[] = {
    {"bias", {"\"none\""}},
    {"init_lora_weights", {"true", "false", "\"gaussian\""}}, /* others change the base */
    {"peft_type", {"\"LORA\""}},
    {"task_type", {"\"CAUSAL_LM\"", "null"}},
};

/* A value in the file; of a string, its decoded text. */
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

/* text: in JSON's notation */
static int is(value v, const char *text)
{
    if (!text) return 0;
    if (v.quoted) return *text == '"' && strlen(text) == v.n + 2 && !memcmp(text + 1, v.at, v.n);
    return strlen(text) == v.n && !memcmp(text, v.at, v.n);
}

/* Return whether it is null, false, "", {} or []. */
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

/* A linear, embedding or norm of the base, by PEFT's name. adapted: the program has an adapter for
 * it; mark: of its weight; named: by the lists; own: rank and alpha by the first pattern that
 * matches it, -1 without one. */
typedef struct module {
    char name[NAME];
    int adapted, mark, named[3];
    double own[2];
} module;

enum { TARGETS = 0, EXCLUDED = 1, SAVED = 2, LISTS = 3, RANK = 0, ALPHA = 1 };
static const char *const lists[LISTS] = {"target_modules", "exclude_modules", "modules_to_save"};
static const char *const sizes[2] = {"r", "lora_alpha"};
static const char *const patterns[2] = {"rank_pattern", "alpha_pattern"};

/* Contents of a file. usual: rank and alpha without a pattern, PEFT's own defaults at first. tying:
 * PEFT keeps a tied weight tied (ensure_weight_tying). */
typedef struct given {
    const zr_program *p;
    const char *base; /* argument of --load, or NULL */
    int root, tying;  /* use_rslora */
    double usual[2];
    module *modules; /* [n] */
    int n;
    int is_list[LISTS], is_pattern[LISTS];
    char note[ZR_WHY / 2]; /* differences that are reported, not refused */
} given;

static void add_note(given *g, const char *what, const char *is)
{
    size_t at = strlen(g->note);
    snprintf(g->note + at, sizeof g->note - at, "%s%.150s %.200s", at ? "; " : "", what, is);
}

/* Write PEFT's name of the module of a tensor's instance i to to[NAME] and return it. end: last
 * part of the tensor's name, which is removed. */
static char *module_name(char *to, const zr_program *p, const zr_tensor *t, int i, const char *end)
{
    const char *lead = of_head(t->name) ? "" : p->lead + strlen(whole);
    const char *layer = t->count > 1 ? strstr(t->name, "%d") : NULL;
    int before = layer ? (int)(layer - t->name) : 0;
    if (layer) snprintf(to, NAME, "%s%.*s%d%s", lead, before, t->name, t->first + i, layer + 2);
    else snprintf(to, NAME, "%s%s", lead, t->name);
    if (ends_in(to, end)) to[strlen(to) - strlen(end)] = 0;
    return to;
}

static void mark_adapted(given *g, const zr_tensor *t)
{
    char name[NAME];
    for (int i = 0; i < t->count; i++) {
        module_name(name, g->p, t, i, ends[0]);
        for (int k = 0; k < g->n; k++) g->modules[k].adapted |= !strcmp(g->modules[k].name, name);
    }
}

static module *add_module(given *g, int mark)
{
    module *m = g->modules + g->n++;
    m->mark = mark;
    m->own[RANK] = m->own[ALPHA] = -1;
    return m;
}

/* List all modules of the base that have a weight, and the head of one that is tied and trained
 * whole; -1: out of memory. */
static int find_modules(given *g)
{
    const zr_tensor *end = g->p->tensors + g->p->ntensors;
    int most = 2;
    for (const zr_tensor *t = g->p->tensors; t < end; t++) most += t->count;
    g->modules = calloc((size_t)most, sizeof *g->modules);
    if (!g->modules) return -1;
    for (const zr_tensor *t = g->p->tensors; t < end; t++)
        for (int i = 0; !zr_is_adapter(t->name) && ends_in(t->name, weight) && i < t->count; i++)
            module_name(add_module(g, zr_marks_of(g->p, t))->name, g->p, t, i, weight);
    if (g->p->second) {
        zr_tensor head = {.name = g->p->second, .count = 1};
        module_name(add_module(g, ZR_WHOLE | ZR_TIED)->name, g->p, &head, 0, weight);
    }
    for (const zr_tensor *t = g->p->tensors; t < end; t++)
        if (ends_in(t->name, ends[0])) mark_adapted(g, t);
    return 0;
}

/* Mark the modules that an entry of a list names. As in PEFT, their names are the entry or end with
 * a dot and the entry; for modules_to_save the dot may be missing. */
static void read_name(given *g, int list, const char *name)
{
    size_t n = strlen(name);
    int found = 0;
    for (module *m = g->modules; m < g->modules + g->n; m++) {
        size_t all = strlen(m->name);
        int same = !strcmp(m->name, name);
        if (!same && !ends_in(m->name, name)) continue;
        if (!same && list != SAVED && m->name[all - n - 1] != '.') continue;
        m->named[list] = found = 1;
    }
    if (!found && list == TARGETS)
        add_note(g, "target_modules lists a name that is not in the model:", name);
    if (!found && list == SAVED)
        add_note(g, "modules_to_save lists a name that is not in the model:", name);
}

static void read_modules(given *g, zr_json *j, int list)
{
    for (int64_t i = 0; zr_json_more(j, '[', &i);) {
        const char *name = zr_json_text(j);
        if (name) read_name(g, list, name);
    }
    g->is_list[list] = 1;
}

/* Accept a value other than a list: a pattern, or nothing. */
static int takes_pattern(given *g, int list, value v)
{
    if (list == SAVED) return is_empty(v);
    g->is_pattern[list] = v.quoted && v.n;
    if (g->is_pattern[list]) add_note(g, lists[list], "is a pattern, which is not checked");
    return v.quoted || is_empty(v);
}

/* Return the index of a key among n; -1: none of them. */
static int index_among(const char *key, const char *const *of, int n)
{
    while (--n >= 0 && strcmp(key, of[n])) continue;
    return n;
}

static int index_of(const char *key, const char *const of[2]) { return index_among(key, of, 2); }

static int list_of(const char *key) { return index_among(key, lists, LISTS); }

/* Check that the modules trained whole are those of modules_to_save. With ensure_weight_tying one
 * name of a tied weight stands for both. */
static int check_whole(given *g, const char *file, char *why)
{
    module *end = g->modules + g->n;
    int one = 0;
    for (const module *m = g->modules; m < end; m++) one |= m->mark & ZR_TIED && m->named[SAVED];
    for (module *m = g->modules; m < end; m++) {
        int tied = one && m->mark & ZR_TIED, trained = m->mark & ZR_WHOLE;
        if (!trained == !(m->named[SAVED] || (tied && g->tying))) continue;
        return zr_why(why, "%.300s: modules_to_save: %s %.100s, which the program %s whole (%s)",
                      file, trained ? "does not list" : "lists", m->name,
                      trained ? "trains" : "does not train",
                      tied ? "without ensure_weight_tying PEFT trains a tied weight apart"
                           : "train.lora.whole");
    }
    return 0;
}

/* Check that adapters are where the lists say. */
static int check_lists(const given *g, const char *file, char *why)
{
    for (const module *m = g->modules; m < g->modules + g->n; m++) {
        int unnamed = g->is_list[TARGETS] && !m->named[TARGETS];
        if (m->adapted && (unnamed || m->named[EXCLUDED]))
            return zr_why(why,
                          "%.300s: %s: %s %.100s, for which the program has an adapter "
                          "(train.lora.match)",
                          file, lists[!unnamed], unnamed ? "does not list" : "lists", m->name);
        if (!m->adapted && m->named[TARGETS] && !m->named[EXCLUDED] && !g->is_pattern[EXCLUDED])
            return zr_why(why,
                          "%.300s: target_modules: %.100s is listed, but the program has "
                          "no adapter for it (train.lora.match)",
                          file, m->name);
    }
    return 0;
}

/* Report if the base that the file names differs from the argument of --load. It is not refused,
 * because a folder may have another name than the hub's model. */
static void compare_base(given *g, value v)
{
    char name[NAME], is[2 * NAME];
    if (!g->base || !v.quoted) return;
    snprintf(name, sizeof name, "%s", v.at);
    for (size_t n = strlen(name); n && name[n - 1] == '/'; n--) name[n - 1] = 0;
    const char *slash = strrchr(name, '/'), *last = slash ? slash + 1 : name;
    if (strcasestr(g->base, last)) return;
    snprintf(is, sizeof is, "%.100s, --load %.100s", name, g->base);
    add_note(g, "base_model_name_or_path is", is);
}

static int is_numeric(value v) { return !v.quoted && strchr("0123456789", *v.at); }

/* Accept a dropout. It changes training, not the sum added to weights. */
static int takes_dropout(given *g, value v)
{
    char is[NAME];
    double own = own_number(g->p, "\"lora_dropout\": ");
    if (!is_numeric(v)) return is_empty(v);
    snprintf(is, sizeof is, "is %.*s; the program trains with %.9g (train.lora.dropout)",
             (int)zr_least((int64_t)v.n, 30), v.at, own);
    if (strtod(v.at, NULL) != own) add_note(g, "lora_dropout", is);
    return 1;
}

/* Return whether a key may have this value; if not, *allowed has the values that it may have. */
static int takes(given *g, const char *key, value v, const char **allowed)
{
    *allowed = "null, false or empty";
    if (index_of(key, sizes) >= 0) {
        g->usual[index_of(key, sizes)] = strtod(v.at, NULL);
        *allowed = "a number";
        return is_numeric(v);
    }
    if (!strcmp(key, "use_rslora")) {
        *allowed = has_root(g->p) ? "true" : "false";
        g->root = is(v, "true");
        return is(v, *allowed) || (!has_root(g->p) && is_empty(v));
    }
    if (!strcmp(key, "ensure_weight_tying")) {
        g->tying = is(v, "true");
        return 1;
    }
    if (!strcmp(key, "lora_dropout")) {
        *allowed = "a number";
        return takes_dropout(g, v);
    }
    if (!strcmp(key, "fan_in_fan_out")) {
        *allowed = turned(g->p) ? "true" : "false";
        return is(v, *allowed);
    }
    if (list_of(key) >= 0) {
        *allowed = "a list of names";
        return takes_pattern(g, list_of(key), v);
    }
    if (!strcmp(key, "base_model_name_or_path")) {
        compare_base(g, v);
        return 1;
    }
    for (size_t i = 0; i < sizeof limited / sizeof *limited; i++) {
        if (strcmp(key, limited[i].key)) continue;
        *allowed = limited[i].values[0];
        for (int k = 0; k < 3; k++)
            if (is(v, limited[i].values[k])) return 1;
        return 0;
    }
    return is_empty(v) || is_one(key, harmless, sizeof harmless / sizeof *harmless);
}

/* Compile a pattern of names as PEFT does: it matches the end of a module's name, behind a dot or
 * from the start. Refuse patterns that POSIX reads in another way. */
static int compile(regex_t *to, const char *pattern)
{
    char text[2 * NAME];
    for (const char *c = pattern; *c; c++) {
        if (*c == '{' || (*c == '\\' && isalnum((unsigned char)c[1]))) return -1;
        if (*c == '?' && c > pattern && strchr("(*+?", c[-1])) return -1;
    }
    int n = snprintf(text, sizeof text, "^(.*\\.)?(%s)$", pattern);
    return n >= (int)sizeof text || regcomp(to, text, REG_EXTENDED | REG_NOSUB) ? -1 : 0;
}

/* Read rank_pattern or alpha_pattern. */
static int read_patterns(given *g, zr_json *j, int size, const char *file, char *why)
{
    regex_t re;
    for (int64_t i = 0; zr_json_more(j, '{', &i);) {
        const char *pattern = zr_json_key(j);
        value v = read_value(j);
        if (j->error) return 0; /* which read_config reports */
        if (!is_numeric(v))
            return zr_why(why, "%s: %s: %.100s: %.*s is not supported; allowed: a number", file,
                          patterns[size], pattern, (int)zr_least((int64_t)v.n, 60), v.at);
        if (compile(&re, pattern))
            return zr_why(why,
                          "%s: %s: \"%.100s\" is not supported; allowed: a name, or a pattern "
                          "without \\d, {}, (?...) and *?",
                          file, patterns[size], pattern);
        for (module *m = g->modules; m < g->modules + g->n; m++)
            if (m->own[size] < 0 && !regexec(&re, m->name, 0, NULL, 0))
                m->own[size] = strtod(v.at, NULL);
        regfree(&re);
    }
    return 0;
}

static int read_config(given *g, zr_json *j, const char *file, char *why)
{
    const char *allowed, *text = j->at;
    for (int64_t i = 0; zr_json_more(j, '{', &i);) {
        const char *key = zr_json_key(j);
        char open = zr_json_peek(j);
        if (open == '[' && list_of(key) >= 0) {
            read_modules(g, j, list_of(key));
            continue;
        }
        if (open == '{' && index_of(key, patterns) >= 0) {
            if (read_patterns(g, j, index_of(key, patterns), file, why)) return -1;
            continue;
        }
        value v = read_value(j);
        const char *quote = v.quoted ? "\"" : "";
        if (!j->error && !takes(g, key, v, &allowed))
            return zr_why(why, "%s: %.60s: %s%.*s%s is not supported; allowed: %s", file, key,
                          quote, (int)zr_least((int64_t)v.n, 60), v.at, quote, allowed);
    }
    if (!j->error && !zr_json_end(j)) return 0;
    return zr_why(why, "%s: byte %" PRId64 ": %s", file, (int64_t)(j->at - text), j->error);
}

/* Read the program's own configuration. */
static int read_adapter(given *own, const zr_program *p, char *why)
{
    *own = (given){.p = p, .usual = {8, 8}};
    char *text = strdup(p->adapter);
    zr_json j = {text, text ? text + strlen(text) : NULL, NULL};
    int bad = !text || find_modules(own) ? zr_why(why, "out of memory")
                                         : read_config(own, &j, "adapter_config.json", why);
    free(text);
    return bad;
}

static double adapter_size(const given *g, const module *m, int size)
{
    return m->own[size] < 0 ? g->usual[size] : m->own[size];
}

/* Check that all adapters have the program's ranks and scales. */
static int check_sizes(const given *g, const given *own, const char *file, char *why)
{
    if (g->root != own->root)
        return zr_why(why, "%.300s: has no use_rslora; the program has it", file);
    for (int size = RANK; size <= ALPHA; size++) {
        for (int i = 0; i < g->n; i++) {
            const module *m = g->modules + i;
            double is = adapter_size(g, m, size), want = adapter_size(own, own->modules + i, size);
            if (m->adapted && is != want)
                return zr_why(why, "%.300s: %s is %.9g; the program has %.9g for %.100s", file,
                              (m->own[size] < 0 ? sizes : patterns)[size], is, want, m->name);
        }
    }
    return 0;
}

/* Report that a folder has no file of adapters, and the likely reason. */
static int say_no_adapters(const char *dir, const char *name, char *why)
{
    char file[ZR_FILE];
    int is_pickle = !zr_path(file, dir, "adapter_model.bin", why) && !access(file, F_OK);
    int is_model = !zr_path(file, dir, ZR_CONFIG, why) && !access(file, F_OK);
    return zr_why(why, "%.300s: has no %s%s", dir, name,
                  is_pickle ? "; adapter_model.bin is not read, as a pickle may run code: save the "
                              "adapters with safe_serialization=True"
                  : is_model ? "; for a whole model use --load"
                             : "");
}

int zr_adapter_fits(const zr_program *p, const char *dir, const char *base, char *note, char *why)
{
    char file[ZR_FILE];
    int64_t n = 0;
    given own, g = {.p = p, .base = base, .usual = {8, 8}};
    for (int i = 1; i >= 0; i--) {
        const char *name = i ? ZR_ADAPTER_MODEL : ZR_ADAPTER_CONFIG;
        if (zr_path(file, dir, name, why)) return -1;
        if (access(file, F_OK) && errno == ENOENT) return say_no_adapters(dir, name, why);
    }
    char *text = zr_file_text(file, &n, why);
    if (!text) return -1;
    zr_json j = {text, text + n, NULL};
    int bad = read_adapter(&own, p, why) ||
              (find_modules(&g) ? zr_why(why, "%s: out of memory", file)
                                : read_config(&g, &j, file, why)) ||
              check_sizes(&g, &own, file, why) || check_lists(&g, file, why) ||
              check_whole(&g, file, why);
    if (!bad && *g.note) zr_why(note, "%.300s: %s", file, g.note);
    free(own.modules);
    free(g.modules);
    free(text);
    return bad ? -1 : 0;
}

/* ---- tensors */
/* Return whether an entry is a weight of the base with the same bits as in the folder `base`. */
static int is_base(const zr_program *p, const zr_table *t, const zr_entry *e, const char *base,
                   char *why)
{
    char name[NAME];
    zr_table own;
    if (!base || !base_of(name, e->name) || zr_folder_open(&own, base, why)) return 0;
    const zr_entry *w = zr_locate_for(p, &own, name);
    int same = w && zr_table_equal(t, e, &own, w);
    zr_table_close(&own);
    return same;
}

/* Require that the two names of a tied weight have one value. */
static int check_tied(const zr_program *p, const zr_table *table, const char *dir, char *why)
{
    char names[2][2 * NAME];
    for (const zr_tensor *t = p->tensors; t < p->tensors + p->ntensors; t++) {
        if (!(zr_marks_of(p, t) & ZR_TIED)) continue;
        snprintf(names[0], sizeof *names, "%s%s", p->lead, t->name);
        snprintf(names[1], sizeof *names, "%s%s", whole, p->second);
        if (!zr_table_equal(table, zr_locate_for(p, table, names[0]), table,
                            zr_locate_for(p, table, names[1])))
            return zr_why(why,
                          "%.300s/%s: tensors %.200s and %.200s differ; in the program they are "
                          "one weight (tie_word_embeddings)",
                          dir, ZR_ADAPTER_MODEL, names[0], names[1]);
    }
    return 0;
}

/* Return why a tensor is not read. */
static const char *foreign(const char *name)
{
    char bare[NAME];
    if (!base_of(bare, name)) return "does not belong to an adapter of this program (train.lora)";
    if (ends_in(name, own)) return "differs from --load's, or --load is missing";
    return "differs from --load's, or --load is missing; PEFT saves it if the embedding "
           "was resized: save that model, too, and --load it";
}

int zr_judge_adapters(const zr_program *p, const zr_table *t, const char *dir, const char *base,
                      char *why)
{
    for (int64_t i = 0; i < t->n; i++) {
        const zr_entry *e = &t->entries[i];
        if (!e->used && !is_base(p, t, e, base, why))
            return zr_why(why, "%s/%s: tensor %.200s %s", dir, t->files[e->file].name, e->name,
                          foreign(e->name));
    }
    return check_tied(p, t, dir, why);
}

/* ---- merging */
struct zr_merge {
    zr_table table; /* of the file of adapters */
    const zr_program *p;
    given own; /* the program's configuration */
    int turned;
    float *of[2];          /* A [rank,in], B [out,rank] */
    int64_t room[2];       /* bytes allocated for each */
    int64_t rank, in, out; /* of the tensor taken last */
    double scale;          /* of this tensor's adapter */
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
    char why[ZR_WHY];
    zr_merge *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    m->p = p;
    int bad = read_adapter(&m->own, p, why);
    for (int i = 0; i < 2; i++) {
        m->room[i] = 4 * most(p, ends[i]);
        m->of[i] = malloc((size_t)m->room[i]);
    }
    if (!bad && m->of[0] && m->of[1]) return m;
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
    free(m->own.modules);
    free(m);
}

/* Return the root of a rank by Newton's method, without libm. */
static double root_of(double x)
{
    double r = x;
    for (int i = 0; i < 64; i++) r = (r + x / r) / 2;
    return r;
}

/* Return the scale of a linear's adapter. name: of its weight, without the model's own part */
static double scale_of(const given *own, const char *name)
{
    char full[NAME];
    const char *lead = of_head(name) ? "" : own->p->lead + strlen(whole);
    int bare = (int)(strlen(name) - strlen(weight));
    snprintf(full, sizeof full, "%s%.*s", lead, bare, name);
    const module *m = own->modules;
    while (strcmp(m->name, full)) m++;
    if (m->own[RANK] < 0 && m->own[ALPHA] < 0) return own->p->lora;
    double rank = adapter_size(own, m, RANK);
    return adapter_size(own, m, ALPHA) / (own->root ? root_of(rank) : rank);
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
        errno = EINVAL; /* the file's contents have changed since they were written */
        if (bytes > m->room[i] || zr_read_at(fd, m->of[i], bytes, e[i]->begin)) return -1;
    }
    m->turned = turned(m->p) && !of_head(name); /* the head is [V,C] in every family */
    m->scale = scale_of(&m->own, name);
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
        if (sum != 0) w[i] = (float)(w[i] + m->scale * sum); /* otherwise -0 would become 0 */
    }
}
