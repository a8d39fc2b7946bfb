/* zr_config.c -- compares the config.json of --load with the program's. Some settings, such as an
 * eps, change no shape of a tensor, and a shape that does not fit does not name the model. */
#define _GNU_SOURCE
#include "zr_file.h"
#include "zr_json.h"
#include "zr_safetensors.h"
#include "zr_save.h"
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Keys of a config.json, or of an object in it, whose values change the computation. */
static const char *const keys[] = {
    "rope_theta",          "factor",
    "low_freq_factor",     "high_freq_factor",
    "beta_fast",           "beta_slow",
    "attention_factor",    "original_max_position_embeddings",
    "rms_norm_eps",        "layer_norm_epsilon",
    "norm_epsilon",        "num_attention_heads",
    "num_key_value_heads", "n_head",
    "num_hidden_layers",   "n_layer",
    "hidden_size",         "n_embd",
    "intermediate_size",   "vocab_size", /* the last one, see VOCAB */
};
/* without FACTOR rope is not scaled */
enum { KEYS = sizeof keys / sizeof *keys, FACTOR = 1, VOCAB = KEYS - 1 };

static void take_number(zr_json *j, const char *key, double found[KEYS])
{
    const char *at = j->at;
    zr_json_skip(j);
    for (int k = 0; k < KEYS; k++)
        if (!strcmp(key, keys[k]) && at < j->at && strchr("-.0123456789", *at))
            found[k] = strtod(at, NULL);
}

/* Read the numbers of these keys; NAN: not there. Returns 0, or -1 if
 * `file` is not a JSON object. */
static int read_numbers(char *text, int64_t n, double found[KEYS], const char *file, char *why)
{
    zr_json j = {text, text + n, NULL};
    for (int k = 0; k < KEYS; k++) found[k] = NAN;
    for (int64_t i = 0; zr_json_more(&j, '{', &i);) {
        const char *key = zr_json_key(&j);
        if (!key) break;
        if (zr_json_peek(&j) != '{') {
            take_number(&j, key, found);
            continue;
        }
        for (int64_t m = 0; zr_json_more(&j, '{', &m);) {
            const char *inner = zr_json_key(&j);
            if (!inner) break;
            zr_json_peek(&j);
            take_number(&j, inner, found);
        }
    }
    if (!zr_json_end(&j)) return 0;
    return zr_why(why, "%s: byte %" PRId64 ": %s", file, (int64_t)(j.at - text), j.error);
}

static int differ(int k, double theirs, double ours)
{
    if (isnan(theirs) || isnan(ours)) return k == FACTOR && isnan(theirs) != isnan(ours);
    return fabs(theirs - ours) > 1e-6 * fabs(ours);
}

static void tell_number(FILE *to, const char *lead, double x)
{
    fprintf(to, isnan(x) ? "%snone" : "%s%g", lead, x);
}

static void compare_numbers(const double theirs[KEYS], const double ours[KEYS], FILE *to)
{
    const char *comma = "";
    for (int k = 0; k < KEYS; k++) {
        if (!differ(k, theirs[k], ours[k])) continue;
        fprintf(to, "%s%s ", comma, keys[k]);
        tell_number(to, "", theirs[k]);
        tell_number(to, ", the program ", ours[k]);
        comma = "; ";
    }
}

int zr_config_differs(const zr_program *p, const char *dir, char *note, char *why)
{
    char file[ZR_FILE], told[ZR_WHY / 2] = "";
    double found[2][KEYS];
    int64_t n = 0;
    if (zr_path(file, dir, ZR_CONFIG, why)) return -1;
    if (!p->config || access(file, F_OK)) return 0;
    char *theirs = zr_file_text(file, &n, why), *ours = strdup(p->config);
    int bad = !theirs || !ours || read_numbers(theirs, n, found[0], file, why) ||
              read_numbers(ours, (int64_t)strlen(ours), found[1], ZR_CONFIG, why);
    FILE *to = bad ? NULL : fmemopen(told, sizeof told, "w");
    if (to) {
        int grows = found[0][VOCAB] == (double)p->vocab_from;
        if (grows) found[0][VOCAB] = found[1][VOCAB];
        compare_numbers(found[0], found[1], to);
        fclose(to);
    }
    free(ours);
    free(theirs);
    if (*told) zr_why(note, "%.200s: is of another model than the program: %s", file, told);
    return bad ? -1 : *told != 0;
}
