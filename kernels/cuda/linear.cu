/* linear.cu -- the products of a linear layer and its gradients by cuBLASLt; the gradient of the
 * bias.
 *
 *   y[M,N] = x[M,K] . w + b; dx = dy . w^T; dw = x^T . dy; db = sum of the rows of dy
 *
 * Invariants
 *  1. cuBLASLt is column-major: a row-major [M,N] is its N x M with leading dimension N. So y = x .
 *     w is computed as y^T = w^T . x^T, and the other products likewise; nothing is copied.
 *  2. Sums are f32: no TF32, and the parts of a product that is split over k are added in f32.
 *  3. The algorithm of a product depends on its shape, types, alignment (at most 16 bytes, so never
 *     on where in memory a plan put it) and the launch's margin. It is the table's entry for the
 *     product (tune.h), or else the heuristic's first choice for that number of SMs. It is looked
 *     up once and reused for products of the same kind. zk_algorithms tells whether two processes
 *     have the same ones.
 *  4. The gradient of the bias is made of partial sums of stripes of rows, folded in order.
 */
#include "part.h"
#include "tune.h"

#include <stdlib.h>
#include <string.h>

enum { WORKSPACE = 32 << 20, ALIGNED = 16, MOST_GEMMS = 256, MOST_CHOICES = 8 };
enum { SAMPLES = 7, TURNS = 4 }; /* timing: number of samples, products per sample */

static void must(cublasStatus_t status, const char *what)
{
    if (status == CUBLAS_STATUS_SUCCESS) return;
    fprintf(stderr, "cuBLASLt, %s: %s\n", what, cublasLtGetStatusString(status));
    fflush(stderr);
    _exit(3);
}

/* ---- a product d = a . b (+ bias) as cuBLASLt sees it, column-major: d is m x n, a is m x k, b is
 * k x n. An operand marked `turned` is stored transposed. */
struct shape {
    int64_t m, n, k, b_wide, d_wide; /* wide: leading dimensions; 0: the matrix's own */
    int64_t target;                  /* SMs; 0: all */
    int32_t a_turned, b_turned;
    cudaDataType_t in, out;
    uint32_t a_align, b_align, d_align, bias_align; /* bytes; bias_align 0: no bias */
};
static_assert(sizeof(shape) == 80, "no bytes between, so that shapes can be compared as bytes");

static const char *type_name(cudaDataType_t type)
{
    return type == CUDA_R_16BF ? "bf16" : type == CUDA_R_16F ? "f16" : "f32";
}

/* Write a shape in words. */
static void name(const shape *s, char key[TUNE_KEY])
{
    int n = snprintf(key, TUNE_KEY, "%lld x %lld x %lld %c%c %s to %s aligned %u %u %u bias %u",
                     (long long)s->m, (long long)s->n, (long long)s->k, s->a_turned ? 'T' : 'N',
                     s->b_turned ? 'T' : 'N', type_name(s->in), type_name(s->out), s->a_align,
                     s->b_align, s->d_align, s->bias_align);
    if (s->b_wide || s->d_wide)
        n += snprintf(key + n, TUNE_KEY - (size_t)n, " wide %lld %lld", (long long)s->b_wide,
                      (long long)s->d_wide);
    if (s->target) snprintf(key + n, TUNE_KEY - (size_t)n, " on %lld SMs", (long long)s->target);
}

/* The operands of a product. bias NULL: none. carry: add to d; such a product cannot be timed.
 * scale: factor of a . b. */
struct places {
    void *d;
    const void *a, *b, *bias;
    int carry;
    float scale;
};

struct gemm {
    shape s;
    cublasLtMatmulDesc_t how;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    bool ran; /* since the last call of zk_algorithms */
};

struct gemms {
    int n;
    gemm made[MOST_GEMMS];
};

gemms *zk_gemms_open(void) { return (gemms *)calloc(1, sizeof(gemms)); }

void zk_gemms_close(gemms *all)
{
    for (gemm *g = all->made; g < all->made + all->n; g++) {
        (void)cublasLtMatmulDescDestroy(g->how);
        (void)cublasLtMatrixLayoutDestroy(g->a);
        (void)cublasLtMatrixLayoutDestroy(g->b);
        (void)cublasLtMatrixLayoutDestroy(g->d);
    }
    free(all);
}

/* ---- describing a product */
static void set(gemm *g, cublasLtMatmulDescAttributes_t name, const void *value, size_t bytes)
{
    must(cublasLtMatmulDescSetAttribute(g->how, name, value, bytes), "a product's attribute");
}

static void describe(gemm *g)
{
    const shape *s = &g->s;
    cublasOperation_t a = s->a_turned ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t b = s->b_turned ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtEpilogue_t end = CUBLASLT_EPILOGUE_BIAS;
    int32_t target = (int32_t)s->target;
    must(cublasLtMatmulDescCreate(&g->how, CUBLAS_COMPUTE_32F, CUDA_R_32F), "a product");
    set(g, CUBLASLT_MATMUL_DESC_TRANSA, &a, sizeof a);
    set(g, CUBLASLT_MATMUL_DESC_TRANSB, &b, sizeof b);
    if (target) set(g, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &target, sizeof target);
    /* an address with the bias's alignment stands for it while an algorithm is chosen */
    const void *bias = (const void *)(uintptr_t)s->bias_align;
    if (bias) {
        set(g, CUBLASLT_MATMUL_DESC_EPILOGUE, &end, sizeof end);
        set(g, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &s->in, sizeof s->in);
        set(g, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
    }
    const char *what = "a matrix";
    must(s->a_turned ? cublasLtMatrixLayoutCreate(&g->a, s->in, s->k, s->m, s->k)
                     : cublasLtMatrixLayoutCreate(&g->a, s->in, s->m, s->k, s->m),
         what);
    int64_t b_wide = s->b_wide ? s->b_wide : s->b_turned ? s->n : s->k;
    must(s->b_turned ? cublasLtMatrixLayoutCreate(&g->b, s->in, s->n, s->k, b_wide)
                     : cublasLtMatrixLayoutCreate(&g->b, s->in, s->k, s->n, b_wide),
         what);
    must(cublasLtMatrixLayoutCreate(&g->d, s->out, s->m, s->n, s->d_wide ? s->d_wide : s->m), what);
}

static void prefer(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t name,
                   const void *value, size_t bytes)
{
    must(cublasLtMatmulPreferenceSetAttribute(p, name, value, bytes), "a preference");
}

/* Ask the heuristic for up to `wanted` algorithms. */
static int ask(zk *k, gemm *g, int wanted, cublasLtMatmulHeuristicResult_t found[])
{
    cublasLtMatmulPreference_t p;
    size_t workspace = WORKSPACE;
    uint32_t split = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    int n = 0;
    must(cublasLtMatmulPreferenceCreate(&p), "a preference");
    prefer(p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
    prefer(p, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &split, sizeof split);
    prefer(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &g->s.a_align, sizeof(uint32_t));
    prefer(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &g->s.b_align, sizeof(uint32_t));
    prefer(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &g->s.d_align, sizeof(uint32_t));
    prefer(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &g->s.d_align, sizeof(uint32_t));
    must(
        cublasLtMatmulAlgoGetHeuristic(k->lt, g->how, g->a, g->b, g->d, g->d, p, wanted, found, &n),
        "an algorithm");
    must(cublasLtMatmulPreferenceDestroy(p), "a preference");
    return n;
}

static cublasStatus_t issue(zk *k, const gemm *g, const cublasLtMatmulAlgo_t *algo,
                            const places *at)
{
    const float old = at->carry ? 1 : 0;
    return cublasLtMatmul(k->lt, g->how, &at->scale, at->a, g->a, at->b, g->b, &old, at->d, g->d,
                          at->d, g->d, algo, k->device, WORKSPACE, k->stream);
}

/* ---- timing algorithms */
/* Return whether an algorithm gives the same bits every time and fits into the workspace. */
static bool fit(const cublasLtMatmulHeuristicResult_t *r)
{
    uint32_t split = CUBLASLT_REDUCTION_SCHEME_MASK;
    size_t n = 0;
    return r->state == CUBLAS_STATUS_SUCCESS && r->workspaceSize <= WORKSPACE &&
           cublasLtMatmulAlgoConfigGetAttribute(&r->algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                                &split, sizeof split,
                                                &n) == CUBLAS_STATUS_SUCCESS &&
           (split == CUBLASLT_REDUCTION_SCHEME_NONE ||
            split == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
}

static int longer(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Return the median microseconds of a product; 0 if it cannot run. */
static float time_one(zk *k, const gemm *g, const cublasLtMatmulAlgo_t *algo, const places *at)
{
    cudaEvent_t from, to;
    float ms[SAMPLES];
    if (issue(k, g, algo, at) != CUBLAS_STATUS_SUCCESS) /* also warms up */
        return 0;
    zk_must(cudaEventCreate(&from), "timing");
    zk_must(cudaEventCreate(&to), "timing");
    for (float &x : ms) {
        zk_must(cudaEventRecord(from, k->stream), "timing");
        for (int i = 0; i < TURNS; i++) must(issue(k, g, algo, at), "a product that is timed");
        zk_must(cudaEventRecord(to, k->stream), "timing");
        zk_must(cudaEventSynchronize(to), "timing");
        zk_must(cudaEventElapsedTime(&x, from, to), "timing");
    }
    zk_must(cudaEventDestroy(from), "timing");
    zk_must(cudaEventDestroy(to), "timing");
    qsort(ms, SAMPLES, sizeof *ms, longer);
    return ms[SAMPLES / 2] * 1000 / TURNS;
}

/* Return the fastest algorithm and add it to the table. The first one wins unless
 * another gains 2 % or more. */
static cublasLtMatmulAlgo_t quickest(zk *k, gemm *g, const cublasLtMatmulHeuristicResult_t found[],
                                     int n, const places *at)
{
    tuned t = {};
    int best = 0;
    if (at->bias) set(g, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &at->bias, sizeof at->bias);
    for (int i = 0; i < n; i++) {
        float us = fit(&found[i]) ? time_one(k, g, &found[i].algo, at) : 0;
        if (i == 0) t.first = us;
        if (us > 0 && (t.us == 0 || us < 0.98 * t.us)) {
            best = i;
            t.us = us;
        }
    }
    static_assert(sizeof t.algo == sizeof found->algo, "an algorithm is eight words");
    memcpy(t.algo, &found[best].algo, sizeof t.algo);
    name(&g->s, t.key);
    tune_add(t);
    return found[best].algo;
}

/* ---- choosing an algorithm */
/* Return an algorithm of the table, which this library must accept. */
static cublasLtMatmulAlgo_t restore(zk *k, const gemm *g, const uint64_t words[TUNE_WORDS])
{
    cublasLtMatmulHeuristicResult_t r = {};
    memcpy(&r.algo, words, sizeof r.algo);
    r.state = cublasLtMatmulAlgoCheck(k->lt, g->how, g->a, g->b, g->d, g->d, &r.algo, &r);
    must(fit(&r) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED,
         "an algorithm of the table (--gemms); write it anew with --tune");
    return r.algo;
}

static void choose(zk *k, gemm *g, const places *at)
{
    cublasLtMatmulHeuristicResult_t found[MOST_CHOICES];
    char key[TUNE_KEY];
    int timing = tune_timing() && !at->carry;
    name(&g->s, key);
    const uint64_t *words = tune_find(key);
    if (words) {
        g->algo = restore(k, g, words);
        return;
    }
    int n = ask(k, g, timing ? MOST_CHOICES : 1, found);
    must(n > 0 ? found[0].state : CUBLAS_STATUS_NOT_SUPPORTED, "an algorithm");
    g->algo = timing ? quickest(k, g, found, n, at) : found[0].algo;
}

/* Return the gemm of this shape, making it if it is new. */
static gemm *look_up(zk *k, const shape *s, const places *at)
{
    gemms *all = k->gemms;
    for (gemm *g = all->made; g < all->made + all->n; g++)
        if (!memcmp(&g->s, s, sizeof *s)) return g;
    if (all->n == MOST_GEMMS) {
        fprintf(
            stderr,
            "the model has more than %d matrix products of different shapes; raise MOST_GEMMS in "
            "kernels/cuda/linear.cu, and MOST_PRODUCTS in tune.cu, and build again\n",
            MOST_GEMMS);
        fflush(stderr);
        _exit(3);
    }
    gemm *g = &all->made[all->n++];
    g->s = *s;
    describe(g);
    choose(k, g, at);
    return g;
}

/* ---- running a product */
static uint32_t alignment(const void *p)
{
    uintptr_t low = (uintptr_t)p & -(uintptr_t)p;
    return (uint32_t)zk_least((int64_t)low, ALIGNED);
}

/* d = scale * a . b (+ bias; + d with carry). full: d is float. b_wide, d_wide:
 * leading dimensions of b and d. L NULL: no margin. */
static void multiply(zk *k, const zk_launch *L, int64_t m, int64_t n, int64_t depth, void *d,
                     const void *a, int a_turned, const void *b, int b_turned, const void *bias,
                     int full, int carry, int64_t b_wide = 0, int64_t d_wide = 0, float scale = 1)
{
    const places at = {d, a, b, bias, carry, scale};
    static const cudaDataType_t types[] = {CUDA_R_32F, CUDA_R_16BF, CUDA_R_16F};
    cudaDataType_t type = types[k->dtype];
    int margin = L ? L[k->column].margin : 0;
    // clang-format off
    shape s = {m, n, depth, b_wide, d_wide,
               margin ? k->processors - margin : 0, a_turned, b_turned, type,
               full ? CUDA_R_32F : type, alignment(a), alignment(b), alignment(d),
               bias ? alignment(bias) : 0};
    // clang-format on
    gemm *g = look_up(k, &s, &at);
    if (bias) set(g, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias);
    must(issue(k, g, &g->algo, &at), "a product");
    g->ran = true;
}

struct setting {
    cublasLtMatmulAlgoConfigAttributes_t name;
    size_t bytes;
};

/* Return a hash of a product and of its algorithm. The algorithm's documented settings count, since
 * nothing is said of the other bits of its eight words. */
static uint64_t hash_of(const gemm *g)
{
    static const setting settings[] = {
        {CUBLASLT_ALGO_CONFIG_ID, 4},
        {CUBLASLT_ALGO_CONFIG_TILE_ID, 4},
        {CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4},
        {CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 4},
        {CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, 4},
        {CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, 4},
        {CUBLASLT_ALGO_CONFIG_STAGES_ID, 4},
        {CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, 2},
        {CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2},
    };
    char text[TUNE_KEY + sizeof settings]; /* 11 characters for each number, of 16 */
    name(&g->s, text);
    int n = (int)strlen(text);
    for (const setting &x : settings) {
        uint32_t value = 0;
        size_t written = 0;
        cublasStatus_t status =
            cublasLtMatmulAlgoConfigGetAttribute(&g->algo, x.name, &value, x.bytes, &written);
        n += snprintf(text + n, sizeof text - (size_t)n, " %u",
                      status == CUBLAS_STATUS_SUCCESS ? value : 0);
    }
    return tune_hash(text, (size_t)n);
}

uint64_t zk_algorithms(zk *k)
{
    uint64_t sum = 0;
    gemms *all = k->gemms;
    for (gemm *g = all->made; g < all->made + all->n; g++) {
        sum += g->ran ? hash_of(g) : 0;
        g->ran = false;
    }
    return sum;
}

/* ---- kernels. A row-major [M,N] is a column-major N x M. */
/* y^T [N,M] = w^T [N,K] . x^T [K,M] */
void zk_linear_fwd(zk *k, const zk_launch *L, real *y, const real *x, const real *w, const real *b,
                   int64_t M, int64_t N, int64_t K, int layout)
{
    multiply(k, L, N, M, K, y, w, layout == ZK_OUT_IN, x, 0, b, 0, 0);
}

void zk_probe(zk *k, real *y, const real *x, const real *w, int64_t n)
{
    multiply(k, NULL, n, n, n, y, w, 1, x, 0, NULL, 0, 0);
}

/* dx^T [K,M] = w [K,N] . dy^T [N,M] */
void zk_linear_bwd_x(zk *k, const zk_launch *L, real *dx, const real *dy, const real *w, int64_t M,
                     int64_t N, int64_t K, int layout)
{
    multiply(k, L, K, M, N, dx, w, layout == ZK_IN_OUT, dy, 0, NULL, 0, 0);
}

/* dw [K,N]: dw^T [N,K] = dy^T [N,M] . x [M,K]; dw [N,K]: dw^T [K,N] = x^T [K,M] . dy [M,N] */
void zk_linear_bwd_w(zk *k, const zk_launch *L, void *dw, const real *dy, const real *x, int64_t M,
                     int64_t N, int64_t K, int layout, int full, int carry)
{
    if (layout == ZK_IN_OUT) multiply(k, L, N, K, M, dw, dy, 0, x, 1, NULL, full, carry);
    else multiply(k, L, K, N, M, dw, x, 0, dy, 1, NULL, full, carry);
}

/* ---- slices */
static real *from(zk *k, const real *p, int64_t at)
{
    return (char *)p + at * (k->dtype == ZK_F32 ? 4 : 2);
}

void zk_slice_fwd(zk *k, const zk_launch *L, real *y, const real *x, const real *w, const real *b,
                  int64_t M, int64_t N, int64_t K, int64_t at, int64_t n)
{
    multiply(k, L, n, M, K, from(k, y, at), w, 1, x, 0, b ? from(k, b, at) : NULL, 0, 0, 0, N);
}

void zk_slice_bwd_x(zk *k, const zk_launch *L, float *dx, const real *dy, const real *w, int64_t M,
                    int64_t N, int64_t K, int64_t at, int64_t n)
{
    multiply(k, L, K, M, n, dx, w, 0, from(k, dy, at), 0, NULL, 1, at > 0, N);
}

/* dw [n,K]: dw^T [K,n] = x^T [K,M] . dy [M,n] */
void zk_slice_bwd_w(zk *k, const zk_launch *L, real *dw, const real *dy, const real *x, int64_t M,
                    int64_t N, int64_t K, int64_t at, int64_t n)
{
    multiply(k, L, K, n, M, dw, x, 0, from(k, dy, at), 1, NULL, 0, 0, N);
}

/* ---- LoRA adapters on columns [at, at + n) of y and dy */
void zk_lora_fwd(zk *k, const zk_launch *L, real *y, const real *base, const real *x, const real *w,
                 int64_t M, int64_t N, int64_t K, int64_t at, int64_t n, float scale)
{
    if (y != base)
        zk_must(cudaMemcpyAsync(y, base, (size_t)(M * N * (k->dtype == ZK_F32 ? 4 : 2)),
                                cudaMemcpyDeviceToDevice, k->stream),
                "zk_lora_fwd");
    multiply(k, L, n, M, K, from(k, y, at), w, 1, x, 0, NULL, 0, 1, 0, N, scale);
}

void zk_lora_bwd_x(zk *k, const zk_launch *L, real *dx, const real *dy, const real *w, int64_t M,
                   int64_t N, int64_t K, int64_t at, int64_t n, float scale)
{
    multiply(k, L, K, M, n, dx, w, 0, from(k, dy, at), 0, NULL, 0, 0, N, 0, scale);
}

/* dw [n,K]: dw^T [K,n] = x^T [K,M] . dy [M,n] */
void zk_lora_bwd_w(zk *k, const zk_launch *L, void *dw, const real *dy, const real *x, int64_t M,
                   int64_t N, int64_t K, int64_t at, int64_t n, float scale, int full, int carry)
{
    multiply(k, L, K, n, M, dw, x, 0, from(k, dy, at), 1, NULL, full, carry, N, 0, scale);
}

/* ---- gradient of the bias: a thread block sums a stripe of rows of dy [M,N], its warps taking
 * rows in turn; a second launch folds the stripes */
enum { WARPS = 8 };

/* part[stripes][N] */
template <class T, int V>
static __global__ void __launch_bounds__((WARPS * ZK_WARP))
    sum_stripes(float *part, const T *dy, int64_t M, int64_t N)
{
    __shared__ float turn[WARPS][ZK_WARP * V];
    int lane = (int)(threadIdx.x % ZK_WARP), warp = (int)(threadIdx.x / ZK_WARP);
    int64_t rows = (M + gridDim.y - 1) / gridDim.y, from = blockIdx.y * rows;
    int64_t to = zk_least(M, from + rows);
    for (int64_t n = blockIdx.x * ZK_WARP * V; n < N; n += (int64_t)gridDim.x * ZK_WARP * V) {
        int64_t at = n + lane * V, first = at < N ? from + warp : to;
        float sum[V] = {}, x[V];
#pragma unroll 4
        for (int64_t m = first; m < to; m += WARPS) {
            fetch(x, dy + m * N + at);
            for (int j = 0; j < V; j++) sum[j] += x[j];
        }
        for (int j = 0; j < V; j++) turn[warp][lane * V + j] = sum[j];
        __syncthreads();
        for (int i = 1; warp == 0 && i < WARPS; i++)
            for (int j = 0; j < V; j++) sum[j] += turn[i][lane * V + j];
        if (warp == 0 && at < N) stow(part + blockIdx.y * N + at, sum);
        __syncthreads();
    }
}

template <class T>
static __global__ void fold_stripes(T *db, const float *part, int stripes, int64_t N)
{
    for (int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; n < N;
         n += (int64_t)gridDim.x * blockDim.x) {
        float sum = 0;
        for (int i = 0; i < stripes; i++) sum += part[i * N + n];
        put(db + n, sum);
    }
}

template <class T> static void bias_gradient(zk *k, const zk_launch *L, T *db, const T *dy,
                                             int64_t M, int64_t N)
{
    float *part = (float *)k->device;
    if (N % 4 || (uintptr_t)dy % sizeof(pack<T, 4>))
        ZK_LAUNCH(k, L, 0, (sum_stripes<T, 1>), part, dy, M, N);
    else ZK_LAUNCH(k, L, 0, (sum_stripes<T, 4>), part, dy, M, N);
    ZK_LAUNCH(k, L, 1, fold_stripes<T>, db, part, L[k->column].part[0].y, N);
}

void zk_linear_bwd_b(zk *k, const zk_launch *L, real *db, const real *dy, int64_t M, int64_t N)
{
    ZK_REAL(k, T, bias_gradient<T>(k, L, (T *)db, (const T *)dy, M, N));
}
