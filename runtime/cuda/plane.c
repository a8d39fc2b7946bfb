/* plane.c -- what a launcher's ranks tell each other beside NCCL's data: a star of connections.
 *
 * Rank 0 listens; every other rank connects, says who it is, and keeps the connection. A call goes
 * from all ranks to rank 0 and back. Who ends closes its connections, which the others see.
 *
 * Invariants
 *  1. Every rank makes the same calls in the same order; no call says which it is.
 *  2. No wait is longer than the run: it looks at the stop flag several times a second.
 */
#define _GNU_SOURCE
#include "cuda.h"
#include <errno.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAGIC = 0x7a72706c, SLICE_MS = 100, PATIENCE_S = 300 };

typedef struct hello {
    uint32_t magic, rank, ranks;
} hello;

/* ---- bytes */

static void lost(zr *z, int rank)
{
    zr_fail(z, ZR_DIED, "the connection to rank %d has ended; see what that rank says", rank);
}

static void ready(zr *z, int fd, short what)
{
    struct pollfd p = {fd, what, 0};
    while (poll(&p, 1, SLICE_MS) <= 0) zr_leave_if_stopped(z);
}

/* Exactly n bytes from or to a rank. */
static void move(zr *z, int rank, void *at, size_t n, int out)
{
    int fd = z->t->line[rank];
    for (size_t done = 0; done < n;) {
        ready(z, fd, out ? POLLOUT : POLLIN);
        ssize_t some = out ? send(fd, (char *)at + done, n - done, MSG_NOSIGNAL)
                           : recv(fd, (char *)at + done, n - done, 0);
        if (some < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (some <= 0) lost(z, rank);
        done += (size_t)some;
    }
}

/* ---- meeting */

static struct addrinfo *address(zr *z)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *found;
    char port[16];
    snprintf(port, sizeof port, "%d", z->t->port0);
    int error = getaddrinfo(z->t->host0, port, &hints, &found);
    if (error)
        zr_fail(z, ZR_ENVIRONMENT, "%s:%s, where rank 0 should be: %s; set ZR_ADDR=HOST:PORT",
                z->t->host0, port, gai_strerror(error));
    return found;
}

static int listen_there(zr *z)
{
    struct addrinfo *a = address(z);
    int yes = 1, fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) ||
        bind(fd, a->ai_addr, a->ai_addrlen) || listen(fd, z->ranks))
        zr_fail(z, ZR_ENVIRONMENT, "listening at %s:%d: %s; set another ZR_ADDR=HOST:PORT",
                z->t->host0, z->t->port0, strerror(errno));
    freeaddrinfo(a);
    return fd;
}

static void accept_all(zr *z)
{
    int door = listen_there(z);
    for (int missing = z->ranks - 1; missing > 0; missing--) {
        hello h;
        ready(z, door, POLLIN);
        z->t->line[0] = accept4(door, NULL, NULL, SOCK_CLOEXEC);
        if (z->t->line[0] < 0) zr_fail(z, ZR_ENVIRONMENT, "meeting ranks: %s", strerror(errno));
        move(z, 0, &h, sizeof h, 0);
        if (h.magic != MAGIC || h.ranks != (uint32_t)z->ranks || h.rank == 0 ||
            h.rank >= h.ranks || z->t->line[h.rank] >= 0)
            zr_fail(z, ZR_DISAGREE, "meeting ranks: rank %u of %u has come, out of place", h.rank,
                    h.ranks);
        z->t->line[h.rank] = z->t->line[0];
    }
    z->t->line[0] = -1;
    close(door);
}

/* Rank 0 may not be there yet. */
static void connect_there(zr *z)
{
    const struct timespec pause = {0, 1000000 * SLICE_MS};
    struct addrinfo *a = address(z);
    double until = zr_now() + PATIENCE_S;
    hello h = {MAGIC, (uint32_t)z->rank, (uint32_t)z->ranks};
    for (;; nanosleep(&pause, NULL)) {
        int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        z->t->line[0] = fd;
        if (fd >= 0 && !connect(fd, a->ai_addr, a->ai_addrlen)) break;
        if (zr_now() > until)
            zr_fail(z, ZR_ENVIRONMENT, "rank 0 does not answer at %s:%d: %s; set "
                    "ZR_ADDR=HOST:PORT to where it can", z->t->host0, z->t->port0,
                    strerror(errno));
        close(fd);
        zr_leave_if_stopped(z);
    }
    freeaddrinfo(a);
    move(z, 0, &h, sizeof h, 1);
}

void zr_plane_open(zr *z)
{
    int yes = 1;
    z->t->line = malloc((size_t)z->ranks * sizeof *z->t->line);
    if (!z->t->line) zr_fail(z, ZR_ENVIRONMENT, "out of memory");
    for (int r = 0; r < z->ranks; r++) z->t->line[r] = -1;
    if (z->rank == 0) accept_all(z);
    else connect_there(z);
    for (int r = 0; r < z->ranks; r++)
        if (z->t->line[r] >= 0)
            setsockopt(z->t->line[r], IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

/* ---- calls */

static void tell(zr *z, void *what, size_t n)
{
    char theirs[ZR_TOLD];
    if (z->rank) {
        move(z, 0, what, n, 1);
        move(z, 0, what, n, 0);
    }
    for (int r = 1; !z->rank && r < z->ranks; r++) move(z, r, theirs, n, 0);
    for (int r = 1; !z->rank && r < z->ranks; r++) move(z, r, what, n, 1);
}

static void total(zr *z, uint64_t sum[2])
{
    uint64_t theirs[2];
    if (z->rank) move(z, 0, sum, 2 * sizeof *sum, 1);
    for (int r = 1; !z->rank && r < z->ranks; r++) {
        move(z, r, theirs, sizeof theirs, 0);
        for (int i = 0; i < 2; i++) sum[i] += theirs[i];
    }
    tell(z, sum, 2 * sizeof *sum);
}

const zr_far zr_plane = {tell, total};

/* Who is gone, seen from the watchdog. */
void zr_plane_look(zr *z)
{
    for (int r = 0; z->far && r < z->ranks; r++) {
        struct pollfd p = {z->t->line[r], POLLRDHUP, 0};
        if (p.fd >= 0 && poll(&p, 1, 0) > 0) lost(z, r);
    }
}
