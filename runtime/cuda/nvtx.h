/* nvtx.h -- names for a profiler, which NVTX shows above the kernels. Without a profiler each
 * costs a jump; without NVTX's headers in the toolkit, nothing. */
#ifndef ZR_NVTX_H
#define ZR_NVTX_H
#include <cuda_runtime_api.h>
#if __has_include(<nvtx3/nvToolsExtCudaRt.h>)
#include <nvtx3/nvToolsExtCudaRt.h>
static inline void zr_begins(const char *name) { nvtxRangePushA(name); }
static inline void zr_ends(void) { nvtxRangePop(); }
static inline void zr_named(cudaStream_t stream, const char *name)
{
    nvtxNameCudaStreamA(stream, name);
}
#else
static inline void zr_begins(const char *name) { (void)name; }
static inline void zr_ends(void) {}
static inline void zr_named(cudaStream_t stream, const char *name) { (void)stream, (void)name; }
#endif
#endif
