/* zk.h -- the kernels a training program calls; the same names on every target.
 *
 * Invariants
 *  1. No kernel allocates, blocks on another rank, or keeps state outside `zk`.
 *  2. A kernel's bits depend on its operands, shapes and, in bf16, the order of products alone; on
 *     a GPU on kernel object and launch: never on threads. A CPU splits work over rows and columns
 *     of the output, never over a summed index.
 *  3. `real` is the program's storage type (float, bf16 or f16, fixed by zk_open): parameters,
 *     activations, their gradients. Arithmetic is f32; a result is rounded once, when stored.
 *  4. On a CPU a linear's output element is one FMA chain in ascending k; in bf16 see zk_products.
 *     Row reductions use 16 lanes (element i goes to lane i % 16, ascending) folded
 *     8,4,2,1. On a GPU the launch table fixes their order.
 *  5. Outputs come first and never alias inputs unless the kernel says so.
 *
 * Letters: B batch, T sequence, M = B*T rows, C width, V vocab, H heads, D head size.
 */
#ifndef ZK_H
#define ZK_H
#include <stddef.h>
#include <stdint.h>

#define ZK_ABI 18

/* one queue's kernel context: threads on a CPU, stream and handles on a GPU */
typedef struct zk zk;
typedef void real; /* float, bf16 or f16 */

enum { ZK_F32 = 0, ZK_BF16 = 1, ZK_F16 = 2 }; /* zk_open's `dtype` */
enum { ZK_IN_OUT = 0, ZK_OUT_IN = 1 };        /* a linear's weight: [in,out] or [out,in] */
/* Rows by token (of an embedding, a head) and columns of logits are a multiple of so many: 16 bytes
 * of halves. Rows beyond the vocabulary are zero. */
enum { ZK_VOCAB = 8 };
enum { ZK_GELU_TANH = 0, ZK_GELU_ERF = 1 };
enum { ZK_LINE = 0, ZK_COSINE = 1, ZK_LOG = 2, ZK_INVERSE = 3 }; /* curves of a zk_phase */

/* One launch on a GPU: blocks in x, y and z, threads of a block, bytes of dynamic shared memory. */
typedef struct zk_grid {
    int32_t x, y, z, block, shared;
} zk_grid;

/* How one (kernel, shape) runs on one target. train.c passes an array with a column per target of
 * the spec; a kernel reads column `zk_open(column)`. tile, CPU: {rows, columns, depth} of a linear,
 * {rows per task} elsewhere; GPU: of the kernel's own meaning. part: the launches of the call,
 * in order. margin: multiprocessors that a GPU's GEMM leaves to others, fewer than there are. */
enum { ZK_PARTS = 4 };
typedef struct zk_launch {
    int32_t tile[3];
    zk_grid part[ZK_PARTS];
    int32_t margin;
} zk_launch;

/* A run of equal tensors in a flat buffer: instance i (of `count`) starts at element at + i*stride
 * and has `elems` elements; its random numbers and its hash are keyed by key + i*key_stride. */
typedef struct zk_span {
    int64_t at, elems, count, stride;
    int64_t key, key_stride;
    float mean, std;    /* initial values: mean + std * normal; std < 0: uniform in mean +- std */
    double rate, decay; /* its factor of lr, and its weight decay */
} zk_span;

/* A piece of a schedule: up to the step before `until` (0: for ever) a value goes from `from` to
 * `to` as x = (step - origin) / span does from 0 to 1, along a curve, in so many stairs (0: none).
 * span may be negative: then x goes from 1 to 0. */
typedef struct zk_phase {
    int64_t until, origin, span;
    double from, to;
    int32_t curve, stairs;
} zk_phase;

enum { ZK_PHASES = 4 };

/* What gradients are multiplied by so that halves hold them: `first`; 0: nothing. window 0: always
 * that. Else it is halved, down to `least`, where a gradient is not finite, but for the first
 * hysteresis - 1 times. After `window` steps in a row without that it doubles, and hysteresis is
 * whole again; with consecutive, it is after every step. */
typedef struct zk_scaler {
    double first, least;
    int64_t window, hysteresis, consecutive;
} zk_scaler;

/* What is fixed about the optimizer. */
typedef struct zk_recipe {
    zk_phase rate[ZK_PHASES], momentum[ZK_PHASES]; /* of lr, and of beta1 */
    double beta2, eps, clip;                       /* clip 0: none */
    int32_t rule;                                  /* ZK_ADAMW ... of update.h */
    int32_t moments;                               /* how m and v are stored: ZK_F32 ... */
    int64_t rows;                                  /* M: leaves carry d(sum of losses)/M */
    uint64_t seed;                                 /* of stochastic rounding */
    zk_scaler scaler;
} zk_recipe;

/* Why a step changed no weight: its gradient is not finite, or it has no valid token; its gradient
 * is not finite, and a lower scale comes next; or there is no lower one. */
enum { ZK_APPLIED = 0, ZK_FAULTY = 1, ZK_RESCALED = 2, ZK_LOWEST = 3 };

/* What changes from step to step; lives in the arena, so that a captured launch never changes. */
typedef struct zk_ctl {
    int64_t step;      /* 1 in the first step; counted by zk_begin */
    int64_t applied;   /* steps not skipped: what schedules and bias corrections count */
    double beta1;      /* of this step */
    double loss, norm; /* of the last step: mean over valid tokens; gradient norm before clipping */
    int64_t valid;     /* valid tokens in the global batch */
    int64_t skipped;   /* the last step: ZK_APPLIED ... */
    float lr, factor, bias1, bias2;
    int64_t leaves;     /* of this step that are pushed on the sums; counted by zk_count */
    double scale;       /* of this step's gradients */
    int64_t clean;      /* steps in a row with a finite gradient, since it last rose */
    int64_t hysteresis; /* what is left of the scaler's */
} zk_ctl;

/* Exact sums as integers: an f64 is split into 32-bit limbs of a fixed-point number held in int64s,
 * so that adding over blocks, threads and ranks is exact in any order. */
enum {
    ZK_LIMBS = 28,
    ZK_NORM = 0,
    ZK_LOSS = 32,
    ZK_VALID = 64,
    ZK_NONFINITE = 65,
    ZK_LOST = 66,
    ZK_SUMS = 72
};

/* ---- context */
/* stream: the target's queue; device, host: scratch, the plan's classes `workspace` and
 * `pinned_scratch` (all NULL on a CPU; device NULL for a queue that runs no linear). Returns NULL
 * and sets *why on failure. */
zk *zk_open(void *stream, void *device, void *host, int dtype, int column, int threads,
            const char **why);
void zk_close(zk *k);
const char *zk_target(void);      /* "cpu", or what the present device is: "sm_80", "sm_90" ... */
const char *zk_object(void);      /* what ranks must agree on: "avx512", "sm_90, 132 SMs, ..." */
int64_t zk_overhead(int threads); /* bytes that zk_open takes outside the arena */
/* The order in which a context's products of bf16 are summed on a CPU: ZK_PAIRS, with which it
 * begins, the odd k of a pair first as vdpbf16ps has it; or ZK_TILES, in groups of 32 as tdpbf16ps
 * has them. Every object has both. Below 0: none is set. Returns the one that is faster here. */
enum { ZK_PAIRS = 0, ZK_TILES = 1 };
int zk_products(zk *k, int order);
/* The table of algorithms for a GPU's products, in file `path`, for all of the process; a CPU has
 * none. ZK_TAKE: products take theirs from it. ZK_TIME: from here on each is timed when it is
 * first run. ZK_END: after the last of them; a table of timed ones is written. Returns 0; 1 and
 * what there is to say in why[n]; -1 and what is wrong. */
enum { ZK_TAKE = 0, ZK_TIME = 1, ZK_END = 2 };
int zk_gemms(int what, const char *path, char *why, size_t n);

/* ---- embedding */
/* y[M,C] = w[token[M],:] + (p ? p[t,:] : 0) */
void zk_embed_fwd(zk *k, const zk_launch *L, real *y, const int32_t *token, const real *w,
                  const real *p, int64_t B, int64_t T, int64_t C);
/* dw[V,C] from dy[M,C], rows added in token order in f32. add = 0: dw is real, every row is written
 * once (0 where no token); add = 1: dw is float and is added to. index: int32 scratch [V+1+M]. */
void zk_embed_bwd(zk *k, const zk_launch *L, void *dw, const real *dy, const int32_t *token,
                  int32_t *index, int64_t M, int64_t V, int64_t C, int add);
/* dp[P,C]: row t < T = sum over b ascending of dy[b,t,:]; rows T..P-1 = 0 */
void zk_position_bwd(zk *k, const zk_launch *L, real *dp, const real *dy, int64_t B, int64_t T,
                     int64_t C, int64_t P);

/* Packed: row m takes p's row position[m], which is below the rows of p; its gradient dp[P,C] is
 * summed as zk_embed_bwd's. index: int32 scratch [P+1+M] */
void zk_embed_packed_fwd(zk *k, const zk_launch *L, real *y, const int32_t *token,
                         const int32_t *position, const real *w, const real *p, int64_t M,
                         int64_t C);
void zk_position_packed_bwd(zk *k, const zk_launch *L, real *dp, const real *dy,
                            const int32_t *position, int32_t *index, int64_t M, int64_t C,
                            int64_t P);

/* ---- norms. stat: float [M,2] (mean, 1/std) for layernorm, [M] (1/rms) for rmsnorm;
 * b and db may be NULL: no bias. `more` [M,C] may be NULL; else forward leaves x + more in `sum`
 * [M,C] and takes the norm of that, and backward adds it to dx: the bits of zk_add before or
 * after */
void zk_layernorm_fwd(zk *k, const zk_launch *L, real *y, float *stat, real *sum, const real *x,
                      const real *more, const real *w, const real *b, int64_t M, int64_t C,
                      float eps);
/* dw, db real [C], summed over rows in f32, ascending on a CPU, NULL: not wanted, as of all norms;
 * scratch: float [2, C] */
void zk_layernorm_bwd(zk *k, const zk_launch *L, real *dx, real *dw, real *db, const real *dy,
                      const real *more, const real *x, const float *stat, const real *w,
                      float *scratch, int64_t M, int64_t C);
void zk_rmsnorm_fwd(zk *k, const zk_launch *L, real *y, float *stat, real *sum, const real *x,
                    const real *more, const real *w, int64_t M, int64_t C, float eps);
void zk_rmsnorm_bwd(zk *k, const zk_launch *L, real *dx, real *dw, const real *dy, const real *more,
                    const real *x, const float *stat, const real *w, float *scratch, int64_t M,
                    int64_t C);
/* RMS norm of every q and k head: in, y [M, (H + 2*G) * D] (q heads, k heads, v heads; v copied);
 * wq, wk [D]; stat: float [M, H + G]. */
void zk_qknorm_fwd(zk *k, const zk_launch *L, real *y, float *stat, const real *in, const real *wq,
                   const real *wk, int64_t M, int64_t H, int64_t G, int64_t D, float eps);
void zk_qknorm_bwd(zk *k, const zk_launch *L, real *din, real *dwq, real *dwk, const real *dy,
                   const real *in, const float *stat, const real *wq, const real *wk,
                   float *scratch, int64_t M, int64_t H, int64_t G, int64_t D);
/* The same of all q heads as one run, and of all k heads: wq [H * D], wk [G * D]; stat: float
 * [M, 2]. */
void zk_qknorm_whole_fwd(zk *k, const zk_launch *L, real *y, float *stat, const real *in,
                         const real *wq, const real *wk, int64_t M, int64_t H, int64_t G, int64_t D,
                         float eps);
void zk_qknorm_whole_bwd(zk *k, const zk_launch *L, real *din, real *dwq, real *dwk, const real *dy,
                         const real *in, const float *stat, const real *wq, const real *wk,
                         int64_t M, int64_t H, int64_t G, int64_t D);

/* ---- linear: y[M,N] = x[M,K] . w (+ b[N]), w by `layout` */
void zk_linear_fwd(zk *k, const zk_launch *L, real *y, const real *x, const real *w, const real *b,
                   int64_t M, int64_t N, int64_t K, int layout);
void zk_linear_bwd_x(zk *k, const zk_launch *L, real *dx, const real *dy, const real *w, int64_t M,
                     int64_t N, int64_t K, int layout);
/* full = 0: dw is real; full = 1: dw is float, not rounded. carry: dw, which is float, is added to,
 * on a CPU as if these rows followed those that made it, in bf16 an even number */
void zk_linear_bwd_w(zk *k, const zk_launch *L, void *dw, const real *dy, const real *x, int64_t M,
                     int64_t N, int64_t K, int layout, int full, int carry);
void zk_linear_bwd_b(zk *k, const zk_launch *L, real *db, const real *dy, int64_t M, int64_t N);
/* The same of rows [at, at + n) of a weight [N,K], which alone are at w and dw: columns
 * [at, at + n) of y and dy. dx is float, begun at 0 and carried on from slice to slice, in
 * ascending order: so on a CPU its bits are the whole's, once it is rounded. */
void zk_slice_fwd(zk *k, const zk_launch *L, real *y, const real *x, const real *w, const real *b,
                  int64_t M, int64_t N, int64_t K, int64_t at, int64_t n);
void zk_slice_bwd_x(zk *k, const zk_launch *L, float *dx, const real *dy, const real *w, int64_t M,
                    int64_t N, int64_t K, int64_t at, int64_t n);
void zk_slice_bwd_w(zk *k, const zk_launch *L, real *dw, const real *dy, const real *x, int64_t M,
                    int64_t N, int64_t K, int64_t at, int64_t n);

/* ---- an adapter of low rank on columns [at, at + n) of a linear's output: y = base, and there +=
 * scale * x[M,K] . w^T, w [n,K]; rounded once. y may be where base is. full, carry: as of a linear;
 * what is carried on is scaled first */
void zk_lora_fwd(zk *k, const zk_launch *L, real *y, const real *base, const real *x, const real *w,
                 int64_t M, int64_t N, int64_t K, int64_t at, int64_t n, float scale);
void zk_lora_bwd_x(zk *k, const zk_launch *L, real *dx, const real *dy, const real *w, int64_t M,
                   int64_t N, int64_t K, int64_t at, int64_t n, float scale);
void zk_lora_bwd_w(zk *k, const zk_launch *L, void *dw, const real *dy, const real *x, int64_t M,
                   int64_t N, int64_t K, int64_t at, int64_t n, float scale, int full, int carry);

/* ---- rotary positions, half rotation: pairs (i, i + D/2); table float [T, D/2, 2] (cos, sin) */
/* table from f64 inverse frequencies [D/2], by our own sine and cosine */
void zk_rope_table(zk *k, const zk_launch *L, float *table, const double *freq, int64_t T,
                   int64_t D);
/* turns q and k heads, copies v; layout as zk_qknorm_fwd. sign +1 forward, -1 backward. y may be
 * in. */
void zk_rope(zk *k, const zk_launch *L, real *y, const real *in, const float *table, int64_t B,
             int64_t T, int64_t H, int64_t G, int64_t D, int sign);
/* the same by position[m] < T */
void zk_rope_packed(zk *k, const zk_launch *L, real *y, const real *in, const float *table,
                    const int32_t *position, int64_t B, int64_t T, int64_t H, int64_t G, int64_t D,
                    int sign);

/* ---- causal attention without a T x T buffer. qkv [M, (H + 2*G) * D]; y [M, H*D]; lse float
 * [B,H,T]. Head h reads k, v head h / (H / G). */
void zk_attention_fwd(zk *k, const zk_launch *L, real *y, float *lse, const real *qkv, int64_t B,
                      int64_t T, int64_t H, int64_t G, int64_t D, float scale);
/* scratch: float [B*H*T + M * (H + 2*G) * D] */
void zk_attention_bwd(zk *k, const zk_launch *L, real *dqkv, const real *dy, const real *y,
                      const real *qkv, const float *lse, float *scratch, int64_t B, int64_t T,
                      int64_t H, int64_t G, int64_t D, float scale);
/* The same where a row sees its own document alone, and of that the last `window` rows, itself one
 * of them: row t those from t - min(position[b,t], window - 1) on. position: int32 [B,T] of rows in
 * their documents, 0, 1, 2 ...; NULL: a sample is one */
void zk_attention_local_fwd(zk *k, const zk_launch *L, real *y, float *lse, const real *qkv,
                            const int32_t *position, int64_t B, int64_t T, int64_t H, int64_t G,
                            int64_t D, int64_t window, float scale);
void zk_attention_local_bwd(zk *k, const zk_launch *L, real *dqkv, const real *dy, const real *y,
                            const real *qkv, const float *lse, float *scratch,
                            const int32_t *position, int64_t B, int64_t T, int64_t H, int64_t G,
                            int64_t D, int64_t window, float scale);

/* ---- elementwise, n elements */
void zk_gelu_fwd(zk *k, const zk_launch *L, real *y, const real *x, int64_t n, int kind);
/* dx may be dy */
void zk_gelu_bwd(zk *k, const zk_launch *L, real *dx, const real *dy, const real *x, int64_t n,
                 int kind);
/* y = max(x, 0)^2 */
void zk_relu2_fwd(zk *k, const zk_launch *L, real *y, const real *x, int64_t n);
/* dx may be dy */
void zk_relu2_bwd(zk *k, const zk_launch *L, real *dx, const real *dy, const real *x, int64_t n);
/* x [M, 2F] (gate, up); y [M, F] = silu(gate) * up */
void zk_swiglu_fwd(zk *k, const zk_launch *L, real *y, const real *x, int64_t M, int64_t F);
void zk_swiglu_bwd(zk *k, const zk_launch *L, real *dx, const real *dy, const real *x, int64_t M,
                   int64_t F);
/* Dropout of B samples of n elements: y = x / (1 - p) where an element stays, else 0, by words of
 * Philox 4x32-10 keyed by (key[b], place, element of the sample). key [B]; 0: all of it stays as it
 * is. y may be x */
void zk_dropout_fwd(zk *k, const zk_launch *L, real *y, const real *x, const int64_t *key,
                    int64_t B, int64_t n, int64_t place, float p);
/* the same of a gradient; dx may be dy */
void zk_dropout_bwd(zk *k, const zk_launch *L, real *dx, const real *dy, const int64_t *key,
                    int64_t B, int64_t n, int64_t place, float p);
/* y = a + b; y may be a or b */
void zk_add(zk *k, const zk_launch *L, real *y, const real *a, const real *b, int64_t n);
/* y = x, rounded to real; float to real. y and x may be the same address only when real is float */
void zk_round(zk *k, const zk_launch *L, real *y, const float *x, int64_t n);

/* ---- loss. target < 0: ignored. loss: float [M], 0 where ignored. logits: rows of V elements, and
 * up to a multiple of ZK_VOCAB of what is ignored. dlogits, alike: d(sum of losses)/rows, times
 * *scale (NULL: 1), 0 beyond V; may be logits; NULL: not wanted. rows: of a micro-batch, of which
 * these M may be a part. */
void zk_cross_entropy(zk *k, const zk_launch *L, float *loss, real *dlogits, const real *logits,
                      const int32_t *target, const double *scale, int64_t M, int64_t V,
                      int64_t rows);
/* y[C] = the last row of x [M,C] whose target is not ignored; the first row where all are */
void zk_pick(zk *k, const zk_launch *L, real *y, const real *x, const int32_t *target, int64_t M,
             int64_t C);
/* sums[ZK_LOSS..] += the micro-batch's loss (f64, on a CPU rows ascending); sums[ZK_VALID] += its
 * valid tokens; sets sums[ZK_LOST] where the loss is not finite */
void zk_loss_sum(zk *k, const zk_launch *L, int64_t *sums, const float *loss, const int32_t *target,
                 int64_t M);

/* ---- gradient sums: canonical trees as a binary counter, which a block of leaves starts anew.
 * Pushes leaves lo .. lo+count-1 (src[i], n elements each; full: float, else real) of `total`,
 * where lo = ctl->leaves, or 0 where ctl is NULL. src itself is host memory; on a GPU what it
 * points to is evenly spaced.
 * block, a power of two: so many leaves in a row are one tree, and the sums of these trees are
 * added in ascending order; 1: all leaves are; total or more: all leaves are one tree.
 * node: float, a buffer of n elements every `stride` elements, one for each bit of `mask` ascending
 * (mask 0: one buffer): the pending nodes, node of 2^b leaves in the buffer of bit b, and all whole
 * blocks in that of the bit that is `block`. When lo + count == total the whole sum is left in the
 * first buffer. One of the sources may be that buffer itself, where they are float: an element is
 * read before it is written. */
void zk_push(zk *k, const zk_launch *L, float *node, int64_t stride, const void *const *src,
             int64_t count, int full, int64_t n, const zk_ctl *ctl, int64_t total, int64_t mask,
             int64_t block);
/* ctl->leaves += leaves: so many more are pushed on every sum */
void zk_count(zk *k, const zk_launch *L, zk_ctl *ctl, int64_t leaves);

/* sums[ZK_SUMS] = 0 */
void zk_clear(zk *k, int64_t *sums);

/* ---- optimizer. p, m, v, g, w: elements [first, first + n) of a flat buffer described by spans;
 * spans, r: host memory */
/* next step: counts it, sets lr and beta1 (schedules), scale (by the last step) and leaves = 0,
 * clears sums[ZK_SUMS] */
void zk_begin(zk *k, const zk_launch *L, zk_ctl *ctl, int64_t *sums, const zk_recipe *r);
/* sums[ZK_NORM..] += squares: blocks of 1024 elements of a tensor, f64, 16 lanes; sets
 * sums[ZK_NONFINITE] */
void zk_square_sum(zk *k, const zk_launch *L, int64_t *sums, const float *g, const zk_span *spans,
                   int64_t nspans, int64_t first, int64_t n);
/* from the sums over all ranks: loss, norm, valid, skipped, factor = M/valid/scale * clip */
void zk_factor(zk *k, const zk_launch *L, zk_ctl *ctl, const int64_t *sums, const zk_recipe *r);
/* One step by r->rule. p float masters; w their real copy (NULL: none). p NULL: w itself, which is
 * bf16, moves. m, v the states, stored as r->moments says, NULL where the rule has none. What moves
 * in bf16 is rounded stochastically, by words of Philox 4x32-10 keyed by (seed, step, key of
 * the tensor, element in it). All stay as they are when ctl->skipped. */
void zk_update(zk *k, const zk_launch *L, const zk_ctl *ctl, const zk_recipe *r, real *w, float *p,
               void *m, void *v, const float *g, const zk_span *spans, int64_t nspans,
               int64_t first, int64_t n);
/* p = initial values, by Philox 4x32-10 keyed by (seed, key of the tensor, element in it); 0
 * between tensors. full: p is float, else real */
void zk_init(zk *k, const zk_launch *L, void *p, const zk_span *spans, int64_t nspans,
             int64_t first, int64_t n, uint64_t seed, int full);
/* sum[2] += hashes of blocks of 1024 elements of a tensor as floats, keyed by (key, block): the
 * same whatever the partition. full: p is float, else real */
void zk_hash(zk *k, const zk_launch *L, uint64_t *sum, const void *p, const zk_span *spans,
             int64_t nspans, int64_t first, int64_t n, int full);
/* `out`, `loss`, `valid`, zk_hash's `sum` and zk_sample's result: host memory, there on return.
 * out[0..6] = step, loss, norm, lr, valid, skipped, scale (0: none) */
void zk_report(zk *k, const zk_ctl *ctl, double *out);
/* mean loss and valid tokens held in sums (for validation) */
void zk_mean(zk *k, const int64_t *sums, double *loss, double *valid);
/* one token drawn from a row of logits [V] at a temperature, of the top_k likeliest (0: of all), of
 * these of the likeliest that have a share of top_p; u in [0,1) */
int32_t zk_sample(zk *k, const real *logits, int64_t V, float temperature, int64_t top_k,
                  double top_p, double u);

/* ---- on the host's processor, on every target: for what lies in host memory. The bits are those
 * of the kernel that each is named after. */
zk *zk_host_open(int dtype, int column, int threads, const char **why); /* as zk_open */
void zk_host_close(zk *k);
extern __typeof__(zk_update) zk_host_update;
extern __typeof__(zk_init) zk_host_init;
extern __typeof__(zk_hash) zk_host_hash;
extern __typeof__(zk_round) zk_host_round;
extern __typeof__(zk_push) zk_host_push;
extern __typeof__(zk_count) zk_host_count;
extern __typeof__(zk_square_sum) zk_host_square_sum;

#endif
