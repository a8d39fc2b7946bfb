/* zr_groups.c -- the ranks of each group, and this rank's place in it. */
#include "zr_fail.h"
#include "zr_groups.h"
#include "zr_rank.h"
#include <inttypes.h>

static int ranks_of(const zr_program *p, int group)
{
    int ranks = 1;
    for (int n = 0; n < p->naxes; n++)
        if (p->axes[n].group == group) ranks *= p->axes[n].size;
    return ranks;
}

/* Return the rank at a place of the group to which `rank` belongs. */
static int member(const zr_program *p, int group, int rank, int place)
{
    int all = 1;
    for (int n = p->naxes; n-- > 0;) {
        const zr_axis *x = p->axes + n;
        if (x->group != group) continue;
        rank += (place % x->size - zr_along(x, rank)) * x->stride;
        place /= x->size;
        all = 0;
    }
    return all ? place : rank;
}

void zr_groups_open(zr *z)
{
    const zr_program *p = z->p;
    for (const zr_axis *x = p->axes; x < p->axes + p->naxes; x++)
        if (x->group < 0 || x->group >= p->ngroups || x->size < 1 || x->stride < 1 ||
            (int64_t)x->size * x->stride > z->ranks || z->ranks % (x->size * x->stride))
            zr_fail(
                z, ZR_DISAGREE,
                "an axis of %d ranks, %d apart, of group %d does not fit %d ranks; regenerate the "
                "program",
                x->size, x->stride, x->group, z->ranks);
    z->group = zr_get(z, p->ngroups, sizeof *z->group);
    for (int g = 0; g < p->ngroups; g++) {
        zr_members *m = z->group + g;
        int ranks = g ? ranks_of(p, g) : z->ranks; /* group 0 is all ranks, and has no axes */
        if (p->groups[g].ranks != ranks)
            zr_fail(z, ZR_DISAGREE,
                    "group %s has %d ranks, but its axes have %d; regenerate the program",
                    p->groups[g].name, p->groups[g].ranks, ranks);
        m->ranks = ranks;
        m->place = zr_place_of(p, g, z->rank);
        m->rank = zr_get(z, ranks, sizeof *m->rank);
        for (int i = 0; i < ranks; i++) {
            m->rank[i] = member(p, g, z->rank, i);
            m->far += p->local && m->rank[i] / p->local != z->rank / p->local;
        }
    }
    int64_t of = p->sharing;
    if (p->context > 1 && (of < 0 || of >= p->ngroups || p->groups[of].ranks != p->context))
        zr_fail(z, ZR_DISAGREE,
                "no group %" PRId64 " of %" PRId64 " ranks shares samples; regenerate the program",
                of, p->context);
}

int zr_summed(const zr *z, int group)
{
    if (!z->apart) return group;
    return z->p->context > 1 ? (int)z->p->sharing : -1;
}

int zr_place(const zr *z, int group) { return z->group[group].place; }
