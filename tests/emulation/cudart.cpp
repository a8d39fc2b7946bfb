/* cudart.cpp -- the CUDA runtime's calls on a CPU. */
#include "shim.h"

#include <cstdlib>

static cudaError_t last;

void shim_enqueue(const char *name, const void *kernel, const shim_grid &g, cudaStream_t stream,
                  std::function<void()> thread)
{
    (void)kernel;
    (void)stream;
    last = g.block < 1 || g.block > 1024 || !g.grid.x || !g.grid.y || !g.grid.z || g.grid.y > 65535 || g.grid.z > 65535 ? cudaErrorInvalidConfiguration
           : g.shared > 227 << 10        ? cudaErrorInvalidValue
                                         : cudaSuccess;
    if (last == cudaSuccess)
        shim_run(name, g, thread);
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t e = last;
    last = cudaSuccess;
    return e;
}

const char *cudaGetErrorString(cudaError_t e)
{
    return e == cudaErrorInvalidConfiguration ? "invalid configuration argument"
           : e == cudaErrorInvalidValue       ? "invalid argument"
                                              : "no error";
}

cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t)
{
    memset(p, value, n);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind, cudaStream_t)
{
    memmove(to, from, n);
    return cudaSuccess;
}
