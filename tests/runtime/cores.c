/* cores.c -- prints the results of runtime/zr_cores.c below a root. `cores ROOT CPUS RANKS`: the
 * number of cores, then the CPUs of each rank; CPUS is a list, or own: those that this process may
 * run on. `cores ROOT memory`: the folders of its memory groups. */
#include "zr_cores.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void say(const char *path, int version, int64_t *to)
{
    printf("%d %s\n", version, path);
    ++*to;
}

static int has(const zr_cpus *in, int cpu) { return in->word[cpu / 64] >> cpu % 64 & 1; }

static void print(const zr_cpus *in)
{
    const char *comma = "";
    for (int cpu = 0, last; cpu < ZR_CPUS; cpu = last + 1) {
        last = cpu;
        if (!has(in, cpu)) continue;
        while (last + 1 < ZR_CPUS && has(in, last + 1)) last++;
        printf("%s%d", comma, cpu);
        if (last > cpu) printf("-%d", last);
        comma = ",";
    }
    printf("\n");
}

int main(int argc, char **argv)
{
    zr_cpus in = {{0}}, mine;
    int64_t groups = 0;
    if (argc < 4) {
        zr_groups(argv[1], argv[2], say, &groups);
        return groups == 0;
    }
    if (!strcmp(argv[2], "own") && zr_cpus_allowed(&in)) return 1;
    for (char *s = strtok(argv[2], ","); s && *s != 'o'; s = strtok(NULL, ",")) {
        char *dash = strchr(s, '-');
        for (int cpu = atoi(s); cpu <= atoi(dash ? dash + 1 : s); cpu++)
            in.word[cpu / 64] |= (uint64_t)1 << cpu % 64;
    }
    printf("%d\n", (int)zr_cores(argv[1], &in));
    for (int rank = 0; rank < atoi(argv[3]); rank++)
        if (zr_cpus_of(argv[1], &in, rank, atoi(argv[3]), &mine)) print(&mine);
        else printf("all\n");
    return 0;
}
