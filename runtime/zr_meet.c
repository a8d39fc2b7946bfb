/* zr_meet.c -- how a launcher's ranks meet: rank 0 listens, the others connect and send a hello.
 *
 * If a launcher names rank 0's host, rank 0 listens on all of its addresses, because on that host
 * the name may be localhost (PyTorchJob) or a loopback address in /etc/hosts (Debian).
 *
 * Invariants
 *  1. No wait is longer than the time to meet (ZR_MEET_S), or the run. A rank's time starts again
 *     when it has reached rank 0. Rank 0's time then ends first: it knows which ranks are missing,
 *     and reports them.
 *  2. No connection, silent or not, keeps rank 0 from the others: all are polled together.
 */
#define _GNU_SOURCE
#include "zr_cores.h"
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_net.h"
#include "zr_options.h"
#include "zr_rank.h"
#include "zr_shared.h"
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

enum { MAGIC = 0x7a72706e, SLICE_MS = 100, HELLO_MS = 5000, REACH_MS = 5000, MEET_S = 300 };
enum { BEHIND_S = 2 }; /* a rank's time to meet ends this much after rank 0's */
/* Most connections without a hello; file descriptors besides those of ranks. */
enum { GUESTS = 32, SPARE = 64 };

typedef struct hello {
    uint32_t magic, rank, ranks, padding;
    uint64_t run, host, cpus; /* equal within a run, a host, a set of CPUs */
} hello;

/* Rank 0's answer: this rank is number `local` of `neighbours` ranks on its host, and `sharing` of
 * them may use the same CPUs (a launcher that binds ranks gives each its own). neighbours 0: the
 * rank belongs to another run. */
typedef struct welcome {
    uint32_t magic;
    int32_t local, neighbours, sharing;
} welcome;

static void begin_time(zr *z)
{
    int64_t patience = zr_setting(z, "ZR_MEET_S", 1000000);
    z->net->until = zr_now() + (double)(patience ? patience : MEET_S);
}

/* Set a connection's options. A host without power sends nothing, and firewalls drop
 * connections that are idle for some minutes. So the system probes every minute and
 * gives a peer up after two. */
static void keep_alive(int fd)
{
    static const struct {
        int level, name, value;
    } options[] = {
        {IPPROTO_TCP, TCP_NODELAY, 1},           /* send at once */
        {SOL_SOCKET, SO_KEEPALIVE, 1},           /* probe idle connections */
        {IPPROTO_TCP, TCP_KEEPIDLE, 60},         /* after this many seconds, */
        {IPPROTO_TCP, TCP_KEEPINTVL, 15},        /* then at this interval, */
        {IPPROTO_TCP, TCP_KEEPCNT, 4},           /* this many times */
        {IPPROTO_TCP, TCP_USER_TIMEOUT, 120000}, /* ms without an acknowledgement */
    };
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        setsockopt(fd, options[i].level, options[i].name, &options[i].value, sizeof(int));
}

/* Get the address of a connection's peer, without the prefix ::ffff: of IPv4 addresses. */
static void name_end(int fd, char name[ZR_ADDRESS])
{
    static const char mapped[] = "::ffff:";
    const size_t k = sizeof mapped - 1;
    struct sockaddr_storage at;
    socklen_t m = sizeof at;
    if (getpeername(fd, (struct sockaddr *)&at, &m) ||
        getnameinfo((struct sockaddr *)&at, m, name, ZR_ADDRESS, NULL, 0, NI_NUMERICHOST))
        snprintf(name, ZR_ADDRESS, "an unknown address");
    else if (!strncmp(name, mapped, k) && strchr(name, '.'))
        memmove(name, name + k, strlen(name + k) + 1);
}

/* Hash this host's name and, as two hosts may share one, its kernel's boot
 * id. A pod has its own name. */
uint64_t zr_host(void)
{
    char text[ZR_HOST_NAME + 64] = "";
    uint64_t hash = ZR_HASH;
    gethostname(text, ZR_HOST_NAME);
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    size_t n = strlen(text);
    if (f) n += fread(text + n, 1, sizeof text - n, f);
    if (f) fclose(f);
    zr_add_hash(&hash, text, n);
    return hash;
}

static hello this_rank(const zr *z)
{
    zr_cpus cpus;
    hello h = {.magic = MAGIC,
               .rank = (uint32_t)z->rank,
               .ranks = (uint32_t)z->ranks,
               .run = z->net->run,
               .host = zr_host(),
               .cpus = ZR_HASH};
    if (!zr_cpus_allowed(&cpus)) zr_add_hash(&h.cpus, &cpus, sizeof cpus);
    return h;
}

/* ---- rank 0 */

/* Listen at an address. Returns -1 and errno on failure. */
static int listen_at(const struct sockaddr *at, socklen_t n, int most)
{
    int yes = 1, no = 0, fd;
    fd = socket(at->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    if (at->sa_family == AF_INET6) /* IPv4 too */
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
    if (!setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) && !bind(fd, at, n) &&
        !listen(fd, most))
        return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

/* Listen at one address of this host, given as a number. */
static int listen_bound(zr *z, const char *address)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST}, *at;
    char port[16];
    snprintf(port, sizeof port, "%d", z->net->port);
    if (getaddrinfo(address, port, &hints, &at))
        zr_fail(z, ZR_USER, "ZR_BIND %s: must be an IPv4 or IPv6 address", address);
    int fd = listen_at(at->ai_addr, at->ai_addrlen, z->ranks);
    freeaddrinfo(at);
    return fd;
}

/* Listen on this host alone if all ranks are here, else on all addresses. */
static int listen_open(const zr *z)
{
    in_port_t port = htons((in_port_t)z->net->port);
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = port};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = port};
    if (z->net->own) four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = z->net->own ? -1 : listen_at((struct sockaddr *)&six, sizeof six, z->ranks);
    return fd < 0 ? listen_at((struct sockaddr *)&four, sizeof four, z->ranks) : fd;
}

static int listen_there(zr *z)
{
    const char *bound = getenv("ZR_BIND");
    if (bound && !*bound) bound = NULL;
    int fd = bound ? listen_bound(z, bound) : listen_open(z);
    if (fd < 0)
        zr_fail(z, ZR_ENVIRONMENT, "listening on port %d%s%s: %s; set another %s", z->net->port,
                bound ? " of " : "", bound ? bound : "", strerror(errno),
                bound ? "ZR_BIND=ADDRESS" : "ZR_ADDR=HOST:PORT");
    return fd;
}

/* Raise the limit of open files: there is a connection to each rank, libraries open files, and the
 * soft limit is often 1024. */
static void raise_limit(zr *z)
{
    struct rlimit limit;
    rlim_t need = (rlim_t)z->ranks + SPARE;
    if (getrlimit(RLIMIT_NOFILE, &limit)) return;
    limit.rlim_cur = limit.rlim_max;
    if (limit.rlim_cur < need || setrlimit(RLIMIT_NOFILE, &limit))
        zr_fail(z, ZR_ENVIRONMENT,
                "rank 0 needs %" PRIu64 " open files for %d ranks; the limit is "
                "%" PRIu64 "; raise it (ulimit -Hn)",
                (uint64_t)need, z->ranks, (uint64_t)limit.rlim_max);
}

/* A connection of which `said` bytes have arrived: a rank, or somebody who probes ports. */
typedef struct guest {
    int fd; /* -1: free */
    size_t said;
    double until; /* deadline for the rest; later it may be closed to make room */
    hello h;
} guest;

typedef struct hall {
    int door, missing; /* missing: ranks that have not connected yet */
    hello *all;        /* [ranks] hellos received */
    guest guests[GUESTS];
    struct pollfd *seen; /* [ranks + GUESTS] the listening socket, connections of ranks, guests */
} hall;

/* Write the numbers of the first missing ranks as text. */
static const char *missing_ranks(const zr *z, char *text, size_t n)
{
    size_t length = 0;
    text[0] = 0;
    for (int r = 1; r < z->ranks && length < n - 16; r++)
        if (z->net->line[r] < 0)
            length += (size_t)snprintf(text + length, n - length, "%s%d", length ? ", " : "", r);
    return text;
}

static guest *free_place(hall *h)
{
    for (guest *g = h->guests; g < h->guests + GUESTS; g++)
        if (g->fd < 0) return g;
    return NULL;
}

static void look_around(const zr *z, hall *h)
{
    struct pollfd *guests = h->seen + z->ranks;
    h->seen[0] = (struct pollfd){free_place(h) ? h->door : -1, POLLIN, 0};
    for (int r = 1; r < z->ranks; r++) h->seen[r] = (struct pollfd){z->net->line[r], POLLRDHUP, 0};
    for (int g = 0; g < GUESTS; g++) guests[g] = (struct pollfd){h->guests[g].fd, POLLIN, 0};
    poll(h->seen, (nfds_t)z->ranks + GUESTS, SLICE_MS);
}

/* Other errors of accept() concern a connection that ended before it was accepted (accept(2)). */
static int out_of_room(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

static void let_in(zr *z, hall *h)
{
    for (guest *g; (g = free_place(h));) {
        int fd = accept4(h->door, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && out_of_room(errno))
            zr_fail(z, ZR_ENVIRONMENT, "connecting ranks: %s", strerror(errno));
        if (fd < 0) return;
        *g = (guest){.fd = fd, .until = zr_now() + 1e-3 * HELLO_MS};
    }
}

static void let_go(guest *g)
{
    if (g->fd >= 0) close(g->fd);
    g->fd = -1;
}

/* Tell a rank of another run that its rank 0 is not here, and close the connection. */
static void turn_away(guest *g)
{
    const welcome none = {.magic = MAGIC};
    ssize_t sent = send(g->fd, &none, sizeof none, MSG_NOSIGNAL);
    (void)sent; /* a rank that misses it sees its connection close */
    let_go(g);
}

/* Accept a guest as a rank. */
static void seat(zr *z, hall *h, guest *g)
{
    uint32_t rank = g->h.rank, ranks = g->h.ranks;
    if (ranks != (uint32_t)z->ranks || rank == 0 || rank >= ranks || z->net->line[rank] >= 0)
        zr_fail(z, ZR_DISAGREE, "connecting ranks: rank %u of %u connected, which is not expected",
                rank, ranks);
    keep_alive(g->fd);
    name_end(g->fd, z->net->end[rank]);
    z->net->line[rank] = g->fd;
    h->all[rank] = g->h;
    h->missing--;
    g->fd = -1;
}

static void hear(zr *z, hall *h, guest *g, int ready)
{
    ssize_t some = 0;
    if (g->fd < 0) return;
    if (ready) some = recv(g->fd, (char *)&g->h + g->said, sizeof g->h - g->said, 0);
    if (some > 0) g->said += (size_t)some;
    int whole = g->said == sizeof g->h, gone = ready && some <= 0;
    if (whole && g->h.magic == MAGIC && g->h.run != z->net->run) turn_away(g);
    else if (whole && g->h.magic == MAGIC) seat(z, h, g);
    else if (whole || gone || (zr_now() > g->until && !free_place(h))) let_go(g);
}

static void check_time(zr *z, const hall *h)
{
    char who[200];
    if (!zr_plane_late(z)) return;
    zr_fail(z, ZR_DIED,
            "%d of %d ranks have not connected to port %d in time (ZR_MEET_S): %s%s; check their "
            "output",
            h->missing, z->ranks, z->net->port, missing_ranks(z, who, sizeof who),
            h->missing > 30 ? " ..." : "");
}

/* Accept all ranks. all[rank] = its hello. */
static void accept_all(zr *z, hello *all)
{
    hall h = {listen_there(z), z->ranks - 1, all, {{0}}, NULL};
    h.seen = zr_get(z, z->ranks + GUESTS, sizeof *h.seen);
    for (int g = 0; g < GUESTS; g++) h.guests[g].fd = -1;
    while (h.missing > 0) {
        zr_leave_if_stopped(z);
        check_time(z, &h);
        look_around(z, &h);
        for (int r = 1; r < z->ranks; r++)
            if (h.seen[r].revents) zr_plane_lost(z, r);
        for (int g = 0; g < GUESTS; g++) hear(z, &h, h.guests + g, h.seen[z->ranks + g].revents);
        let_in(z, &h);
    }
    for (int g = 0; g < GUESTS; g++) let_go(h.guests + g);
    close(h.door);
    free(h.seen);
}

static void take_place(zr *z, welcome w)
{
    z->net->neighbours = w.neighbours;
    z->net->sharing = w.sharing;
    if (z->net->local < 0) z->net->local = w.local - (z->rank - z->lowest);
}

/* Tell every rank its number on its host. */
static void welcome_all(zr *z, const hello *all)
{
    for (int r = 0; r < z->ranks; r++) {
        welcome w = {.magic = MAGIC};
        for (int p = 0; p < z->ranks; p++) {
            int near = all[p].host == all[r].host;
            w.local += near && p < r;
            w.neighbours += near;
            w.sharing += near && all[p].cpus == all[r].cpus;
        }
        if (r == 0) take_place(z, w);
        else zr_plane_move(z, r, &w, sizeof w, 1);
    }
}

/* Return the first rank on another host than the first of its `local` ranks; -1: none. */
static int stray(const zr *z, const hello *all, int local)
{
    for (int r = 0; r < z->ranks; r++)
        if (all[r].host != all[r - r % local].host) return r;
    return -1;
}

/* Fail unless each p->local consecutive ranks are on one host, as the plan assumes. */
static void check_hosts(zr *z, const hello *all)
{
    int local = z->p->local, at = local ? stray(z, all, local) : -1, fits = z->ranks;
    if (at < 0) return;
    gethostname(z->net->end[0], sizeof z->net->end[0] - 1);
    while (z->ranks % fits || stray(z, all, fits) >= 0) fits--;
    zr_fail(
        z, ZR_DISAGREE,
        "rank %d (%s) is on another host than rank %d (%s), but the program expects ranks %d to %d "
        "on one host (cluster.local: %d); place ranks host by host (Slurm: srun "
        "--distribution=block, Open MPI: --map-by slot), or generate with cluster.local: %d",
        at, z->net->end[at], at - at % local, z->net->end[at - at % local], at - at % local,
        at - at % local + local - 1, local, fits);
}

static void receive(zr *z)
{
    hello *all = zr_get(z, z->ranks, sizeof *all);
    all[0] = this_rank(z);
    raise_limit(z);
    accept_all(z, all);
    check_hosts(z, all);
    welcome_all(z, all);
    free(all);
}

/* ---- the other ranks */

/* Return an error if a socket is connected to itself. If nobody listens at a port that Linux may
 * assign, a connecting socket may get that very port; the connection is then to itself and would
 * keep rank 0 from the port. It is closed with a reset, which leaves no trace. */
static int refuse_oneself(int fd)
{
    const struct linger reset = {1, 0};
    struct sockaddr_storage mine = {0}, theirs = {0};
    socklen_t n = sizeof mine, m = sizeof theirs;
    if (getsockname(fd, (struct sockaddr *)&mine, &n) ||
        getpeername(fd, (struct sockaddr *)&theirs, &m))
        return errno;
    if (n != m || memcmp(&mine, &theirs, n)) return 0;
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    return ECONNREFUSED;
}

/* Connect within some seconds. Returns 0, or an error number. */
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

/* Add an address that does not answer to why, as far as there is space for it in a message. */
enum { REASONS = 512 };
static void add_reason(char why[REASONS], const char *where, const char *what)
{
    static const char more[] = " ...";
    size_t n = strlen(why), room = REASONS - n;
    int m = snprintf(why + n, room, "%s%s: %s", n ? ", " : "", where, what);
    if ((size_t)m >= room) memcpy(why + REASONS - sizeof more, more, sizeof more);
}

/* Connect to the first address that answers. Returns -1 and why on failure. */
static int reach(const struct addrinfo *a, char why[REASONS])
{
    for (; a; a = a->ai_next) {
        char address[ZR_ADDRESS] = "an address";
        int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        int error = fd < 0 ? errno : try_address(fd, a);
        if (!error) error = refuse_oneself(fd);
        if (!error) return fd;
        if (fd >= 0) close(fd);
        getnameinfo(a->ai_addr, a->ai_addrlen, address, ZR_ADDRESS, NULL, 0, NI_NUMERICHOST);
        add_reason(why, address, strerror(error));
    }
    return -1;
}

/* Look up rank 0's name and try to connect. It is looked up anew every time: on Kubernetes it gets
 * an address only some seconds after the pods start, and another when its pod restarts. */
static int try_name(zr *z, const char *name, char why[REASONS])
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM}, *found;
    char port[16];
    snprintf(port, sizeof port, "%d", z->net->port);
    int error = getaddrinfo(name, port, &hints, &found);
    if (error) {
        add_reason(why, name, gai_strerror(error));
        return -1;
    }
    int fd = reach(found, why);
    freeaddrinfo(found);
    return fd;
}

static int try_to_reach(zr *z, char why[REASONS])
{
    char names[ZR_HOST_NAME], *rest = names, *name;
    int fd = -1;
    *why = 0;
    snprintf(names, sizeof names, "%s", z->net->host);
    while (fd < 0 && (name = strsep(&rest, ","))) fd = try_name(z, name, why);
    return fd;
}

/* Connect to rank 0, which may not be there yet, and exchange hellos. */
static void connect_there(zr *z)
{
    const struct timespec pause = {0, 1000000 * SLICE_MS};
    char why[REASONS];
    hello h = this_rank(z);
    welcome w;
    while ((z->net->line[0] = try_to_reach(z, why)) < 0) {
        if (zr_plane_late(z))
            zr_fail(z, ZR_ENVIRONMENT,
                    "rank 0 does not answer at %s:%d (ZR_MEET_S): %s; set "
                    "ZR_ADDR=HOST:PORT to a reachable address",
                    z->net->host, z->net->port, why);
        nanosleep(&pause, NULL);
        zr_leave_if_stopped(z);
    }
    begin_time(z);
    z->net->until += BEHIND_S;
    keep_alive(z->net->line[0]);
    name_end(z->net->line[0], z->net->end[0]);
    zr_plane_move(z, 0, &h, sizeof h, 1);
    zr_plane_move(z, 0, &w, sizeof w, 0);
    if (w.magic != MAGIC)
        zr_fail(z, ZR_ENVIRONMENT,
                "the server at %s:%d is not rank 0; set another ZR_ADDR=HOST:PORT", z->net->host,
                z->net->port);
    if (!w.neighbours)
        zr_fail(z, ZR_ENVIRONMENT,
                "rank 0 of another run answers at %s:%d; set another ZR_ADDR=HOST:PORT, and the "
                "same ZR_TOKEN on all ranks",
                z->net->host, z->net->port);
    take_place(z, w);
}

void zr_meet(zr *z)
{
    if (!z->net->port) z->net->ask(z);
    begin_time(z);
    z->net->line = zr_get(z, z->ranks, sizeof *z->net->line);
    z->net->end = zr_get(z, z->ranks, sizeof *z->net->end);
    for (int r = 0; r < z->ranks; r++) z->net->line[r] = -1;
    if (z->rank == 0) receive(z);
    else connect_there(z);
}
