/* part.h -- flat buffers on a GPU: finding the tensor of each block.
 *
 * Tensors of a flat buffer start at multiples of ZK_BLOCK elements, and so does every piece of it
 * that a kernel is given, so a block lies in one tensor or between tensors. The lanes of a warp
 * look up a block together, each in its own span.
 */
#ifndef ZK_CUDA_PART_H
#define ZK_CUDA_PART_H
#include "pack.h"

#include "../scalar.h"

/* ---- spans as a kernel parameter */
struct span_list {
    zk_span span[ZK_WARP];
};

/* Return the first of n spans, one per lane; lanes past the end get empty spans. */
static inline span_list some_spans(const zk_span *spans, int64_t n)
{
    span_list list = {};
    memcpy(list.span, spans, (size_t)zk_least(n, ZK_WARP) * sizeof *spans);
    return list;
}

/* ---- the part of a block in a tensor: elements elem .. elem + n - 1 of tensor
 * `key`; `lane` owns its span */
struct block_part {
    int64_t key, elem;
    int lane, n;
};

/* Find the part at element `e` of the flat buffer, the same in every lane.
 * Returns 0 between tensors. */
__device__ inline int find_part(block_part *part, const zk_span &own, int64_t e)
{
    int64_t past = e - own.at, i = past > 0 && own.stride > 0 ? past / own.stride : 0;
    int64_t elem = past - i * own.stride;
    int mine = elem >= 0 && i < own.count && elem < own.elems;
    unsigned who = __ballot_sync((unsigned)ZK_ALL, mine);
    if (!who) return 0;
    part->lane = __ffs((int)who) - 1;
    part->elem = __shfl_sync((unsigned)ZK_ALL, elem, part->lane);
    part->key = __shfl_sync((unsigned)ZK_ALL, own.key + i * own.key_stride, part->lane);
    int64_t left = __shfl_sync((unsigned)ZK_ALL, own.elems, part->lane) - part->elem;
    part->n = (int)zk_least(left, ZK_BLOCK);
    return 1;
}

/* ---- warps of the launch: number of this warp, number of all */
__device__ inline int lane_here(void) { return (int)(threadIdx.x % ZK_WARP); }

__device__ inline int64_t warp_here(void)
{
    return (int64_t)blockIdx.x * (blockDim.x / ZK_WARP) + threadIdx.x / ZK_WARP;
}

__device__ inline int64_t warps_here(void) { return (int64_t)gridDim.x * (blockDim.x / ZK_WARP); }

#endif
