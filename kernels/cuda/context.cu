/* context.cu -- the kernel context on a GPU, and which GPU it is.
 *
 * Invariants
 *  1. A context allocates no device memory: the plan gives it its scratch.
 *  2. zk_object names everything except operands that the bits of a kernel depend on; ranks compare
 *     it.
 */
#include "cuda.h"
#include "tune.h"

#include <stdlib.h>

struct device_facts {
    int major, minor, processors;
    char name[40]; /* the beginning of the name */
};

/* Look up the current device. Returns NULL, or why there is none. */
static const char *look(device_facts *d)
{
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&d->major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&d->minor, cudaDevAttrComputeCapabilityMinor, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&d->processors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceProp p = {};
    if (error == cudaSuccess) error = cudaGetDeviceProperties(&p, device);
    snprintf(d->name, sizeof d->name, "%.*s", (int)sizeof d->name - 1, p.name);
    return error == cudaSuccess ? NULL : cudaGetErrorString(error);
}

/* Code for sm_100 runs on every device of that major version: sm_103 is a B300. */
const char *zk_target(void)
{
    static char name[16];
    device_facts d;
    if (look(&d)) return "none";
    snprintf(name, sizeof name, "sm_%d%d", d.major, d.major == 10 ? 0 : d.minor);
    return name;
}

const char *zk_object(void)
{
    static char name[160];
    device_facts d;
    if (look(&d)) return "none";
    int n = snprintf(name, sizeof name, "sm_%d%d, %s, %d SMs, cuBLASLt %zu", d.major, d.minor,
                     d.name, d.processors, cublasLtGetVersion());
    if (tune_sum())
        snprintf(name + n, sizeof name - (size_t)n, ", gemms %016llx",
                 (unsigned long long)tune_sum());
    return name;
}

/* On a GPU the launches fix the order. */
int zk_products(zk *k, int order)
{
    (void)k, (void)order;
    return ZK_PAIRS;
}

int64_t zk_overhead(int threads)
{
    (void)threads;
    return 0;
}

zk *zk_open(void *stream, void *device, void *host, int dtype, int column, int threads,
            const char **why)
{
    static char reason[160];
    (void)threads;
    device_facts d;
    const char *none = look(&d);
    *why = NULL;
    if (none) {
        snprintf(reason, sizeof reason, "no CUDA device: %s", none);
        *why = reason;
    } else if (dtype < ZK_F32 || dtype > ZK_F16) {
        *why = "the kernels on a GPU store f32, bf16 or f16";
    }
    zk *k = *why ? NULL : (zk *)calloc(1, sizeof(zk));
    if (!k) {
        *why = *why ? *why : "no memory for the kernels' context";
        return NULL;
    }
    // clang-format off
    *k = {(cudaStream_t)stream, (char *)device, (char *)host, dtype, column, d.processors,
          NULL, zk_gemms_open()};
    // clang-format on
    cublasStatus_t status = k->gemms ? cublasLtCreate(&k->lt) : CUBLAS_STATUS_ALLOC_FAILED;
    if (status != CUBLAS_STATUS_SUCCESS) {
        free(k->gemms);
        snprintf(reason, sizeof reason, "cuBLASLt does not start: %s",
                 cublasLtGetStatusString(status));
        *why = reason;
        free(k);
        return NULL;
    }
    return k;
}

void zk_close(zk *k)
{
    zk_gemms_close(k->gemms);
    (void)cublasLtDestroy(k->lt);
    free(k);
}
