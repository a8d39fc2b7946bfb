/* launcher.c -- what a program of RANKS ranks makes of its environment: launcher RANKS [meet]
 *
 * Prints rank, ranks started here, rank on its host, host and port of rank 0; `meet`: meets the
 * other ranks first, and prints how many are on its host and on its CPUs as well. */
#include "zr_int.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

const char zr_digest[] = "";

int main(int argc, char **argv)
{
    static zr_options options;
    const zr_program program = {.name = "launcher"};
    int ranks = atoi(argv[1]);
    zr z = {.p = &program, .o = &options, .rank = -1, .ranks = ranks, .here = ranks,
            .log.file = -1};
    zr_find_launcher(&z);
    if (argc > 2) {
        z.rank = z.lowest;
        z.shared = calloc(1, sizeof *z.shared + (size_t)ranks * sizeof *z.shared->seat);
        zr_plane_open(&z);
        printf("sharing %d ", z.net.sharing);
    }
    printf("rank %d here %d local %d of %d at %s:%d%s%s\n", z.lowest, z.here, z.net.local,
           z.net.neighbours, z.far ? z.net.host : "-", z.net.port, z.net.own ? " own" : "",
           z.far ? "" : " alone");
    return 0;
}
