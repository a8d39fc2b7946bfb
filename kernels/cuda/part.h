/* part.h -- flat buffers on a GPU: elements several at a time, and the tensor of each block.
 *
 * Tensors of a flat buffer start at multiples of ZK_BLOCK elements, and so does every piece of it
 * that a kernel is given: a block lies in one tensor or between tensors. A warp looks its block up
 * together, each lane in a span of its own.
 */
#ifndef ZK_CUDA_PART_H
#define ZK_CUDA_PART_H
#include "cuda.h"

#include "../scalar.h"

/* ---- V elements, aligned to their size */
template <class T, int V> struct alignas(sizeof(T) * V) pack {
    T v[V];
};

/* x = p[0 .. V-1], 0 from the left-th on */
template <int V, class T> __device__ inline void fetch(float (&x)[V], const T *p, int64_t left)
{
    if (left >= V) {
        pack<T, V> all = *(const pack<T, V> *)p;
        for (int j = 0; j < V; j++)
            x[j] = get(all.v[j]);
    } else {
        for (int j = 0; j < V; j++)
            x[j] = j < left ? get(p[j]) : 0;
    }
}

/* the first `left` of p[0 .. V-1] = x */
template <int V, class T> __device__ inline void stow(T *p, const float (&x)[V], int64_t left)
{
    if (left >= V) {
        pack<T, V> all;
        for (int j = 0; j < V; j++)
            put(&all.v[j], x[j]);
        *(pack<T, V> *)p = all;
    } else {
        for (int j = 0; j < V && j < left; j++)
            put(p + j, x[j]);
    }
}

/* ---- spans, as a kernel's parameter */
struct span_list {
    zk_span span[ZK_WARP];
};

/* The first of n spans; the lanes past them own empty ones. */
static inline span_list some_spans(const zk_span *spans, int64_t n)
{
    span_list list = {};
    memcpy(list.span, spans, (size_t)zk_least(n, ZK_WARP) * sizeof *spans);
    return list;
}

/* ---- what a block is of: elements elem .. elem + n - 1 of tensor `key`; `lane` owns its span */
struct block_part {
    int64_t key, elem;
    int lane, n;
};

/* The part at element `e` of the flat buffer, the same in every lane; 0 between tensors. */
__device__ inline int find_part(block_part *part, const zk_span &own, int64_t e)
{
    int64_t past = e - own.at, i = past > 0 && own.stride > 0 ? past / own.stride : 0;
    int64_t elem = past - i * own.stride;
    int mine = elem >= 0 && i < own.count && elem < own.elems;
    unsigned who = __ballot_sync((unsigned)ZK_ALL, mine);
    if (!who)
        return 0;
    part->lane = __ffs((int)who) - 1;
    part->elem = __shfl_sync((unsigned)ZK_ALL, elem, part->lane);
    part->key = __shfl_sync((unsigned)ZK_ALL, own.key + i * own.key_stride, part->lane);
    int64_t left = __shfl_sync((unsigned)ZK_ALL, own.elems, part->lane) - part->elem;
    part->n = (int)zk_least(left, ZK_BLOCK);
    return 1;
}

/* ---- warps of the launch: which one this is, and how many there are */
__device__ inline int lane_here(void) { return (int)(threadIdx.x % ZK_WARP); }

__device__ inline int64_t warp_here(void)
{
    return (int64_t)blockIdx.x * (blockDim.x / ZK_WARP) + threadIdx.x / ZK_WARP;
}

__device__ inline int64_t warps_here(void) { return (int64_t)gridDim.x * (blockDim.x / ZK_WARP); }

#endif
