/* optimizer.c -- the constants of a step, the update (formulas in update.h), initial values, and
 * the hash of the weights.
 *
 * Invariants
 *  1. The result for an element depends on the element alone, so any sharding of a flat buffer
 *     gives the same bits. Gaps between tensors are 0 from the start and are not read or written
 *     again.
 *  2. The bits of the update are the same on every target (update.h); the constants of a step are
 *     computed in f64.
 */
#include "../digest.h"
#include "../step.h"
#include "part.h"
#include "philox.h"
#include "../update.h" /* after part.h, which defines lanes */

enum { BLOCKS = 32 }; /* blocks of a task by default */

/* A flat buffer split into tasks: f is called for the part of each tensor in a task. */
typedef struct flat {
    const zk_span *spans; /* [nspans] */
    int64_t nspans, first, n, piece;
    void (*f)(void *arg, const zk_part *part);
    void *arg;
} flat;

static void flat_task(void *arg, int64_t task, int thread)
{
    const flat *a = arg;
    int64_t lo = a->first + task * a->piece, hi = zk_least(lo + a->piece, a->first + a->n);
    (void)thread;
    zk_each_part(a->spans, a->nspans, a->first, lo, hi, a->f, a->arg);
}

static void each(zk *k, const zk_launch *L, const zk_span *spans, int64_t nspans, int64_t first,
                 int64_t n, void (*f)(void *arg, const zk_part *part), void *arg)
{
    flat a = {spans, nspans, first, n, ZK_BLOCK * zk_tile(k, L, 0, BLOCKS), f, arg};
    zk_for(k, zk_pieces(n, a.piece), flat_task, &a);
}

/* ---- constants of a step */

void ZK(zk_clear)(zk *k, int64_t *sums)
{
    (void)k;
    memset(sums, 0, ZK_SUMS * sizeof *sums);
}

void ZK(zk_begin)(zk *k, const zk_launch *L, zk_ctl *ctl, int64_t *sums, const zk_recipe *r)
{
    (void)L;
    ZK(zk_clear)(k, sums);
    step_begin(ctl, r);
}

void ZK(zk_factor)(zk *k, const zk_launch *L, zk_ctl *ctl, const int64_t *sums, const zk_recipe *r)
{
    (void)k, (void)L;
    step_factor(ctl, sums, r);
}

/* ---- the update */
typedef struct flat_update {
    real *w;       /* [n], or NULL */
    float *p;      /* [n]; NULL: w is updated itself */
    void *m, *v;   /* [n]; NULL if the rule has none */
    const void *g; /* [n] */
    int dtype, moments, grads;
    uint64_t seed; /* of stochastic rounding */
    step s;
    const zk_ctl *ctl;
} flat_update;

/* Round x to bf16 stochastically, by the lower (shift 0) or upper (16)
 * half of a word per element. */
ZK_INLINE lanes by_chance(lanes x, const uint32_t word[LANES], int shift)
{
    lanes_bits all;
    memcpy(&all, word, sizeof all);
    return lanes_dither(x, all >> shift & 0xffff);
}

/* Draw the words of elements i .. i + 63 of a part. second: ZK_SECOND or 0. */
ZK_INLINE void draw_words(uint32_t out[DRAWN], const flat_update *a, const zk_part *part, int64_t i,
                          uint64_t second)
{
    words(out, 4, 1, a->seed, (uint64_t)part->key, (uint64_t)(part->elem + i) / 4 | second);
}

/* Update elements i .. i + n - 1 of a part, n <= LANES. chance: first and second words of the 64
 * elements from i / 64 * 64; they are drawn when i is the first of these. */
ZK_INLINE void update_lanes(const flat_update *a, const zk_part *part, const pull *own, int moments,
                            int64_t i, int n, uint32_t chance[2][DRAWN])
{
    int64_t at = part->at + i;
    lanes m = a->m ? lanes_get(a->m, at, moments, n) : lanes_set(0);
    lanes v = a->v ? lanes_get(a->v, at, moments, n) : lanes_set(0);
    lanes p = a->p ? lanes_get(a->p, at, ZK_F32, n) : lanes_get(a->w, at, ZK_BF16, n);
    p = update(&a->s, own, p, &m, &v, lanes_get(a->g, at, a->grads, n));
    if (moments == ZK_BF16) {
        if (i % DRAWN == 0) draw_words(chance[0], a, part, i, 0);
        m = by_chance(m, chance[0] + i % DRAWN, 0);
        v = by_chance(v, chance[0] + i % DRAWN, 16);
    }
    if (!a->p) {
        if (i % DRAWN == 0) draw_words(chance[1], a, part, i, ZK_SECOND);
        p = by_chance(p, chance[1] + i % DRAWN, 0);
    }
    if (a->m) lanes_put(a->m, at, moments, m, n);
    if (a->v) lanes_put(a->v, at, moments, v, n);
    if (a->p) lanes_put(a->p, at, ZK_F32, p, n);
    if (a->w) lanes_put(a->w, at, a->dtype, p, n);
}

ZK_INLINE void update_some(const flat_update *a, const zk_part *part, int moments)
{
    pull own = pull_of(a->ctl, part->span);
    uint32_t chance[2][DRAWN];
    int64_t i = 0;
    for (; i + LANES <= part->n; i += LANES) update_lanes(a, part, &own, moments, i, LANES, chance);
    if (i < part->n) update_lanes(a, part, &own, moments, i, (int)(part->n - i), chance);
}

static void update_part(void *arg, const zk_part *part)
{
    const flat_update *a = arg;
    if (a->moments == ZK_BF16) update_some(a, part, ZK_BF16);
    else update_some(a, part, ZK_F32);
}

void ZK(zk_update)(zk *k, const zk_launch *L, const zk_ctl *ctl, const zk_recipe *r, real *w,
                   float *p, void *m, void *v, const void *g, const zk_span *spans, int64_t nspans,
                   int64_t first, int64_t n, int full)
{
    flat_update a = {.w = w,
                     .p = p,
                     .m = m,
                     .v = v,
                     .g = g,
                     .dtype = k->dtype,
                     .moments = r->moments,
                     .grads = full ? ZK_F32 : k->dtype,
                     .seed = update_seed(ctl, r),
                     .s = step_of(ctl, r),
                     .ctl = ctl};
    if (!ctl->skipped) each(k, L, spans, nspans, first, n, update_part, &a);
}

/* ---- initial values: 64 elements from 16 counters. Counter 16*(element/64) + lane gives elements
 * 64*(element/64) + lane + 0, 16, 32, 48, so that 16 lanes are stored at once. */
typedef struct initial {
    real *p; /* [n] */
    uint64_t seed;
    int dtype;
} initial;

static const float TURN = 6.28318530717958647692f;

/* Box-Muller: compute two normals from two words. The uniform for the radius is (a/2 + 1/2) / 2^31
 * in (0, 1]; the angle is b / 2^32 turns, reduced exactly to within an eighth of a turn. */
static void normals(v16 z[2], v16u a, v16u b)
{
    v16u quarter = (b + (1u << 29)) >> 30;
    v16 u = fma16(__builtin_convertvector((v16i)(a >> 1), v16), set16(0x1p-31f), set16(0x1p-32f));
    v16 x = __builtin_convertvector((v16i)(b - (quarter << 30)), v16) * set16(TURN * 0x1p-32f);
    v16 xx = x * x, radius = sqrt16(set16(-2) * log16(u));
    v16 s = fma16(xx, set16(2.75573192e-6f), set16(-1.98412698e-4f)); /* Taylor series to x^9 */
    s = fma16(xx, fma16(xx, s, set16(8.33333333e-3f)), set16(-0.166666667f));
    v16 c = fma16(xx, set16(-2.75573192e-7f), set16(2.48015873e-5f)); /* Taylor series to x^10 */
    c = fma16(xx, fma16(xx, c, set16(-1.38888889e-3f)), set16(4.16666667e-2f));
    c = radius * fma16(xx, fma16(xx, c, set16(-0.5f)), set16(1));
    s = radius * fma16(xx * x, s, x);
    v16i odd = -(v16i)(quarter & 1);
    z[0] = (v16)((v16u)select16(odd, s, c) ^ ((quarter + 1) & 2) << 30);
    z[1] = (v16)((v16u)select16(odd, c, s) ^ (quarter & 2) << 30);
}

/* Map 16 words to numbers in [-1, 1]. */
static v16 uniform(v16u word) { return __builtin_convertvector((v16i)word, v16) * set16(0x1p-31f); }

static void init_part(void *arg, const zk_part *part)
{
    const initial *a = arg;
    v16 mean = set16(part->span->mean), std = set16(part->span->std);
    for (int64_t i = 0; i < part->n; i += DRAWN) {
        v16u word[4];
        uint32_t drawn[DRAWN];
        v16 z[4] = {set16(0), set16(0), set16(0), set16(0)};
        if (part->span->std != 0) {
            words(drawn, 1, 16, a->seed, (uint64_t)part->key, (uint64_t)(part->elem + i) / 4);
            memcpy(word, drawn, sizeof word);
            normals(z, word[0], word[1]);
            normals(z + 2, word[2], word[3]);
            for (int j = 0; j < 4 && part->span->std < 0; j++) z[j] = uniform(word[j]);
        }
        for (int j = 0; j < 4 && i + 16 * j < part->n; j++)
            zk_put(a->p, part->at + i + 16 * j, a->dtype, fma16(std, z[j], mean),
                   part->n - i - 16 * j);
    }
}

/* Set the gaps between tensors to 0: units are gathered whole, and kernels read
 * rows that pad a vocabulary. */
static void init_task(void *arg, int64_t task, int thread)
{
    const flat *a = arg;
    const initial *to = a->arg;
    int64_t at = task * a->piece;
    int64_t width = to->dtype == ZK_F32 ? 4 : 2;
    memset((char *)to->p + at * width, 0, (size_t)(zk_least(a->piece, a->n - at) * width));
    flat_task(arg, task, thread);
}

void ZK(zk_init)(zk *k, const zk_launch *L, void *p, const zk_span *spans, int64_t nspans,
                 int64_t first, int64_t n, uint64_t seed, int full)
{
    initial a = {p, seed, full ? ZK_F32 : k->dtype};
    flat all = {spans, nspans, first, n, ZK_BLOCK * zk_tile(k, L, 0, BLOCKS), init_part, &a};
    zk_for(k, zk_pieces(n, all.piece), init_task, &all);
}

/* ---- the hash */
typedef struct digest {
    uint64_t *sum; /* [2] */
    const real *p; /* [n] */
    int dtype;
} digest;

/* digest_block of eight whole blocks, one per lane, because each word
 * depends on the one before it. */
static void digest_eight(uint64_t sum[2], uint64_t key, uint64_t block, const real *p, int64_t at,
                         int dtype)
{
    v8u a, b;
    for (uint64_t l = 0; l < 8; l++) {
        uint64_t start = digest_start(key, block + l, ZK_BLOCK);
        a[l] = digest_mix(start);
        b[l] = digest_mix(~start);
    }
    for (int64_t i = 0; i < ZK_BLOCK; i += 16) {
        v8u word[8]; /* of one block each */
        for (int l = 0; l < 8; l++) word[l] = (v8u)zk_get(p, at + ZK_BLOCK * l + i, dtype, 16);
        for (int w = 0; w < 8; w++) {
            v8u x = {word[0][w], word[1][w], word[2][w], word[3][w],
                     word[4][w], word[5][w], word[6][w], word[7][w]};
            a = (a ^ x) * DIGEST_A;
            b = (b ^ x) * DIGEST_B;
            a ^= a >> 32;
            b ^= b >> 29;
        }
    }
    for (int l = 0; l < 8; l++) {
        sum[0] += digest_mix(a[l]);
        sum[1] += digest_mix(b[l]);
    }
}

static void hash_part(void *arg, const zk_part *part)
{
    const digest *a = arg;
    uint64_t own[2] = {0, 0};
    int64_t i = 0;
    /* AVX2 has no 64-bit products; one block at a time is faster there */
    for (; LANES == 16 && part->n - i >= 8 * ZK_BLOCK; i += 8 * ZK_BLOCK)
        digest_eight(own, (uint64_t)part->key, (uint64_t)((part->elem + i) / ZK_BLOCK), a->p,
                     part->at + i, a->dtype);
    for (; i < part->n; i += ZK_BLOCK) {
        int64_t block = (part->elem + i) / ZK_BLOCK, n = zk_least(ZK_BLOCK, part->n - i);
        digest_block(own, (uint64_t)part->key, (uint64_t)block, a->p, part->at + i, n, a->dtype);
    }
    __atomic_fetch_add(a->sum, own[0], __ATOMIC_RELAXED);
    __atomic_fetch_add(a->sum + 1, own[1], __ATOMIC_RELAXED);
}

void ZK(zk_hash)(zk *k, const zk_launch *L, uint64_t *sum, const void *p, const zk_span *spans,
                 int64_t nspans, int64_t first, int64_t n, int full)
{
    digest a = {sum, p, full ? ZK_F32 : k->dtype};
    each(k, L, spans, nspans, first, n, hash_part, &a);
}
