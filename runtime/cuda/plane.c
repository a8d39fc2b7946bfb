/* plane.c -- what a launcher's ranks tell each other beside NCCL's data: a star of connections.
 *
 * Rank 0 listens; every other rank connects, says who it is, and keeps the connection. A call goes
 * from all ranks to rank 0 and back. Who ends closes its connections, which the others see.
 *
 * Where a launcher names rank 0's host, rank 0 listens on all of its addresses: to rank 0 itself
 * the name may be localhost (PyTorchJob) or a loopback address of /etc/hosts (Debian).
 *
 * Invariants
 *  1. Every rank makes the same calls in the same order; no call says which it is.
 *  2. No wait is longer than the run: it looks at the stop flag several times a second.
 */
#define _GNU_SOURCE
#include "cuda.h"
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAGIC = 0x7a72706c, SLICE_MS = 100, HELLO_MS = 5000, PATIENCE_S = 300 };

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

/* -1: errno says why */
static int listen_at(const struct sockaddr *at, socklen_t n, int most)
{
    int yes = 1, no = 0, fd = socket(at->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return -1;
    if (at->sa_family == AF_INET6)        /* and IPv4 */
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
    if (!setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) && !bind(fd, at, n) &&
        !listen(fd, most)) return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

static int listen_there(zr *z)
{
    in_port_t port = htons((in_port_t)z->t->port0);
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = port};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = port};
    if (z->t->host_is_own) four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = z->t->host_is_own ? -1 : listen_at((struct sockaddr *)&six, sizeof six, z->ranks);
    if (fd < 0) fd = listen_at((struct sockaddr *)&four, sizeof four, z->ranks);
    if (fd < 0)
        zr_fail(z, ZR_ENVIRONMENT, "listening at port %d: %s; set another ZR_ADDR=HOST:PORT",
                z->t->port0, strerror(errno));
    return fd;
}

/* Who has come; 0: somebody who is no rank, as ports of a network are tried. */
static int greeted(int fd, hello *h)
{
    size_t done = 0;
    struct pollfd p = {fd, POLLIN, 0};
    while (done < sizeof *h && poll(&p, 1, HELLO_MS) > 0) {
        ssize_t some = recv(fd, (char *)h + done, sizeof *h - done, 0);
        if (some <= 0) break;
        done += (size_t)some;
    }
    return done == sizeof *h && h->magic == MAGIC;
}

static void accept_all(zr *z)
{
    int door = listen_there(z);
    for (int missing = z->ranks - 1; missing > 0;) {
        hello h;
        ready(z, door, POLLIN);
        int fd = accept4(door, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0 && errno != ECONNABORTED && errno != EINTR)
            zr_fail(z, ZR_ENVIRONMENT, "meeting ranks: %s", strerror(errno));
        if (fd < 0) continue;
        if (!greeted(fd, &h)) {
            close(fd);
            continue;
        }
        if (h.ranks != (uint32_t)z->ranks || h.rank == 0 || h.rank >= h.ranks ||
            z->t->line[h.rank] >= 0)
            zr_fail(z, ZR_DISAGREE, "meeting ranks: rank %u of %u has come, out of place", h.rank,
                    h.ranks);
        z->t->line[h.rank] = fd;
        missing--;
    }
    close(door);
}

/* A connection to the first of the addresses that answers; -1: none, errno says why */
static int reach(const struct addrinfo *a)
{
    for (; a; a = a->ai_next) {
        int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd >= 0 && !connect(fd, a->ai_addr, a->ai_addrlen)) return fd;
        int error = errno;
        if (fd >= 0) close(fd);
        errno = error;
    }
    return -1;
}

/* Rank 0 may not be there yet. */
static void connect_there(zr *z)
{
    const struct timespec pause = {0, 1000000 * SLICE_MS};
    struct addrinfo *a = address(z);
    double until = zr_now() + PATIENCE_S;
    hello h = {MAGIC, (uint32_t)z->rank, (uint32_t)z->ranks};
    while ((z->t->line[0] = reach(a)) < 0) {
        if (zr_now() > until)
            zr_fail(z, ZR_ENVIRONMENT, "rank 0 does not answer at %s:%d: %s; set "
                    "ZR_ADDR=HOST:PORT to where it can", z->t->host0, z->t->port0,
                    strerror(errno));
        nanosleep(&pause, NULL);
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
