/* zr_config.c -- is the folder of --load of another model than the program? Shapes do not tell of
 * numbers that no tensor has. */
#define _GNU_SOURCE
#include "zr_json.h"
#include "zr_safetensors.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Keys of a config.json, in it or in one of its objects, whose values decide what is computed */
static const char *const keys[] = {
    "rope_theta",          "factor",
    "low_freq_factor",     "high_freq_factor",
    "beta_fast",           "beta_slow",
    "attention_factor",    "original_max_position_embeddings",
    "rms_norm_eps",        "layer_norm_epsilon",
    "norm_epsilon",        "num_attention_heads",
    "num_key_value_heads", "n_head",
};
enum { KEYS = sizeof keys / sizeof *keys, FACTOR = 1 }; /* without FACTOR rope is not scaled */

static void take_number(zr_json *j, const char *key, double found[KEYS])
{
    const char *at = j->at;
    zr_json_skip(j);
    for (int k = 0; k < KEYS; k++)
        if (!strcmp(key, keys[k]) && at < j->at && strchr("-.0123456789", *at))
            found[k] = strtod(at, NULL);
}

/* NAN: it is not there. Returns 0, or -1: it is no object of JSON. */
static int read_numbers(char *text, int64_t n, double found[KEYS])
{
    zr_json j = {text, text + n, NULL};
    for (int k = 0; k < KEYS; k++) found[k] = NAN;
    for (int64_t i = 0; zr_json_more(&j, '{', &i);) {
        const char *key = zr_json_key(&j);
        if (!key) return -1;
        if (zr_json_peek(&j) != '{') {
            take_number(&j, key, found);
            continue;
        }
        for (int64_t m = 0; zr_json_more(&j, '{', &m);) {
            const char *inner = zr_json_key(&j);
            if (!inner) return -1;
            zr_json_peek(&j);
            take_number(&j, inner, found);
        }
    }
    return zr_json_end(&j);
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

static void compare_numbers(char *theirs, int64_t n, char *ours, FILE *to)
{
    double found[2][KEYS];
    const char *comma = "";
    if (read_numbers(theirs, n, found[0]) || read_numbers(ours, (int64_t)strlen(ours), found[1]))
        return;
    for (int k = 0; k < KEYS; k++) {
        if (!differ(k, found[0][k], found[1][k])) continue;
        fprintf(to, "%s%s ", comma, keys[k]);
        tell_number(to, "", found[0][k]);
        tell_number(to, ", the program ", found[1][k]);
        comma = "; ";
    }
}

int zr_config_differs(const zr_program *p, const char *dir, char *note)
{
    char file[ZR_FILE], why[ZR_WHY], told[ZR_WHY / 2] = "";
    int64_t n = 0;
    if (!p->config || zr_path(file, dir, ZR_CONFIG, why) || access(file, F_OK)) return 0;
    char *theirs = zr_file_text(file, &n, why), *ours = strdup(p->config);
    FILE *to = fmemopen(told, sizeof told, "w");
    if (theirs && ours && to) compare_numbers(theirs, n, ours, to);
    if (to) fclose(to);
    free(ours);
    free(theirs);
    if (*told) zr_why(note, "%.200s: is of another model than the program: %s", file, told);
    return *told != 0;
}
