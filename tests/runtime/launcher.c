/* launcher.c -- prints the place that a program of RANKS ranks takes from its environment: launcher
 * RANKS [meet|alive|alone WHAT]
 *
 * Prints rank, ranks started here, rank on its host, host and port of rank 0. `meet`: meets the
 * other ranks first, and also prints how many are on its host and on its CPUs; `alive`: also how
 * its connections are kept alive; `alone`: WHAT must be different on each rank.
 */
#include "zr_handshake.h"
#include "zr_net.h"
#include "zr_options.h"
#include "zr_rank.h"
#include "zr_watch.h"
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

const char zr_digest[] = "", zr_release[] = "";

static int option(int fd, int level, int name)
{
    int value = -1;
    socklen_t n = sizeof value;
    return getsockopt(fd, level, name, &value, &n) ? -1 : value;
}

static void tell_lives(const zr *z)
{
    for (int r = 0; r < z->ranks; r++) {
        int fd = z->net->line[r], each = option(fd, IPPROTO_TCP, TCP_KEEPINTVL);
        if (fd < 0) continue;
        printf("to %d: asks %s after %d s, then %d times in %d s; waits %d ms\n", r,
               option(fd, SOL_SOCKET, SO_KEEPALIVE) == 1 ? "whether it lives" : "nothing",
               option(fd, IPPROTO_TCP, TCP_KEEPIDLE), option(fd, IPPROTO_TCP, TCP_KEEPCNT),
               each * option(fd, IPPROTO_TCP, TCP_KEEPCNT),
               option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT));
    }
}

int main(int argc, char **argv)
{
    static zr_options options;
    const zr_program program = {.name = "launcher"};
    int ranks = atoi(argv[1]);
    zr z = {.p = &program,
            .o = &options,
            .rank = -1,
            .ranks = ranks,
            .here = ranks,
            .net = &(zr_net){.port = 0},
            .watch = &(zr_watch){.limit = 0}};
    zr_find_launcher(&z);
    if (argc > 2) {
        z.rank = z.lowest;
        z.shared = calloc(1, sizeof *z.shared + (size_t)ranks * sizeof *z.shared->seat);
        zr_meet(&z);
        if (!strcmp(argv[2], "alive")) tell_lives(&z);
        if (!strcmp(argv[2], "alone")) zr_plane_alone(&z, argv[3], "look for another");
        printf("sharing %d ", z.net->sharing);
    }
    printf("rank %d here %d local %d of %d at %s:%d%s%s\n", z.lowest, z.here, z.net->local,
           z.net->neighbours, z.far ? z.net->host : "-", z.net->port, z.net->own ? " own" : "",
           z.far ? "" : " alone");
    return 0;
}
