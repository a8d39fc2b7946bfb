/* act.c -- elementwise kernels: GELU, squared ReLU, scaling, caps of logits, SwiGLU, GeGLU,
 * dropout, addition, rounding, and weights from their quantized form.
 *
 *   gelu(x) = x * sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3); erf: x/2 * (1 + erf(x/sqrt(2)))
 *   relu2(x) = max(x, 0)^2; swiglu(gate, up) = gate * sigmoid(gate) * up;
 *   geglu(gate, up) = gelu(gate) * up
 *   dropout(x) = x / (1 - p) if kept, else 0
 *
 * Invariants
 *  1. The result for an element depends on that element alone, with the same bits in a whole
 *     register and in the ragged tail.
 *  2. A task reads the elements of a register before it writes them, so an output may be an input
 *     where zk.h allows it.
 */
#include "../drop.h"
#include "../quantized.h"
#include "part.h"
#include "philox.h"

enum { PIECE = 1 << 14, ROWS = 16 }; /* elements and rows of a task, by default */

typedef struct act {
    real *y; /* or dx */
    const real *x, *dy, *b;
    int64_t n, piece, F;
    int dtype, kind;
    float scale, cap;
} act;

ZK_INLINE lanes sigmoid(lanes x) { return lanes_set(1) / (lanes_set(1) + lanes_exp(-x)); }

/* ---- GELU. The tanh form is computed as x * sigmoid(2u), which keeps its relative accuracy
 * where 1 + tanh(u) cancels. From |x| = 16 on the sigmoid is 0 or 1 in f32, so x is clamped
 * there and u stays finite. */
static const float ROOT = 1.59576912160573071176f; /* 2 sqrt(2/pi) */
static const float CUBE = 0.044715f;

ZK_INLINE lanes clamp(lanes x) { return lanes_min(lanes_max(x, lanes_set(-16)), lanes_set(16)); }

ZK_INLINE lanes gelu(lanes x, int kind)
{
    if (kind == ZK_GELU_ERF)
        return lanes_set(0.5f) * x *
               (lanes_set(1) + lanes_erf(x * lanes_set(0.70710678118654752440f)));
    lanes t = clamp(x);
    return x * sigmoid(lanes_set(ROOT) * lanes_fma(lanes_set(CUBE) * t, t * t, t));
}

/* derivative of gelu */
ZK_INLINE lanes slope_of(lanes x, int kind)
{
    if (kind == ZK_GELU_ERF) {
        lanes share = lanes_fma(lanes_set(0.5f), lanes_erf(x * lanes_set(0.70710678118654752440f)),
                                lanes_set(0.5f));
        lanes density = lanes_set(0.39894228040143267794f) * lanes_exp(lanes_set(-0.5f) * x * x);
        return lanes_fma(x, density, share);
    }
    lanes t = clamp(x), s = sigmoid(lanes_set(ROOT) * lanes_fma(lanes_set(CUBE) * t, t * t, t));
    lanes inner = lanes_set(ROOT) * lanes_fma(lanes_set(3 * CUBE) * t, t, lanes_set(1));
    return lanes_fma(x * s * (lanes_set(1) - s), inner, s);
}

static void gelu_fwd_task(void *arg, int64_t task, int thread)
{
    const act *a = arg;
    int64_t end = zk_least((task + 1) * a->piece, a->n);
    (void)thread;
    for (int64_t i = task * a->piece; i < end; i += LANES)
        lanes_put(a->y, i, a->dtype, gelu(lanes_get(a->x, i, a->dtype, end - i), a->kind), end - i);
}

void ZK(zk_gelu_fwd)(zk *k, const zk_launch *L, real *y, const real *x, int64_t n, int kind)
{
    act a = {
        .y = y, .x = x, .n = n, .kind = kind, .dtype = k->dtype, .piece = zk_tile(k, L, 0, PIECE)};
    zk_for(k, zk_pieces(n, a.piece), gelu_fwd_task, &a);
}

static void gelu_bwd_task(void *arg, int64_t task, int thread)
{
    const act *a = arg;
    int64_t end = zk_least((task + 1) * a->piece, a->n);
    (void)thread;
    for (int64_t i = task * a->piece; i < end; i += LANES) {
        lanes slope = slope_of(lanes_get(a->x, i, a->dtype, end - i), a->kind);
        lanes_put(a->y, i, a->dtype, lanes_get(a->dy, i, a->dtype, end - i) * slope, end - i);
    }
}

void ZK(zk_gelu_bwd)(zk *k, const zk_launch *L, real *dx, const real *dy, const real *x, int64_t n,
                     int kind)
{
    act a = {.y = dx,
             .x = x,
             .dy = dy,
             .n = n,
             .kind = kind,
             .dtype = k->dtype,
             .piece = zk_tile(k, L, 0, PIECE)};
    zk_for(k, zk_pieces(n, a.piece), gelu_bwd_task, &a);
}

/* ---- squared ReLU; NaN stays NaN */
ZK_INLINE lanes relu(lanes x) { return lanes_max(lanes_set(0), x); }

static void relu2_fwd_task(void *arg, int64_t task, int thread)
{
    const act *a = arg;
    int64_t end = zk_least((task + 1) * a->piece, a->n);
    (void)thread;
    for (int64_t i = task * a->piece; i < end; i += LANES) {
        lanes x = relu(lanes_get(a->x, i, a->dtype, end - i));
        lanes_put(a->y, i, a->dtype, x * x, end - i);
    }
}

void ZK(zk_relu2_fwd)(zk *k, const zk_launch *L, real *y, const real *x, int64_t n)
{
    act a = {.y = y, .x = x, .n = n, .piece = zk_tile(k, L, 0, PIECE), .dtype = k->dtype};
    zk_for(k, zk_pieces(n, a.piece), relu2_fwd_task, &a);
}

static void relu2_bwd_task(void *arg, int64_t task, int thread)
{
    const act *a = arg;
    int64_t end = zk_least((task + 1) * a->piece, a->n);
    (void)thread;
    for (int64_t i = task * a->piece; i < end; i += LANES) {
        lanes slope = lanes_set(2) * relu(lanes_get(a->x, i, a->dtype, end - i));
        lanes_put(a->y, i, a->dtype, lanes_get(a->dy, i, a->dtype, end - i) * slope, end - i);
    }
}

void ZK(zk_relu2_bwd)(zk *k, const zk_launch *L, real *dx, const real *dy, const real *x, int64_t n)
{
    act a = {
        .y = dx, .x = x, .dy = dy, .n = n, .piece = zk_tile(k, L, 0, PIECE), .dtype = k->dtype};
    zk_for(k, zk_pieces(n, a.piece), relu2_bwd_task, &a);
}

/* ---- scaling */
static void scale_task(void *arg, int64_t task, int thread)
{
    const act *a = arg;
    int64_t end = zk_least((task + 1) * a->piece, a->n);
    (void)thread;
    for (int64_t i = task * a->piece; i < end; i += LANES) {
        lanes x = lanes_get(a->x, i, a->dtype, end - i);
        lanes_put(a->y, i, a->dtype, lanes_set(a->scale) * x, end - i);
    }
}

void ZK(zk_scale_fwd)(zk *k, const zk_launch *L, real *y, const real *x, int64_t n, float scale)
{
    act a = {.y = y,
             .x = x,
             .n = n,
             .piece = zk_tile(k, L, 0, PIECE),
             .dtype = k->dtype,
             .scale = scale};
    zk_for(k, zk_pieces(n, a.piece), scale_task, &a);
}

void ZK(zk_scale_bwd)(zk *k, const zk_launch *L, real *dx, const real *dy, int64_t n, float scale)
{
    ZK(zk_scale_fwd)(k, L, dx, dy, n, scale);
}

/* ---- caps of logits */
static void softcap_task(void *arg, int64_t task, int thread)
{
    const act *a = arg;
    int64_t end = zk_least((task + 1) * a->piece, a->n);
    lanes cap = lanes_set(a->cap);
    (void)thread;
    for (int64_t i = task * a->piece; i < end; i += LANES) {
        lanes x = lanes_get(a->x, i, a->dtype, end - i);
        lanes_put(a->y, i, a->dtype, cap * lanes_tanh(x / cap), end - i);
    }
}

void ZK(zk_softcap)(zk *k, const zk_launch *L, real *y, const real *x, int64_t M, int64_t V,
                    float cap)
{
    act a = {.y = y,
             .x = x,
             .n = M * zk_pieces(V, ZK_VOCAB) * ZK_VOCAB,
             .piece = zk_tile(k, L, 0, PIECE),
             .dtype = k->dtype,
             .cap = cap};
    zk_for(k, zk_pieces(a.n, a.piece), softcap_task, &a);
}

/* ---- gates: y = f(gate) * up, where f is gelu by tanh or silu(g) = g * s with s = sigmoid(g), the
 * slope of which is s + g s (1 - s) */
enum { SILU = ZK_GELU_ERF + 1 };

ZK_INLINE lanes gate_of(lanes x, int kind) { return kind == SILU ? x * sigmoid(x) : gelu(x, kind); }

ZK_INLINE lanes gate_slope(lanes x, int kind)
{
    if (kind != SILU) return slope_of(x, kind);
    lanes s = sigmoid(x);
    return lanes_fma(x * s, lanes_set(1) - s, s);
}

static void gated_fwd_task(void *arg, int64_t task, int thread)
{
    const act *a = arg;
    (void)thread;
    for (int64_t m = task * a->piece; m < zk_least((task + 1) * a->piece, a->n); m++)
        for (int64_t i = 0; i < a->F; i += LANES) {
            lanes gate = lanes_get(a->x, 2 * m * a->F + i, a->dtype, a->F - i);
            lanes up = lanes_get(a->x, (2 * m + 1) * a->F + i, a->dtype, a->F - i);
            lanes_put(a->y, m * a->F + i, a->dtype, gate_of(gate, a->kind) * up, a->F - i);
        }
}

static void gated_bwd_task(void *arg, int64_t task, int thread)
{
    const act *a = arg;
    (void)thread;
    for (int64_t m = task * a->piece; m < zk_least((task + 1) * a->piece, a->n); m++)
        for (int64_t i = 0; i < a->F; i += LANES) {
            int64_t at = 2 * m * a->F + i, n = a->F - i;
            lanes gate = lanes_get(a->x, at, a->dtype, n);
            lanes up = lanes_get(a->x, at + a->F, a->dtype, n);
            lanes dy = lanes_get(a->dy, m * a->F + i, a->dtype, n);
            lanes_put(a->y, at, a->dtype, dy * up * gate_slope(gate, a->kind), n);
            lanes_put(a->y, at + a->F, a->dtype, dy * gate_of(gate, a->kind), n);
        }
}

/* Run a task over M rows of gates of F columns. dy: NULL forward. */
static void gated(zk *k, const zk_launch *L, void (*task)(void *, int64_t, int), real *y,
                  const real *dy, const real *x, int64_t M, int64_t F, int kind)
{
    act a = {.y = y,
             .x = x,
             .dy = dy,
             .n = M,
             .F = F,
             .kind = kind,
             .dtype = k->dtype,
             .piece = zk_tile(k, L, 0, ROWS)};
    zk_for(k, zk_pieces(M, a.piece), task, &a);
}

void ZK(zk_swiglu_fwd)(zk *k, const zk_launch *L, real *y, const real *x, int64_t M, int64_t F)
{
    gated(k, L, gated_fwd_task, y, NULL, x, M, F, SILU);
}

void ZK(zk_swiglu_bwd)(zk *k, const zk_launch *L, real *dx, const real *dy, const real *x,
                       int64_t M, int64_t F)
{
    gated(k, L, gated_bwd_task, dx, dy, x, M, F, SILU);
}

void ZK(zk_geglu_fwd)(zk *k, const zk_launch *L, real *y, const real *x, int64_t M, int64_t F)
{
    gated(k, L, gated_fwd_task, y, NULL, x, M, F, ZK_GELU_TANH);
}

void ZK(zk_geglu_bwd)(zk *k, const zk_launch *L, real *dx, const real *dy, const real *x, int64_t M,
                      int64_t F)
{
    gated(k, L, gated_bwd_task, dx, dy, x, M, F, ZK_GELU_TANH);
}

/* ---- dropout. A task has elements of one sample and starts at a multiple of DRAWN. */
typedef struct dropout {
    real *y;
    const real *x;
    const int64_t *key; /* [B] */
    int64_t n, piece;   /* elements of a sample, of a task */
    drop d;
    int dtype;
} dropout;

static void dropout_task(void *arg, int64_t task, int thread)
{
    const dropout *a = arg;
    int64_t pieces = zk_pieces(a->n, a->piece), b = task / pieces, from = task % pieces * a->piece;
    int64_t end = zk_least(from + a->piece, a->n);
    uint32_t drawn[DRAWN];
    (void)thread;
    for (int64_t i = from; i < end; i += LANES) {
        int64_t at = b * a->n + i;
        lanes x = lanes_get(a->x, at, a->dtype, end - i);
        if (a->key[b]) {
            lanes_bits word;
            if (i % DRAWN == 0)
                words(drawn, 4, 1, (uint64_t)a->key[b], a->d.place, (uint64_t)i / 4);
            memcpy(&word, drawn + i % DRAWN, sizeof word);
            lanes_mask kept = (lanes_mask)(word >= a->d.least);
            x = lanes_select(kept, x * lanes_set(a->d.scale), lanes_set(0));
        }
        lanes_put(a->y, at, a->dtype, x, end - i);
    }
}

void ZK(zk_dropout_fwd)(zk *k, const zk_launch *L, real *y, const real *x, const int64_t *key,
                        int64_t B, int64_t n, int64_t place, float p)
{
    int64_t piece = zk_pieces(zk_tile(k, L, 0, PIECE), DRAWN) * DRAWN;
    dropout a = {y, x, key, n, piece, drop_of(place, p), k->dtype};
    zk_for(k, B * zk_pieces(n, piece), dropout_task, &a);
}

void ZK(zk_dropout_bwd)(zk *k, const zk_launch *L, real *dx, const real *dy, const int64_t *key,
                        int64_t B, int64_t n, int64_t place, float p)
{
    ZK(zk_dropout_fwd)(k, L, dx, dy, key, B, n, place, p);
}

/* ---- addition and rounding */
static void add_task(void *arg, int64_t task, int thread)
{
    const act *a = arg;
    int64_t end = zk_least((task + 1) * a->piece, a->n);
    (void)thread;
    for (int64_t i = task * a->piece; i < end; i += LANES) {
        lanes sum = lanes_get(a->x, i, a->dtype, end - i) + lanes_get(a->b, i, a->dtype, end - i);
        lanes_put(a->y, i, a->dtype, sum, end - i);
    }
}

void ZK(zk_add)(zk *k, const zk_launch *L, real *y, const real *a, const real *b, int64_t n)
{
    act s = {.y = y, .x = a, .b = b, .n = n, .piece = zk_tile(k, L, 0, PIECE), .dtype = k->dtype};
    zk_for(k, zk_pieces(n, s.piece), add_task, &s);
}

static void round_task(void *arg, int64_t task, int thread)
{
    const act *a = arg;
    int64_t end = zk_least((task + 1) * a->piece, a->n);
    (void)thread;
    for (int64_t i = task * a->piece; i < end; i += LANES)
        lanes_put(a->y, i, a->dtype, lanes_get(a->x, i, ZK_F32, end - i), end - i);
}

void ZK(zk_round)(zk *k, const zk_launch *L, real *y, const float *x, int64_t n)
{
    act a = {.y = y, .x = x, .n = n, .piece = zk_tile(k, L, 0, PIECE), .dtype = k->dtype};
    zk_for(k, zk_pieces(n, a.piece), round_task, &a);
}

/* ---- quantized weights, a block of ZK_NF4_BLOCK elements at a time */
typedef struct quantized {
    real *y;
    const uint32_t *w;
    int64_t n, piece;
    int dtype, format;
} quantized;

/* Write the weights from element i on to x[ZK_NF4_BLOCK]. */
static void dequantize_block(float *x, const quantized *a, int64_t i)
{
    int64_t each = zk_chunk(a->format), first = i - i % each, size = zk_least(each, a->n - first);
    const uint32_t *w = a->w + first / each * zk_chunk_bytes(a->format, each) / 4;
    if (a->format == ZK_INT8) {
        float scale = zk_float(w, ZK_INT8_CHUNK);
        const int8_t *q = (const int8_t *)w + (i - first);
        for (int j = 0; j < ZK_NF4_BLOCK; j++) x[j] = (float)q[j] * scale;
        return;
    }
    int64_t block = (i - first) / ZK_NF4_BLOCK;
    const uint8_t *q = (const uint8_t *)w + ZK_NF4_BLOCK / 2 * block;
    float factor = zk_nf4_factor(w, zk_nf4_blocks(size), block), of[16];
    for (uint32_t k = 0; k < 16; k++) of[k] = zk_nf4_level(k) * factor;
    for (int j = 0; j < ZK_NF4_BLOCK; j++) x[j] = of[q[j / 2] >> (j % 2 ? 0 : 4) & 15];
}

static void dequantize_task(void *arg, int64_t task, int thread)
{
    const quantized *a = arg;
    int64_t end = zk_least((task + 1) * a->piece, a->n);
    float x[ZK_NF4_BLOCK];
    (void)thread;
    for (int64_t i = task * a->piece; i < end; i += ZK_NF4_BLOCK) {
        dequantize_block(x, a, i);
        for (int j = 0; j < ZK_NF4_BLOCK && i + j < end; j += LANES)
            lanes_put(a->y, i + j, a->dtype, lanes_get(x, j, ZK_F32, LANES), end - i - j);
    }
}

void ZK(zk_dequantize)(zk *k, const zk_launch *L, real *y, const real *w, int64_t n, int64_t m,
                       int format)
{
    int64_t piece = zk_pieces(zk_tile(k, L, 0, PIECE), ZK_NF4_BLOCK) * ZK_NF4_BLOCK;
    quantized a = {y, w, n, piece, k->dtype, format};
    (void)m;
    zk_for(k, zk_pieces(n, piece), dequantize_task, &a);
}
