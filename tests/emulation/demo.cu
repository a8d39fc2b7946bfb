/* demo.cu -- kernels that test the emulation: barriers, warps, sums, places, and mistakes. */
#include "../../kernels/cuda/cuda.h"

namespace {

__global__ void places(int *to)
{
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int *at = to + 6 * (block * blockDim.x + threadIdx.x);
    at[0] = (int)blockIdx.x;
    at[1] = (int)blockIdx.y;
    at[2] = (int)blockIdx.z;
    at[3] = (int)threadIdx.x;
    at[4] = (int)blockDim.x;
    at[5] = (int)(gridDim.x * 10000 + gridDim.y * 100 + gridDim.z);
}

/* each thread reads its neighbour's value, `times` times over */
__global__ void turn(int *x, int times)
{
    ZK_SHARED(int, row);
    unsigned t = threadIdx.x, n = blockDim.x;
    row[t] = x[t];
    for (int i = 0; i < times; i++) {
        __syncthreads();
        int next = row[(t + 1) % n];
        __syncthreads();
        row[t] = next;
    }
    x[t] = row[t];
}

template <class T> __global__ void sums(float *sum, float *most, const T *x, int n)
{
    float s = 0, m = -1e30f;
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) {
        s += get(x[i]);
        m = max(m, get(x[i]));
    }
    s = block_sum(s);
    m = block_max(m, -1e30f);
    sum[threadIdx.x] = s;
    most[threadIdx.x] = m;
}

__global__ void warps(int *to)
{
    int t = (int)threadIdx.x;
    int *at = to + 6 * t;
    at[0] = __shfl_sync(~0u, t, 5);
    at[1] = __shfl_xor_sync(~0u, t, 3);
    at[2] = __shfl_down_sync(~0u, t, 2);
    at[3] = __shfl_up_sync(~0u, t, 4, 8);
    at[4] = (int)__ballot_sync(~0u, t % 3 == 0);
    __syncwarp();
    atomicAdd(&to[5], 1);
}

__global__ void some_at_barrier(int *x)
{
    if (threadIdx.x < 40) __syncthreads();
    x[threadIdx.x] = 1;
}

__global__ void two_barriers(int *x)
{
    if (threadIdx.x < 40) __syncthreads();
    else __syncthreads();
    x[threadIdx.x] = 1;
}

__global__ void some_in_warp(int *x)
{
    if (threadIdx.x != 7) x[threadIdx.x] = __shfl_xor_sync(~0u, x[threadIdx.x], 1);
}

__global__ void half_a_mask(int *x) { x[threadIdx.x] = __shfl_xor_sync(0xffffu, 1, 1); }

/* Mistakes within a launch: x is in device memory or shared. */
__global__ void no_barrier(int *x)
{
    __shared__ int row[64];
    row[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = row[63 - threadIdx.x];
}

__global__ void one_barrier(int *x) /* the second one is missing: rows are read and overwritten */
{
    ZK_SHARED(int, row);
    for (int i = 0; i < 2; i++) {
        row[threadIdx.x] = i;
        __syncthreads();
        x[threadIdx.x] = row[(threadIdx.x + 1) % 64];
    }
}

__global__ void shuffle_is_no_barrier(int *x)
{
    __shared__ int row[32];
    row[threadIdx.x] = 1;
    (void)__shfl_xor_sync(~0u, 1, 1);
    x[threadIdx.x] = row[31 - threadIdx.x];
}

__global__ void warp_barrier(int *x)
{
    __shared__ int row[32];
    row[threadIdx.x] = (int)threadIdx.x;
    __syncwarp();
    x[threadIdx.x] = row[31 - threadIdx.x];
}

/* x: 2 rows of a block's threads; the second is the first, turned round */
__global__ void turn_round(int *x, int barrier)
{
    unsigned t = threadIdx.x, n = blockDim.x;
    x[t] = (int)t;
    if (barrier) __syncthreads();
    x[n + t] = x[n - 1 - t];
}

__global__ void of_its_thread(int *x) { x[threadIdx.x] = 1; }

template <class T> __global__ void puts(T *to, const float *x)
{
    put(&to[threadIdx.x], x[threadIdx.x]);
}

}

extern "C" {

void demo_places(zk *k, const zk_launch *L, int *to) { ZK_LAUNCH(k, L, 0, places, to); }

void demo_turn(zk *k, const zk_launch *L, int *x, int times) { ZK_LAUNCH(k, L, 0, turn, x, times); }

void demo_sums(zk *k, const zk_launch *L, float *sum, float *most, const void *x, int n)
{
    ZK_REAL(k, T, ZK_LAUNCH(k, L, 0, (sums<T>), sum, most, (const T *)x, n));
}

void demo_warps(zk *k, const zk_launch *L, int *to) { ZK_LAUNCH(k, L, 0, warps, to); }

void demo_some_at_barrier(zk *k, const zk_launch *L, int *x)
{
    ZK_LAUNCH(k, L, 0, some_at_barrier, x);
}

void demo_two_barriers(zk *k, const zk_launch *L, int *x) { ZK_LAUNCH(k, L, 0, two_barriers, x); }

void demo_some_in_warp(zk *k, const zk_launch *L, int *x) { ZK_LAUNCH(k, L, 0, some_in_warp, x); }

void demo_half_a_mask(zk *k, const zk_launch *L, int *x) { ZK_LAUNCH(k, L, 0, half_a_mask, x); }

void demo_no_barrier(zk *k, const zk_launch *L, int *x) { ZK_LAUNCH(k, L, 0, no_barrier, x); }

void demo_one_barrier(zk *k, const zk_launch *L, int *x) { ZK_LAUNCH(k, L, 0, one_barrier, x); }

void demo_shuffle_is_no_barrier(zk *k, const zk_launch *L, int *x)
{
    ZK_LAUNCH(k, L, 0, shuffle_is_no_barrier, x);
}

void demo_warp_barrier(zk *k, const zk_launch *L, int *x) { ZK_LAUNCH(k, L, 0, warp_barrier, x); }

void demo_turn_round(zk *k, const zk_launch *L, int *x, int barrier)
{
    ZK_LAUNCH(k, L, 0, turn_round, x, barrier);
}

void demo_of_its_thread(zk *k, const zk_launch *L, int *x) { ZK_LAUNCH(k, L, 0, of_its_thread, x); }

void demo_puts(zk *k, const zk_launch *L, void *to, const float *x)
{
    ZK_REAL(k, T, ZK_LAUNCH(k, L, 0, (puts<T>), (T *)to, x));
}
}
