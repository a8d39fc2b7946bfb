/* zr_stall.c -- how the parent finds a rank that makes no progress: stopped, or in a command that
 * does not end.
 *
 * In a step or an evaluation commands complete all the time on at least one rank. If none has for
 * too long, every rank except the culprit is waiting for a peer, and counts that in its seat
 * several times a second. The culprit has a command that is not such a wait, or counts nothing at
 * all.
 *
 * Ranks of other hosts cannot be seen. So they report several times a second that they live
 * (zr_plane.c), which counts as a completed command of the rank that waits for them.
 *
 * Invariants
 *  1. A rank outside of steps and evaluations that does not wait for another host's rank (it
 *     starts, loads, saves, prints) may take as long as it needs, unless a signal has stopped it.
 *  2. Time in which the parent itself did not run does not count: all processes were stopped.
 *  3. A rank that uses a processor is working: its limit is ZR_TIMES as long.
 */
#define _GNU_SOURCE
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_memory.h"
#include "zr_range.h"
#include "zr_rank.h"
#include "zr_seats.h"
#include "zr_shared.h"
#include "zr_stall.h"
#include "zr_watch.h"
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>

static zr_seat *seat_of(zr *z, int r) { return &z->shared->seat[z->lowest + r]; }

static uint32_t waited(zr *z, int r, int queue)
{
    return atomic_load_explicit(&seat_of(z, r)->pulse[queue].waited, memory_order_relaxed);
}

static const char *doing(zr *z, int r, int queue)
{
    return atomic_load_explicit(&seat_of(z, r)->pulse[queue].doing, memory_order_relaxed);
}

/* Return whether a queue's command waits for another queue. */
static int is_held(zr *z, int r, int queue)
{
    return atomic_load_explicit(&seat_of(z, r)->pulse[queue].held, memory_order_relaxed);
}

/* Return the CPU seconds of a process. */
static double cpu_of(pid_t pid)
{
    clockid_t clock;
    struct timespec t;
    if (clock_getcpuclockid(pid, &clock) || clock_gettime(clock, &t)) return 0;
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Return whether something must make progress: all ranks are in steps or wait for a message, or one
 * is stopped. *moves: commands that ranks have completed so far. */
static int must_move(zr *z, const zr_stall *s, uint32_t *moves)
{
    int all = 1, stopped = 0;
    *moves = 0;
    for (int r = 0; r < z->here; r++) {
        all &= atomic_load_explicit(&seat_of(z, r)->life, memory_order_relaxed) >= ZR_STEPS;
        stopped |= s->rank[r].stopped;
        for (int q = 0; q <= ZR_QUEUES; q++)
            *moves += atomic_load_explicit(&seat_of(z, r)->pulse[q].ended, memory_order_relaxed);
    }
    return all || stopped;
}

static double limit(zr *z, const zr_stall *s)
{
    return zr_limit(z, atomic_load(&seat_of(z, 0)->step) < 2 ? ZR_UNKNOWN : s->longest);
}

/* Return the queue on which a rank is stuck; -1: it waits for others. */
static int culprit(zr *z, const zr_stall *s, int r)
{
    int waits = 0;
    for (int q = 0; q < ZR_QUEUES; q++)
        if (waited(z, r, q) != s->rank[r].waited[q]) waits = 1;
        else if (doing(z, r, q) && !is_held(z, r, q)) return q;
    return waits ? -1 : ZR_MAIN;
}

/* Return the rank that is stuck, and its queue; -1: all wait for each other. A rank stopped by a
 * signal comes first. */
static int find_culprit(zr *z, const zr_stall *s, int *queue)
{
    for (int r = 0; r < z->here; r++)
        if (s->rank[r].stopped) {
            *queue = culprit(z, s, r);
            if (*queue < 0) *queue = ZR_MAIN;
            return r;
        }
    for (int r = 0; r < z->here; r++)
        if ((*queue = culprit(z, s, r)) >= 0) return r;
    return -1;
}

/* Return whether a rank used a processor for a tenth of the time since half of the limit. */
static int works(const zr_stall *s, int r, double half)
{
    return cpu_of(s->rank[r].pid) - s->rank[r].cpu > 0.1 * (s->quiet - half);
}

/* Describe ranks that this parent started and that wait for others, by one of them. */
static void describe_far(zr *z, const zr_stall *s, char *why)
{
    int r = z->here - 1, awaited, group;
    char who[ZR_HOST_NAME], whom[3 * ZR_ADDRESS] = "ranks of other hosts";
    while ((awaited = zr_awaited(seat_of(z, r), &group)) < 0 && r > 0) r--;
    if (awaited >= 0)
        snprintf(whom, sizeof whom, "rank %d%s%.40s on host %s", awaited, group ? " of group " : "",
                 group ? z->p->groups[group].name : "", z->shared->seat[awaited].host);
    zr_why(why,
           "no command has finished for %.0f s (ZR_TIMEOUT_S): %s waits in step %" PRId64
           " for %s; all ranks of this host are stopped; check for a host, a network or a process "
           "that is down or hangs",
           s->quiet, zr_who(z, z->lowest + r, who), atomic_load(&seat_of(z, r)->step), whom);
}

/* Write which rank of this host waits for a rank, with its command and group, after "; ". */
static void describe_waiting(zr *z, int rank, char *words, size_t n)
{
    words[0] = 0;
    for (int r = 0, group; r < z->here && !words[0]; r++) {
        if (zr_awaited(seat_of(z, r), &group) != rank) continue;
        const char *what = NULL; /* its only command that runs, if there is just one */
        for (int q = 0, running = 0; q < ZR_QUEUES; q++)
            if (doing(z, r, q) && !is_held(z, r, q)) what = running++ ? NULL : doing(z, r, q);
        snprintf(words, n, "; rank %d waits for it%s%.40s%s%.40s", z->lowest + r,
                 what ? " at " : "", what ? what : "", group ? " in group " : "",
                 group ? z->p->groups[group].name : "");
    }
}

static void describe(zr *z, const zr_stall *s, int r, int queue, char *why)
{
    char waiting[160];
    if (r < 0 && z->far) {
        describe_far(z, s, why);
        return;
    }
    if (r < 0) {
        zr_why(why,
               "no command has finished for %.0f s (ZR_TIMEOUT_S), and all ranks wait for each "
               "other; all are stopped",
               s->quiet);
        return;
    }
    const char *what = doing(z, r, queue);
    describe_waiting(z, z->lowest + r, waiting, sizeof waiting);
    zr_why(why,
           "no command has finished for %.0f s (ZR_TIMEOUT_S): rank %d makes no progress in step "
           "%" PRId64 ", queue %s, %s%s%s; all ranks are stopped; check for a stopped process, "
           "or a disk or file system that does not respond",
           s->quiet, z->lowest + r, atomic_load(&seat_of(z, r)->step), zr_queue_name(queue),
           what ? "at " : "between two commands", what ? what : "", waiting);
}

/* Note the state half-way through a quiet period, for comparison at its end. */
static void note(zr *z, zr_stall *s)
{
    for (int r = 0; r < z->here; r++) {
        s->rank[r].cpu = cpu_of(s->rank[r].pid);
        for (int q = 0; q <= ZR_QUEUES; q++) s->rank[r].waited[q] = waited(z, r, q);
    }
}

int zr_stalled(zr *z, zr_stall *s, char *why)
{
    const double most = 0.2; /* most seconds counted for one look, which comes every 0.05 s */
    double now = zr_now(), passed = now - s->looked < most ? now - s->looked : most;
    double before = s->quiet, half = limit(z, s) / 2;
    int queue = -1;
    uint32_t moves;
    s->looked = now;
    if (zr_is_gpu) return 0; /* on a GPU the ranks' own watchdogs do this: zr_watch.c */
    if (!must_move(z, s, &moves) || moves != s->moves) {
        if (before > s->longest) s->longest = before;
        s->moves = moves;
        s->quiet = 0;
        return 0;
    }
    s->quiet += passed;
    if (before < half && s->quiet >= half) note(z, s);
    if (s->quiet < 2 * half) return 0;
    int r = find_culprit(z, s, &queue);
    if (r >= 0 && s->quiet < ZR_TIMES * 2 * half && works(s, r, half)) return 0;
    describe(z, s, r, queue, why);
    return 1;
}
