/* team.h -- teams: neighbouring threads that work on one row together. */
#ifndef ZK_CUDA_TEAM_H
#define ZK_CUDA_TEAM_H
#include "cuda.h"

/* The threads of a part of a warp (a power of two), or of a whole block. rank: number of the team
 * in its block. */
struct team {
    int threads, rank, lane, teams;
};

__device__ inline team my_team(int threads)
{
    int t = (int)threadIdx.x;
    return {threads, t / threads, t % threads, (int)blockDim.x / threads};
}

/* Return the sum over the team. All threads of a warp call it. */
__device__ inline float team_sum(const team &t, float x)
{
    if (t.threads > ZK_WARP) return block_sum(x);
    for (int apart = t.threads / 2; apart; apart /= 2)
        x += __shfl_xor_sync((unsigned)ZK_ALL, x, apart);
    return x;
}

#endif
