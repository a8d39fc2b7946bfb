/* order.c -- the order of samples, for test_order.py.
 *
 *   order permute SEED SOURCE FROM TO LO HI   for each epoch and each n from LO to HI a line: the
 *                                             places of 0 .. n-1
 *   order turns M FILE:W ...                  the sources of samples 0 .. M-1, in one line
 *   order check M FILE:W ...                  checks the tokens of samples 0 .. M-1; shuffled if
 *                                             M < 0
 *
 * W counts in ten-thousandths. If zr_mix_taken does not count the samples so far, the exit code is
 * 1.
 */
#include "zr_data.h"
#include "zr_file.h"
#include "zr_mix.h"
#include "zr_order.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int permute(char **v)
{
    uint64_t seed = strtoull(v[0], NULL, 10), source = strtoull(v[1], NULL, 10);
    for (uint64_t epoch = strtoull(v[2], NULL, 10); epoch <= strtoull(v[3], NULL, 10); epoch++)
        for (int64_t n = atoll(v[4]); n <= atoll(v[5]); n++)
            for (int64_t i = 0; i < n; i++)
                printf("%" PRId64 "%c", zr_permuted(zr_order_key(seed, source, epoch), n, i),
                       i + 1 < n ? ' ' : '\n');
    return 0;
}

static int turns(const zr_mix *mix, int64_t m)
{
    int64_t so_far[ZR_SOURCES] = {0}, taken[ZR_SOURCES] = {0};
    for (int64_t i = 0; i < m; i++) {
        int64_t at = i;
        int k = zr_source_of(mix->fork, mix->n - 2, &at);
        if (at != so_far[k]++) return 1;
        zr_mix_taken(mix, i + 1, taken);
        if (memcmp(taken, so_far, sizeof taken)) return 1;
        printf("%d%c", k, i + 1 < m ? ' ' : '\n');
    }
    return 0;
}

static int of_files(const char *what, int64_t m, char **v, int n)
{
    char why[ZR_WHY];
    zr_given given[ZR_SOURCES] = {0};
    zr_mix mix = {.shuffle = m < 0};
    int bad = 2;
    for (int k = 0; k < n; k++) {
        char *colon = strrchr(v[k], ':');
        *colon = 0;
        given[k] = (zr_given){v[k], atoll(colon + 1), (int)strlen(v[k])};
    }
    if (!zr_mix_open(&mix, given, n, "", &(zr_form){1, 256, -1, -1, 2, 0}, why))
        bad = *what == 't' ? turns(&mix, m) : 2 * -zr_mix_check(&mix, labs(m), 0, 1, why);
    if (bad == 2) fprintf(stderr, "%s\n", why);
    zr_mix_close(&mix);
    return bad;
}

int main(int argc, char **argv)
{
    if (argc == 8 && !strcmp(argv[1], "permute")) return permute(argv + 2);
    if (argc > 3) return of_files(argv[1], atoll(argv[2]), argv + 3, argc - 3);
    return 99;
}
