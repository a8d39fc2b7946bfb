/* data.c -- reads a token file as a rank would, for test_data.py.
 *
 *   data FILE T VOCAB IGNORE FIRST N RANK RANKS B WIDTH
 *
 * Opens the file (WIDTH: bytes of a token if the file does not tell, or 0), checks samples FIRST ..
 * FIRST+N-1 as RANK of RANKS, then prints `tokens` and `targets` of samples FIRST .. FIRST+B-1, a
 * line each. Errors go to stderr, with exit code 2.
 */
#include "zr_data.h"
#include "zr_file.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static int report(const char *why)
{
    fprintf(stderr, "%s\n", why);
    return 2;
}

static void print_row(const int32_t *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) printf("%" PRId32 "%c", x[i], i + 1 < n ? ' ' : '\n');
}

int main(int argc, char **argv)
{
    char why[ZR_WHY];
    zr_data d;
    int64_t v[11] = {0};
    if (argc != 11) return 99;
    for (int i = 2; i < 11; i++) v[i] = strtoll(argv[i], NULL, 10);
    int64_t T = v[2], B = v[9];
    zr_form form = {T, v[3], v[4], -1, (int)v[10], 0};
    if (zr_data_open(&d, argv[1], &form, why)) return report(why);
    if (zr_data_check(&d, v[5], v[6], (int)v[7], (int)v[8], why)) return report(why);
    /* each as long as the data, so the sanitizer sees a step over the end */
    int32_t *tokens = malloc((size_t)(B * T) * sizeof *tokens);
    int32_t *targets = malloc((size_t)(B * T) * sizeof *targets);
    int bad = zr_data_read(&d, v[5], B, tokens, targets, why) ? report(why) : 0;
    for (int64_t b = 0; b < B && !bad; b++) {
        print_row(tokens + b * T, T);
        print_row(targets + b * T, T);
    }
    free(tokens);
    free(targets);
    zr_data_close(&d);
    return bad;
}
