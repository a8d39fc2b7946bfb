/* near.c -- ranks that this program starts, all on this host: each can read the common part of the
 * others' arenas. */
#define _GNU_SOURCE
#include "cpu.h"
#include "../zr_fail.h"
#include "../zr_memory.h"
#include "../zr_net.h"
#include "../zr_options.h"
#include "../zr_range.h"
#include "../zr_rank.h"
#include <sys/mman.h>

enum { MOST_DELAY = 1000000000 };

void zr_prepare(zr *z)
{
    zr_refuse_launcher(z);
    zr_choose_threads(z);
    z->t = zr_get(z, 1, sizeof *z->t);
    z->reads_peers = 1;
    zr_find_column(z);
    z->t->room = zr_pages(z->p->columns[z->column].arena);
    z->t->common = zr_pages(z->p->shared);
    z->t->delay = zr_setting(z, "ZR_GATHER_DELAY_US", MOST_DELAY);
    z->t->unmap = zr_setting(z, "ZR_UNMAP_PEERS", 1) != 0;
    zr_check_memory(z, z->ranks);
    z->t->memory = zr_memory(z, z->ranks * z->t->common);
}

void zr_open(zr *z) { zr_keep_apart(z->rank, z->ranks); }

void zr_arena(zr *z)
{
    zr_target *t = z->t;
    t->peer = zr_get(z, z->ranks, sizeof *t->peer);
    /* one range of addresses: the common part from the memory file, the rest private */
    t->arena = zr_common(z, t->memory, z->rank * t->common, zr_private(z, t->room),
                         PROT_READ | PROT_WRITE);
    t->host = zr_private(z, z->p->hosted);
    zr_take_pages(z, t->arena, t->room);
    if (t->host) zr_take_pages(z, t->host, z->p->hosted);
    for (int r = 0; r < z->ranks; r++)
        t->peer[r] = r == z->rank ? t->arena
                                  : zr_common(z, t->memory, r * t->common, NULL,
                                              t->unmap ? PROT_NONE : PROT_READ);
}

void zr_join(zr *z) { (void)z; }

void zr_part(zr *z) { (void)z; }
