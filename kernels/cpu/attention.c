/* attention.c -- causal attention by blocks of 64 queries and 64 keys; no buffer grows with T x T.
 * Blocks that documents or a window hide completely are skipped.
 *
 *   s = scale * q . k^T; lse = logsumexp(s); p = exp(s - lse); y = p . v
 *   capped: s = cap * tanh(s / cap), and ds *= 1 - tanh(s / cap)^2
 *   dp = dy . v^T; dot = sum(dy * y); ds = p * (dp - dot) * scale
 *   dq = ds . k; dk = ds^T . q; dv = p^T . dy
 *   dropped: y = (p * f) . v, dv = (p * f)^T . dy, dp = f * (dy . v^T); f: 0 or 1 / (1 - share)
 *
 * Invariants
 *  1. Every sum over keys, queries or head elements has a fixed order of terms, added as blocks.h
 *     says. Forward: keys ascending. dq: regions (256 keys) descending, keys ascending within a
 *     region. dk and dv: query blocks ascending, then heads of the group, then queries. The widths
 *     of tiles have no effect. In the order of tiles p * f and ds are rounded to bf16.
 *  2. A score is rounded to f32 after scaling and capping, in backward as in forward, so p <= 1 up
 *     to the rounding of lse.
 *  3. Scores are stored transposed, [key][query]. A register holds queries, so maxima and sums over
 *     keys need no sum across lanes.
 *  4. The scratch of a thread holds D <= 1024.
 */
#include "../drop.h"
#include "blocks.h"
#include "philox.h"
#include <float.h>

enum { REGION = 4 };    /* blocks per side of a backward task */
enum { WIDEST = 1024 }; /* largest head size, which zgen enforces */
_Static_assert(4 * BLOCK * (9 * WIDEST + 4 * BLOCK + 3) <= ZK_SCRATCH, "backward's space fits");

typedef struct attention {
    zk *k;
    real *out;                /* y [M, H*D] or dqkv [M, stride] */
    const real *qkv, *y, *dy; /* [M, stride], [M, H*D], [M, H*D] */
    const int32_t *position;  /* [B,T], or NULL: each sample is one document */
    const int64_t *key;       /* [B], or NULL: no probability is dropped */
    float *lse, *dot;         /* [B,H,T]; dot: row sums of dy * y */
    float *sum;               /* gradient of qkv before rounding, [M, stride] */
    /* apart: distance of regions, see backward_task */
    int64_t B, T, H, G, D, window, stride, blocks, apart;
    shape s;          /* of a head */
    float scale, cap; /* cap: of scores, 0 for none */
    drop d;           /* of probabilities, with `key` */
    int64_t head;     /* number of the first head among all of a sample */
} attention;

/* ---- blocks of rows */
static void store_rows(const attention *a, const float *block, real *p, int dtype, int64_t at,
                       int64_t stride, int64_t rows)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t d = 0; d < a->D; d += LANES)
            lanes_put(p, at + i * stride + d, dtype, lanes_load(block + i * a->s.pad + d),
                      a->D - d);
}

/* Fill to[64] with n floats and zeros. */
static void load_line(float *to, const float *from, int64_t n)
{
    memset(to, 0, BLOCK * sizeof(float));
    memcpy(to, from, (size_t)n * sizeof(float));
}

/* ---- the keys that a query sees: rows t - reach .. t */
static int64_t reach(const attention *a, int64_t b, int64_t t)
{
    return zk_least(a->position ? a->position[b * a->T + t] : t, a->window - 1);
}

/* Return the first key that row t sees; no later row sees an earlier one. */
static int64_t first_key(const attention *a, int64_t b, int64_t t) { return t - reach(a, b, t); }

/* The keys of a block that each query of another block sees. */
typedef struct sight {
    const int32_t *reach; /* [64] reach of each query; NULL: they see all keys of the block */
    int64_t ahead;        /* distance in rows from the first key to the first query */
} sight;

/* Return which keys of key block j query block i sees. line: int32 [64], storage for `reach`. */
static sight sight_of(const attention *a, int32_t *line, int64_t b, int64_t i, int64_t j)
{
    int64_t from = i * BLOCK, end = zk_least(from + BLOCK, a->T);
    if (i > j && first_key(a, b, end - 1) <= j * BLOCK) return (sight){NULL, 0};
    memset(line, 0, BLOCK * sizeof *line);
    for (int64_t t = from; t < end; t++) line[t - from] = (int32_t)reach(a, b, t);
    return (sight){line, from - j * BLOCK};
}

/* Return x with -infinity for those of queries c .. c+LANES-1 that do
 * not see key j of its block. */
ZK_INLINE lanes hide(lanes x, sight s, int64_t j, int64_t c)
{
    static const int32_t number[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    lanes_mask lane, reach;
    memcpy(&lane, number, sizeof lane);
    memcpy(&reach, s.reach + c, sizeof reach);
    lanes_mask back = lane + (int32_t)(s.ahead + c - j);
    return lanes_select((back < 0) | (back > reach), lanes_set(-__builtin_inff()), x);
}

/* Return the scaled scores of key j of its block and queries c .. c+LANES-1 of theirs. With a cap
 * above 0 they are capped, and *bent is the tanh of each. */
ZK_INLINE lanes score(const attention *a, const float *p, int64_t j, int64_t c, sight s, float cap,
                      lanes *bent)
{
    lanes x = lanes_load(p + j * BLOCK + c) * lanes_set(a->scale);
    if (cap > 0) {
        *bent = lanes_tanh(x / lanes_set(cap));
        x = lanes_set(cap) * *bent;
    }
    return s.reach ? hide(x, s, j, c) : x;
}

/* Compute p[keys][queries], the products of rows of two blocks. */
static void scores(const attention *a, float *p, const block *keys, const block *queries,
                   int64_t nkeys, int64_t nqueries)
{
    multiply(&a->s, p, BLOCK, rows_of(&a->s, keys), queries->turned, BLOCK, terms(&a->s, nkeys),
             nqueries, terms(&a->s, a->D), 0);
}

/* ---- dropout of probabilities, as drop.h says */
/* Fill factor [64 keys][64 queries] for query block i and key block j of head h. Return it, or NULL
 * if the sample drops nothing. */
static const float *drop_factors(const attention *a, float *factor, int64_t b, int64_t h, int64_t i,
                                 int64_t j)
{
    if (!a->key || !a->key[b]) return NULL;
    const v8u lane = {0, 1, 2, 3, 4, 5, 6, 7}, least = (v8u){0} + a->d.least;
    for (int64_t q = 0; q < BLOCK; q += 16)
        for (int64_t n = 0; n < BLOCK / 2; n++) {
            int64_t to = n / 8 * 16 + n % 8, key = j * BLOCK + to;
            uint64_t row = (uint64_t)((a->head + h) * a->T + i * BLOCK + q);
            v8u at = (row + lane) * (uint64_t)a->T + (uint64_t)key;
            v8u word[4] = {at, at >> 32, (v8u){0} + a->d.place, (v8u){0} + (a->d.place >> 32)};
            philox(word, (uint64_t)a->key[b]);
            for (int w = 0; w < 4; w++) {
                float *line = factor + (to + w % 2 * 8) * BLOCK + q + w / 2 * 8;
                v8u kept = (v8u)((word[w] & UINT32_MAX) >= least);
                for (int l = 0; l < 8; l++) line[l] = kept[l] ? a->d.scale : 0;
            }
        }
    return factor;
}

/* ---- forward */
typedef struct forward {
    block q, key, value;
    float *sum;                  /* [64][pad] */
    float *p, *factor, *words;   /* [64 keys][64 queries]; of p */
    float *top, *total, *shrink; /* [64]: maximum, sum of exp, factor for the old sums */
    int32_t *reach;              /* [64] */
} forward;

static forward forward_space(const attention *a, int thread)
{
    int64_t block = BLOCK * a->s.pad;
    float *s = zk_scratch(a->k, thread), *p = s + 5 * block, *lines = p + 3 * BLOCK * BLOCK;
    return (forward){.q = block_at(&a->s, s),
                     .key = block_at(&a->s, s + 2 * block),
                     .value = block_at(&a->s, s + 3 * block),
                     .sum = s + 4 * block,
                     .p = p,
                     .factor = p + BLOCK * BLOCK,
                     .words = p + 2 * BLOCK * BLOCK,
                     .top = lines,
                     .total = lines + BLOCK,
                     .shrink = lines + 2 * BLOCK,
                     .reach = (int32_t *)(lines + 3 * BLOCK)};
}

/* Replace the products of `keys` keys and queries c .. c+LANES-1 by exp(score - top), times factor
 * if that is not NULL, and update top and the sums. top is finite. */
static void weigh(const attention *a, const forward *f, int64_t c, int64_t keys, sight s,
                  const float *factor)
{
    lanes old = lanes_load(f->top + c), top = old, total = lanes_set(0), bent = total;
    const float cap = a->cap;
    const int rounding = rounds(&a->s); /* here, as a store might change *a */
    for (int64_t j = 0; j < keys; j++) {
        lanes x = score(a, f->p, j, c, s, cap, &bent);
        lanes_store(f->p + j * BLOCK + c, x);
        top = lanes_max(top, x);
    }
    lanes shrink = lanes_exp(old - top);
    for (int64_t j = 0; j < keys; j++) {
        lanes p = lanes_exp(lanes_load(f->p + j * BLOCK + c) - top);
        total += p;
        if (factor) p *= lanes_load(factor + j * BLOCK + c);
        lanes_store(f->p + j * BLOCK + c, rounding ? rounded(p) : p);
    }
    lanes_store(f->top + c, top);
    lanes_store(f->total + c, lanes_fma(lanes_load(f->total + c), shrink, total));
    lanes_store(f->shrink + c, shrink);
}

/* Multiply the rows of block [64][pad] by factor[64]. */
static void scale_rows(const attention *a, float *block, const float *factor, int64_t rows)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t d = 0; d < a->s.pad; d += LANES)
            lanes_store(block + i * a->s.pad + d,
                        lanes_load(block + i * a->s.pad + d) * lanes_set(factor[i]));
}

/* Write y and lse of head h, queries from .. from+rows-1 of sequence b,
 * from the sums over all keys. */
static void finish(const attention *a, const forward *f, int64_t b, int64_t h, int64_t from,
                   int64_t rows)
{
    float lse[BLOCK];
    for (int64_t c = 0; c < BLOCK; c += LANES) {
        lanes total = lanes_load(f->total + c);
        lanes_store(lse + c, lanes_load(f->top + c) + lanes_log(total));
        lanes_store(f->shrink + c, lanes_set(1) / total);
    }
    scale_rows(a, f->sum, f->shrink, rows);
    int64_t at = ((b * a->T + from) * a->H + h) * a->D;
    store_rows(a, f->sum, a->out, a->k->dtype, at, a->H * a->D, rows);
    memcpy(a->lse + (b * a->H + h) * a->T + from, lse, (size_t)rows * sizeof(float));
}

/* Task (b, h, query block). Tasks of a head follow each other, so that
 * its keys stay in the cache. */
static void forward_task(void *arg, int64_t task, int thread)
{
    const attention *a = arg;
    int64_t i = a->blocks - 1 - task % a->blocks;
    int64_t h = task / a->blocks % a->H, b = task / a->blocks / a->H;
    int64_t from = i * BLOCK, rows = zk_least(BLOCK, a->T - from), padded = rounded_up(&a->s, rows);
    int64_t start = b * a->T * a->stride, key = start + (a->H + h / (a->H / a->G)) * a->D;
    int64_t first = first_key(a, b, from) / BLOCK;
    forward f = forward_space(a, thread);
    tiles_begin_for(&a->s);
    load_block(&a->s, &f.q, TURNED, a->qkv, start + from * a->stride + h * a->D, a->stride, rows);
    for (int64_t c = 0; c < BLOCK; c += LANES) {
        lanes_store(f.top + c, lanes_set(-FLT_MAX));
        lanes_store(f.total + c, lanes_set(0));
    }
    for (int64_t j = first; j <= i; j++) {
        sight s = sight_of(a, f.reach, b, i, j);
        const float *factor = drop_factors(a, f.factor, b, h, i, j);
        int64_t keys = zk_least(BLOCK, a->T - j * BLOCK), at = key + j * BLOCK * a->stride;
        load_block(&a->s, &f.key, LEFT, a->qkv, at, a->stride, keys);
        load_block(&a->s, &f.value, RIGHT, a->qkv, at + a->G * a->D, a->stride, keys);
        scores(a, f.p, &f.key, &f.q, keys, padded);
        for (int64_t c = 0; c < padded; c += LANES) weigh(a, &f, c, keys, s, factor);
        if (j > first) scale_rows(a, f.sum, f.shrink, rows);
        multiply(&a->s, f.sum, a->s.pad, columns_of_square(&a->s, f.p, f.words), f.value.right,
                 a->s.pad, rows, a->s.pad, terms(&a->s, keys), j > first);
    }
    finish(a, &f, b, h, from, rows);
    tiles_end_for(&a->s);
}

static attention attention_of(zk *k, const int32_t *position, int64_t B, int64_t T, int64_t H,
                              int64_t G, int64_t D, int64_t window, float scale, float cap)
{
    return (attention){.k = k,
                       .B = B,
                       .T = T,
                       .H = H,
                       .G = G,
                       .D = D,
                       .position = position,
                       .window = window,
                       .stride = (H + 2 * G) * D,
                       .s = shape_of(k, D),
                       .blocks = (T + BLOCK - 1) / BLOCK,
                       .scale = scale,
                       .cap = cap};
}

/* Drop probabilities, each with probability p, as drop.h says. head: number of the first head. */
static attention dropping(attention a, const int64_t *key, int64_t place, int64_t head, float p)
{
    a.key = key;
    a.head = head;
    a.d = drop_of(place, p);
    return a;
}

static void attend(attention a, real *y, float *lse, const real *qkv)
{
    a.out = y;
    a.lse = lse;
    a.qkv = qkv;
    zk_for(a.k, a.B * a.H * a.blocks, forward_task, &a);
}

void ZK(zk_attention_capped_fwd)(zk *k, const zk_launch *L, real *y, float *lse, const real *qkv,
                                 const int32_t *position, int64_t B, int64_t T, int64_t H,
                                 int64_t G, int64_t D, int64_t window, float scale, float cap)
{
    (void)L;
    attend(attention_of(k, position, B, T, H, G, D, window, scale, cap), y, lse, qkv);
}

void ZK(zk_attention_dropped_fwd)(zk *k, const zk_launch *L, real *y, float *lse, const real *qkv,
                                  const int32_t *position, const int64_t *key, int64_t B, int64_t T,
                                  int64_t H, int64_t G, int64_t D, int64_t window, int64_t place,
                                  int64_t head, float scale, float p)
{
    attention a = attention_of(k, position, B, T, H, G, D, window, scale, 0);
    (void)L;
    attend(dropping(a, key, place, head, p), y, lse, qkv);
}

void ZK(zk_attention_local_fwd)(zk *k, const zk_launch *L, real *y, float *lse, const real *qkv,
                                const int32_t *position, int64_t B, int64_t T, int64_t H, int64_t G,
                                int64_t D, int64_t window, float scale)
{
    ZK(zk_attention_capped_fwd)(k, L, y, lse, qkv, position, B, T, H, G, D, window, scale, 0);
}

void ZK(zk_attention_fwd)(zk *k, const zk_launch *L, real *y, float *lse, const real *qkv,
                          int64_t B, int64_t T, int64_t H, int64_t G, int64_t D, float scale)
{
    ZK(zk_attention_local_fwd)(k, L, y, lse, qkv, NULL, B, T, H, G, D, T, scale);
}

/* ---- backward */
typedef struct backward {
    block q, dy, key, value;
    float *dq, *dkey, *dvalue;      /* [64][pad] */
    float *p, *ds, *factor, *words; /* [64 keys][64 queries]; of p or ds */
    float *lse, *dot;               /* [64] */
    int32_t *reach;                 /* [64] */
} backward;

static backward backward_space(const attention *a, int thread)
{
    int64_t block = BLOCK * a->s.pad;
    float *s = zk_scratch(a->k, thread), *p = s + 9 * block, *lines = p + 4 * BLOCK * BLOCK;
    return (backward){.q = block_at(&a->s, s),
                      .dy = block_at(&a->s, s + 2 * block),
                      .key = block_at(&a->s, s + 4 * block),
                      .value = block_at(&a->s, s + 5 * block),
                      .dq = s + 6 * block,
                      .dkey = s + 7 * block,
                      .dvalue = s + 8 * block,
                      .p = p,
                      .ds = p + BLOCK * BLOCK,
                      .factor = p + 2 * BLOCK * BLOCK,
                      .words = p + 3 * BLOCK * BLOCK,
                      .lse = lines,
                      .dot = lines + BLOCK,
                      .reach = (int32_t *)(lines + 2 * BLOCK)};
}

/* Compute p = exp(score - lse) and ds = p * (dp - dot) * scale in place of the products q.k and
 * dy.v. With a factor, dp and then p are multiplied by it. */
static void weigh_again(const attention *a, const backward *s, int64_t c, int64_t keys, sight seen,
                        const float *factor)
{
    lanes lse = lanes_load(s->lse + c), dot = lanes_load(s->dot + c), bent = dot;
    const float cap = a->cap;
    const int rounding = rounds(&a->s);
    for (int64_t j = 0; j < keys; j++) {
        lanes p = lanes_exp(score(a, s->p, j, c, seen, cap, &bent) - lse);
        lanes dp = lanes_load(s->ds + j * BLOCK + c);
        if (factor) dp *= lanes_load(factor + j * BLOCK + c);
        lanes ds = p * (dp - dot) * lanes_set(a->scale);
        if (cap > 0) ds *= lanes_fma(-bent, bent, lanes_set(1));
        if (factor) p *= lanes_load(factor + j * BLOCK + c);
        lanes_store(s->p + j * BLOCK + c, rounding ? rounded(p) : p);
        lanes_store(s->ds + j * BLOCK + c, rounding ? rounded(ds) : ds);
    }
}

static int64_t regions(const attention *a) { return (a->blocks + REGION - 1) / REGION; }

/* Add the part of head h and query block i to dq, dkey and dvalue for key
 * block j, which is loaded. */
static void backward_head(const attention *a, const backward *s, int64_t b, int64_t h, int64_t i,
                          int64_t j, int first)
{
    int64_t from = i * BLOCK, rows = zk_least(BLOCK, a->T - from), padded = rounded_up(&a->s, rows);
    int64_t keys = zk_least(BLOCK, a->T - j * BLOCK), line = (b * a->H + h) * a->T + from;
    int64_t m = b * a->T + from, at = m * a->stride + h * a->D, pad = a->s.pad;
    const shape *of = &a->s;
    sight seen = sight_of(a, s->reach, b, i, j);
    const float *factor = drop_factors(a, s->factor, b, h, i, j);
    load_block(of, &s->q, TURNED | RIGHT, a->qkv, at, a->stride, rows);
    load_block(of, &s->dy, TURNED | RIGHT, a->dy, (m * a->H + h) * a->D, a->H * a->D, rows);
    load_rows(of, s->dq, a->sum, ZK_F32, at, a->stride, first ? 0 : rows);
    load_line(s->lse, a->lse + line, rows);
    load_line(s->dot, a->dot + line, rows);
    scores(a, s->p, &s->key, &s->q, keys, padded);
    scores(a, s->ds, &s->value, &s->dy, keys, padded);
    for (int64_t c = 0; c < padded; c += LANES) weigh_again(a, s, c, keys, seen, factor);
    multiply(of, s->dvalue, pad, rows_of_square(of, s->p, s->words), s->dy.right, pad, keys, pad,
             terms(of, rows), 1);
    multiply(of, s->dkey, pad, rows_of_square(of, s->ds, s->words), s->q.right, pad, keys, pad,
             terms(of, rows), 1);
    multiply(of, s->dq, pad, columns_of_square(of, s->ds, s->words), s->key.right, pad, rows, pad,
             terms(of, keys), 1);
    store_rows(a, s->dq, a->sum, ZK_F32, at, a->stride, rows);
}

/* Return the end of those of the query blocks i .. end-1 that see a key of block j. */
static int64_t end_of_sight(const attention *a, int64_t b, int64_t i, int64_t end, int64_t j)
{
    while (end > i && first_key(a, b, (end - 1) * BLOCK) >= (j + 1) * BLOCK) end--;
    return end;
}

/* Add the part of query blocks i .. end-1 to dkey and dvalue of key block j of group g. */
static void backward_key(const attention *a, const backward *s, int64_t b, int64_t g, int64_t i,
                         int64_t end, int64_t j, int first)
{
    int64_t keys = zk_least(BLOCK, a->T - j * BLOCK), heads = a->H / a->G;
    int64_t key = (b * a->T + j * BLOCK) * a->stride + (a->H + g) * a->D, value = key + a->G * a->D;
    load_block(&a->s, &s->key, LEFT | RIGHT, a->qkv, key, a->stride, keys);
    load_block(&a->s, &s->value, LEFT, a->qkv, value, a->stride, keys);
    load_rows(&a->s, s->dkey, a->sum, ZK_F32, key, a->stride, first ? 0 : keys);
    load_rows(&a->s, s->dvalue, a->sum, ZK_F32, value, a->stride, first ? 0 : keys);
    for (; i < end; i++)
        for (int64_t h = g * heads; h < (g + 1) * heads; h++)
            backward_head(a, s, b, h, i, j, first && j % REGION == 0);
    store_rows(a, s->dkey, a->sum, ZK_F32, key, a->stride, keys);
    store_rows(a, s->dvalue, a->sum, ZK_F32, value, a->stride, keys);
}

/* Task (b, group, square of REGION x REGION blocks), `apart` regions below the diagonal. Tasks at
 * the same distance share no query and no key, so no two of them write the same element. */
static void backward_task(void *arg, int64_t task, int thread)
{
    const attention *a = arg;
    int64_t n = regions(a) - a->apart, j = task % n * REGION, i = j + a->apart * REGION;
    int64_t g = task / n % a->G, b = task / n / a->G, end = zk_least(i + REGION, a->blocks);
    backward s = backward_space(a, thread);
    tiles_begin_for(&a->s);
    for (int64_t last = j + REGION; j < last && j < end; j++) {
        /* on the diagonal take all blocks: the first block of a query starts its dq */
        int64_t from = i > j ? i : j, to = a->apart ? end_of_sight(a, b, from, end, j) : end;
        if (from < to) backward_key(a, &s, b, g, from, to, j, a->apart == 0);
    }
    tiles_end_for(&a->s);
}

/* Compute dot for all heads of one row. */
static void dot_task(void *arg, int64_t m, int thread)
{
    const attention *a = arg;
    (void)thread;
    for (int64_t h = 0; h < a->H; h++) {
        v16 sum = set16(0);
        for (int64_t d = 0; d < a->D; d += 16) {
            int64_t at = (m * a->H + h) * a->D + d, n = a->D - d;
            sum = fma16(zk_get(a->dy, at, a->k->dtype, n), zk_get(a->y, at, a->k->dtype, n), sum);
        }
        a->dot[(m / a->T * a->H + h) * a->T + m % a->T] = sum16(sum);
    }
}

/* Round one row of the gradient. */
static void round_row(void *arg, int64_t m, int thread)
{
    const attention *a = arg;
    (void)thread;
    for (int64_t c = 0; c < a->stride; c += LANES) {
        int64_t at = m * a->stride + c, n = a->stride - c;
        lanes_put(a->out, at, a->k->dtype, lanes_get(a->sum, at, ZK_F32, n), n);
    }
}

/* scratch: as zk.h says of zk_attention_bwd */
static void attend_back(attention a, real *dqkv, const real *dy, const real *y, const real *qkv,
                        const float *lse, float *scratch)
{
    const int dtype = a.k->dtype;
    a.out = dqkv;
    a.qkv = qkv;
    a.y = y;
    a.dy = dy;
    a.lse = (float *)lse;
    a.dot = scratch;
    a.sum = dtype == ZK_F32 ? dqkv : scratch + a.B * a.H * a.T;
    zk_for(a.k, a.B * a.T, dot_task, &a);
    for (a.apart = 0; a.apart < regions(&a); a.apart++)
        zk_for(a.k, a.B * a.G * (regions(&a) - a.apart), backward_task, &a);
    if (dtype != ZK_F32) zk_for(a.k, a.B * a.T, round_row, &a);
}

void ZK(zk_attention_capped_bwd)(zk *k, const zk_launch *L, real *dqkv, const real *dy,
                                 const real *y, const real *qkv, const float *lse, float *scratch,
                                 const int32_t *position, int64_t B, int64_t T, int64_t H,
                                 int64_t G, int64_t D, int64_t window, float scale, float cap)
{
    (void)L;
    attend_back(attention_of(k, position, B, T, H, G, D, window, scale, cap), dqkv, dy, y, qkv, lse,
                scratch);
}

void ZK(zk_attention_dropped_bwd)(zk *k, const zk_launch *L, real *dqkv, const real *dy,
                                  const real *y, const real *qkv, const float *lse, float *scratch,
                                  const int32_t *position, const int64_t *key, int64_t B, int64_t T,
                                  int64_t H, int64_t G, int64_t D, int64_t window, int64_t place,
                                  int64_t head, float scale, float p)
{
    attention a = attention_of(k, position, B, T, H, G, D, window, scale, 0);
    (void)L;
    attend_back(dropping(a, key, place, head, p), dqkv, dy, y, qkv, lse, scratch);
}

void ZK(zk_attention_local_bwd)(zk *k, const zk_launch *L, real *dqkv, const real *dy,
                                const real *y, const real *qkv, const float *lse, float *scratch,
                                const int32_t *position, int64_t B, int64_t T, int64_t H, int64_t G,
                                int64_t D, int64_t window, float scale)
{
    ZK(zk_attention_capped_bwd)(k, L, dqkv, dy, y, qkv, lse, scratch, position, B, T, H, G, D,
                                window, scale, 0);
}

void ZK(zk_attention_bwd)(zk *k, const zk_launch *L, real *dqkv, const real *dy, const real *y,
                          const real *qkv, const float *lse, float *scratch, int64_t B, int64_t T,
                          int64_t H, int64_t G, int64_t D, float scale)
{
    ZK(zk_attention_local_bwd)(k, L, dqkv, dy, y, qkv, lse, scratch, NULL, B, T, H, G, D, T, scale);
}
