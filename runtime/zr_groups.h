/* zr_groups.h -- places in groups, and the shards of a state that a rank has, from tables alone.
 *
 * A rank is the sum of its places along the axes of a group times their strides, plus a number
 * common to all ranks of the group. Places in a group vary fastest along its last axis; a group
 * without axes is all ranks in order.
 */
#ifndef ZR_GROUPS_H
#define ZR_GROUPS_H
#include "zr.h"

/* Return the place of a rank along an axis. */
static inline int zr_along(const zr_axis *x, int rank) { return rank / x->stride % x->size; }

/* Return a rank's place in a group. */
static inline int zr_place_of(const zr_program *p, int group, int rank)
{
    int place = 0, all = 1;
    for (const zr_axis *x = p->axes; x < p->axes + p->naxes; x++) {
        if (x->group != group) continue;
        place = place * x->size + zr_along(x, rank);
        all = 0;
    }
    return all ? rank : place;
}

/* Return the number of shards that a rank has of a state, which are consecutive, and the number of
 * the first. Of these the rank owns the one that is its place in p->owners. */
static inline int zr_parts(const zr_program *p, const zr_state *s)
{
    return s->over < 0 ? p->ranks : p->ranks / p->groups[s->over].ranks;
}

static inline int zr_first_part(const zr_program *p, const zr_state *s, int rank)
{
    return s->over < 0 ? 0 : zr_place_of(p, s->over, rank) * zr_parts(p, s);
}

/* Return the bytes of an element of a state. */
static inline int64_t zr_width(const zr_state *s) { return (int[]){4, 2, 2, 8, 8}[s->type]; }

/* A group as this rank sees it. */
typedef struct zr_members {
    int ranks, place, far; /* place: of this rank; far: members on other hosts */
    int *rank;             /* [ranks] rank at each place */
} zr_members;
void zr_groups_open(zr *z);
/* Return the group that an all-reduce over `group` adds; -1: this rank alone. */
int zr_summed(const zr *z, int group);

#endif
