/* zr_names.c -- finds tensors of a folder under their other names, and explains why one is missing
 * or does not fit; see zr_names.h.
 *
 * Invariants
 *  1. A tensor under its own name is preferred to one under another.
 *  2. An explanation has no effect: a misfit is refused whatever its cause.
 */
#define _GNU_SOURCE
#include "zr_file.h"
#include "zr_names.h"
#include "zr_safetensors.h"
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- other names */
/* Prefixes of names in files of a whole model; files of the base alone have none. */
enum { PREFIXES = 3, PREFIX = 16, NAME = 256 };
static const char prefixes[PREFIXES][PREFIX] = {"transformer.", "model.", "gpt_neox."};
static const char *const heads[] = {"lm_head.weight", "embed_out.weight", NULL};
static const char *const embeddings[] = {"wte.weight", "embed_tokens.weight", "embed_in.weight",
                                         NULL};

const char *zr_unprefixed(const char *name)
{
    for (int i = 0; i < PREFIXES; i++) {
        size_t n = strlen(prefixes[i]);
        if (!strncmp(name, prefixes[i], n)) return name + n;
    }
    return name;
}

zr_entry *zr_locate(const zr_table *t, const char *name)
{
    char with[NAME + PREFIX];
    const char *bare = zr_unprefixed(name);
    zr_entry *e = zr_table_find(t, name);
    if (!e && bare != name) e = zr_table_find(t, bare);
    for (int i = 0; !e && i < PREFIXES; i++) {
        snprintf(with, sizeof with, "%s%s", prefixes[i], bare);
        e = zr_table_find(t, with);
    }
    return e;
}

static int is_known(const char *name, const char *const *known)
{
    while (*known && strcmp(*known, zr_unprefixed(name))) known++;
    return *known != NULL;
}

static int is_head(const char *name) { return is_known(name, heads); }

int zr_is_embedding(const char *name) { return is_known(name, embeddings); }

/* Return whether the program has a head of its own. */
static int has_head(const zr_program *p)
{
    int k = 0;
    while (k < p->ntensors && !is_head(p->tensors[k].name)) k++;
    return k < p->ntensors;
}

static zr_entry *locate_one(const zr_table *t, const char *const *known)
{
    zr_entry *e = NULL;
    for (; !e && *known; known++) e = zr_locate(t, *known);
    return e;
}

zr_entry *zr_locate_for(const zr_program *p, const zr_table *t, const char *name)
{
    zr_entry *e = zr_locate(t, name);
    if (e || has_head(p)) return e;
    if (zr_is_embedding(name)) return locate_one(t, heads);
    return is_head(name) ? locate_one(t, embeddings) : NULL;
}

int zr_is_buffer(const char *name)
{
    static const char *const known[][2] = {/* PREFIX N SUFFIX */
                                           {"h.", ".attn.bias"},
                                           {"h.", ".attn.masked_bias"},
                                           {"layers.", ".attention.bias"},
                                           {"layers.", ".attention.masked_bias"},
                                           {"layers.", ".attention.rotary_emb.inv_freq"},
                                           {"layers.", ".self_attn.rotary_emb.inv_freq"}};
    name = zr_unprefixed(name);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        size_t n = strlen(known[i][0]), digits = 0;
        if (!strncmp(name, known[i][0], n)) digits = strspn(name + n, "0123456789");
        if (digits && !strcmp(name + n + digits, known[i][1])) return 1;
    }
    return 0;
}

int zr_is_tied_head(const zr_table *t, const zr_entry *e)
{
    const zr_entry *w = is_head(e->name) ? locate_one(t, embeddings) : NULL;
    return w && zr_table_equal(t, w, t, e);
}

int zr_is_used_as(const zr_table *t, const zr_entry *e)
{
    for (const zr_entry *u = t->entries; u < t->entries + t->n; u++)
        if (u->used && u->file == e->file && u->begin == e->begin && u->end == e->end)
            return u->begin < u->end;
    return 0;
}

/* ---- why a folder does not fit */
/* Return the first number between dots, which is a layer's, plus 1; 0: there is none. */
static int64_t layers_up_to(const char *name)
{
    for (const char *at = name; (at = strchr(at, '.')); at++) {
        size_t digits = strspn(at + 1, "0123456789");
        if (digits && digits < 10 && at[1 + digits] == '.') return atoll(at + 1) + 1;
    }
    return 0;
}

void zr_extent_add(zr_extent *to, const char *name, const int64_t *shape, int ndim)
{
    int64_t layers = layers_up_to(name);
    uint64_t n = 1;
    for (int i = 0; i < ndim; i++) n *= (uint64_t)shape[i];
    to->tensors++;
    to->elements += n;
    if (layers > to->layers) to->layers = layers;
}

static void put_extent(FILE *to, zr_extent e)
{
    fprintf(to, "%" PRId64 " tensors of %" PRIu64 " elements, layers %" PRId64, e.tensors,
            e.elements, e.layers);
}

/* Write the sizes of the program and of the folder, so that a user of the wrong one notices. */
static void put_sides(FILE *to, const zr_program *p, zr_extent ours, const zr_table *t)
{
    zr_extent theirs = {0};
    for (const zr_entry *e = t->entries; e < t->entries + t->n; e++)
        zr_extent_add(&theirs, e->name, e->shape, e->ndim);
    fprintf(to, "; %.150s is the program of %.60s (", program_invocation_name, p->name);
    put_extent(to, ours);
    fprintf(to, ", vocab %" PRId64 "), the folder has ", p->vocab);
    put_extent(to, theirs);
}

/* Parts of names that show another format, or a model inside another. */
static const struct {
    const char *mark, *whose;
} marks[] = {
    {"_orig_mod.", "torch.compile's: save model._orig_mod"},
    {"_fsdp_wrapped_module.", "FSDP's: save its full state dict"},
    {"_checkpoint_wrapped_module.", "activation checkpointing's: save the unwrapped model"},
    {"_forward_module.", "Lightning Fabric's: save the wrapped model"},
    {"module.", "DistributedDataParallel's or DeepSpeed's: save model.module"},
    {"base_model.model.", "PEFT's, not merged: save model.merge_and_unload(), or give the base "
                          "with --load and the adapters with --adapter"},
    {"default.weight", "PEFT's in memory: use the PEFT model's save_pretrained"},
    {"model.model.", "a model inside another: save the inner one"},
    {"language_model.", "a multimodal model's: save its text model"},
    {"qweight", "GPTQ's or AWQ's: use the weights before quantization"},
    {"weight_scale", "of quantized weights: use the weights before quantization"},
    {"weight_scale_inv", "of quantized weights: use the weights before quantization"},
    {"tok_embeddings.", "Meta's format: use the folder in transformers' format"},
};

/* Return whether a part of the name begins with the mark. */
static int is_marked(const char *name, const char *mark)
{
    const char *at = strstr(name, mark);
    while (at && at > name && at[-1] != '.') at = strstr(at + 1, mark);
    return at != NULL;
}

/* Write that names in the folder have a mark that the wanted name lacks. Returns whether any do. */
static int put_mark(FILE *to, const zr_table *t, const char *wanted)
{
    for (size_t m = 0; m < sizeof marks / sizeof *marks; m++) {
        int64_t n = 0;
        for (int64_t i = 0; i < t->n; i++) n += is_marked(t->entries[i].name, marks[m].mark);
        if (!n || is_marked(wanted, marks[m].mark)) continue;
        fprintf(to, "; of the %" PRId64 " names there %" PRId64 " have \"%s\", which is %s", t->n,
                n, marks[m].mark, marks[m].whose);
        return 1;
    }
    return 0;
}

/* Return whether the folder's model is tied and the program's is not. */
static int is_tied_there(const zr_program *p, const zr_table *t, const char *missing)
{
    return has_head(p) && ((is_head(missing) && locate_one(t, embeddings)) ||
                           (zr_is_embedding(missing) && locate_one(t, heads)));
}

static void put_missing(FILE *to, const zr_program *p, zr_extent ours, const zr_table *t,
                        const char *name)
{
    if (put_mark(to, t, name)) return;
    if (is_tied_there(p, t, name))
        fprintf(to, "; the folder's model is tied (tie_word_embeddings), the program's is not");
    put_sides(to, p, ours, t);
}

/* Explain another shape: more or fewer rows mean another vocabulary or context. */
static void put_shape(FILE *to, const zr_program *p, zr_extent ours, const zr_table *t,
                      const zr_tensor *wanted, const zr_entry *e)
{
    int64_t rows = e->shape[0];
    int alike = wanted->ndim == 2 && e->ndim == 2 && e->shape[1] == wanted->shape[1];
    if (alike && (zr_is_embedding(wanted->name) || is_head(wanted->name)))
        fprintf(to,
                "; there is one row per token: generate the program with model.vocab %" PRId64 "%s",
                rows,
                rows > wanted->shape[0] ? "" : ", or with --from and --vocab, which adds the rows");
    else if (alike && !strcmp(zr_unprefixed(wanted->name), "wpe.weight"))
        fprintf(
            to,
            "; there is one row per position: generate the program with the embedding's context "
            "%" PRId64,
            rows);
    else put_sides(to, p, ours, t);
}

/* Explain unused tensors: a head that differs from the embedding is not of a tied model. */
static void put_unused(FILE *to, const zr_program *p, zr_extent ours, const zr_table *t)
{
    const zr_entry *e = has_head(p) ? NULL : locate_one(t, heads);
    if (e && !e->used && !zr_is_tied_head(t, e))
        fprintf(to, "; its head is not tied to its embedding: generate the program with "
                    "tie_word_embeddings false in config.json");
    else put_sides(to, p, ours, t);
}

void zr_tell_misfit(char *to, const zr_program *p, zr_extent ours, const zr_table *t,
                    const zr_tensor *wanted, const char *name, const zr_entry *e)
{
    FILE *f = fmemopen(to, ZR_WHY, "w");
    *to = 0;
    if (!f) return;
    if (!wanted) put_unused(f, p, ours, t);
    else if (!e) put_missing(f, p, ours, t, name);
    else put_shape(f, p, ours, t, wanted, e);
    fclose(f);
}
