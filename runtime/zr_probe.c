/* zr_probe.c -- measures the GPU of every rank beside the others (--check-gpus). */
#define _GNU_SOURCE
#include "zr_fail.h"
#include "zr_log.h"
#include "zr_memory.h"
#include "zr_net.h"
#include "zr_probe.h"
#include "zr_queue.h"
#include "zr_rank.h"
#include "zr_seats.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ENOUGH = 85 }; /* percent of the median that a GPU must reach */
enum { LINE = 200 };

static const struct {
    const char *name, *unit;
    double scale;
} probes[ZR_PROBES] = {
    {"product", "TFLOP/s", 1e-12}, {"copy", "GB/s", 1e-9}, {"gather", "GB/s", 1e-9}};

typedef float rates[ZR_PROBES];

/* Get the rates of every rank, all[ranks]: in turn each rank's are added to zeros. */
static void exchange_rates(zr *z, const rates mine, rates *all)
{
    for (int r = 0; r < z->ranks; r++) {
        uint64_t sum[2] = {0};
        _Static_assert(sizeof(rates) <= sizeof sum, "what zr_total can add");
        if (r == z->rank) memcpy(sum, mine, sizeof(rates));
        zr_total(z, sum);
        memcpy(all[r], sum, sizeof(rates));
    }
}

static int slower(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Return the median over ranks; of an even number the upper one. */
static float median_of(zr *z, rates *all, int what)
{
    float *sorted = zr_get(z, z->ranks, sizeof *sorted);
    for (int r = 0; r < z->ranks; r++) sorted[r] = all[r][what];
    qsort(sorted, (size_t)z->ranks, sizeof *sorted, slower);
    float median = sorted[z->ranks / 2];
    free(sorted);
    return median;
}

/* Write the rates as text, with their percentage of `median` unless that is NULL. Return the
 * smallest percentage. */
static double rates_text(char line[LINE], const rates x, const float *median)
{
    double least = 100;
    int n = 0;
    *line = 0;
    for (int what = 0; what < ZR_PROBES; what++) {
        if (x[what] <= 0) continue;
        n += snprintf(line + n, LINE - (size_t)n, "%s%s %.4g %s", n ? ", " : "", probes[what].name,
                      probes[what].scale * (double)x[what], probes[what].unit);
        double share = median ? 100 * (double)(x[what] / median[what]) : 100;
        if (median) n += snprintf(line + n, LINE - (size_t)n, " (%.0f %%)", share);
        if (share < least) least = share;
    }
    return least;
}

void zr_check_gpus(zr *z)
{
    char host[ZR_HOST_NAME] = "", line[LINE];
    rates mine, median, *all = zr_get(z, z->ranks, sizeof *all);
    int near = z->far ? z->net->neighbours : z->ranks, local = z->rank - z->lowest;
    zr_queues_start(z);
    for (int what = 0; what < ZR_PROBES; what++) {
        zr_barrier(z);
        mine[what] = (float)zr_probe(z, what);
    }
    exchange_rates(z, mine, all);
    for (int what = 0; what < ZR_PROBES; what++) median[what] = median_of(z, all, what);
    (void)rates_text(line, median, NULL);
    zr_print(z, STDOUT_FILENO, "median of %d ranks: %s\n", z->ranks, line);
    double least = rates_text(line, mine, median);
    gethostname(host, sizeof host - 1);
    for (int r = 0; r < z->ranks; r++) {
        zr_barrier(z);
        if (r != z->rank) continue;
        printf("rank %d: host %s, %d of %d there: %s%s\n", r, host,
               (z->far ? z->net->local : 0) + local, near, line, least < ENOUGH ? ", slow" : "");
        fflush(stdout);
    }
    zr_barrier(z);
    zr_queues_stop(z);
    free(all);
    if (least < ENOUGH)
        zr_fail(z, ZR_ENVIRONMENT,
                "the GPU reaches %.0f %% of the median, less than %d %%; compare its clocks, "
                "temperature and links with another's (nvidia-smi -q), or leave its host out",
                least, ENOUGH);
}
