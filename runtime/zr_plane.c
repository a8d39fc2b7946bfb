/* zr_plane.c -- messages between a launcher's ranks besides their data, over a star of connections.
 *
 * Every rank except rank 0 has a connection to it (zr_meet.c). A call sends messages from all ranks
 * to rank 0 and back. A rank that ends closes its connections, which the others notice.
 *
 * Invariants
 *  1. Every rank makes the same calls in the same order; messages do not name the call.
 *  2. Once all arenas are allocated (z->ready), a message begins with WORD. Before WORD any number
 *     of BEATs may arrive, which mean that the rank lives. No BEAT is sent within a message, nor
 *     after a rank's last one, as a connection closed with unread data is reset.
 *  3. No wait is longer than the run: it checks the stop flag several times a second. Until all
 *     ranks have met and compared programs, no wait is longer than ZR_MEET_S; later a peer that is
 *     gone is noticed by the end of its connection.
 */
#define _GNU_SOURCE
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_net.h"
#include "zr_rank.h"
#include "zr_seats.h"
#include "zr_shared.h"
#include "zr_watch.h"
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { SLICE_MS = 100 };
enum { BEAT = 'b', WORD = 'w' };

/* ---- bytes */

void zr_plane_grace(zr *z)
{
    const struct timespec grace = {0, 300000000};
    nanosleep(&grace, NULL);
    zr_leave_if_stopped(z);
}

void zr_plane_lost(zr *z, int rank)
{
    zr_plane_grace(z);
    zr_fail(z, ZR_DIED, "the connection to rank %d at %s is lost; check that rank's output", rank,
            z->net->end[rank]);
}

int zr_plane_late(const zr *z) { return z->net->until > 0 && zr_now() > z->net->until; }

/* While rank 0 waits for a rank, check whether another one is gone; the parent reports the wait.
 * While sending nobody checks, as a rank may exit once it has the last message. */
static void idle(zr *z, int rank, int out)
{
    zr_count_wait(z, ZR_MAIN);
    zr_awaits(z, 0, rank);
    if (!out && !z->rank) zr_plane_look(z);
}

static void move_bytes(zr *z, int rank, void *at, size_t n, int out)
{
    struct pollfd p = {z->net->line[rank], out ? POLLOUT : POLLIN, 0};
    for (size_t done = 0; done < n;) {
        zr_leave_if_stopped(z);
        int ready = poll(&p, 1, SLICE_MS) > 0;
        if (!ready && zr_plane_late(z))
            zr_fail(z, ZR_DIED, "rank %d has not answered in time (ZR_MEET_S); check that it runs",
                    rank);
        if (!ready) {
            idle(z, rank, out);
            continue;
        }
        ssize_t some = out ? send(p.fd, (char *)at + done, n - done, MSG_NOSIGNAL)
                           : recv(p.fd, (char *)at + done, n - done, 0);
        if (some < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (some <= 0) zr_plane_lost(z, rank);
        done += (size_t)some;
    }
}

static void send_word(zr *z, int rank, const void *at, size_t n)
{
    char all[1 + ZR_TOLD] = {WORD};
    int bare = z->ready == 0;
    memcpy(all + 1, at, n);
    pthread_mutex_lock(&z->watch->lock);
    move_bytes(z, rank, all + bare, n + !bare, 1);
    pthread_mutex_unlock(&z->watch->lock);
}

/* Return the number of BEATs that have already arrived; they are many after a long step. */
static size_t more_beats(zr *z, int rank, char *some, size_t n)
{
    size_t beats = 0;
    ssize_t come = recv(z->net->line[rank], some, n, MSG_PEEK | MSG_DONTWAIT);
    while ((ssize_t)beats < come && some[beats] == BEAT) beats++;
    return beats;
}

/* Receive a message. A BEAT counts as progress for the parent (zr_stall.c). */
static void take_word(zr *z, int rank, void *at, size_t n, int life)
{
    char c = BEAT, some[1024];
    while (z->ready > 0 && c != WORD) {
        move_bytes(z, rank, &c, 1, 0);
        zr_lives(z, life);
        if (c == BEAT) move_bytes(z, rank, some, more_beats(z, rank, some, sizeof some), 0);
    }
    move_bytes(z, rank, at, n, 0);
}

void zr_plane_move(zr *z, int rank, void *at, size_t n, int out)
{
    zr_seat *seat = &z->shared->seat[z->rank];
    int was = atomic_load(&seat->life), life = was == ZR_SILENT ? ZR_SILENT : ZR_AWAITS;
    zr_lives(z, life);
    if (out) send_word(z, rank, at, n);
    else take_word(z, rank, at, n, life);
    zr_awaits(z, 0, -1);
    zr_lives(z, was);
}

void zr_plane_beat(zr *z)
{
    const char beat = BEAT;
    int silent = atomic_load(&z->shared->seat[z->rank].life) == ZR_SILENT;
    for (int r = 0; z->far && !silent && r < z->ranks; r++)
        if (z->net->line[r] >= 0) send(z->net->line[r], &beat, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* ---- calls */

static void tell(zr *z, void *what, size_t n)
{
    char theirs[ZR_TOLD];
    if (z->rank) {
        zr_plane_move(z, 0, what, n, 1);
        zr_plane_move(z, 0, what, n, 0);
    }
    for (int r = 1; !z->rank && r < z->ranks; r++) zr_plane_move(z, r, theirs, n, 0);
    /* ranks on rank 0's host last: on this message they may stop, and stop rank 0 with them */
    for (int r = z->ranks - 1; !z->rank && r > 0; r--) zr_plane_move(z, r, what, n, 1);
}

static void total(zr *z, uint64_t sum[2])
{
    uint64_t theirs[2];
    if (z->rank) zr_plane_move(z, 0, sum, 2 * sizeof *sum, 1);
    for (int r = 1; !z->rank && r < z->ranks; r++) {
        zr_plane_move(z, r, theirs, sizeof theirs, 0);
        for (int i = 0; i < 2; i++) sum[i] += theirs[i];
    }
    tell(z, sum, 2 * sizeof *sum);
}

const zr_far zr_plane = {tell, total};

/* ---- resources that no two ranks may share */

typedef struct claim {
    char what[64], host[ZR_HOST_NAME];
    int32_t rank;
} claim;

static int compare_claims(const void *a, const void *b)
{
    const claim *x = a, *y = b;
    int order = strcmp(x->what, y->what);
    return order ? order : x->rank - y->rank;
}

/* On rank 0: write to why[ZR_WHY] which two ranks have the same one; "" if there are none. */
static void settle(zr *z, claim mine, const char *advice, char *why)
{
    claim *all = zr_get(z, z->ranks, sizeof *all);
    all[0] = mine;
    for (int r = 1; r < z->ranks; r++) {
        zr_plane_move(z, r, all + r, sizeof *all, 0);
        all[r].what[sizeof all->what - 1] = 0; /* it came over a network */
        all[r].host[sizeof all->host - 1] = 0;
    }
    qsort(all, (size_t)z->ranks, sizeof *all, compare_claims);
    for (claim *c = all; !*why && c + 1 < all + z->ranks; c++)
        if (*c->what && !strcmp(c->what, c[1].what))
            zr_why(why, "rank %d on host %s and rank %d on host %s both have %s; %s", c->rank,
                   c->host, c[1].rank, c[1].host, c->what, advice);
    free(all);
}

void zr_plane_alone(zr *z, const char *what, const char *advice)
{
    char why[ZR_WHY] = "";
    claim mine = {.rank = z->rank};
    _Static_assert(ZR_TOLD <= sizeof why, "what tell can tell");
    snprintf(mine.what, sizeof mine.what, "%s", what);
    gethostname(mine.host, sizeof mine.host - 1);
    if (z->rank == 0) settle(z, mine, advice, why);
    else zr_plane_move(z, 0, &mine, sizeof mine, 1);
    tell(z, why, ZR_TOLD);
    why[ZR_TOLD - 1] = 0;
    if (*why) zr_fail(z, ZR_ENVIRONMENT, "%s", why);
}

/* Check whether a rank is gone; called by the watchdog and by ranks that wait. */
void zr_plane_look(zr *z)
{
    for (int r = 0; z->far && r < z->ranks; r++) {
        struct pollfd p = {z->net->line[r], POLLRDHUP, 0};
        if (p.fd >= 0 && poll(&p, 1, 0) > 0) zr_plane_lost(z, r);
    }
}
