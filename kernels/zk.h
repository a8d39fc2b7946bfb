/* zk.h -- the kernels that a training program calls; they have the same names on every target.
 *
 * Invariants
 *  1. No kernel allocates, waits for another rank, or keeps state outside `zk`.
 *  2. The bits of a result depend on operands and shapes, in bf16 also on the order of products,
 *     and on a GPU also on kernel object and launch. They never depend on the number of threads: a
 *     CPU splits work over rows and columns of the output, never over a summed index.
 *  3. `real` is the program's storage type (float, bf16 or f16, set by zk_open) for parameters,
 *     activations and their gradients. Arithmetic is in f32; a result is rounded once, when it is
 *     stored.
 *  4. On a CPU each output element of a linear is one chain of FMAs in ascending k; for bf16 see
 *     zk_products. Reductions of a row use 16 lanes (element i goes to lane i % 16, ascending),
 *     which are folded 8, 4, 2, 1. On a GPU the launch table fixes the
 *     order of row reductions.
 *  5. Outputs come first and never alias inputs unless the kernel's comment allows it.
 *  6. Operands are in the memory of the kernel's queue unless said to be in host memory. Kernels
 *     return no error: on a GPU an error of CUDA or cuBLASLt ends the process with exit code 3.
 *
 * Letters: B batch, T sequence, M = B*T rows, C width, V vocabulary, H query heads, G key and value
 * heads, D head size, N and K output and input features. [M,C] is row-major.
 */
#ifndef ZK_H
#define ZK_H
#include <stddef.h>
#include <stdint.h>

#define ZK_ABI 26

/* The kernel context of one queue: threads on a CPU, stream and handles on a GPU. */
typedef struct zk zk;
typedef void real; /* float, bf16 or f16 */

enum { ZK_F32 = 0, ZK_BF16 = 1, ZK_F16 = 2 }; /* zk_open's `dtype` */
enum { ZK_IN_OUT = 0, ZK_OUT_IN = 1 }; /* layout of a linear's weight: [in,out] or [out,in] */
/* The vocabulary is padded to a multiple of this: rows of the embedding and the head, columns of
 * the logits. 8 halves are 16 bytes. Padding rows are zero. */
enum { ZK_VOCAB = 8 };
enum { ZK_HALVES = 0, ZK_ADJACENT = 1 }; /* pairs of a rotation: (i, i + W/2), (2i, 2i + 1) */
enum { ZK_GELU_TANH = 0, ZK_GELU_ERF = 1 };
enum { ZK_INT8 = 1, ZK_NF4 = 2 }; /* formats of quantized weights (quantized.h) */
/* curves of a zk_phase */
enum { ZK_LINE = 0, ZK_COSINE = 1, ZK_LOG = 2, ZK_INVERSE = 3, ZK_RESTARTS = 4 };

/* One launch on a GPU: blocks in x, y and z, threads per block, bytes of dynamic shared memory. */
typedef struct zk_grid {
    int32_t x, y, z, block, shared;
} zk_grid;

/* How one (kernel, shape) runs on one target. train.c passes an array with a column for each
 * target of the spec; a kernel reads the column given to zk_open. tile: on a CPU {rows, columns,
 * depth} of a linear and elsewhere {rows, elements or blocks of 1024 elements per task}; on a GPU
 * its meaning depends on the kernel. part: the launches of the call, in order. margin: SMs that a
 * GPU's GEMM leaves to other kernels; fewer than the GPU has. */
enum { ZK_PARTS = 4 };
typedef struct zk_launch {
    int32_t tile[3];
    zk_grid part[ZK_PARTS];
    int32_t margin;
} zk_launch;

/* Equal tensors in a flat buffer: instance i of `count` starts at element at + i*stride and has
 * `elems` elements. Its random numbers and its hash are keyed by key + i*key_stride. */
typedef struct zk_span {
    int64_t at, elems, count, stride;
    int64_t key, key_stride;
    float mean, std;    /* initial values: mean + std * normal; std < 0: uniform in mean +- |std| */
    double rate, decay; /* factor of the learning rate, and weight decay */
} zk_span;

/* One phase of a schedule, for steps before `until` (0: for ever). The value goes from `from` to
 * `to` along a curve while x = (step - origin) / span goes from 0 to 1, in `stairs` equal stairs
 * (0: smoothly). A negative span makes x go from 1 to 0. ZK_RESTARTS goes along `stairs` equal
 * cosines, each from `from` to `to`. */
typedef struct zk_phase {
    int64_t until, origin, span;
    double from, to;
    int32_t curve, stairs;
} zk_phase;

enum { ZK_PHASES = 4 };

/* Loss scaling: gradients are multiplied by a scale so that they fit in halves. The scale starts at
 * `first` (0: no scaling). window 0: it never changes. Otherwise a step with a gradient that is not
 * finite halves it, down to `least`, except the first hysteresis - 1 such steps. After `window`
 * steps in a row without one it doubles and hysteresis is restored; with `consecutive` every such
 * step restores hysteresis. */
typedef struct zk_scaler {
    double first, least;
    int64_t window, hysteresis, consecutive;
} zk_scaler;

/* The constants of the optimizer. */
typedef struct zk_recipe {
    zk_phase rate[ZK_PHASES], momentum[ZK_PHASES]; /* schedules of lr and of beta1 */
    double beta2, eps, clip;                       /* clip: largest gradient norm; 0: no clipping */
    int32_t rule;                                  /* optimizer: ZK_ADAMW ... of update.h */
    int32_t moments;                               /* type of m and v: ZK_F32 ... */
    int64_t rows;  /* M of a micro-batch: its gradients are d(sum of losses)/M */
    uint64_t seed; /* for stochastic rounding */
    zk_scaler scaler;
} zk_recipe;

/* Why a step changed no weight. ZK_FAULTY: a gradient was not finite, or no token was
 * valid. ZK_RESCALED: a gradient was not finite, and the loss scale drops. ZK_LOWEST: the
 * scale cannot drop further. */
enum { ZK_APPLIED = 0, ZK_FAULTY = 1, ZK_RESCALED = 2, ZK_LOWEST = 3 };

/* The state of a training step. It lies in the arena, so that captured launches need not change. */
typedef struct zk_ctl {
    int64_t step;      /* number of the step, from 1; zk_begin counts it */
    int64_t applied;   /* steps not skipped: schedules and bias corrections count these */
    double beta1;      /* beta1 in this step */
    double loss, norm; /* last step: mean loss; gradient norm before clipping */
    int64_t valid;     /* valid tokens in the global batch */
    int64_t skipped;   /* last step: ZK_APPLIED ... */
    float lr, factor, bias1, bias2; /* learning rate, factor of gradients, bias corrections */
    int64_t leaves;     /* gradients of this step already added to the sums; zk_count counts them */
    double scale;       /* loss scale of this step's gradients */
    int64_t clean;      /* steps in a row with finite gradients since the scale last rose */
    int64_t hysteresis; /* overflows up to the one that halves the scale */
} zk_ctl;

/* Layout of the exact sums. A sum of f64 is a fixed-point number of ZK_LIMBS 32-bit limbs, each in
 * an int64, so that adding over blocks, threads and ranks is exact in any order. ZK_NORM: the
 * squared gradient norm; ZK_LOSS: the loss; ZK_VALID: valid tokens; ZK_NONFINITE and ZK_LOST: flags
 * for a gradient and a loss that are not finite; ZK_MEANS: micro-batches whose mean loss was added,
 * 0 if sums of losses were. */
enum {
    ZK_LIMBS = 28,
    ZK_NORM = 0,
    ZK_LOSS = 32,
    ZK_VALID = 64,
    ZK_NONFINITE = 65,
    ZK_LOST = 66,
    ZK_MEANS = 67,
    ZK_SUMS = 72
};

/* ---- context */
/* Open the kernel context of a queue. stream: the queue's CUDA stream. device, host: scratch, the
 * plan's classes `workspace` and `pinned_scratch`. On a CPU all three are NULL; device is NULL for
 * a queue that runs no linear. Returns NULL and sets *why on failure. */
zk *zk_open(void *stream, void *device, void *host, int dtype, int column, int threads,
            const char **why);
void zk_close(zk *k);
const char *zk_target(void); /* "cpu", or the current device: "sm_80", "sm_90" ... */
const char *zk_object(void); /* must be equal on all ranks: "avx512", "sm_90, 132 SMs, ..." */
/* Return the bytes that zk_open and zk_products allocate outside the arena, at most. */
int64_t zk_overhead(int threads);
/* Set the order in which a context on a CPU sums products in bf16. ZK_PAIRS, the default: of
 * each pair of k the odd one first, as vdpbf16ps does. ZK_TILES: in groups of 32, as
 * tdpbf16ps does, also in attention, for which p and ds are rounded to bf16. Every kernel
 * object has both. Below 0: leave the order unset. Returns the
 * order that is faster here, or -1: there is no memory for the operands. */
enum { ZK_PAIRS = 0, ZK_TILES = 1 };
int zk_products(zk *k, int order);
/* Use or make a table of algorithms for a GPU's matrix products in file `path`, for the whole
 * process. ZK_TAKE: read the table and use its algorithms. ZK_TIME: from now on time each product
 * when it first runs. ZK_END: finish either; after ZK_TIME write the table. A CPU has no table.
 * Returns 0; 1 with a message in why[n]; or -1 with an error there. */
enum { ZK_TAKE = 0, ZK_TIME = 1, ZK_END = 2 };
int zk_gemms(int what, const char *path, char *why, size_t n);
/* Return a hash of the products that the context has issued since the last call, each with the
 * algorithm that was chosen for it; their order does not matter. On a CPU always 0. */
uint64_t zk_algorithms(zk *k);
/* y = x . w^T, matrices of n rows and n columns, to measure how fast a GPU is. A CPU has none. */
void zk_probe(zk *k, real *y, const real *x, const real *w, int64_t n);

/* ---- embedding */
/* y[M,C] = w[token[M],:] + (p ? p[t,:] : 0) */
void zk_embed_fwd(zk *k, const zk_launch *L, real *y, const int32_t *token, const real *w,
                  const real *p, int64_t B, int64_t T, int64_t C);
/* dw[V,C] = sums of the rows of dy[M,C] by token, added in token order in f32. add = 0: dw is real
 * and every row is written once, with 0 if its token does not occur. add = 1: dw is float and is
 * added to. index: int32 scratch [V+1+M]. */
void zk_embed_bwd(zk *k, const zk_launch *L, void *dw, const real *dy, const int32_t *token,
                  int32_t *index, int64_t M, int64_t V, int64_t C, int add);
/* dp[P,C]: row t < T = sum of dy[b,t,:] over b, ascending; rows T..P-1 = 0 */
void zk_position_bwd(zk *k, const zk_launch *L, real *dp, const real *dy, int64_t B, int64_t T,
                     int64_t C, int64_t P);

/* Packed documents: row m uses row position[m] of p, which must be less than its number of rows.
 * The gradient dp[P,C] is summed as in zk_embed_bwd. index: int32 scratch [P+1+M]. */
void zk_embed_packed_fwd(zk *k, const zk_launch *L, real *y, const int32_t *token,
                         const int32_t *position, const real *w, const real *p, int64_t M,
                         int64_t C);
void zk_position_packed_bwd(zk *k, const zk_launch *L, real *dp, const real *dy,
                            const int32_t *position, int32_t *index, int64_t M, int64_t C,
                            int64_t P);

/* ---- norms: y = (x - mean) * rstd * w + b; rmsnorm has no mean and no b. stat: float [M,2] (mean,
 * rstd = 1/sqrt(variance + eps)) for layernorm; [M] (rstd = 1/sqrt(mean square + eps)) for rmsnorm.
 * b and db are NULL without a bias. With `more` [M,C], which may be NULL, forward stores x + more
 * in `sum` [M,C] and normalizes that, and backward adds `more` to dx; the bits are those of a
 * separate zk_add. */
void zk_layernorm_fwd(zk *k, const zk_launch *L, real *y, float *stat, real *sum, const real *x,
                      const real *more, const real *w, const real *b, int64_t M, int64_t C,
                      float eps);
/* dw, db: real [C], summed over rows in f32, on a CPU in ascending order. In all norms NULL means
 * that the gradient is not wanted. scratch: float [2,C]. */
void zk_layernorm_bwd(zk *k, const zk_launch *L, real *dx, real *dw, real *db, const real *dy,
                      const real *more, const real *x, const float *stat, const real *w,
                      float *scratch, int64_t M, int64_t C);
void zk_rmsnorm_fwd(zk *k, const zk_launch *L, real *y, float *stat, real *sum, const real *x,
                    const real *more, const real *w, int64_t M, int64_t C, float eps);
void zk_rmsnorm_bwd(zk *k, const zk_launch *L, real *dx, real *dw, const real *dy, const real *more,
                    const real *x, const float *stat, const real *w, float *scratch, int64_t M,
                    int64_t C);
/* The same with 1 + w in place of w. */
void zk_rmsnorm1_fwd(zk *k, const zk_launch *L, real *y, float *stat, real *sum, const real *x,
                     const real *more, const real *w, int64_t M, int64_t C, float eps);
void zk_rmsnorm1_bwd(zk *k, const zk_launch *L, real *dx, real *dw, const real *dy,
                     const real *more, const real *x, const float *stat, const real *w,
                     float *scratch, int64_t M, int64_t C);
/* RMS norm of each query and key head. in, y: [M,(H+2*G)*D], query heads, key heads, value heads;
 * value heads are copied. wq, wk: [D]. stat: float [M,H+G], rstd of each head. */
void zk_qknorm_fwd(zk *k, const zk_launch *L, real *y, float *stat, const real *in, const real *wq,
                   const real *wk, int64_t M, int64_t H, int64_t G, int64_t D, float eps);
void zk_qknorm_bwd(zk *k, const zk_launch *L, real *din, real *dwq, real *dwk, const real *dy,
                   const real *in, const float *stat, const real *wq, const real *wk,
                   float *scratch, int64_t M, int64_t H, int64_t G, int64_t D);
/* The same with 1 + wq and 1 + wk. */
void zk_qknorm1_fwd(zk *k, const zk_launch *L, real *y, float *stat, const real *in, const real *wq,
                    const real *wk, int64_t M, int64_t H, int64_t G, int64_t D, float eps);
void zk_qknorm1_bwd(zk *k, const zk_launch *L, real *din, real *dwq, real *dwk, const real *dy,
                    const real *in, const float *stat, const real *wq, const real *wk,
                    float *scratch, int64_t M, int64_t H, int64_t G, int64_t D);
/* RMS norm over all query heads together, and over all key heads together. wq: [H*D]; wk: [G*D];
 * stat: float [M,2]. */
void zk_qknorm_whole_fwd(zk *k, const zk_launch *L, real *y, float *stat, const real *in,
                         const real *wq, const real *wk, int64_t M, int64_t H, int64_t G, int64_t D,
                         float eps);
void zk_qknorm_whole_bwd(zk *k, const zk_launch *L, real *din, real *dwq, real *dwk, const real *dy,
                         const real *in, const float *stat, const real *wq, const real *wk,
                         int64_t M, int64_t H, int64_t G, int64_t D);

/* ---- linear: y[M,N] = x[M,K] . w (+ b[N]); `layout` is that of w */
void zk_linear_fwd(zk *k, const zk_launch *L, real *y, const real *x, const real *w, const real *b,
                   int64_t M, int64_t N, int64_t K, int layout);
void zk_linear_bwd_x(zk *k, const zk_launch *L, real *dx, const real *dy, const real *w, int64_t M,
                     int64_t N, int64_t K, int layout);
/* dw = dy^T . x in the layout of w. full = 0: dw is real; full = 1: dw is float and not rounded.
 * carry: add to dw, which is float. On a CPU the bits are those of one call over the earlier rows
 * and these; in bf16 the number of earlier rows must be even. */
void zk_linear_bwd_w(zk *k, const zk_launch *L, void *dw, const real *dy, const real *x, int64_t M,
                     int64_t N, int64_t K, int layout, int full, int carry);
void zk_linear_bwd_b(zk *k, const zk_launch *L, real *db, const real *dy, int64_t M, int64_t N);
/* The linear of rows [at, at + n) of a weight [N,K]; w and dw point to these rows alone. They make
 * columns [at, at + n) of y and use those of dy. dx is float, starts at 0, and accumulates over the
 * slices in ascending order; once rounded it has on a CPU the bits of the whole product. */
void zk_slice_fwd(zk *k, const zk_launch *L, real *y, const real *x, const real *w, const real *b,
                  int64_t M, int64_t N, int64_t K, int64_t at, int64_t n);
void zk_slice_bwd_x(zk *k, const zk_launch *L, float *dx, const real *dy, const real *w, int64_t M,
                    int64_t N, int64_t K, int64_t at, int64_t n);
void zk_slice_bwd_w(zk *k, const zk_launch *L, real *dw, const real *dy, const real *x, int64_t M,
                    int64_t N, int64_t K, int64_t at, int64_t n);

/* ---- LoRA adapter on columns [at, at + n) of a linear's output: y = base, plus scale * x[M,K] .
 * w[n,K]^T in these columns, rounded once. y may be base. full: as in zk_linear_bwd_w. carry: add
 * scale * dy^T . x to dw, which is float */
void zk_lora_fwd(zk *k, const zk_launch *L, real *y, const real *base, const real *x, const real *w,
                 int64_t M, int64_t N, int64_t K, int64_t at, int64_t n, float scale);
void zk_lora_bwd_x(zk *k, const zk_launch *L, real *dx, const real *dy, const real *w, int64_t M,
                   int64_t N, int64_t K, int64_t at, int64_t n, float scale);
void zk_lora_bwd_w(zk *k, const zk_launch *L, void *dw, const real *dy, const real *x, int64_t M,
                   int64_t N, int64_t K, int64_t at, int64_t n, float scale, int full, int carry);

/* ---- rotary position embedding, half rotation: it rotates pairs (i, i + D/2) */
/* table: float [T,D/2,2] of (cos, sin). freq: f64 inverse frequencies [D/2], in host memory */
void zk_rope_table(zk *k, const zk_launch *L, float *table, const double *freq, int64_t T,
                   int64_t D);
/* Rotate query and key heads and copy value heads; the shapes are those of zk_qknorm_fwd. sign +1:
 * forward, -1: backward. y may be `in`. */
void zk_rope(zk *k, const zk_launch *L, real *y, const real *in, const float *table, int64_t B,
             int64_t T, int64_t H, int64_t G, int64_t D, int sign);
/* The same by position[m], which must be less than T. */
void zk_rope_packed(zk *k, const zk_launch *L, real *y, const real *in, const float *table,
                    const int32_t *position, int64_t B, int64_t T, int64_t H, int64_t G, int64_t D,
                    int sign);

/* Rotate the first W elements of each query and key head, and copy the rest. which 1: by `table`,
 * [T,W/2,2], times factor; 2: by table2 and factor2; 0: copy everything. pairs: elements (i, i +
 * W/2) or (2i, 2i + 1) are a pair. position as above, or NULL for rows by sample. table2 may be
 * NULL if `which` is not 2. y may be `in`. */
void zk_rope_part(zk *k, const zk_launch *L, real *y, const real *in, const float *table,
                  const float *table2, const int32_t *position, int64_t B, int64_t T, int64_t H,
                  int64_t G, int64_t D, int64_t W, int pairs, int which, float factor,
                  float factor2, int sign);

/* Sort the heads of rows by the rank of a context group that they go to: y
 * [ranks,M,(H+2*G*copies)/ranks,D] from x [M,H+2*G,D], the query, key and value heads of each rank
 * in order, each key and value head `copies` times. ranks divides H and G * copies. */
void zk_cut_heads_fwd(zk *k, const zk_launch *L, real *y, const real *x, int64_t M, int64_t H,
                      int64_t G, int64_t D, int64_t ranks, int64_t copies);
/* The gradients of copies are added in f32 in ascending order, and rounded once. */
void zk_cut_heads_bwd(zk *k, const zk_launch *L, real *dx, const real *dy, int64_t M, int64_t H,
                      int64_t G, int64_t D, int64_t ranks, int64_t copies);
/* Put the heads of all ranks side by side: y [M,H,D] from x [ranks,M,H/ranks,D]. sign -1: the other
 * way round. */
void zk_join_heads(zk *k, const zk_launch *L, real *y, const real *x, int64_t M, int64_t H,
                   int64_t D, int64_t ranks, int sign);

/* ---- causal attention, which stores no T x T matrix: y = softmax(scale * q . k^T) . v by head.
 * qkv: [M,(H+2*G)*D]; y: [M,H*D]; lse: float [B,H,T], log-sum-exp of each row of scores. Query head
 * h reads key and value head h / (H / G). */
void zk_attention_fwd(zk *k, const zk_launch *L, real *y, float *lse, const real *qkv, int64_t B,
                      int64_t T, int64_t H, int64_t G, int64_t D, float scale);
/* scratch: float [B*H*T + M * (H + 2*G) * D] */
void zk_attention_bwd(zk *k, const zk_launch *L, real *dqkv, const real *dy, const real *y,
                      const real *qkv, const float *lse, float *scratch, int64_t B, int64_t T,
                      int64_t H, int64_t G, int64_t D, float scale);
/* Attention within documents and a window: row t sees rows t - min(position[b,t], window - 1) to t.
 * position: int32 [B,T], each row's position in its document; NULL: each sample is one document. */
void zk_attention_local_fwd(zk *k, const zk_launch *L, real *y, float *lse, const real *qkv,
                            const int32_t *position, int64_t B, int64_t T, int64_t H, int64_t G,
                            int64_t D, int64_t window, float scale);
void zk_attention_local_bwd(zk *k, const zk_launch *L, real *dqkv, const real *dy, const real *y,
                            const real *qkv, const float *lse, float *scratch,
                            const int32_t *position, int64_t B, int64_t T, int64_t H, int64_t G,
                            int64_t D, int64_t window, float scale);

/* The same with scores cap * tanh(score / cap); cap is above 0. */
void zk_attention_capped_fwd(zk *k, const zk_launch *L, real *y, float *lse, const real *qkv,
                             const int32_t *position, int64_t B, int64_t T, int64_t H, int64_t G,
                             int64_t D, int64_t window, float scale, float cap);
void zk_attention_capped_bwd(zk *k, const zk_launch *L, real *dqkv, const real *dy, const real *y,
                             const real *qkv, const float *lse, float *scratch,
                             const int32_t *position, int64_t B, int64_t T, int64_t H, int64_t G,
                             int64_t D, int64_t window, float scale, float cap);

/* Local attention that drops each probability with probability p < 1 and multiplies the others by
 * 1 / (1 - p), after the softmax. key, place: as of zk_dropout_fwd; head: number of the first of
 * the H heads among all heads of a sample. */
void zk_attention_dropped_fwd(zk *k, const zk_launch *L, real *y, float *lse, const real *qkv,
                              const int32_t *position, const int64_t *key, int64_t B, int64_t T,
                              int64_t H, int64_t G, int64_t D, int64_t window, int64_t place,
                              int64_t head, float scale, float p);
void zk_attention_dropped_bwd(zk *k, const zk_launch *L, real *dqkv, const real *dy, const real *y,
                              const real *qkv, const float *lse, float *scratch,
                              const int32_t *position, const int64_t *key, int64_t B, int64_t T,
                              int64_t H, int64_t G, int64_t D, int64_t window, int64_t place,
                              int64_t head, float scale, float p);

/* ---- elementwise, n elements */
void zk_gelu_fwd(zk *k, const zk_launch *L, real *y, const real *x, int64_t n, int kind);
/* dx may be dy */
void zk_gelu_bwd(zk *k, const zk_launch *L, real *dx, const real *dy, const real *x, int64_t n,
                 int kind);
/* y = max(x, 0)^2 */
void zk_relu2_fwd(zk *k, const zk_launch *L, real *y, const real *x, int64_t n);
/* dx may be dy */
void zk_relu2_bwd(zk *k, const zk_launch *L, real *dx, const real *dy, const real *x, int64_t n);
/* y = scale * x; y may be x */
void zk_scale_fwd(zk *k, const zk_launch *L, real *y, const real *x, int64_t n, float scale);
/* The same for a gradient; dx may be dy. */
void zk_scale_bwd(zk *k, const zk_launch *L, real *dx, const real *dy, int64_t n, float scale);
/* x: [M,2F] (gate, up); y: [M,F] = silu(gate) * up */
void zk_swiglu_fwd(zk *k, const zk_launch *L, real *y, const real *x, int64_t M, int64_t F);
void zk_swiglu_bwd(zk *k, const zk_launch *L, real *dx, const real *dy, const real *x, int64_t M,
                   int64_t F);
/* The same with gelu by tanh in place of silu */
void zk_geglu_fwd(zk *k, const zk_launch *L, real *y, const real *x, int64_t M, int64_t F);
void zk_geglu_bwd(zk *k, const zk_launch *L, real *dx, const real *dy, const real *x, int64_t M,
                  int64_t F);
/* Dropout of B samples of n elements: y = x / (1 - p) for elements that are kept, else 0. They are
 * chosen by Philox 4x32-10, keyed by (key[b], place, element of the sample). key: [B]; a key of 0
 * keeps all elements and does not scale. y may be x. */
void zk_dropout_fwd(zk *k, const zk_launch *L, real *y, const real *x, const int64_t *key,
                    int64_t B, int64_t n, int64_t place, float p);
/* The same for a gradient; dx may be dy. */
void zk_dropout_bwd(zk *k, const zk_launch *L, real *dx, const real *dy, const int64_t *key,
                    int64_t B, int64_t n, int64_t place, float p);
/* y = a + b; y may be a or b */
void zk_add(zk *k, const zk_launch *L, real *y, const real *a, const real *b, int64_t n);
/* y = x, rounded from float to real; y may be x only if real is float */
void zk_round(zk *k, const zk_launch *L, real *y, const float *x, int64_t n);
/* y = the n weights that are quantized in w, rounded to real (quantized.h). w has the size of m
 * reals; format: ZK_INT8 or ZK_NF4. */
void zk_dequantize(zk *k, const zk_launch *L, real *y, const real *w, int64_t n, int64_t m,
                   int format);

/* ---- loss: loss = logsumexp(logits) - logits[target] for each row; dlogits = (softmax(logits) -
 * onehot(target)) / rows * scale. A target below 0 is ignored: its loss is 0. loss: float [M].
 * logits, dlogits: [M,V], rows padded to a multiple of ZK_VOCAB; the padding is ignored, and 0 in
 * dlogits. scale NULL: 1. dlogits may be logits, or NULL if not wanted. rows: rows of the
 * micro-batch, of which these M may be a part. */
void zk_cross_entropy(zk *k, const zk_launch *L, float *loss, real *dlogits, const real *logits,
                      const int32_t *target, const double *scale, int64_t M, int64_t V,
                      int64_t rows);
/* The same with targets that are smoothed (a share `smoothing` of each is spread over all V tokens)
 * and penalty * lse^2 added, lse = logsumexp(logits). cap above 0: dlogits is the gradient of the
 * logits before zk_softcap. With dlogits NULL the loss is the plain one. */
void zk_soft_cross_entropy(zk *k, const zk_launch *L, float *loss, real *dlogits,
                           const real *logits, const int32_t *target, const double *scale,
                           int64_t M, int64_t V, int64_t rows, float smoothing, float penalty,
                           float cap);
/* y = cap * tanh(x / cap), for logits of M rows, with their padding; y may be x. */
void zk_softcap(zk *k, const zk_launch *L, real *y, const real *x, int64_t M, int64_t V, float cap);
/* y[C] = the last row of x [M,C] whose target is not ignored. If all are, y is not written. */
void zk_pick(zk *k, const zk_launch *L, real *y, const real *x, const int32_t *target, int64_t M,
             int64_t C);
/* Add the micro-batch's loss to sums[ZK_LOSS..] (in f64; on a CPU rows are added in ascending
 * order) and its valid tokens to sums[ZK_VALID]. Sets sums[ZK_LOST] if the loss is not finite. */
void zk_loss_sum(zk *k, const zk_launch *L, int64_t *sums, const float *loss, const int32_t *target,
                 int64_t M);
/* The same with the mean loss of the micro-batch's valid tokens, 0 if none is valid. Counts the
 * micro-batch in sums[ZK_MEANS]. all: the targets of the micro-batch's A tokens. target has those
 * of all of them (all = target, A = M), or of a block, which adds A / M times its part of the
 * mean. */
void zk_loss_mean(zk *k, const zk_launch *L, int64_t *sums, const float *loss,
                  const int32_t *target, const int32_t *all, int64_t M, int64_t A);
/* *factor = A / valid tokens among `all`, 0 if none is valid, times *scale (NULL: 1). A loss with
 * this scale has the gradient of the mean over the micro-batch's valid tokens; of a block of M
 * tokens, A / M times its part of that. */
void zk_loss_factor(zk *k, const zk_launch *L, double *factor, const int32_t *all,
                    const double *scale, int64_t A);

/* ---- gradient sums, as a binary counter of pending nodes
 * Add gradients or sums of them ("leaves") lo .. lo+count-1 of `total`, n elements each, to a sum;
 * lo is ctl->leaves, or 0 if ctl is NULL. src[i]: float if `full`, else real. src itself is in
 * host memory; on a GPU the buffers that it points to must be evenly spaced.
 * block, a power of two: that many leaves in a row are summed as a balanced tree, and the sums of
 * blocks are added in ascending order. block 1 adds all leaves in order; block >= total makes one
 * tree.
 * node: float buffers of n elements, `stride` elements apart, one for each bit of `mask` ascending
 * (mask 0: one buffer). The buffer of bit b holds the pending node of 2^b leaves; the buffer of bit
 * `block` holds the sum of whole blocks. When lo + count == total the first buffer holds the
 * complete sum. If the sources are float, one of them may be the first buffer: an element is read
 * before it is written. */
void zk_push(zk *k, const zk_launch *L, float *node, int64_t stride, const void *const *src,
             int64_t count, int full, int64_t n, const zk_ctl *ctl, int64_t total, int64_t mask,
             int64_t block);
/* ctl->leaves += leaves: the number just added to every sum */
void zk_count(zk *k, const zk_launch *L, zk_ctl *ctl, int64_t leaves);

/* sums[ZK_SUMS] = 0 */
void zk_clear(zk *k, int64_t *sums);

/* ---- optimizer. p, m, v, g, w: elements [first, first + n) of a flat buffer that the spans
 * describe. spans and r are in host memory. */
/* Begin the next step: count it, set lr and beta1 by their schedules and the loss scale by the last
 * step, set leaves = 0 and clear sums[ZK_SUMS]. */
void zk_begin(zk *k, const zk_launch *L, zk_ctl *ctl, int64_t *sums, const zk_recipe *r);
/* Add the squares of g to sums[ZK_NORM..], in blocks of 1024 elements of a tensor, each summed in
 * f64 with 16 lanes. Sets sums[ZK_NONFINITE] if a square is not finite. full: g is float, else
 * real. */
void zk_square_sum(zk *k, const zk_launch *L, int64_t *sums, const void *g, const zk_span *spans,
                   int64_t nspans, int64_t first, int64_t n, int full);
/* Set loss, norm, valid, skipped and factor = M / valid / scale * clip from
 * the sums over all ranks. */
void zk_factor(zk *k, const zk_launch *L, zk_ctl *ctl, const int64_t *sums, const zk_recipe *r);
/* Update parameters by one step of the optimizer r->rule. p: float masters; w: their copy in real,
 * or NULL. p NULL: w, which is bf16, is updated itself. m, v: moments of type r->moments, NULL if
 * the rule has none. States stored in bf16 are rounded stochastically by Philox 4x32-10, keyed by
 * (seed, step, key of the tensor, element in it). full: g is float, else real. Nothing changes if
 * ctl->skipped. */
void zk_update(zk *k, const zk_launch *L, const zk_ctl *ctl, const zk_recipe *r, real *w, float *p,
               void *m, void *v, const void *g, const zk_span *spans, int64_t nspans, int64_t first,
               int64_t n, int full);
/* Set p to its initial values by Philox 4x32-10, keyed by (seed, key of the tensor, element in it),
 * and to 0 between tensors. full: p is float, else real. */
void zk_init(zk *k, const zk_launch *L, void *p, const zk_span *spans, int64_t nspans,
             int64_t first, int64_t n, uint64_t seed, int full);
/* Add the hashes of blocks of 1024 elements of a tensor, taken as floats and keyed by (key, block),
 * to sum[2]: the same however the tensors are sharded. full: p is float, else real. */
void zk_hash(zk *k, const zk_launch *L, uint64_t *sum, const void *p, const zk_span *spans,
             int64_t nspans, int64_t first, int64_t n, int full);
/* The results `out`, `loss`, `valid`, zk_hash's `sum` and zk_sample's are in host memory and
 * complete on return. out[0..6] = step, loss, norm, lr, valid, skipped, scale (0: no scaling). */
void zk_report(zk *k, const zk_ctl *ctl, double *out);
/* Compute the mean loss and the valid tokens held in sums, for validation. */
void zk_mean(zk *k, const int64_t *sums, double *loss, double *valid);
/* Sample one token from a row of logits [V] at a temperature: from the top_k
 * likeliest (0: all), and of these from the likeliest whose probabilities add up to
 * top_p. u: a random number in [0,1). */
int32_t zk_sample(zk *k, const real *logits, int64_t V, float temperature, int64_t top_k,
                  double top_p, double u);

/* ---- kernels on the host's processor, on every target, for data in host memory. They have the
 * bits of the kernels they are named after. */
zk *zk_host_open(int dtype, int column, int threads, const char **why); /* as zk_open */
void zk_host_close(zk *k);
extern __typeof__(zk_update) zk_host_update;
extern __typeof__(zk_init) zk_host_init;
extern __typeof__(zk_hash) zk_host_hash;
extern __typeof__(zk_round) zk_host_round;
extern __typeof__(zk_push) zk_host_push;
extern __typeof__(zk_count) zk_host_count;
extern __typeof__(zk_square_sum) zk_host_square_sum;

/* ---- quantizing weights on the host (quantized.h). The bits of 16384 weights in a row, from a
 * multiple of 16384 on, depend on them alone. */
int64_t zk_quantized(int format, int64_t n); /* bytes of n weights */
/* Quantize n weights: a multiple of 16384, or up to the tensor's end. Returns their bytes. */
int64_t zk_host_quantize(uint8_t *to, const float *from, int64_t n, int format);
/* Return whether weights that were quantized elsewhere can keep their numbers: with a factor for
 * each block of so many, and a scale for so many factors (nested; 0: factors are floats). */
int zk_host_keeps(int format, int64_t block, int64_t nested);
/* Write n weights that keep their numbers, and return their bytes: a multiple of 16384, or up to
 * the last one with this scale, which begin at a chunk. codes: as in quantized.h; NF4: factors, a
 * byte for each block, and scale and mean in scale[2]; INT8: scale[1]. */
int64_t zk_host_keep(uint8_t *to, const uint8_t *codes, const uint8_t *factors, const float *scale,
                     int64_t n, int format);

#endif
