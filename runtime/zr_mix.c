/* zr_mix.c -- samples of one or more token files, mixed by their weights. Each file starts again at
 * its end; its samples come in order or shuffled.
 *
 * Invariants
 *  1. A sample is a function of its number alone (zr_order.h); no state is kept.
 *  2. A source with share w of the weights has m*w of the first m samples, plus or minus two. The
 *     forks are a Huffman tree: the two lightest weights are joined first, so the weight at least
 *     doubles at every second fork on the way from a source to the root. Each fork rounds by at
 *     most half a sample, and a source gets its share of that error: at most 1, 1, 1/2, 1/2, 1/4
 *     ... of it from its own fork upwards, so 4 halves in sum.
 */
#include "zr_data.h"
#include "zr_file.h"
#include "zr_mix.h"
#include "zr_order.h"
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Return the lightest of those left (weight above 0). */
static int lightest(const int64_t *weight, int n)
{
    int found = -1;
    for (int i = 0; i < n; i++)
        if (weight[i] > 0 && (found < 0 || weight[i] < weight[found])) found = i;
    return found;
}

/* Make fork[n-1] from weight[n]. */
static void pair_up(zr_mix *s)
{
    int64_t weight[2 * ZR_SOURCES] = {0};
    int n = s->n;
    for (int i = 0; i < n; i++) weight[i] = s->of[i].weight;
    for (int k = 0; k < n - 1; k++) {
        for (int b = 0; b < 2; b++) {
            int i = lightest(weight, n + k);
            s->fork[k].weight[b] = weight[i];
            s->fork[k].way[b] = i < n ? ~i : i - n;
            weight[i] = 0;
        }
        weight[n + k] = s->fork[k].weight[0] + s->fork[k].weight[1];
    }
}

/* Reduce the weights to their ratio in smallest integers. */
static void reduce(zr_mix *s)
{
    int64_t divisor = 0;
    for (int i = 0; i < s->n; i++)
        for (int64_t a = s->of[i].weight, rest; a; a = rest) {
            rest = divisor % a;
            divisor = a;
        }
    for (int i = 0; i < s->n; i++) s->of[i].weight /= divisor;
}

/* Open a source. A folder stands for its file `name`. */
static int take_file(zr_dataset *to, const zr_given *given, const char *name, const zr_form *f,
                     char *why)
{
    struct stat is;
    int n = snprintf(to->path, ZR_FILE, "%.*s", given->length, given->file);
    if (n < ZR_FILE && !stat(to->path, &is) && S_ISDIR(is.st_mode))
        n += snprintf(to->path + n, (size_t)(ZR_FILE - n), "/%s", name);
    if (n >= ZR_FILE) return zr_why(why, "%.200s...: the path is too long", given->file);
    return zr_data_open(&to->data, to->path, f, why);
}

int zr_mix_open(zr_mix *s, const zr_given *given, int n, const char *name, const zr_form *f,
                char *why)
{
    zr_form each = *f;
    if (n < 1) return 0;
    each.part = n;
    s->of = calloc((size_t)n, sizeof *s->of);
    s->fork = calloc((size_t)n, sizeof *s->fork);
    if (!s->of || !s->fork) return zr_why(why, "%s: out of memory", given->file);
    for (s->n = 0; s->n < n; s->n++) {
        zr_dataset *to = &s->of[s->n];
        to->weight = given[s->n].weight;
        if (take_file(to, &given[s->n], name, &each, why)) return -1;
    }
    reduce(s);
    pair_up(s);
    return 0;
}

void zr_mix_taken(const zr_mix *s, int64_t m, int64_t *taken)
{
    int64_t at[ZR_SOURCES] = {0};
    if (s->n == 1) taken[0] = m;
    at[s->n < 2 ? 0 : s->n - 2] = m;
    for (int k = s->n - 2; k >= 0; k--)
        for (int b = 0; b < 2; b++) {
            int way = s->fork[k].way[b];
            int64_t first = zr_turns(&s->fork[k], at[k]);
            *(way < 0 ? &taken[~way] : &at[way]) = b ? at[k] - first : first;
        }
}

int zr_mix_check(const zr_mix *s, int64_t used, int rank, int ranks, char *why)
{
    int64_t taken[ZR_SOURCES] = {0};
    zr_mix_taken(s, used, taken);
    for (int k = 0; k < s->n; k++) {
        const zr_data *d = &s->of[k].data;
        int64_t n = s->shuffle && taken[k] ? d->samples : taken[k];
        if (zr_data_check(d, 0, n, rank, ranks, why)) return -1;
    }
    return 0;
}

int zr_mix_read(const zr_mix *s, int64_t first, int64_t B, int32_t *tokens, int32_t *targets,
                char *why)
{
    for (int64_t b = 0; b < B; b++) {
        int64_t at = first + b;
        int k = zr_source_of(s->fork, s->n - 2, &at);
        const zr_data *d = &s->of[k].data;
        uint64_t epoch = (uint64_t)(at / d->samples);
        at %= d->samples;
        if (s->shuffle) at = zr_permuted(zr_order_key(s->seed, (uint64_t)k, epoch), d->samples, at);
        if (zr_data_read(d, at, 1, tokens + b * d->T, targets + b * d->T, why)) return -1;
    }
    return 0;
}

void zr_mix_close(zr_mix *s)
{
    for (int k = 0; k < s->n; k++) zr_data_close(&s->of[k].data);
    free(s->of);
    free(s->fork);
    *s = (zr_mix){0};
}
