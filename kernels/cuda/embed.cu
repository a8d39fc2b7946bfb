/* embed.cu -- token and position embedding, forward and backward.
 *
 *   y[m] = w[token[m]] + p[position[m]]; dw[v] = sum of dy[m] over m with token[m] = v
 *
 * Invariants
 *  1. An element of a gradient is summed by one thread. Its terms are added in f32 in token order
 *     (batch order for positions), and the sum is rounded once: the bits are those of a CPU.
 *  2. The rows of a token keep their order, whatever the order of blocks: one block places all rows
 *     of its own range of tokens.
 */
#include "pack.h"

namespace {

/* ---- forward. y [M,C], w [V,C]; p: NULL, or its row position[m], or, without position, the row of
 * m in its sample */
template <class T, int V>
__global__ void gather(T *y, const int32_t *token, const int32_t *position, const T *w, const T *p,
                       int64_t M, int64_t length, int64_t C)
{
    for (int64_t m = blockIdx.x; m < M; m += gridDim.x) {
        const T *word = w + token[m] * C;
        int64_t at = position ? position[m] : m % length;
        for (int64_t c = threadIdx.x * V; c < C; c += blockDim.x * V) {
            float a[V], b[V];
            fetch(a, word + c);
            if (p) {
                fetch(b, p + at * C + c);
                for (int j = 0; j < V; j++) a[j] += b[j];
            }
            stow(y + m * C + c, a);
        }
    }
}

/* ---- backward: a counting sort. place [M] receives the rows in order of token, then of
 * row; the rows of token v end at end[v] and begin where those of token v-1 end. A block
 * sorts the tokens from `low` on. next [size] in shared memory first counts them, then holds
 * the place of the next row. */

/* Count the rows of this block's tokens; returns how many rows have a smaller token. */
__device__ inline int count(int32_t *next, const int32_t *token, int M, int low, int size)
{
    int below = 0;
    for (int i = (int)threadIdx.x; i < size; i += (int)blockDim.x) next[i] = 0;
    __syncthreads();
    for (int m = (int)threadIdx.x; m < M; m += (int)blockDim.x) {
        int v = token[m] - low;
        below += v < 0;
        if (v >= 0 && v < size) atomicAdd(&next[v], 1);
    }
    return block_sum(below);
}

/* next[i] = from + next[0] + ... + next[i-1], by the first warp, with a run of tokens per lane */
__device__ inline void scan(int32_t *next, int size, int from)
{
    int lane = (int)threadIdx.x, each = (size + ZK_WARP - 1) / ZK_WARP, sum = 0;
    int first = min(lane * each, size), last = min(first + each, size);
    for (int i = first; i < last; i++) sum += next[i];
    int at = sum;
    for (int by = 1; by < ZK_WARP; by *= 2) {
        int other = __shfl_up_sync((unsigned)ZK_ALL, at, by);
        at += lane >= by ? other : 0;
    }
    at += from - sum;
    for (int i = first; i < last; i++) {
        int n = next[i];
        next[i] = at;
        at += n;
    }
}

/* Count the threads before this one in the block that have the same token. mine: a bit per thread
 * whose token is this block's. */
__device__ inline int same_before(const int32_t *all, const unsigned *mine)
{
    int t = (int)threadIdx.x, same = 0;
    for (int warp = 0; warp <= t / ZK_WARP; warp++) {
        unsigned bits = mine[warp];
        if (warp == t / ZK_WARP) bits &= (1u << t % ZK_WARP) - 1;
        for (; bits; bits &= bits - 1) same += all[warp * ZK_WARP + __ffs((int)bits) - 1] == all[t];
    }
    return same;
}

__global__ void sort(int32_t *end, int32_t *place, const int32_t *token, int M, int V)
{
    ZK_SHARED(int32_t, next);
    __shared__ int32_t all[1024];
    __shared__ unsigned mine[ZK_WARP];
    int t = (int)threadIdx.x, most = (V + (int)gridDim.x - 1) / (int)gridDim.x;
    int low = min((int)blockIdx.x * most, V), size = min(most, V - low);
    int below = count(next, token, M, low, size);
    if (t < ZK_WARP) scan(next, size, below);
    int ahead = t < M ? token[t] : -1;
    for (int first = 0; first < M; first += (int)blockDim.x) {
        int v = ahead - low, own = v >= 0 && v < size && first + t < M;
        ahead = first + t + (int)blockDim.x < M ? token[first + t + blockDim.x] : -1;
        unsigned bits = __ballot_sync((unsigned)ZK_ALL, own);
        all[t] = v;
        if (t % ZK_WARP == 0) mine[t / ZK_WARP] = bits;
        __syncthreads();
        if (own) place[next[v] + same_before(all, mine)] = first + t;
        __syncthreads();
        if (own) atomicAdd(&next[v], 1);
    }
    __syncthreads();
    for (int i = t; i < size; i += (int)blockDim.x) end[low + i] = next[i];
}

/* Sum rows of dw, one per warp, V columns per lane, 32 rows of dy at a time. dw [V,C]: W is T, or
 * float if it is added to. */
template <class W, class T, int V, int ADD>
__global__ void sum_rows(W *dw, const T *dy, const int32_t *end, const int32_t *place, int words,
                         int64_t C)
{
    int lane = (int)(threadIdx.x % ZK_WARP), warps = (int)(blockDim.x / ZK_WARP);
    int64_t c = ((int64_t)blockIdx.y * ZK_WARP + lane) * V;
    int v = (int)(blockIdx.x * warps + threadIdx.x / ZK_WARP);
    for (; v < words; v += (int)gridDim.x * warps) {
        int from = v ? end[v - 1] : 0, to = end[v];
        float sum[V] = {}, x[V];
        if (ADD && from == to) continue;
        if (ADD && c < C) fetch(sum, dw + v * C + c);
        for (; from < to; from += ZK_WARP) {
            int n = min(to - from, (int)ZK_WARP), mine = lane < n ? place[from + lane] : 0;
#pragma unroll 8
            for (int i = 0; i < n; i++) {
                int64_t m = __shfl_sync((unsigned)ZK_ALL, mine, i);
                if (c < C) fetch(x, dy + m * C + c);
                for (int j = 0; c < C && j < V; j++) sum[j] += x[j];
            }
        }
        if (c < C) stow(dw + v * C + c, sum);
    }
}

/* dp [P,C], dy [B,T,C] */
template <class T, int V>
__global__ void sum_positions(T *dp, const T *dy, int64_t B, int64_t length, int64_t C, int64_t P)
{
    for (int64_t t = blockIdx.x; t < P; t += gridDim.x)
        for (int64_t c = threadIdx.x * V; c < C; c += blockDim.x * V) {
            float sum[V] = {}, x[V];
#pragma unroll 4
            for (int64_t b = 0; b < (t < length ? B : 0); b++) {
                fetch(x, dy + (b * length + t) * C + c);
                for (int j = 0; j < V; j++) sum[j] += x[j];
            }
            stow(dp + t * C + c, sum);
        }
}

}

extern "C" {

void zk_embed_fwd(zk *k, const zk_launch *L, real *y, const int32_t *token, const real *w,
                  const real *p, int64_t B, int64_t T, int64_t C)
{
    ZK_REAL(k, R,
            ZK_WIDE(R, V, C,
                    ZK_LAUNCH(k, L, 0, (gather<R, V>), (R *)y, token, (const int32_t *)NULL,
                              (const R *)w, (const R *)p, B * T, T, C)));
}

void zk_embed_packed_fwd(zk *k, const zk_launch *L, real *y, const int32_t *token,
                         const int32_t *position, const real *w, const real *p, int64_t M,
                         int64_t C)
{
    ZK_REAL(k, R,
            ZK_WIDE(R, V, C,
                    ZK_LAUNCH(k, L, 0, (gather<R, V>), (R *)y, token, position, (const R *)w,
                              (const R *)p, M, M, C)));
}

void zk_embed_bwd(zk *k, const zk_launch *L, void *dw, const real *dy, const int32_t *token,
                  int32_t *index, int64_t M, int64_t V, int64_t C, int add)
{
    int32_t *end = index, *place = index + V + 1;
    ZK_LAUNCH(k, L, 0, sort, end, place, token, (int)M, (int)V);
    if (add)
        ZK_REAL(k, R,
                ZK_WIDE(R, N, C,
                        ZK_LAUNCH(k, L, 1, (sum_rows<float, R, N, 1>), (float *)dw, (const R *)dy,
                                  end, place, (int)V, C)));
    else
        ZK_REAL(k, R,
                ZK_WIDE(R, N, C,
                        ZK_LAUNCH(k, L, 1, (sum_rows<R, R, N, 0>), (R *)dw, (const R *)dy, end,
                                  place, (int)V, C)));
}

void zk_position_bwd(zk *k, const zk_launch *L, real *dp, const real *dy, int64_t B, int64_t T,
                     int64_t C, int64_t P)
{
    ZK_REAL(k, R,
            ZK_WIDE(R, V, C,
                    ZK_LAUNCH(k, L, 0, (sum_positions<R, V>), (R *)dp, (const R *)dy, B, T, C, P)));
}

void zk_position_packed_bwd(zk *k, const zk_launch *L, real *dp, const real *dy,
                            const int32_t *position, int32_t *index, int64_t M, int64_t C,
                            int64_t P)
{
    zk_embed_bwd(k, L, dp, dy, position, index, M, P, C, 0);
}
}
