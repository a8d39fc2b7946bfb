/* cublaslt.cpp -- cuBLASLt's products on a CPU: f32, bf16 or f16, f32 sums, optionally a bias.
 *
 * Invariants
 *  1. An element of a product is one FMA chain in ascending k, or as many chains as its algorithm
 *     has parts of k, added in order; then alpha, beta and the bias follow, and it is rounded once.
 *     Two parts are reported as the fastest, and a reduction in place as faster still. With a
 *     number of processors the first choice has 2, 3 or 4 parts, depending on that number.
 *     ZR_EMULATE_CHOICE=N leaves the first N choices out, as another process of the library might.
 *  2. A product uses the contents of its descriptors at the time of issue.
 *  3. A shape, type or attribute that is not emulated is refused as not supported.
 *  4. An algorithm serves matrices with the alignment (256 bytes by default) and the number of
 *     processors given when it was requested, and needs workspace for its parts' sums. A product
 *     that leaves processors to NCCL leaves as many as its communicators hold.
 *  5. A handle takes a page of device memory. A product owns its whole workspace: both ends are
 *     checked as written.
 */
#include "queue.h"
#include "../../kernels/scalar.h"

#include <cublasLt.h>
#include <new>

namespace {

struct matmul {
    cublasOperation_t a, b;
    cublasLtEpilogue_t end;
    const void *bias;
    cudaDataType_t bias_type;
    int32_t bias_typed, target; /* target: processors; 0: all */
};

struct layout {
    cudaDataType_t type;
    int64_t rows, cols, ld;
};

struct preference {
    uint64_t workspace;
    uint32_t reductions, align[4]; /* of a, b, c and d, in bytes */
};

/* The words of an algorithm: parts of k, and how they are added (cublasLtReductionScheme_t). */
enum { MAGIC = 0x656d756c, MOST_PARTS = 4, ALIGNED = 256 };
struct algorithm {
    uint64_t magic, parts, reduction;
    uint32_t align[4];
    int64_t target;
};

/* Returns the descriptors' own words, inside the library's opaque ones. */
template <class T, class Opaque> T *in(Opaque *o)
{
    static_assert(sizeof(T) <= sizeof(Opaque), "fits");
    return reinterpret_cast<T *>(o);
}

const matmul *in(cublasLtMatmulDesc_t d) { return in<matmul>(d); }

const layout *in(cublasLtMatrixLayout_t l) { return in<layout>(l); }

bool known(cudaDataType_t t) { return t == CUDA_R_32F || t == CUDA_R_16BF || t == CUDA_R_16F; }

size_t bytes(cudaDataType_t t) { return t == CUDA_R_32F ? 4 : 2; }

float load(const void *p, int64_t i, cudaDataType_t t)
{
    if (t == CUDA_R_32F) return ((const float *)p)[i];
    uint16_t x = ((const uint16_t *)p)[i];
    return t == CUDA_R_16F ? widen_f16(x) : widen(x);
}

void store(void *p, int64_t i, cudaDataType_t t, float x)
{
    if (t == CUDA_R_32F) ((float *)p)[i] = x;
    else ((uint16_t *)p)[i] = t == CUDA_R_16F ? narrow_f16(x) : narrow(x);
}

struct product {
    matmul how;
    layout a, b, c, d;
    const void *pa = nullptr, *pb = nullptr, *pc = nullptr;
    void *pd = nullptr, *workspace = nullptr;
    size_t workspace_bytes = 0;
    float alpha = 1, beta = 0;
    int64_t m = 0, n = 0, k = 0;
    algorithm how_to = {};
};

void check(const void *p, const layout &l, bool write)
{
    for (int64_t j = 0; j < l.cols; j++)
        race_check((const char *)p + (size_t)(j * l.ld) * bytes(l.type),
                   (size_t)l.rows * bytes(l.type), write);
}

/* Returns the matrix as floats, [rows] of `cols` each, transposed if its operand is. */
std::vector<float> unpack(const void *p, const layout &l, bool turned, int64_t outer, int64_t inner)
{
    std::vector<float> x((size_t)(outer * inner));
    for (int64_t o = 0; o < outer; o++)
        for (int64_t i = 0; i < inner; i++)
            x[(size_t)(o * inner + i)] = load(p, turned ? o + i * l.ld : i + o * l.ld, l.type);
    return x;
}

void check_all(const product &p)
{
    check(p.pa, p.a, false);
    check(p.pb, p.b, false);
    if (p.beta != 0) check(p.pc, p.c, false);
    if (p.how.bias) race_check(p.how.bias, (size_t)p.m * bytes(p.how.bias_type), false);
    check(p.pd, p.d, true);
    if (p.workspace_bytes) {
        race_check(p.workspace, 1, true);
        race_check((char *)p.workspace + p.workspace_bytes - 1, 1, true);
    }
}

void multiply(const product &p)
{
    check_all(p);
    std::vector<float> a = unpack(p.pa, p.a, p.how.a != CUBLAS_OP_N, p.k, p.m);
    std::vector<float> b = unpack(p.pb, p.b, p.how.b != CUBLAS_OP_N, p.n, p.k);
    std::vector<float> sum((size_t)p.m), part((size_t)p.m);
    int64_t each = (p.k + (int64_t)p.how_to.parts - 1) / (int64_t)p.how_to.parts;
    for (int64_t j = 0; j < p.n; j++) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int64_t from = 0; from < p.k; from += each) {
            std::fill(part.begin(), part.end(), 0.0f);
            for (int64_t k = from; k < p.k && k < from + each; k++) {
                const float *column = &a[(size_t)(k * p.m)], y = b[(size_t)(j * p.k + k)];
                for (int64_t i = 0; i < p.m; i++)
                    part[(size_t)i] = __builtin_fmaf(column[i], y, part[(size_t)i]);
            }
            for (int64_t i = 0; i < p.m; i++)
                sum[(size_t)i] = from ? sum[(size_t)i] + part[(size_t)i] : part[(size_t)i];
        }
        for (int64_t i = 0; i < p.m; i++) {
            float x = p.alpha * sum[(size_t)i];
            if (p.beta != 0) x = __builtin_fmaf(p.beta, load(p.pc, i + j * p.c.ld, p.c.type), x);
            if (p.how.bias) x += load(p.how.bias, i, p.how.bias_type);
            store(p.pd, i + j * p.d.ld, p.d.type, x);
        }
    }
}

/* Finds the shape of a product, or that it is none. */
cublasStatus_t fit(product *p)
{
    bool ta = p->how.a != CUBLAS_OP_N, tb = p->how.b != CUBLAS_OP_N;
    p->m = ta ? p->a.cols : p->a.rows;
    p->k = ta ? p->a.rows : p->a.cols;
    p->n = tb ? p->b.rows : p->b.cols;
    bool shapes = p->k == (tb ? p->b.cols : p->b.rows) && p->d.rows == p->m && p->d.cols == p->n &&
                  p->c.rows == p->m && p->c.cols == p->n;
    bool types = p->a.type == p->b.type && p->c.type == p->d.type &&
                 (p->d.type == p->a.type || p->d.type == CUDA_R_32F);
    if (p->how.end == CUBLASLT_EPILOGUE_DEFAULT) p->how.bias = nullptr;
    else if (!p->how.bias) return CUBLAS_STATUS_INVALID_VALUE;
    if (!p->how.bias_typed) p->how.bias_type = p->d.type;
    return !shapes  ? CUBLAS_STATUS_INVALID_VALUE
           : !types ? CUBLAS_STATUS_NOT_SUPPORTED
                    : CUBLAS_STATUS_SUCCESS;
}

/* the seconds that a product is reported to take */
double time_of(const algorithm &a)
{
    bool in_place = a.reduction == CUBLASLT_REDUCTION_SCHEME_INPLACE;
    return in_place ? 1e-6 : a.parts == 2 ? 5e-6 : 1e-5 * (double)(1 + a.parts);
}

algorithm read(const cublasLtMatmulAlgo_t &a)
{
    algorithm made;
    memcpy(&made, &a, sizeof made);
    return made;
}

size_t workspace_of(const algorithm &a, const product &p)
{
    return a.parts < 2 ? 0 : (size_t)(a.parts * 4) * (size_t)(p.m * p.n);
}

bool known(const algorithm &a, const matmul &how)
{
    return a.magic == MAGIC && a.target == how.target && a.parts && a.parts <= MOST_PARTS &&
           a.align[0] && a.align[1] && a.align[2] && a.align[3];
}

int processors(void)
{
    int n = 0;
    (void)cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0);
    return n;
}

bool aligned(const product &p)
{
    const void *at[] = {p.pa, p.pb, p.beta == 0 ? p.pd : p.pc, p.pd, p.workspace};
    const uint32_t to[] = {p.how_to.align[0], p.how_to.align[1], p.how_to.align[2],
                           p.how_to.align[3], 16};
    for (int i = 0; i < 5; i++)
        if ((uintptr_t)at[i] % to[i]) return false;
    return true;
}

}

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

const char *cublasLtGetStatusString(cublasStatus_t s)
{
    return s == CUBLAS_STATUS_SUCCESS         ? "CUBLAS_STATUS_SUCCESS"
           : s == CUBLAS_STATUS_INVALID_VALUE ? "CUBLAS_STATUS_INVALID_VALUE"
           : s == CUBLAS_STATUS_NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED"
           : s == CUBLAS_STATUS_ALLOC_FAILED  ? "CUBLAS_STATUS_ALLOC_FAILED"
                                              : "another cuBLASLt status";
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *lt)
{
    *lt = (cublasLtHandle_t)race_alloc(DEVICE, 1);
    return *lt ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t lt)
{
    return race_free(DEVICE, lt) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

/* ---- descriptors */
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    *d = new cublasLtMatmulDescOpaque_t{};
    *in<matmul>(*d) = {
        CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_EPILOGUE_DEFAULT, nullptr, CUDA_R_32F, 0, 0};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d)
{
    delete d;
    return CUBLAS_STATUS_SUCCESS;
}

template <class T> static cublasStatus_t take(T *to, const void *value, size_t n)
{
    if (n != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(to, value, n);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d,
                                              cublasLtMatmulDescAttributes_t name,
                                              const void *value, size_t n)
{
    matmul *m = in<matmul>(d);
    if (name == CUBLASLT_MATMUL_DESC_TRANSA) return take(&m->a, value, n);
    if (name == CUBLASLT_MATMUL_DESC_TRANSB) return take(&m->b, value, n);
    if (name == CUBLASLT_MATMUL_DESC_BIAS_POINTER) return take(&m->bias, value, n);
    if (name == CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE) {
        m->bias_typed = 1;
        return take(&m->bias_type, value, n);
    }
    if (name == CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET) {
        cublasStatus_t s = take(&m->target, value, n);
        return s == CUBLAS_STATUS_SUCCESS && (m->target < 0 || m->target > processors())
                   ? CUBLAS_STATUS_INVALID_VALUE
                   : s;
    }
    if (name != CUBLASLT_MATMUL_DESC_EPILOGUE) return CUBLAS_STATUS_NOT_SUPPORTED;
    cublasStatus_t s = take(&m->end, value, n);
    if (s != CUBLAS_STATUS_SUCCESS || m->end == CUBLASLT_EPILOGUE_DEFAULT ||
        m->end == CUBLASLT_EPILOGUE_BIAS)
        return s;
    return CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld)
{
    if (!known(type)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!rows || !cols || ld < (int64_t)rows) return CUBLAS_STATUS_INVALID_VALUE;
    *l = new cublasLtMatrixLayoutOpaque_t{};
    *in<layout>(*l) = {type, (int64_t)rows, (int64_t)cols, ld};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l)
{
    delete l;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p)
{
    *p = new cublasLtMatmulPreferenceOpaque_t{};
    *in<preference>(*p) = {0, CUBLASLT_REDUCTION_SCHEME_MASK, {ALIGNED, ALIGNED, ALIGNED, ALIGNED}};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p)
{
    delete p;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                    cublasLtMatmulPreferenceAttributes_t name,
                                                    const void *value, size_t n)
{
    if (name == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
        return take(&in<preference>(p)->workspace, value, n);
    if (name == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK)
        return take(&in<preference>(p)->reductions, value, n);
    static const cublasLtMatmulPreferenceAttributes_t names[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    for (int i = 0; i < 4; i++)
        if (name == names[i]) return take(&in<preference>(p)->align[i], value, n);
    return CUBLAS_STATUS_NOT_SUPPORTED;
}

/* ---- products */
/* Choices in order: 1 part of k (more with a number of processors), 2 added in place if that is
 * allowed, then 2 and more. */
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t how,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t prefer, int wanted,
                                              cublasLtMatmulHeuristicResult_t found[], int *n)
{
    product p = {*in(how), *in(a), *in(b), *in(c), *in(d)};
    cublasStatus_t s = fit(&p);
    const char *word = getenv("ZR_EMULATE_CHOICE");
    uint64_t first = word ? strtoull(word, nullptr, 10) : 0;
    *n = 0;
    for (uint64_t i = first; s == CUBLAS_STATUS_SUCCESS && i <= MOST_PARTS && *n < wanted; i++) {
        uint64_t few = p.how.target ? 2 + (uint64_t)p.how.target % 3 : 1;
        uint64_t parts = i == 0 ? few : i == 1 ? 2 : i;
        uint64_t how_to = parts == 1 ? CUBLASLT_REDUCTION_SCHEME_NONE
                          : i == 1   ? CUBLASLT_REDUCTION_SCHEME_INPLACE
                                     : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        const preference *x = in<preference>(prefer);
        algorithm a = {MAGIC,
                       parts,
                       how_to,
                       {x->align[0], x->align[1], x->align[2], x->align[3]},
                       p.how.target};
        if ((how_to & ~(uint64_t)x->reductions) || workspace_of(a, p) > x->workspace) continue;
        found[*n] = {};
        memcpy(&found[*n].algo, &a, sizeof a);
        found[*n].workspaceSize = workspace_of(a, p);
        found[(*n)++].state = CUBLAS_STATUS_SUCCESS;
    }
    return s;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t how,
                                       cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                       cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                       const cublasLtMatmulAlgo_t *algo,
                                       cublasLtMatmulHeuristicResult_t *result)
{
    result->workspaceSize = 0;
    return known(read(*algo), *in(how)) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t name,
                                                    void *value, size_t n, size_t *written)
{
    bool narrow = name == CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID ||
                  name == CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID;
    algorithm a = read(*algo);
    uint32_t x = name == CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME ? (uint32_t)a.reduction
                 : name == CUBLASLT_ALGO_CONFIG_SPLITK_NUM     ? (uint32_t)a.parts
                                                               : 0;
    if (name > CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID || n != (narrow ? 2 : sizeof x))
        return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(value, &x, *written = n);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t how, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t la, const void *b,
                              cublasLtMatrixLayout_t lb, const void *beta, const void *c,
                              cublasLtMatrixLayout_t lc, void *d, cublasLtMatrixLayout_t ld,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t n,
                              cudaStream_t stream)
{
    product p = {*in(how), *in(la), *in(lb), *in(lc), *in(ld), a, b, c, d, workspace, n};
    p.alpha = *(const float *)alpha;
    p.beta = *(const float *)beta;
    p.how_to = read(*algo);
    cublasStatus_t s = fit(&p);
    if (s != CUBLAS_STATUS_SUCCESS) return s;
    if (p.how.target && processors() - p.how.target < queue_blocks)
        shim_fail("cuBLASLt: a product on %d of %d processors, beside communicators on %d",
                  p.how.target, processors(), queue_blocks);
    if (!known(p.how_to, p.how) || !aligned(p) || n < workspace_of(p.how_to, p))
        return CUBLAS_STATUS_INVALID_VALUE;
    cudaError_t e = queue_issue(stream, "cublasLtMatmul", [p] {
        return work([p] {
            multiply(p);
            queue_clock += time_of(p.how_to);
            return DONE;
        });
    });
    return e == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
