/* zr_ranks.c -- the ranks of one host: starting, watching and stopping them.
 *
 * The program forks a process for every rank and remains as the parent, which owns no arena, reads
 * no data, and only waits for children and signals.
 *
 * Invariants
 *  1. A rank never outlives the parent; the parent returns only when every rank has ended.
 *  2. A file registered with zr_temp is removed, unless the run has unregistered it or another
 *     run has locked it.
 */
#define _GNU_SOURCE
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_log.h"
#include "zr_options.h"
#include "zr_progress.h"
#include "zr_rank.h"
#include "zr_ranks.h"
#include "zr_shared.h"
#include "zr_stall.h"
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { GRACE_MS = 300 }; /* time for ranks to exit by themselves */

/* ---- signals */

/* Signals that end a run. They often go to the whole process group; the parent decides for all. */
static const int endings[] = {SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGTERM};
enum { ENDINGS = sizeof endings / sizeof *endings };

/* Return whether a signal asks a run with checkpoints to save and exit, the first time it comes. */
static int asks(const zr *z, int signal)
{
    return z->o->checkpoints && (signal == SIGTERM || signal == SIGINT || signal == SIGUSR1);
}

static zr_shared *asked; /* shared state of this rank's run */

static void ask(int signal)
{
    (void)signal;
    zr_ask(asked, zr_now());
}

/* Set a rank's signal handlers: it ignores the signals above, but passes on those
 * that ask to save and exit. */
static void take_signals(zr *z)
{
    asked = z->shared;
    for (int i = 0; i < ENDINGS; i++) {
        struct sigaction was, now = {.sa_handler = SIG_IGN, .sa_flags = SA_RESTART};
        sigaction(endings[i], NULL, &was);
        int ignored = was.sa_handler == SIG_IGN && endings[i] != SIGTERM;
        if (asks(z, endings[i]) && !ignored) now.sa_handler = ask;
        sigaction(endings[i], &now, NULL);
    }
}

/* Choose the signals for which the parent waits. Except for SIGTERM, a signal ignored at the start
 * stays ignored (nohup, a script's `&`). */
static void choose_signals(sigset_t *set)
{
    struct sigaction was;
    /* if ignored, ranks would end before the parent could wait for them */
    signal(SIGCHLD, SIG_DFL);
    sigemptyset(set);
    sigaddset(set, SIGCHLD);
    for (int i = 0; i < ENDINGS; i++)
        if (endings[i] == SIGTERM || sigaction(endings[i], NULL, &was) || was.sa_handler != SIG_IGN)
            sigaddset(set, endings[i]);
}

/* ---- the parent */

/* Run a rank's process. */
static void live(zr *z, int rank, pid_t parent, const sigset_t *before, void (*body)(zr *z))
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(ZR_DIED);
    take_signals(z);
    sigprocmask(SIG_SETMASK, before, NULL);
    z->rank = rank;
    body(z);
    fflush(NULL);
    _exit(ZR_OK);
}

static void share(zr *z)
{
    size_t bytes = sizeof *z->shared + (size_t)z->ranks * sizeof *z->shared->seat;
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        zr_fail(z, ZR_ENVIRONMENT, "mapping %zu bytes: %s", bytes, strerror(errno));
    z->shared = at;
    z->seat = zr_get(z, z->ranks, sizeof *z->seat);
    for (int r = 0; r < z->ranks; r++) z->seat[r] = &z->shared->seat[r];
}

/* Return whether a rank that exits with this code has reported the error itself. Kernels also exit
 * this way if a device or a library fails. */
static int own(int code)
{
    return code == ZR_USER || code == ZR_ENVIRONMENT || code == ZR_DISAGREE || code == ZR_DIED ||
           code == ZR_STUCK;
}

/* Stop the run if rank `rank` ended with an error. */
static void judge(zr *z, int rank, int status)
{
    char line[ZR_LINE], who[ZR_HOST_NAME];
    int n = 0, code = WIFEXITED(status) ? WEXITSTATUS(status) : ZR_DIED;
    zr_who(z, rank, who);
    if (WIFSIGNALED(status))
        n = snprintf(line, ZR_LINE, "%s: %s was ended by signal %d (%s)%s; all ranks are stopped\n",
                     z->p->name, who, WTERMSIG(status), strsignal(WTERMSIG(status)),
                     WTERMSIG(status) == SIGKILL ? ", perhaps because memory ran out" : "");
    else if (code)
        n = snprintf(
            line, ZR_LINE, "%s: %s ended with exit code %d%s; all ranks are stopped\n", z->p->name,
            who, code,
            own(code) ? ""
                      : ", which this program does not use: a library may have printed the reason");
    if (n) zr_end(z, own(code) ? code : ZR_DIED, line, n);
}

/* Wait for ranks that have ended, and note which are stopped. Returns the number still running. */
static int reap(zr *z, zr_watched *rank)
{
    int left = 0;
    for (int r = 0; r < z->here; r++) {
        int status = ZR_DIED << 8; /* for a rank that somebody else has waited for */
        if (rank[r].pid <= 0) continue;
        pid_t seen = waitpid(rank[r].pid, &status, WNOHANG | WUNTRACED | WCONTINUED);
        if (seen > 0 && (WIFSTOPPED(status) || WIFCONTINUED(status)))
            rank[r].stopped = WIFSTOPPED(status);
        else if (seen != 0) {
            rank[r].pid = 0; /* the number may belong to another process from now on */
            judge(z, z->lowest + r, status);
            continue;
        }
        left++;
    }
    return left;
}

static void interrupted(zr *z, int signal)
{
    char line[ZR_LINE], who[ZR_HOST_NAME];
    if (asks(z, signal) && !z->told_to_leave) {
        z->told_to_leave = 1;
        zr_ask(z->shared, zr_now());
        zr_print(z, STDERR_FILENO,
                 "%s: signal %d (%s): saves after this step and exits; a second signal ends it at "
                 "once\n",
                 zr_speaker(z, who), signal, strsignal(signal));
        return;
    }
    int saved = atomic_load(&z->shared->saved);
    int n = snprintf(
        line, ZR_LINE, "\n%s: stopped by signal %d (%s) %s step %" PRId64 "%s\n",
        zr_speaker(z, who), signal, strsignal(signal), saved ? "with weights saved after" : "in",
        atomic_load(&z->shared->seat[z->lowest].step),
        saved || z->o->checkpoints ? "" : "; nothing is saved (--checkpoints DIR saves)");
    zr_end(z, 128 + signal, line, n);
}

static void stalled(zr *z, zr_stall *s)
{
    char why[ZR_WHY], line[ZR_LINE];
    if (!zr_stalled(z, s, why)) return;
    zr_end(z, ZR_STUCK, line, snprintf(line, ZR_LINE, "%s: %s\n", z->p->name, why));
}

/* Wait until all ranks have ended. After a failure, kill those that do not exit in time. */
static void watch_ranks(zr *z, const sigset_t *signals, zr_stall *s)
{
    double deadline = 0;
    struct timespec slice = {0, 50000000};
    while (reap(z, s->rank) > 0) {
        int signal = sigtimedwait(signals, NULL, &slice);
        double now = zr_now(), grace = 1e-3 * GRACE_MS;
        if (signal > 0 && signal != SIGCHLD) interrupted(z, signal);
        stalled(z, s);
        zr_progress_look(z);
        if (!atomic_load(&z->shared->code)) continue;
        if (deadline == 0) deadline = now + 1e-3 * ZR_SAY_MS + grace;
        if (atomic_load(&z->shared->stop) && deadline > now + grace) deadline = now + grace;
        for (int r = 0; now > deadline && r < z->here; r++)
            if (s->rank[r].pid > 0) kill(s->rank[r].pid, SIGKILL);
    }
}

/* Remove temporary files. All ranks have ended, and so have their locks: a
 * locked file is another run's. */
static void clear_temps(zr *z)
{
    char why[ZR_WHY];
    for (int of = 0; of < ZR_TEMPS; of++)
        if (z->shared->temp[of][0]) zr_save_clear(z->shared->temp[of], why);
}

int zr_ranks(zr *z, void (*body)(zr *z))
{
    sigset_t signals, before;
    pid_t parent = getpid();
    zr_stall s = {.rank = zr_get(z, z->here, sizeof *s.rank)};
    choose_signals(&signals);
    sigprocmask(SIG_BLOCK, &signals, &before);
    share(z);
    fflush(NULL);
    for (int r = 0; r < z->here; r++) {
        pid_t pid = s.rank[r].pid = fork();
        if (pid == 0) live(z, z->lowest + r, parent, &before, body);
        if (pid < 0) {
            char line[ZR_LINE];
            int n = snprintf(line, ZR_LINE, "%s: starting rank %d: %s\n", z->p->name, z->lowest + r,
                             strerror(errno));
            zr_end(z, ZR_ENVIRONMENT, line, n);
            break;
        }
    }
    watch_ranks(z, &signals, &s);
    clear_temps(z);
    free(s.rank);
    free(z->seat);
    int code = atomic_load(&z->shared->code);
    return !code && atomic_load(&z->shared->left) ? ZR_REQUEUE : code;
}
