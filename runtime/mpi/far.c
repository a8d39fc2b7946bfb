/* far.c -- ranks that a launcher has started, on this host or others. Ranks of one host read the
 * common part of each other's arenas, through the files that /proc shows of a process; to others
 * there is a wire. Pieces that arrive over it wait to be added in the inbox, which follows a CPU's
 * arena.
 *
 * Environment, for tests
 *   ZR_RANKS_PER_HOST=N    only groups of N consecutive ranks see each other's memory
 *
 * Invariants
 *  1. Of two ranks either both see each other or neither does.
 */
#define _GNU_SOURCE
#include "wire.h"
#include "../cpu/cpu.h"
#include "../zr_fail.h"
#include "../zr_file.h"
#include "../zr_memory.h"
#include "../zr_net.h"
#include "../zr_options.h"
#include "../zr_range.h"
#include "../zr_rank.h"
#include "../zr_seats.h"
#include "../zr_shared.h"
#include "../zr_watch.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_RANKS = 1 << 24 };

/* The page after the common part of an arena in the memory file. token: different in every file. */
typedef struct lobby {
    zr_seat seat;
    uint64_t token;
} lobby;

/* How to find a rank's memory file. */
typedef struct door {
    int32_t pid, file;
    uint64_t host, token;
    char name[ZR_ADDRESS]; /* name of the host */
} door;

/* Copy the program, with this target's arena extended to the end of the inbox. */
static void add_inbox(zr *z)
{
    const zr_program *p = z->p;
    zr_program *own = zr_get(z, 1, sizeof *own);
    zr_column *columns = zr_get(z, p->ncolumns, sizeof *columns);
    memcpy(columns, p->columns, (size_t)p->ncolumns * sizeof *columns);
    columns[z->column].arena = p->inbox + p->inboxes * p->inbox_step;
    *own = *p;
    own->columns = columns;
    z->p = own;
}

void zr_prepare(zr *z)
{
    z->t = zr_get(z, 1, sizeof *z->t);
    z->net->ask = zr_mpi_ask;
    zr_find_launcher(z);
    if (!z->far && z->ranks > 1)
        zr_fail(z, ZR_USER,
                "this program has %d ranks that MPI starts: mpirun -n %d %s; out/train starts "
                "its ranks itself, on one host",
                z->ranks, z->ranks, z->o->words[0]);
    zr_find_column(z);
    if (z->p->inboxes) add_inbox(z);
    z->t->room = zr_pages(z->p->columns[z->column].arena);
    z->t->common = zr_pages(z->p->shared);
}

/* Called when ranks have met, so that those of this host are known. */
void zr_open(zr *z)
{
    int here = z->far ? z->net->neighbours : 1;
    zr_choose_threads(z);
    zr_check_memory(z, here);
    if (z->far && z->net->sharing == here) zr_keep_apart(z->net->local, here);
}

/* ---- which ranks see each other */

static lobby *map_lobby(int file, int64_t at, int protection)
{
    void *there = mmap(NULL, sizeof(lobby), protection, MAP_SHARED, file, at);
    return there == MAP_FAILED ? NULL : there;
}

/* Describe this rank's memory file to the others. */
static door open_door(zr *z, lobby *own)
{
    uint64_t token = ZR_HASH;
    door d = {getpid(), z->t->memory, zr_host(), 0, ""};
    double now = zr_now();
    gethostname(d.name, sizeof d.name - 1);
    zr_add_hash(&token, &d, sizeof d);
    zr_add_hash(&token, &now, sizeof now);
    d.token = own->token = token + (uint64_t)z->rank;
    return d;
}

/* Return a rank's memory file and set its seat; -1 if it cannot be seen from here. */
static int enter(zr *z, int rank, const door *d)
{
    char path[64];
    int64_t most = zr_setting(z, "ZR_RANKS_PER_HOST", MOST_RANKS);
    if (d->host != zr_host() || (most && rank / most != z->rank / most)) return -1;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", d->pid, d->file);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    lobby *there = file < 0 ? NULL : map_lobby(file, z->t->common, PROT_READ);
    if (there && there->token == d->token) {
        z->seat[rank] = &there->seat;
        return file;
    }
    if (there) munmap(there, sizeof *there);
    if (file >= 0) close(file);
    return -1;
}

/* Set file[r] = -1 if only one of two ranks sees the other. */
static void know_each_other(zr *z, int *file)
{
    char *mine = zr_get(z, z->ranks, 1), *all = zr_get(z, z->ranks, (size_t)z->ranks);
    for (int r = 0; r < z->ranks; r++) mine[r] = file[r] >= 0;
    zr_mpi_tell_all(z, mine, all, (size_t)z->ranks);
    for (int r = 0; r < z->ranks; r++)
        if (!all[(int64_t)r * z->ranks + z->rank]) file[r] = -1;
    free(mine);
    free(all);
}

/* Map the arenas of all ranks that see each other; for the others set up the wire
 * and memory for its data. */
static void find_peers(zr *z, lobby *own)
{
    zr_target *t = z->t;
    door mine = open_door(z, own), *all = zr_get(z, z->ranks, sizeof *all);
    int *file = zr_get(z, z->ranks, sizeof *file);
    zr_mpi_tell_all(z, &mine, all, sizeof mine);
    for (int r = 0; r < z->ranks; r++) file[r] = r == z->rank ? t->memory : enter(z, r, all + r);
    know_each_other(z, file);
    for (int r = 0; r < z->ranks; r++) {
        snprintf(z->shared->seat[r].host, ZR_ADDRESS, "%.63s", all[r].name);
        if (file[r] < 0) z->seat[r] = NULL, t->wire = &zr_mpi;
        else if (r != z->rank) t->peer[r] = zr_common(z, file[r], 0, NULL, PROT_READ);
    }
    for (int queue = 0; t->wire && queue < ZR_COLLECTIVES; queue++)
        t->theirs[queue] = zr_get(z, z->ranks, ZR_SUMMED * sizeof **t->theirs);
    free(all);
    free(file);
}

void zr_arena(zr *z)
{
    zr_target *t = z->t;
    t->peer = zr_get(z, z->ranks, sizeof *t->peer);
    t->memory = zr_memory(z, t->common + zr_pages(sizeof(lobby)));
    t->arena = t->peer[z->rank] =
        zr_common(z, t->memory, 0, zr_private(z, t->room), PROT_READ | PROT_WRITE);
    t->host = zr_private(z, z->p->hosted);
    zr_take_pages(z, t->arena, t->room);
    if (t->host) zr_take_pages(z, t->host, z->p->hosted);
    lobby *own = map_lobby(t->memory, t->common, PROT_READ | PROT_WRITE);
    if (!own) zr_fail(z, ZR_ENVIRONMENT, "mapping a page: %s", strerror(errno));
    z->seat[z->rank] = &own->seat;
    if (z->far) find_peers(z, own);
    z->reads_peers = !t->wire;
}

void zr_join(zr *z)
{
    zr_watch_start(z);
    if (z->t->wire) zr_mpi_open(z);
}

void zr_part(zr *z)
{
    zr_barrier(z);
    zr_watch_alone(z);
    if (z->far) zr_mpi.close(z);
    zr_watch_stop(z);
}
