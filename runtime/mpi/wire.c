/* wire.c -- a wire over MPI: Issend, Irecv and Testsome.
 *
 * Invariants
 *  1. MPI is called under one lock and never waits under it, so queues do not delay each other and
 *     MPI_THREAD_SERIALIZED is enough.
 *  2. Each queue has a communicator of its own, so its pieces meet those of no other queue.
 *  3. A message has less than 2 GiB, the limit of MPI's counts.
 *  4. A completed send has been received (Issend), so the sender need not call MPI again for it.
 */
#define _GNU_SOURCE
#include "wire.h"
#include "../cpu/cpu.h"
#include "../zr_fail.h"
#include "../zr_net.h"
#include "../zr_queue.h"
#include "../zr_rank.h"
#include "../zr_seats.h"
#include "../zr_shared.h"
#include <ifaddrs.h>
#include <inttypes.h>
#include <mpi.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 1 << 30 }; /* most bytes of a message */

struct zr_mpi {
    pthread_mutex_t lock;
    struct {
        MPI_Comm comm;
        MPI_Request *request; /* [room] requests, those in progress first */
        /* [room] statuses: gcc takes MPICH's "none" for an array without room */
        MPI_Status *status;
        int *peer, *ended;  /* [room] peer of each request; results of MPI_Testsome */
        int at, used, room; /* at: all requests before it have ended */
    } of[ZR_QUEUES];
};

static void must(zr *z, int error, const char *what)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int n;
    if (error == MPI_SUCCESS) return;
    MPI_Error_string(error, text, &n);
    zr_plane_grace(z);
    zr_plane_look(z);
    zr_fail(z, ZR_STUCK,
            "step %" PRId64 ": %s: MPI: %s; check for a rank or a network that is down",
            z->step + 1, what, text);
}

/* Tell Open MPI not to use its "put" protocol. There a receiver requests the rest of a message, and
 * the request waits behind data that it sends. If ranks are out of step, a link then carries data
 * in one direction at a time. */
static void choose_ways(void) { setenv("OMPI_MCA_btl_tcp_flags", "send", 0); }

static void join_world(zr *z)
{
    int given, rank, ranks;
    if (z->t->mpi) return;
    choose_ways();
    z->t->mpi = zr_get(z, 1, sizeof *z->t->mpi);
    pthread_mutex_init(&z->t->mpi->lock, NULL);
    must(z, MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &given), "MPI's start");
    if (given < MPI_THREAD_SERIALIZED)
        zr_fail(z, ZR_ENVIRONMENT,
                "this MPI supports calls from one thread only; a build of MPI with "
                "MPI_THREAD_SERIALIZED is needed");
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (rank != z->rank || ranks != z->ranks)
        zr_fail(z, ZR_DISAGREE, "MPI says rank %d of %d, but the launcher's variables say %d of %d",
                rank, ranks, z->rank, z->ranks);
}

/* Return whether an address means nothing on another host: it is local to its interface. */
static int is_local(const struct sockaddr *at)
{
    return at->sa_family == AF_INET6 &&
           IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)at)->sin6_addr);
}

/* Write this host's name, and as many of its addresses as fit. */
static void name_host(char names[ZR_HOST_NAME])
{
    struct ifaddrs *all, *a;
    char one[INET6_ADDRSTRLEN];
    gethostname(names, ZR_HOST_NAME - 1);
    if (getifaddrs(&all)) return;
    for (a = all; a; a = a->ifa_next) {
        size_t n = strlen(names);
        const struct sockaddr *at = a->ifa_addr;
        if (!at || a->ifa_flags & IFF_LOOPBACK || is_local(at)) continue;
        if (getnameinfo(at,
                        at->sa_family == AF_INET ? sizeof(struct sockaddr_in)
                                                 : sizeof(struct sockaddr_in6),
                        one, sizeof one, NULL, 0, NI_NUMERICHOST))
            continue;
        if (n + strlen(one) + 2 < ZR_HOST_NAME) snprintf(names + n, ZR_HOST_NAME - n, ",%s", one);
    }
    freeifaddrs(all);
}

/* Rank 0's address, and the hash by which it knows its run. */
typedef struct place {
    char names[ZR_HOST_NAME];
    uint64_t run;
    int32_t port;
} place;

void zr_mpi_ask(zr *z)
{
    z->net->port = zr_port_of(z, z->net->run);
    place first = {.run = z->net->run, .port = z->net->port};
    join_world(z);
    if (z->rank == 0) name_host(first.names);
    must(z, MPI_Bcast(&first, sizeof first, MPI_BYTE, 0, MPI_COMM_WORLD),
         "asking for rank 0's host");
    if (first.run != z->net->run || first.port != z->net->port)
        zr_fail(z, ZR_DISAGREE,
                "ZR_TOKEN or ZR_PORTS differs from rank 0's; give all ranks the same");
    snprintf(z->net->host, ZR_HOST_NAME, "%s", first.names);
}

void zr_mpi_tell_all(zr *z, const void *mine, void *all, size_t n)
{
    join_world(z);
    must(z, MPI_Allgather(mine, (int)n, MPI_BYTE, all, (int)n, MPI_BYTE, MPI_COMM_WORLD),
         "telling all ranks");
}

/* Return the requests of one collective: to and from each peer, in messages of MOST bytes. */
static int requests(const zr *z) { return 2 * (z->ranks - 1) * (int)(z->t->room / MOST + 1); }

void zr_mpi_open(zr *z)
{
    struct zr_mpi *m = z->t->mpi;
    for (int queue = 0; queue < ZR_COLLECTIVES; queue++) {
        if (!zr_uses(z, queue)) continue;
        must(z, MPI_Comm_dup(MPI_COMM_WORLD, &m->of[queue].comm), "creating a communicator");
        MPI_Comm_set_errhandler(m->of[queue].comm, MPI_ERRORS_RETURN);
        m->of[queue].room = requests(z);
        m->of[queue].request = zr_get(z, m->of[queue].room, sizeof *m->of[queue].request);
        m->of[queue].status = zr_get(z, m->of[queue].room, sizeof *m->of[queue].status);
        m->of[queue].peer = zr_get(z, m->of[queue].room, sizeof *m->of[queue].peer);
        m->of[queue].ended = zr_get(z, m->of[queue].room, sizeof *m->of[queue].ended);
    }
}

typedef int begin(void *at, int n, MPI_Datatype type, int rank, MPI_Comm comm, MPI_Request *r);

static int begin_send(void *at, int n, MPI_Datatype type, int rank, MPI_Comm comm, MPI_Request *r)
{
    return MPI_Issend(at, n, type, rank, 0, comm, r);
}

static int begin_receive(void *at, int n, MPI_Datatype type, int rank, MPI_Comm comm,
                         MPI_Request *r)
{
    return MPI_Irecv(at, n, type, rank, 0, comm, r);
}

static void move(zr *z, int queue, int rank, char *at, int64_t bytes, begin *some, const char *what)
{
    struct zr_mpi *m = z->t->mpi;
    for (int64_t i = 0; i < bytes; i += MOST) {
        int n = (int)(bytes - i < MOST ? bytes - i : MOST);
        m->of[queue].peer[m->of[queue].used] = rank;
        MPI_Request *next = &m->of[queue].request[m->of[queue].used++];
        pthread_mutex_lock(&m->lock);
        int error = some(at + i, n, MPI_BYTE, rank, m->of[queue].comm, next);
        pthread_mutex_unlock(&m->lock);
        must(z, error, what);
    }
}

static void send_piece(zr *z, int queue, int rank, const void *at, int64_t bytes)
{
    move(z, queue, rank, (char *)at, bytes, begin_send, "sending");
}

static void receive_piece(zr *z, int queue, int rank, void *at, int64_t bytes)
{
    move(z, queue, rank, at, bytes, begin_receive, "receiving");
}

/* Test the requests of a queue. If a run hangs, the parent reports the peer noted here. */
static int test_pieces(zr *z, int queue)
{
    struct zr_mpi *m = z->t->mpi;
    int ended, used = m->of[queue].used, at = m->of[queue].at;
    MPI_Request *request = m->of[queue].request;
    pthread_mutex_lock(&m->lock);
    int error = MPI_Testsome(used, request, &ended, m->of[queue].ended, m->of[queue].status);
    pthread_mutex_unlock(&m->lock);
    must(z, error, "exchanging pieces");
    while (at < used && request[at] == MPI_REQUEST_NULL) at++;
    int all = at == used;
    zr_awaits(z, z->queue[queue].group, all ? -1 : m->of[queue].peer[at]);
    m->of[queue].at = all ? 0 : at;
    if (all) m->of[queue].used = 0;
    return all;
}

static void close_world(zr *z)
{
    struct zr_mpi *m = z->t->mpi;
    if (!m) return;
    for (int queue = 0; queue < ZR_COLLECTIVES; queue++) {
        if (!m->of[queue].room) continue;
        MPI_Comm_free(&m->of[queue].comm);
        free(m->of[queue].request);
        free(m->of[queue].status);
        free(m->of[queue].peer);
        free(m->of[queue].ended);
    }
    must(z, MPI_Finalize(), "MPI's end");
    free(m);
}

const zr_wire zr_mpi = {send_piece, receive_piece, test_pieces, close_world};
