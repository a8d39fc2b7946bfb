/* zr_groups.h -- places in groups, and which shards a rank has of a state: what tables say alone.
 *
 * A rank is the sum of its places along the axes of a group times their strides, and of what is the
 * same for all ranks of the group. Places in a group count fastest along its last axis; a group
 * without axes has all ranks in order.
 */
#ifndef ZR_GROUPS_H
#define ZR_GROUPS_H
#include "zr.h"

/* The place of a rank along an axis */
static inline int zr_along(const zr_axis *x, int rank) { return rank / x->stride % x->size; }

/* A rank's place in a group of the program */
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

/* Shards that a rank has of a state, one behind the other, and the number of the first. Among them
 * the rank owns the one that is its place in p->owners. */
static inline int zr_parts(const zr_program *p, const zr_state *s)
{
    return s->over < 0 ? p->ranks : p->ranks / p->groups[s->over].ranks;
}

static inline int zr_first_part(const zr_program *p, const zr_state *s, int rank)
{
    return s->over < 0 ? 0 : zr_place_of(p, s->over, rank) * zr_parts(p, s);
}

#endif
