/* zr_verify.c -- hashes of a run's states: of the weights, however they are sharded, and of
 * replicated states, which are compared (--verify-every).
 *
 * Invariants
 *  1. They run only between two steps, with all queues empty: then copies agree, and no dead slot
 *     is read.
 *  2. Nothing is allocated after zr_verify_open.
 */
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_groups.h"
#include "zr_log.h"
#include "zr_memory.h"
#include "zr_options.h"
#include "zr_progress.h"
#include "zr_queue.h"
#include "zr_rank.h"
#include "zr_seats.h"
#include "zr_sum.h"
#include "zr_verify.h"
#include <inttypes.h>
#include <string.h>

typedef uint64_t words __attribute__((vector_size(64)));
enum { BYTES = 65536, LANES = 4 };

/* ---- the weights */

/* Return where a function finds elements of a state: in its arena, or in the tile's place, to which
 * they are read from the file. */
static int64_t brought(zr *z, const zr_state *s, int64_t at, int64_t n)
{
    if (s->queue != ZR_STORE) return at;
    zr_drain(z); /* earlier contents have been used */
    zr_copy(z, ZR_LOAD, at, z->p->brought, zr_width(s) * n);
    zr_drain(z);
    return z->p->brought;
}

/* Hash instance i of a state: in one call, or from the file tile by tile. */
static void hash_instance(zr *z, const zr_state *s, int64_t i, uint64_t *sum)
{
    int filed = s->queue == ZR_STORE;
    int64_t tile = filed ? z->p->tile : s->n;
    for (int64_t at = 0; at < s->n; at += tile) {
        int64_t n = s->n - at < tile ? s->n - at : tile;
        int64_t there = brought(z, s, s->at + i * s->stride + zr_width(s) * at, n);
        zr_call(z, filed ? ZR_HOST : s->queue, s->hash, there, i, (int64_t)(intptr_t)sum,
                s->first + at, n);
    }
}

void zr_hash_weights(zr *z, uint64_t sum[2])
{
    sum[0] = sum[1] = 0;
    for (const zr_state *s = z->p->states; s < z->p->states + z->p->nstates; s++)
        for (int64_t i = 0; s->hash && i < s->count; i++) hash_instance(z, s, i, sum);
    zr_drain(z);
    zr_total(z, sum);
}

/* ---- replicated states */

/* Add from[BYTES]. Each lane takes every 32nd word. A changed word changes
 * its lane, whatever follows. */
static inline __attribute__((always_inline)) void add_plain(words lane[LANES], const char *from)
{
    for (int i = 0; i < BYTES; i += sizeof(words) * LANES)
#pragma GCC unroll 4
        for (int l = 0; l < LANES; l++) {
            words word;
            memcpy(&word, from + i + sizeof word * l, sizeof word);
            lane[l] = (lane[l] ^ word) * 0x9e3779b97f4a7c15;
        }
}

__attribute__((target("avx512f,avx512dq"))) static void add_avx512(words lane[LANES],
                                                                   const char *from)
{
    add_plain(lane, from);
}

static void add_words(words lane[LANES], const char *from)
{
    zr_has_avx512() ? add_avx512(lane, from) : add_plain(lane, from);
}

/* Add bytes of a state, in place if the host can read them; the last block is padded with 0. */
static void add_bytes(zr *z, const zr_state *s, words lane[LANES], int64_t at, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += BYTES) {
        int64_t some = bytes - i < BYTES ? bytes - i : BYTES;
        const char *from = some == BYTES ? zr_reach(z, s->queue, at + i) : NULL;
        if (!from) {
            memset(z->words + some, 0, (size_t)(BYTES - some));
            zr_read(z, s->queue, z->words, at + i, some);
            from = z->words;
        }
        add_words(lane, from);
    }
}

/* Hash a row's elements, [first, first + n) of every shard. */
static uint64_t hash_row(zr *z, const zr_state *s)
{
    words lane[LANES] = {0};
    uint64_t sum = ZR_HASH;
    int64_t width = zr_width(s), shards = s->shard ? zr_parts(z->p, s) : 1;
    for (int64_t i = 0; i < s->count; i++)
        for (int64_t r = 0; r < shards; r++)
            add_bytes(z, s, lane, s->at + i * s->stride + width * r * s->shard, width * s->n);
    zr_add_hash(&sum, lane, sizeof lane);
    return sum;
}

/* Return the name of a tensor in the state, for a message; with %d if it has several instances. */
static const char *tensor_of(const zr *z, const zr_state *s)
{
    for (int t = 0; t < z->p->ntensors; t++)
        if (z->p->tensors[t].flat == s->flat) return z->p->tensors[t].name;
    return "the step's numbers";
}

static void differs(zr *z, const zr_state *s, const char *how)
{
    zr_fail(z, ZR_ENVIRONMENT,
            "after step %" PRId64 " this rank's %s (%s and the tensors stored with it) %s "
            "(--verify-every): memory or processor of one of them is faulty; resume from a "
            "checkpoint on other hosts",
            (int64_t)z->step, s->what, tensor_of(z, s), how);
}

/* Compare copies of a state. If every rank has all of it, with rank 0's copy. If the ranks of a
 * group share it, ranks at the same place have copies: their hashes are added over all ranks, two
 * places at a time. */
static void compare_copies(zr *z, const zr_state *s)
{
    int places = s->over < 0 ? 1 : z->p->groups[s->over].ranks, copies = z->ranks / places;
    if (copies == 1) return;
    uint64_t mine = hash_row(z, s), first = mine;
    if (places == 1) {
        zr_tell(z, &first, sizeof first);
        if (first != mine) differs(z, s, "differs from rank 0's");
        return;
    }
    int own = z->group[s->over].place;
    for (int place = 0; place < places; place += 2) {
        uint64_t sum[2] = {own == place ? mine : 0, own == place + 1 ? mine : 0};
        zr_total(z, sum);
        if (own / 2 == place / 2 && sum[own % 2] != mine * (uint64_t)copies)
            differs(z, s, "and its copies on other ranks differ");
    }
}

void zr_verify_open(zr *z)
{
    if (z->o->verify_every) z->words = zr_get(z, BYTES, 1);
}

int zr_verify_due(const zr *z, int64_t steps)
{
    return z->o->verify_every && steps % z->o->verify_every == 0;
}

void zr_verify(zr *z)
{
    uint64_t sum[2];
    double begun = zr_now();
    zr_progress(z, "verification", NULL, 0);
    for (const zr_state *s = z->p->states; s < z->p->states + z->p->nstates; s++)
        if (z->ranks > 1) compare_copies(z, s);
    zr_barrier(z); /* no rank continues if one has failed */
    zr_hash_weights(z, sum);
    zr_progress(z, NULL, NULL, 0);
    zr_log_verified(z, z->step, sum, zr_now() - begun);
}
