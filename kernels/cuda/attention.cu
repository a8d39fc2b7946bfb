/* attention.cu -- causal attention on tensor cores, forward; no buffer grows with T x T. LOCAL: a
 * row does not see all rows before it (attention.h).
 *
 *   s = scale * q . k^T; top = running max(s); p = exp(s - top)
 *   y = sum(p * v) / sum(p); lse = top + log(sum(p)); old sums *= exp(old top - top)
 *   CAPPED: s = cap * tanh(s / cap); DROPPED: y = sum(p * f * v) / sum(p), f as in drop.h
 *
 * Invariants
 *  1. A block has ROWS queries of one head, a warp 16 * M of them, or 16 of each half. Keys come in
 *     tiles of N, ascending; shared memory holds two tiles, one in use and one being copied.
 *  2. Products are of halves with f32 sums; scores, maxima and sums over keys are f32; p is rounded
 *     to a half before its product with v. The result of a query depends on no later token.
 *  3. exp is 2^x by the GPU's own instruction. Its relative error of 2^-22 is hidden by the
 *     rounding of p, and it gives the same bits in every run, in forward and in backward.
 *  4. Scores are multiplied by scale after the maximum is taken, so scale must be positive.
 */
#include "attention.h"
#include "wgmma.h"

namespace {

/* Running maximum and sum of exp for a lane's rows: row 16m + 8r + lane / 4 of the warp is [m][r].
 * `total` covers the lane's own columns only. */
template <int M> struct running {
    float top[M][2], total[M][2];
};

/* Reach of the rows of `running`: reach_of each. */
template <int M> struct sight {
    int reach[M][2];
};

template <int M> __device__ inline void look(sight<M> *see, const heads &a, int b, int query)
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            see->reach[m][r] = reach_of(a, b, query + 16 * m + 8 * r + lane_of() / 4);
}

/* Set the scores of keys that a query does not see to -infinity; the
 * arguments are those of hide. */
template <int M, int N>
__device__ inline void hide_far(float (&s)[M][N / 8][4], int key, int query, const sight<M> &see)
{
    int back = query + lane_of() / 4 - key - lane_of() % 4 * 2;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (beyond(back + 16 * m + i / 2 * 8 - 8 * n - i % 2, see.reach[m][i / 2]))
                    s[m][n][i] = -INFINITY;
}

/* Set the scores of keys after their query to -infinity. key, query: first key of the tile, first
 * query of the warp. */
template <int M, int N>
__device__ inline void hide(float (&s)[M][N / 8][4], int key, int query)
{
    int row = query + lane_of() / 4, column = key + lane_of() % 4 * 2;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (column + 8 * n + i % 2 > row + 16 * m + i / 2 * 8) s[m][n][i] = -INFINITY;
}

/* Replace the products of q and k by capped scores. */
template <int M, int N> __device__ inline void cap(float (&s)[M][N / 8][4], const heads &a)
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] = a.cap * bent(a, s[m][n][i]);
}

/* Multiply probabilities by their factors (drop.h). key, query: as of hide; seed: the sample's key,
 * 0 if it drops nothing. */
template <int M, int N>
__device__ inline void drop_some(float (&s)[M][N / 8][4], const heads &a, int64_t seed, int h,
                                 int key, int query)
{
    if (!seed) return;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N / 8; n += 2)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                uint32_t c[4];
                words_of(c, a, seed, h, query + 16 * m + lane_of() / 4,
                         key + 8 * n + lane_of() % 4 * 2 + odd);
#pragma unroll
                for (int w = 0; w < 4; w++)
                    s[m][n + w % 2][w / 2 * 2 + odd] *= c[w] >= a.d.least ? a.d.scale : 0;
            }
}

/* Update the running maxima with the tile's scores. shrink: factor for sums made with the old
 * maxima. LOCAL: a row may have seen no key yet. */
template <bool LOCAL, int M, int N>
__device__ inline void raise(const float (&s)[M][N / 8][4], float (&shrink)[M][2], running<M> *w,
                             float scale2)
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = w->top[m][r];
#pragma unroll
            for (int n = 0; n < N / 8; n++)
                top = fmaxf(top, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            bool none = LOCAL && top == -INFINITY;
            shrink[m][r] = none ? 1 : power2((w->top[m][r] - top) * scale2);
            w->top[m][r] = top;
        }
}

/* Replace the products of q and k by p = exp(score - top), and add p to the totals. The old sums
 * are rescaled only if a row of the warp has a new maximum, which is rare. */
template <bool LOCAL, int M, int N, int C>
__device__ inline void weigh(float (&s)[M][N / 8][4], float (&sum)[M][C / 8][4], running<M> *w,
                             float scale2)
{
    float shrink[M][2];
    bool changed = false;
    raise<LOCAL, M, N>(s, shrink, w, scale2);
#pragma unroll
    for (int m = 0; m < M; m++) changed |= shrink[m][0] != 1 || shrink[m][1] != 1;
    if (__any_sync(~0u, changed)) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                w->total[m][i / 2] *= i % 2 ? 1 : shrink[m][i / 2];
#pragma unroll
                for (int c = 0; c < C / 8; c++) sum[m][c][i] *= shrink[m][i / 2];
            }
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                bool none = LOCAL && w->top[m][i / 2] == -INFINITY;
                float top = none ? 0 : w->top[m][i / 2] * scale2;
                s[m][n][i] = power2(fmaf(s[m][n][i], scale2, -top));
                w->total[m][i / 2] += s[m][n][i];
            }
}

/* Compute y = sum / total, in registers, and store lse of the warp's `rows` rows. */
template <int M, int C>
__device__ inline void finish(float (&sum)[M][C / 8][4], float *lse, running<M> *w, int rows,
                              float scale)
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float total = w->total[m][r];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            float inverse = 1 / total;
            int row = 16 * m + 8 * r + lane_of() / 4;
            if (lane_of() % 4 == 0 && row < rows)
                lse[row] = fmaf(w->top[m][r], scale, (float)zk_log(total));
#pragma unroll
            for (int c = 0; c < C / 8; c++) {
                sum[m][c][2 * r] *= inverse;
                sum[m][c][2 * r + 1] *= inverse;
            }
        }
}

/* Grid: blocks of queries (from the last, which has the most keys), H, B. */
template <class T, int D, int M, int WARPS, int N, bool LOCAL, int KIND = USUAL>
__global__ void __launch_bounds__((WARPS * ZK_WARP), 8 / WARPS)
    forward(T *y, float *lse, const T *qkv, heads a)
{
    constexpr int ROWS = 16 * M * WARPS, THREADS = WARPS * ZK_WARP, TILE = N * D * 2;
    ZK_SHARED(T, shared);
    int first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, h = (int)blockIdx.y, b = (int)blockIdx.z;
    int kv = a.H + h / (a.H / a.G);
    int stride = qkv_stride(a);
    place q = place_of(shared);
    place keys = q + ROWS * D * 2, values = keys + 2 * TILE; /* two tiles each */
    int tiles = (min(first + ROWS, a.T) + N - 1) / N;
    int start = LOCAL ? first_key(a, b, first) / N : 0;
    auto copy_keys = [&](int j) {
        const T *k = qkv_at(qkv, a, b, (int64_t)j * N, (int)again((place)kv));
        place other = (place)(j % 2 * TILE);
        copy_tile<D, N, THREADS>(keys + other, k, stride, a.T - j * N, a.D);
        copy_tile<D, N, THREADS>(values + other, k + a.G * a.D, stride, a.T - j * N, a.D);
    };
    copy_tile<D, ROWS, THREADS>(q, qkv_at(qkv, a, b, first, h), stride, a.T - first, a.D);
    copy_keys(start);
    running<M> w;
    sight<M> see;
    if (LOCAL) look<M>(&see, a, b, first + warp_of() * 16 * M);
    float sum[M][D / 8][4] = {};
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            w.top[m][r] = -INFINITY;
            w.total[m][r] = 0;
        }
    for (int j = start; j < tiles; j++) {
        wait_copies();
        __syncthreads();
        if (j + 1 < tiles) copy_keys(j + 1);
        int query = first + warp_of() * 16 * M; /* not kept: registers are too few */
        if (j * N >= query + 16 * M) continue;
        float s[M][N / 8][4];
        place now = (place)(j % 2 * TILE), own = q + (place)(warp_of() * 16 * M * D * 2);
        dot_rows<T>(s, left_rows<D, M, 0>(own + lane_of_rows<D>()),
                    keys + now + lane_of_columns<D>());
        if (KIND == CAPPED) cap<M, N>(s, a);
        if (LOCAL) hide_far<M, N>(s, j * N, query, see);
        else if (j * N + N - 1 > query) hide<M, N>(s, j * N, query);
        weigh<LOCAL, M, N, D>(s, sum, &w, (KIND == CAPPED ? 1.0f : a.scale) * LOG2E);
        if (KIND == DROPPED) drop_some<M, N>(s, a, a.key[block_z()], block_y(), j * N, query);
        add_product<T, D, D, M, N>(sum, s, values + now + lane_of_rows<D>(), 0);
    }
    int query = first + warp_of() * 16 * M;
    place own = q + (place)(warp_of() * 16 * M * D * 2);
    h = block_y();
    finish<M, D>(sum, line_at(lse, a, b, query, h), &w, a.T - query,
                 KIND == CAPPED ? 1.0f : a.scale);
    store_tile<D, D, M>(y_at(y, a, b, query, h), (int64_t)a.H * a.D, a.T - query, a.D, own, sum);
}

/* The same by warpgroups: a block is one, with two halves of 64 queries, and tiles of 64 keys. The
 * products of one half run beside the exponentials of the other. */
template <class T, int D>
__global__ void __launch_bounds__(ZK_GROUP, 2)
    forward_group(T *y, float *lse, const T *qkv, heads a)
{
#ifdef ZK_GROUPS
    constexpr int HALF = 64, ROWS = 2 * HALF, N = 64, TILE = N * D * 2;
    ZK_SHARED(T, shared);
    int first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, h = (int)blockIdx.y, b = (int)blockIdx.z;
    int kv = a.H + h / (a.H / a.G), stride = qkv_stride(a), mine = first + warp_of() * 16;
    place q = place_of(shared);
    place keys = q + ROWS * D * 2, values = keys + 2 * TILE; /* two tiles each */
    int tiles = (min(first + ROWS, a.T) + N - 1) / N;
    auto copy_keys = [&](int j) {
        const T *k = qkv_at(qkv, a, b, (int64_t)j * N, kv);
        place other = (place)(j % 2 * TILE);
        copy_panels<D, N, ZK_GROUP>(keys + other, k, stride, a.T - j * N, a.D);
        copy_panels<D, N, ZK_GROUP>(values + other, k + a.G * a.D, stride, a.T - j * N, a.D);
    };
    copy_panels<D, ROWS, ZK_GROUP>(q, qkv_at(qkv, a, b, first, h), stride, a.T - first, a.D);
    copy_keys(0);
    running<1> w[2];
    float s[2][1][N / 8][4], sum[2][1][D / 8][4] = {};
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            w[m].top[0][r] = -INFINITY;
            w[m].total[0][r] = 0;
        }
    for (int j = 0; j < tiles; j++) {
        place now = (place)(j % 2 * TILE);
        wait_copies();
        tell_products();
        __syncthreads();
        if (j + 1 < tiles) copy_keys(j + 1);
        begin_products();
#pragma unroll
        for (int m = 0; m < 2; m++) {
            group_dot<T, D, ROWS, N>(s[m], q + (place)(m * HALF * 128), keys + now);
            end_products();
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            uint32_t p[4][4];
            wait_products<1>();
            settle(s[m]);
            if (j * N + N - 1 > mine + m * HALF) hide<1, N>(s[m], j * N, mine + m * HALF);
            weigh<false, 1, N, D>(s[m], sum[m], &w[m], a.scale * LOG2E);
            pack_left<T>(p, s[m]);
            settle(sum[m]);
            begin_products();
            group_add<T, D, N>(sum[m], p, values + now);
            end_products();
        }
        wait_products<0>();
        settle(sum[0]);
        settle(sum[1]);
    }
    __syncthreads(); /* all products with q are complete */
#pragma unroll
    for (int m = 0; m < 2; m++) {
        int query = mine + m * HALF;
        place own = q + (place)((m * HALF + warp_of() * 16) * D * 2);
        finish<1, D>(sum[m], line_at(lse, a, b, query, h), &w[m], a.T - query, a.scale);
        store_tile<D, D, 1>(y_at(y, a, b, query, h), (int64_t)a.H * a.D, a.T - query, a.D, own,
                            sum[m]);
    }
#else
    no_groups();
#endif
}

template <class T> struct instance {
    int width, keys, group, block; /* tile; threads */
    void (*run)(T *, float *, const T *, heads);
};

template <class T> const instance<T> causal[] = {
    {64, 64, 0, 128, forward<T, 64, 2, 4, 64, false>},
    {128, 64, 0, 128, forward<T, 128, 2, 4, 64, false>},
    {128, 32, 0, 128, forward<T, 128, 2, 4, 32, false>},
    {256, 32, 0, 256, forward<T, 256, 1, 8, 32, false>},
    {64, 64, 1, 128, forward_group<T, 64>},
    {128, 64, 1, 128, forward_group<T, 128>},
};

/* width 128 with 64 keys would spill registers */
template <class T> const instance<T> local[] = {
    {64, 64, 0, 128, forward<T, 64, 2, 4, 64, true>},
    {128, 32, 0, 128, forward<T, 128, 2, 4, 32, true>},
    {256, 32, 0, 256, forward<T, 256, 1, 8, 32, true>},
};

template <class T> const instance<T> capped[] = {
    {64, 64, 0, 128, forward<T, 64, 2, 4, 64, true, CAPPED>},
    {128, 32, 0, 128, forward<T, 128, 2, 4, 32, true, CAPPED>},
    {256, 32, 0, 256, forward<T, 256, 1, 8, 32, true, CAPPED>},
};

template <class T> const instance<T> dropped[] = {
    {64, 64, 0, 128, forward<T, 64, 2, 4, 64, true, DROPPED>},
    {128, 32, 0, 128, forward<T, 128, 2, 4, 32, true, DROPPED>},
    {256, 32, 0, 256, forward<T, 256, 1, 8, 32, true, DROPPED>},
};

template <class T, int N>
void launch(const instance<T> (&known)[N], zk *k, const zk_launch *L, real *y, float *lse,
            const real *qkv, const heads &a)
{
    const zk_launch *l = &L[k->column];
    for (const instance<T> &i : known)
        if (i.width == l->tile[0] && i.keys == l->tile[1] && i.group == l->tile[2] &&
            i.block == l->part[0].block && a.D % 8 == 0 && a.D <= i.width && a.scale > 0) {
            ZK_LAUNCH(k, L, 0, i.run, (T *)y, lse, (const T *)qkv, a);
            return;
        }
    no_attention(l, a);
}

}

extern "C" {

void zk_attention_fwd(zk *k, const zk_launch *L, real *y, float *lse, const real *qkv, int64_t B,
                      int64_t T, int64_t H, int64_t G, int64_t D, float scale)
{
    const zk_launch *l = &L[k->column];
    heads a = heads_of(T, H, G, D, scale, NULL, T, 0);
    (void)B;
    if (l->tile[0] == 0) return plain_attention_fwd(k, L, y, lse, qkv, a);
    if (k->dtype == ZK_BF16) return launch(causal<bf16>, k, L, y, lse, qkv, a);
    if (k->dtype == ZK_F16) return launch(causal<f16>, k, L, y, lse, qkv, a);
    no_attention(l, a);
}

void zk_attention_local_fwd(zk *k, const zk_launch *L, real *y, float *lse, const real *qkv,
                            const int32_t *position, int64_t B, int64_t T, int64_t H, int64_t G,
                            int64_t D, int64_t window, float scale)
{
    const zk_launch *l = &L[k->column];
    heads a = heads_of(T, H, G, D, scale, position, window, 0);
    (void)B;
    if (l->tile[0] == 0) return plain_attention_fwd(k, L, y, lse, qkv, a);
    if (k->dtype == ZK_BF16) return launch(local<bf16>, k, L, y, lse, qkv, a);
    if (k->dtype == ZK_F16) return launch(local<f16>, k, L, y, lse, qkv, a);
    no_attention(l, a);
}

void zk_attention_capped_fwd(zk *k, const zk_launch *L, real *y, float *lse, const real *qkv,
                             const int32_t *position, int64_t B, int64_t T, int64_t H, int64_t G,
                             int64_t D, int64_t window, float scale, float cap)
{
    const zk_launch *l = &L[k->column];
    heads a = heads_of(T, H, G, D, scale, position, window, cap);
    (void)B;
    if (l->tile[0] == 0) return plain_attention_fwd(k, L, y, lse, qkv, a);
    if (k->dtype == ZK_BF16) return launch(capped<bf16>, k, L, y, lse, qkv, a);
    if (k->dtype == ZK_F16) return launch(capped<f16>, k, L, y, lse, qkv, a);
    no_attention(l, a);
}

void zk_attention_dropped_fwd(zk *k, const zk_launch *L, real *y, float *lse, const real *qkv,
                              const int32_t *position, const int64_t *key, int64_t B, int64_t T,
                              int64_t H, int64_t G, int64_t D, int64_t window, int64_t place,
                              int64_t head, float scale, float p)
{
    const zk_launch *l = &L[k->column];
    heads a = dropped_heads(heads_of(T, H, G, D, scale, position, window, 0), key, place, head, p);
    (void)B;
    if (l->tile[0] == 0) return plain_attention_fwd(k, L, y, lse, qkv, a);
    if (k->dtype == ZK_BF16) return launch(dropped<bf16>, k, L, y, lse, qkv, a);
    if (k->dtype == ZK_F16) return launch(dropped<f16>, k, L, y, lse, qkv, a);
    no_attention(l, a);
}
}
