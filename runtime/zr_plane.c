/* zr_plane.c -- what a launcher's ranks tell each other beside their data: a star of connections.
 *
 * Rank 0 listens; every other rank connects, says who it is, and keeps the connection. A call goes
 * from all ranks to rank 0 and back. Who ends closes its connections, which the others see.
 *
 * Where a launcher names rank 0's host, rank 0 listens on all of its addresses: to rank 0 itself
 * the name may be localhost (PyTorchJob) or a loopback address of /etc/hosts (Debian).
 *
 * Invariants
 *  1. Every rank makes the same calls in the same order; no call says which it is.
 *  2. No wait is longer than the run: it looks at the stop flag several times a second. Until all
 *     have met no wait is longer than the time for that (ZR_MEET_S).
 */
#define _GNU_SOURCE
#include "zr_cores.h"
#include "zr_int.h"
#include <errno.h>
#include <inttypes.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAGIC = 0x7a72706d, SLICE_MS = 100, HELLO_MS = 5000, REACH_MS = 5000, MEET_S = 300 };
enum { SPARE = 64 };                      /* descriptors beside the connections */

typedef struct hello {
    uint32_t magic, rank, ranks, padding;
    uint64_t host, cpus;                  /* equal where two ranks run on one host, on its CPUs */
} hello;

/* What rank 0 answers: this rank is number `local` of the `neighbours` on its host, and `sharing`
 * of them may run where it may: a launcher that binds its ranks gives each CPUs of its own. */
typedef struct welcome {
    int32_t local, neighbours, sharing;
} welcome;

/* ---- bytes */

static void lost(zr *z, int rank)
{
    zr_fail(z, ZR_DIED, "the connection to rank %d has ended; see what that rank says", rank);
}

static int late(const zr *z) { return z->net.until > 0 && zr_now() > z->net.until; }

/* Exactly n bytes from or to a rank. */
static void move(zr *z, int rank, void *at, size_t n, int out)
{
    struct pollfd p = {z->net.line[rank], out ? POLLOUT : POLLIN, 0};
    for (size_t done = 0; done < n;) {
        zr_leave_if_stopped(z);
        if (late(z))
            zr_fail(z, ZR_DIED, "rank %d has not answered in time (ZR_MEET_S); see what it does",
                    rank);
        if (poll(&p, 1, SLICE_MS) <= 0) continue;
        ssize_t some = out ? send(p.fd, (char *)at + done, n - done, MSG_NOSIGNAL)
                           : recv(p.fd, (char *)at + done, n - done, 0);
        if (some < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (some <= 0) lost(z, rank);
        done += (size_t)some;
    }
}

/* A host that loses power says nothing, and firewalls forget connections that are idle for some
 * minutes: the system asks every minute, and gives a peer up after two. */
static void keep_alive(int fd)
{
    static const struct { int level, name, value; } options[] = {
        {IPPROTO_TCP, TCP_NODELAY, 1},
        {SOL_SOCKET, SO_KEEPALIVE, 1},
        {IPPROTO_TCP, TCP_KEEPIDLE, 60},  /* seconds */
        {IPPROTO_TCP, TCP_KEEPINTVL, 15},
        {IPPROTO_TCP, TCP_KEEPCNT, 4},
        {IPPROTO_TCP, TCP_USER_TIMEOUT, 120000},      /* ms */
    };
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        setsockopt(fd, options[i].level, options[i].name, &options[i].value, sizeof(int));
}

/* The name of this host and, where two have one name, of its kernel's start. A pod has a name of
 * its own. */
static hello this_rank(const zr *z)
{
    char text[ZR_HOST_NAME + 64] = "";
    zr_cpus cpus;
    hello h = {.magic = MAGIC, .rank = (uint32_t)z->rank, .ranks = (uint32_t)z->ranks,
               .host = ZR_HASH, .cpus = ZR_HASH};
    gethostname(text, ZR_HOST_NAME);
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    size_t n = strlen(text);
    if (f) n += fread(text + n, 1, sizeof text - n, f);
    if (f) fclose(f);
    zr_add_hash(&h.host, text, n);
    if (!zr_cpus_allowed(&cpus)) zr_add_hash(&h.cpus, &cpus, sizeof cpus);
    return h;
}

/* ---- rank 0 */

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
    in_port_t port = htons((in_port_t)z->net.port);
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = port};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = port};
    if (z->net.own) four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = z->net.own ? -1 : listen_at((struct sockaddr *)&six, sizeof six, z->ranks);
    if (fd < 0) fd = listen_at((struct sockaddr *)&four, sizeof four, z->ranks);
    if (fd < 0)
        zr_fail(z, ZR_ENVIRONMENT, "listening at port %d: %s; set another ZR_ADDR=HOST:PORT",
                z->net.port, strerror(errno));
    return fd;
}

/* Room for a connection to each rank: the soft limit is 1024 in most places. */
static void raise_limit(zr *z)
{
    struct rlimit limit;
    rlim_t need = (rlim_t)z->ranks + SPARE;
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= need) return;
    limit.rlim_cur = limit.rlim_max < need ? limit.rlim_max : need;
    if (limit.rlim_cur < need || setrlimit(RLIMIT_NOFILE, &limit))
        zr_fail(z, ZR_ENVIRONMENT, "rank 0 needs %" PRIu64 " open files for %d ranks; the limit is "
                "%" PRIu64 "; raise it (ulimit -Hn)", (uint64_t)need, z->ranks,
                (uint64_t)limit.rlim_max);
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

/* The numbers of the ranks that have not come, the first of them, as text. */
static const char *missing_ranks(const zr *z, char *text, size_t n)
{
    size_t length = 0;
    text[0] = 0;
    for (int r = 1; r < z->ranks && length < n - 16; r++)
        if (z->net.line[r] < 0)
            length += (size_t)snprintf(text + length, n - length, "%s%d", length ? ", " : "", r);
    return text;
}

static void wait_for_somebody(zr *z, int door, int missing)
{
    char who[200];
    struct pollfd p = {door, POLLIN, 0};
    while (poll(&p, 1, SLICE_MS) <= 0) {
        zr_leave_if_stopped(z);
        if (late(z))
            zr_fail(z, ZR_DIED, "%d of %d ranks have not come to port %d in time (ZR_MEET_S): "
                    "%s%s; see what they say", missing, z->ranks, z->net.port,
                    missing_ranks(z, who, sizeof who), missing > 30 ? " ..." : "");
    }
}

/* all[rank] = what those say that come */
static void accept_all(zr *z, hello *all)
{
    int door = listen_there(z);
    for (int missing = z->ranks - 1; missing > 0;) {
        hello h;
        wait_for_somebody(z, door, missing);
        int fd = accept4(door, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0 && errno != ECONNABORTED && errno != EINTR)
            zr_fail(z, ZR_ENVIRONMENT, "meeting ranks: %s", strerror(errno));
        if (fd < 0) continue;
        if (!greeted(fd, &h)) {
            close(fd);
            continue;
        }
        if (h.ranks != (uint32_t)z->ranks || h.rank == 0 || h.rank >= h.ranks ||
            z->net.line[h.rank] >= 0)
            zr_fail(z, ZR_DISAGREE, "meeting ranks: rank %u of %u has come, out of place", h.rank,
                    h.ranks);
        keep_alive(fd);
        z->net.line[h.rank] = fd;
        all[h.rank] = h;
        missing--;
    }
    close(door);
}

static void take_place(zr *z, welcome w)
{
    z->net.neighbours = w.neighbours;
    z->net.sharing = w.sharing;
    if (z->net.local < 0) z->net.local = w.local - (z->rank - z->lowest);
}

/* Tells every rank where it is among those of its host. */
static void welcome_all(zr *z, const hello *all)
{
    for (int r = 0; r < z->ranks; r++) {
        welcome w = {0, 0, 0};
        for (int p = 0; p < z->ranks; p++) {
            int near = all[p].host == all[r].host;
            w.local += near && p < r;
            w.neighbours += near;
            w.sharing += near && all[p].cpus == all[r].cpus;
        }
        if (r == 0) take_place(z, w);
        else move(z, r, &w, sizeof w, 1);
    }
}

static void receive(zr *z)
{
    hello *all = calloc((size_t)z->ranks, sizeof *all);
    if (!all) zr_fail(z, ZR_ENVIRONMENT, "out of memory");
    all[0] = this_rank(z);
    raise_limit(z);
    accept_all(z, all);
    welcome_all(z, all);
    free(all);
}

/* ---- the other ranks */

/* Connects within some seconds. 0, or an error number */
static int try_address(int fd, const struct addrinfo *a)
{
    int error = 0;
    socklen_t n = sizeof error;
    struct pollfd p = {fd, POLLOUT, 0};
    if (!connect(fd, a->ai_addr, a->ai_addrlen)) return 0;
    if (errno != EINPROGRESS) return errno;
    if (poll(&p, 1, REACH_MS) <= 0) return ETIMEDOUT;
    return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &n) ? errno : error;
}

/* A connection to the first of the addresses that answers; -1: none, and why. */
static int reach(const struct addrinfo *a, const char **why)
{
    for (; a; a = a->ai_next) {
        int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        int error = fd < 0 ? errno : try_address(fd, a);
        if (!error) return fd;
        if (fd >= 0) close(fd);
        *why = strerror(error);
    }
    return -1;
}

/* Rank 0's name is looked up for every attempt: on Kubernetes it has an address only some seconds
 * after the pods have begun, and another one when its pod begins anew. */
static int try_to_reach(zr *z, const char **why)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *found;
    char port[16];
    snprintf(port, sizeof port, "%d", z->net.port);
    int error = getaddrinfo(z->net.host, port, &hints, &found);
    if (error) {
        *why = gai_strerror(error);
        return -1;
    }
    int fd = reach(found, why);
    freeaddrinfo(found);
    return fd;
}

/* Rank 0 may not be there yet. */
static void connect_there(zr *z)
{
    const struct timespec pause = {0, 1000000 * SLICE_MS};
    const char *why = "";
    hello h = this_rank(z);
    welcome w;
    while ((z->net.line[0] = try_to_reach(z, &why)) < 0) {
        if (late(z))
            zr_fail(z, ZR_ENVIRONMENT, "rank 0 does not answer at %s:%d (ZR_MEET_S): %s; set "
                    "ZR_ADDR=HOST:PORT to where it can", z->net.host, z->net.port, why);
        nanosleep(&pause, NULL);
        zr_leave_if_stopped(z);
    }
    keep_alive(z->net.line[0]);
    move(z, 0, &h, sizeof h, 1);
    move(z, 0, &w, sizeof w, 0);
    take_place(z, w);
}

void zr_plane_open(zr *z)
{
    int64_t patience = zr_setting(z, "ZR_MEET_S", 1000000);
    z->net.until = zr_now() + (double)(patience ? patience : MEET_S);
    z->net.line = malloc((size_t)z->ranks * sizeof *z->net.line);
    if (!z->net.line) zr_fail(z, ZR_ENVIRONMENT, "out of memory");
    for (int r = 0; r < z->ranks; r++) z->net.line[r] = -1;
    if (z->rank == 0) receive(z);
    else connect_there(z);
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
        struct pollfd p = {z->net.line[r], POLLRDHUP, 0};
        if (p.fd >= 0 && poll(&p, 1, 0) > 0) lost(z, r);
    }
}
