/* attention_bwd.cu -- causal attention on tensor cores, backward, without atomics.
 *
 *   p = exp(scale * q . k^T - lse); dp = dy . v^T; dot = sum(dy * y); ds = p * (dp - dot)
 *   dv = p^T . dy; dk = scale * ds^T . q; dq = scale * ds . k
 *   CAPPED: p = exp(s - lse) and ds *= 1 - t^2, where s = cap * t, t = tanh(scale * q . k^T / cap)
 *   DROPPED: dp = f * (dy . v^T), dv = (p * f)^T . dy, f as in drop.h
 *
 * Invariants
 *  1. Two kernels recompute p from scores and lse. `keys_bwd` sums dk and dv over the heads of the
 *     group and, for each head, over queries; `queries_bwd` sums dq over keys. All sums are
 *     ascending, each in the registers of one warp, so no sum depends on how blocks are scheduled.
 *  2. keys_bwd holds scores as [key][query], so that p and ds in registers are left operands of the
 *     products with dy and q; queries_bwd holds them as [query][key] for the product with k.
 *  3. p and ds are rounded to halves before those products; ds is computed from p before rounding.
 *  4. Operands that a warp uses in every product (its keys and values, its queries and dy) are kept
 *     in registers as far as possible: HELD steps of 16 columns. No order depends on HELD.
 *  5. Rows past T are zeros: they add p * 0 with a finite p, and their own sums are not stored.
 */
#include "attention.h"
#include "wgmma.h"

namespace {

/* Return p of a score. hidden: the query does not see the key. lse2: the query's line. */
__device__ inline float chance(float s, float lse2, float scale2, bool hidden)
{
    return hidden ? 0 : power2(fmaf(s, scale2, -lse2));
}

/* Replace a score by p and dp by the gradient of the score without scale. dot: the query's line. */
__device__ inline void gradient(float *s, float *dp, float lse2, float dot, float scale2,
                                bool hidden)
{
    *s = chance(*s, lse2, scale2, hidden);
    *dp = *s * (*dp - dot);
}

/* The same with capped scores; s starts as the product of query and key. */
__device__ inline void capped_gradient(float *s, float *dp, float lse2, float dot, const heads &a,
                                       bool hidden)
{
    float t = bent(a, *s);
    *s = chance(a.cap * t, lse2, LOG2E, hidden);
    *dp = *s * (*dp - dot) * fmaf(-t, t, 1.0f);
}

/* Draw which probabilities are kept: bit 4n + i of kept[m] is that of s[m][n][i]. KEYS: rows of s
 * are keys; row, column: the first of the warp. seed: the sample's key; 0 keeps all. */
template <bool KEYS, int M, int N>
__device__ inline void draw(uint32_t (&kept)[M], const heads &a, int64_t seed, int h, int row,
                            int column)
{
    static_assert(N <= 64, "bits");
#pragma unroll
    for (int m = 0; m < M; m++) {
        kept[m] = seed ? 0 : ~0u;
        if (!seed) continue;
#pragma unroll
        for (int n = 0; n < N / 8; n += 2)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                uint32_t c[4];
                int r = row + 16 * m + lane_of() / 4, to = column + 8 * n + lane_of() % 4 * 2 + odd;
                words_of(c, a, seed, h, KEYS ? to : r, KEYS ? r : to);
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    int right = KEYS ? w / 2 : w % 2, below = KEYS ? w % 2 : w / 2;
                    if (c[w] >= a.d.least) kept[m] |= 1u << (4 * (n + right) + 2 * below + odd);
                }
            }
    }
}

template <int M, int C> __device__ inline void times(float (&x)[M][C / 8][4], float factor)
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int c = 0; c < C / 8; c++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[m][c][i] *= factor;
}

/* ---- dk and dv */
/* Replace s = k . q and dp = v . dy of a warp's 16 * M keys and N queries by p and ds. */
template <bool LOCAL, int KIND, int M, int N>
__device__ inline void key_gradients(float (&s)[M][N / 8][4], float (&dp)[M][N / 8][4], place dots,
                                     place lse2s, place reaches, int key, int query, const heads &a,
                                     int64_t seed, int h)
{
    uint32_t kept[M];
    if (KIND == DROPPED) draw<true, M, N>(kept, a, seed, h, key, query);
    int row = key + lane_of() / 4, column = lane_of() % 4 * 2;
    bool edge = key + 16 * M - 1 > query;
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        float2 dot = load_pair(dots + (place)(4 * (8 * n + column)));
        float2 lse2 = load_pair(lse2s + (place)(4 * (8 * n + column))), reach = {};
        if (LOCAL) reach = load_pair(reaches + (place)(4 * (8 * n + column)));
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int q = query + column + 8 * n + i % 2, k = row + 16 * m + i / 2 * 8;
                bool hidden = LOCAL ? beyond(q - k, __float_as_int(i % 2 ? reach.y : reach.x))
                                    : edge && k > q;
                float line = i % 2 ? lse2.y : lse2.x, own = i % 2 ? dot.y : dot.x, f = 1;
                if (KIND == DROPPED) {
                    f = factor(kept[m] >> (4 * n + i), a, seed);
                    dp[m][n][i] *= f;
                }
                if (KIND == CAPPED)
                    capped_gradient(&s[m][n][i], &dp[m][n][i], line, own, a, hidden);
                else gradient(&s[m][n][i], &dp[m][n][i], line, own, a.scale * LOG2E, hidden);
                if (KIND == DROPPED) s[m][n][i] *= f;
            }
    }
}

/* Replace s = k . q of a warp's 16 keys and N queries by p. */
template <int N>
__device__ inline void key_chances(float (&s)[1][N / 8][4], place lse2s, int key, int query,
                                   float scale2)
{
    int row = key + lane_of() / 4, column = lane_of() % 4 * 2;
    bool edge = key + 15 > query;
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        float2 lse2 = load_pair(lse2s + (place)(4 * (8 * n + column)));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int q = query + column + 8 * n + i % 2, k = row + i / 2 * 8;
            s[0][n][i] = chance(s[0][n][i], i % 2 ? lse2.y : lse2.x, scale2, edge && k > q);
        }
    }
}

/* Replace dp = v . dy by ds; s holds p. */
template <int N>
__device__ inline void key_slopes(const float (&s)[1][N / 8][4], float (&dp)[1][N / 8][4],
                                  place dots)
{
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        float2 dot = load_pair(dots + (place)(4 * (8 * n + lane_of() % 4 * 2)));
#pragma unroll
        for (int i = 0; i < 4; i++)
            dp[0][n][i] = s[0][n][i] * (dp[0][n][i] - (i % 2 ? dot.y : dot.x));
    }
}

/* The queries of one round in shared memory: q, dy: [R][D]; dot, lse2, reach: [R]. */
template <int D, int R> struct round_of {
    static constexpr int BYTES = 2 * R * D * 2 + 1024; /* tiles start at multiples of 1024 */
    place q, dy, dot, lse2, reach;
    __device__ explicit round_of(place at)
        : q(at), dy(at + R * D * 2), dot(at + 2 * R * D * 2), lse2(dot + 4 * R), reach(lse2 + 4 * R)
    {
        static_assert(12 * R <= 1024, "lines fit");
    }
};

/* Grid: blocks of keys, parts of D times G, B. A block sums C of the D columns, from `part` on. */
template <class T, int D, int C, int M, int WARPS, int R, int N, int HELD, bool LOCAL, int KIND>
__global__ void __launch_bounds__((WARPS * ZK_WARP), 8 / WARPS)
    keys_bwd(T *dqkv, const T *dy, const T *qkv, const float *lines, int64_t line, heads a)
{
    constexpr int KEYS = 16 * M * WARPS, THREADS = WARPS * ZK_WARP, OWN = 16 * M * D * 2;
    ZK_SHARED(T, shared);
    int first = (int)blockIdx.x * KEYS, key = first + warp_of() * 16 * M;
    int part = D == C ? 0 : (int)blockIdx.y % (D / C) * C;
    /* computed again instead of kept in registers */
    auto group = [] { return block_y() / (D / C); };
    auto keys_of = [&](auto *all, int t) { return qkv_at(all, a, block_z(), t, a.H + group()); };
    int stride = qkv_stride(a);
    place k = place_of(shared), v = k + KEYS * D * 2, rounds = v + KEYS * D * 2;
    place own = (place)(warp_of() * OWN);
    auto copy_queries = [&](int h, int i, int slot) {
        int b = block_z();
        round_of<D, R> to(rounds + (place)(slot * round_of<D, R>::BYTES));
        int left = a.T - i * R, head = group() * a.each + h, t = (int)threadIdx.x;
        copy_tile<D, R, THREADS>(to.q, qkv_at(qkv, a, b, i * R, head), stride, left, a.D);
        copy_tile<D, R, THREADS>(to.dy, y_at(dy, a, b, i * R, head), a.H * a.D, left, a.D);
        if (t < R) {
            const float *from = line_at(lines, a, b, i * R, head);
            int at = t < left ? t : 0;
            copy4(to.dot + (place)(4 * t), from + at, t < left);
            copy4(to.lse2 + (place)(4 * t), from + line + at, t < left);
            if (LOCAL) store4(to.reach + (place)(4 * t), (uint32_t)reach_of(a, b, i * R + t));
        }
    };
    const T *from = keys_of(qkv, first);
    copy_tile<D, KEYS, THREADS>(k, from, stride, a.T - first, a.D);
    copy_tile<D, KEYS, THREADS>(v, from + a.G * a.D, stride, a.T - first, a.D);
    int start = first / R, end = (a.T + R - 1) / R;
    if (LOCAL) end = min(end, end_of_sight(a, block_z(), start * R, R, first + KEYS) / R);
    copy_queries(0, start, 0);
    float dk[M][C / 8][4] = {}, dv[M][C / 8][4] = {};
    wait_copies();
    __syncthreads();
    left_rows<D, M, HELD> keys(k + own + lane_of_rows<D>()), values(v + own + lane_of_rows<D>());
    for (int h = 0, i = start, slot = 0; h < a.each; slot ^= 1) {
        wait_copies();
        __syncthreads();
        round_of<D, R> now(rounds + (place)(slot * round_of<D, R>::BYTES));
        int at = i * R, head = h;
        if (++i == end) {
            i = start;
            h++;
        }
        if (h < a.each) copy_queries(h, i, slot ^ 1);
        int64_t seed = KIND == DROPPED ? a.key[block_z()] : 0;
        for (int n = 0; n < R; n += N) {
            if (at + n + N <= key) continue;
            place down = (place)(n * D * 2);
            float s[M][N / 8][4], dp[M][N / 8][4];
            dot_rows<T>(s, keys, now.q + down + lane_of_columns<D>());
            dot_rows<T>(dp, values, now.dy + down + lane_of_columns<D>());
            key_gradients<LOCAL, KIND, M, N>(s, dp, now.dot + (place)(4 * n),
                                             now.lse2 + (place)(4 * n), now.reach + (place)(4 * n),
                                             key, at + n, a, seed, group() * a.each + head);
            add_product<T, D, C, M, N>(dv, s, now.dy + down + lane_of_rows<D>(), part);
            add_product<T, D, C, M, N>(dk, dp, now.q + down + lane_of_rows<D>(), part);
        }
    }
    times<M, C>(dk, a.scale);
    int left = a.T - key, d = a.D - part;
    T *to = keys_of(dqkv, key) + part;
    store_tile<D, C, M>(to, stride, left, d, k + own, dk);
    store_tile<D, C, M>(to + a.G * a.D, stride, left, d, v + own, dv);
}

/* The same by warpgroups, each with 64 keys. The product of p and dy runs while the warpgroup
 * computes ds. */
template <class T, int D>
__global__ void __launch_bounds__(2 * ZK_GROUP, 1)
    keys_group(T *dqkv, const T *dy, const T *qkv, const float *lines, int64_t line, heads a)
{
#ifdef ZK_GROUPS
    constexpr int GROUPS = 2, KEYS = 64 * GROUPS, THREADS = GROUPS * ZK_GROUP, R = 64;
    ZK_SHARED(T, shared);
    int first = (int)blockIdx.x * KEYS, group = warp_of() / 4 * 64;
    int stride = qkv_stride(a), b = block_z(), g = block_y();
    place k = place_of(shared), v = k + KEYS * D * 2, rounds = v + KEYS * D * 2;
    auto copy_queries = [&](int h, int i, int slot) {
        round_of<D, R> to(rounds + (place)(slot * round_of<D, R>::BYTES));
        int left = a.T - i * R, head = g * a.each + h, t = (int)threadIdx.x;
        copy_panels<D, R, THREADS>(to.q, qkv_at(qkv, a, b, i * R, head), stride, left, a.D);
        copy_panels<D, R, THREADS>(to.dy, y_at(dy, a, b, i * R, head), a.H * a.D, left, a.D);
        if (t < R) {
            const float *from = line_at(lines, a, b, i * R, head);
            int at = t < left ? t : 0;
            copy4(to.dot + (place)(4 * t), from + at, t < left);
            copy4(to.lse2 + (place)(4 * t), from + line + at, t < left);
        }
    };
    const T *from = qkv_at(qkv, a, b, first, a.H + g);
    copy_panels<D, KEYS, THREADS>(k, from, stride, a.T - first, a.D);
    copy_panels<D, KEYS, THREADS>(v, from + a.G * a.D, stride, a.T - first, a.D);
    int start = first / R, end = (a.T + R - 1) / R;
    copy_queries(0, start, 0);
    float dk[1][D / 8][4] = {}, dv[1][D / 8][4] = {};
    for (int h = 0, i = start, slot = 0; h < a.each; slot ^= 1) {
        wait_copies();
        tell_products();
        __syncthreads();
        round_of<D, R> now(rounds + (place)(slot * round_of<D, R>::BYTES));
        int at = i * R;
        if (++i == end) {
            i = start;
            h++;
        }
        if (h < a.each) copy_queries(h, i, slot ^ 1);
        if (at + R <= first + group) continue;
        float s[1][R / 8][4], dp[1][R / 8][4];
        uint32_t left[4][4];
        begin_products();
        group_dot<T, D, KEYS, R>(s, k + (place)(group * 128), now.q);
        end_products();
        group_dot<T, D, KEYS, R>(dp, v + (place)(group * 128), now.dy);
        end_products();
        wait_products<1>();
        settle(s);
        key_chances<R>(s, now.lse2, first + group + warp_of() % 4 * 16, at, a.scale * LOG2E);
        pack_left<T>(left, s);
        settle(dv);
        begin_products();
        group_add<T, D, R>(dv, left, now.dy);
        end_products();
        wait_products<1>();
        settle(dp);
        key_slopes<R>(s, dp, now.dot);
        uint32_t slopes[4][4];
        pack_left<T>(slopes, dp);
        settle(dk);
        begin_products();
        group_add<T, D, R>(dk, slopes, now.q);
        end_products();
        wait_products<0>();
        settle(dv);
        settle(dk);
    }
    __syncthreads(); /* all products with k and v are complete */
    times<1, D>(dk, a.scale);
    int key = first + warp_of() * 16;
    place own = (place)(warp_of() * 16 * D * 2);
    T *to = qkv_at(dqkv, a, b, key, a.H + g);
    store_tile<D, D, 1>(to, stride, a.T - key, a.D, k + own, dk);
    store_tile<D, D, 1>(to + a.G * a.D, stride, a.T - key, a.D, v + own, dv);
#else
    no_groups();
#endif
}

/* ---- dq */
template <bool LOCAL, int KIND, int M, int N>
__device__ inline void query_gradients(float (&s)[M][N / 8][4], float (&dp)[M][N / 8][4],
                                       const float (&dot)[M][2], const float (&lse2)[M][2],
                                       const int (&reach)[M][2], int key, int query, const heads &a,
                                       int64_t seed, int h)
{
    uint32_t kept[M];
    if (KIND == DROPPED) draw<false, M, N>(kept, a, seed, h, query, key);
    int row = query + lane_of() / 4, column = key + lane_of() % 4 * 2;
    bool edge = key + N - 1 > query;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int back = row + 16 * m + i / 2 * 8 - (column + 8 * n + i % 2);
                bool hidden = LOCAL ? beyond(back, reach[m][i / 2]) : edge && back < 0;
                float line = lse2[m][i / 2], own = dot[m][i / 2];
                if (KIND == DROPPED) dp[m][n][i] *= factor(kept[m] >> (4 * n + i), a, seed);
                if (KIND == CAPPED)
                    capped_gradient(&s[m][n][i], &dp[m][n][i], line, own, a, hidden);
                else gradient(&s[m][n][i], &dp[m][n][i], line, own, a.scale * LOG2E, hidden);
            }
}

/* Replace s = q . k of a warp's 16 queries and N keys by p. */
template <int N>
__device__ inline void query_chances(float (&s)[1][N / 8][4], const float (&lse2)[1][2], int key,
                                     int query, float scale2)
{
    int row = query + lane_of() / 4, column = key + lane_of() % 4 * 2;
    bool edge = key + N - 1 > query;
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bool hidden = edge && column + 8 * n + i % 2 > row + i / 2 * 8;
            s[0][n][i] = chance(s[0][n][i], lse2[0][i / 2], scale2, hidden);
        }
}

/* Replace dp = dy . v by ds; s holds p. */
template <int N>
__device__ inline void query_slopes(const float (&s)[1][N / 8][4], float (&dp)[1][N / 8][4],
                                    const float (&dot)[1][2])
{
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) dp[0][n][i] = s[0][n][i] * (dp[0][n][i] - dot[0][i / 2]);
}

/* Grid: blocks of queries from the last, H, B. */
template <class T, int D, int M, int WARPS, int R, int N, int HELD, bool LOCAL, int KIND>
__global__ void __launch_bounds__((WARPS * ZK_WARP), 8 / WARPS)
    queries_bwd(T *dqkv, const T *dy, const T *qkv, const float *lines, int64_t line, heads a)
{
    constexpr int ROWS = 16 * M * WARPS, THREADS = WARPS * ZK_WARP, TILE = R * D * 2;
    ZK_SHARED(T, shared);
    int first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, h = (int)blockIdx.y, b = (int)blockIdx.z;
    int query = first + warp_of() * 16 * M, left = a.T - first, kv = a.H + h / a.each;
    int stride = qkv_stride(a);
    place q = place_of(shared), dys = q + ROWS * D * 2, keys = dys + ROWS * D * 2;
    place values = keys + 2 * TILE, own = (place)(warp_of() * 16 * M * D * 2);
    int tiles = (min(first + ROWS, a.T) + R - 1) / R;
    int start = LOCAL ? first_key(a, b, first) / R : 0;
    auto copy_keys = [&](int j) {
        const T *k = qkv_at(qkv, a, b, (int64_t)j * R, kv);
        place other = (place)(j % 2 * TILE);
        copy_tile<D, R, THREADS>(keys + other, k, stride, a.T - j * R, a.D);
        copy_tile<D, R, THREADS>(values + other, k + a.G * a.D, stride, a.T - j * R, a.D);
    };
    copy_tile<D, ROWS, THREADS>(q, qkv_at(qkv, a, b, first, h), stride, left, a.D);
    copy_tile<D, ROWS, THREADS>(dys, y_at(dy, a, b, first, h), a.H * a.D, left, a.D);
    copy_keys(start);
    float dot[M][2], lse2[M][2], dq[M][D / 8][4] = {};
    int reach[M][2] = {};
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int t = query + 16 * m + 8 * r + lane_of() / 4;
            const float *from = line_at(lines, a, b, t < a.T ? t : 0, h);
            dot[m][r] = t < a.T ? from[0] : 0;
            lse2[m][r] = t < a.T ? from[line] : 0;
            if (LOCAL) reach[m][r] = reach_of(a, b, t);
        }
    wait_copies();
    __syncthreads();
    left_rows<D, M, HELD> mine(q + own + lane_of_rows<D>()), grads(dys + own + lane_of_rows<D>());
    for (int j = start; j < tiles; j++) {
        wait_copies();
        __syncthreads();
        if (j + 1 < tiles) copy_keys(j + 1);
        for (int n = 0; n < R; n += N) {
            int key = j * R + n;
            if (key >= query + 16 * M) continue;
            place now = (place)(j % 2 * TILE + n * D * 2);
            float s[M][N / 8][4], dp[M][N / 8][4];
            dot_rows<T>(s, mine, keys + now + lane_of_columns<D>());
            dot_rows<T>(dp, grads, values + now + lane_of_columns<D>());
            query_gradients<LOCAL, KIND, M, N>(s, dp, dot, lse2, reach, key, query, a,
                                               KIND == DROPPED ? a.key[block_z()] : 0, block_y());
            add_product<T, D, D, M, N>(dq, dp, keys + now + lane_of_rows<D>(), 0);
        }
    }
    times<M, D>(dq, a.scale);
    store_tile<D, D, M>(qkv_at(dqkv, a, b, query, h), stride, a.T - query, a.D, q + own, dq);
}

/* The same by warpgroups, each with 64 queries. */
template <class T, int D>
__global__ void __launch_bounds__(2 * ZK_GROUP, D == 64 ? 2 : 1)
    queries_group(T *dqkv, const T *dy, const T *qkv, const float *lines, int64_t line, heads a)
{
#ifdef ZK_GROUPS
    constexpr int GROUPS = 2, ROWS = 64 * GROUPS, THREADS = GROUPS * ZK_GROUP, R = 64;
    constexpr int TILE = R * D * 2;
    ZK_SHARED(T, shared);
    int first = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, h = (int)blockIdx.y, b = (int)blockIdx.z;
    int group = warp_of() / 4 * 64, query = first + warp_of() * 16, kv = a.H + h / a.each;
    int stride = qkv_stride(a), left = a.T - first;
    place q = place_of(shared), dys = q + ROWS * D * 2, keys = dys + ROWS * D * 2;
    place values = keys + 2 * TILE;
    int tiles = (min(first + ROWS, a.T) + R - 1) / R;
    auto copy_keys = [&](int j) {
        const T *k = qkv_at(qkv, a, b, (int64_t)j * R, kv);
        place other = (place)(j % 2 * TILE);
        copy_panels<D, R, THREADS>(keys + other, k, stride, a.T - j * R, a.D);
        copy_panels<D, R, THREADS>(values + other, k + a.G * a.D, stride, a.T - j * R, a.D);
    };
    copy_panels<D, ROWS, THREADS>(q, qkv_at(qkv, a, b, first, h), stride, left, a.D);
    copy_panels<D, ROWS, THREADS>(dys, y_at(dy, a, b, first, h), a.H * a.D, left, a.D);
    copy_keys(0);
    float dot[1][2], lse2[1][2], dq[1][D / 8][4] = {};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int t = query + 8 * r + lane_of() / 4;
        const float *from = line_at(lines, a, b, t < a.T ? t : 0, h);
        dot[0][r] = t < a.T ? from[0] : 0;
        lse2[0][r] = t < a.T ? from[line] : 0;
    }
    for (int j = 0; j < tiles; j++) {
        place now = (place)(j % 2 * TILE);
        wait_copies();
        tell_products();
        __syncthreads();
        if (j + 1 < tiles) copy_keys(j + 1);
        if (j * R >= first + group + 64) continue;
        float s[1][R / 8][4], dp[1][R / 8][4];
        uint32_t slopes[4][4];
        begin_products();
        group_dot<T, D, ROWS, R>(s, q + (place)(group * 128), keys + now);
        end_products();
        group_dot<T, D, ROWS, R>(dp, dys + (place)(group * 128), values + now);
        end_products();
        wait_products<1>();
        settle(s);
        query_chances<R>(s, lse2, j * R, query, a.scale * LOG2E);
        wait_products<0>();
        settle(dp);
        query_slopes<R>(s, dp, dot);
        pack_left<T>(slopes, dp);
        settle(dq);
        begin_products();
        group_add<T, D, R>(dq, slopes, keys + now);
        end_products();
        wait_products<0>();
        settle(dq);
    }
    __syncthreads(); /* all products with q are complete */
    times<1, D>(dq, a.scale);
    store_tile<D, D, 1>(qkv_at(dqkv, a, b, query, h), stride, a.T - query, a.D,
                        q + (place)(warp_of() * 16 * D * 2), dq);
#else
    no_groups();
#endif
}

template <class T> struct instance {
    typedef void kernel(T *, const T *, const T *, const float *, int64_t, heads);
    int width, group, block[2]; /* tile[0] and [2]; threads of each kernel */
    kernel *keys, *queries;
};

/* HELD is the largest value that spills registers on no target. keys_bwd at width 64 could have 3,
 * with N = 16 to make space for it; that saves a sixth of the reads but spills on sm_100. With caps
 * N = 32 would spill there, as it would with dropout in queries_bwd at width 128. */
template <class T, bool LOCAL, int KIND> const instance<T> instances[] = {
    {64,
     0,
     {128, 128},
     keys_bwd<T, 64, 64, 2, 4, 64, (KIND == USUAL ? 32 : 16), 0, LOCAL, KIND>,
     queries_bwd<T, 64, 2, 4, 64, 32, 4, LOCAL, KIND>},
    {128,
     0,
     {256, 128},
     keys_bwd<T, 128, 128, 1, 8, 64, 16, 8, LOCAL, KIND>,
     queries_bwd<T, 128, 2, 4, 32, (KIND == DROPPED ? 16 : 32), 0, LOCAL, KIND>},
    {256,
     0,
     {128, 128},
     keys_bwd<T, 256, 128, 1, 4, 32, 32, 0, LOCAL, KIND>,
     queries_bwd<T, 256, 1, 4, 32, 32, 0, LOCAL, KIND>},
};

template <class T> const instance<T> by_groups[] = {
    {64, 1, {256, 256}, keys_group<T, 64>, queries_group<T, 64>},
    {128, 1, {256, 256}, keys_group<T, 128>, queries_group<T, 128>},
};

/* Launch the kernels that the table asks for. line: numbers in each of the two `lines`. */
template <class T, int N>
void launch(const instance<T> (&known)[N], zk *k, const zk_launch *L, real *dqkv, const real *dy,
            const real *qkv, const float *lines, int64_t line, const heads &a)
{
    const zk_launch *l = &L[k->column];
    for (const instance<T> &i : known)
        if (i.width == l->tile[0] && i.group == l->tile[2] && i.block[0] == l->part[1].block &&
            i.block[1] == l->part[2].block && a.D % 8 == 0 && a.D <= i.width && a.scale > 0) {
            ZK_LAUNCH(k, L, 1, i.keys, (T *)dqkv, (const T *)dy, (const T *)qkv, lines, line, a);
            ZK_LAUNCH(k, L, 2, i.queries, (T *)dqkv, (const T *)dy, (const T *)qkv, lines, line, a);
            return;
        }
    no_attention(l, a);
}

template <class T, bool LOCAL, int KIND>
void launch_any(zk *k, const zk_launch *L, real *dqkv, const real *dy, const real *qkv,
                const float *lines, int64_t line, const heads &a)
{
    if (!LOCAL && L[k->column].tile[2])
        return launch(by_groups<T>, k, L, dqkv, dy, qkv, lines, line, a);
    launch(instances<T, LOCAL, KIND>, k, L, dqkv, dy, qkv, lines, line, a);
}

template <bool LOCAL, int KIND>
void attention_bwd(zk *k, const zk_launch *L, real *dqkv, const real *dy, const real *y,
                   const real *qkv, const float *lse, float *scratch, int64_t B, const heads &a)
{
    const zk_launch *l = &L[k->column];
    int64_t line = B * a.H * a.T;
    attention_lines(k, L, 0, scratch, dy, y, lse, B, a);
    if (l->tile[0] == 0) return plain_attention_bwd(k, L, dqkv, dy, qkv, lse, scratch, a);
    auto run = k->dtype == ZK_BF16  ? launch_any<bf16, LOCAL, KIND>
               : k->dtype == ZK_F16 ? launch_any<f16, LOCAL, KIND>
                                    : NULL;
    if (run) return run(k, L, dqkv, dy, qkv, scratch, line, a);
    no_attention(l, a);
}

}

extern "C" {

void zk_attention_bwd(zk *k, const zk_launch *L, real *dqkv, const real *dy, const real *y,
                      const real *qkv, const float *lse, float *scratch, int64_t B, int64_t T,
                      int64_t H, int64_t G, int64_t D, float scale)
{
    attention_bwd<false, USUAL>(k, L, dqkv, dy, y, qkv, lse, scratch, B,
                                heads_of(T, H, G, D, scale, NULL, T, 0));
}

void zk_attention_local_bwd(zk *k, const zk_launch *L, real *dqkv, const real *dy, const real *y,
                            const real *qkv, const float *lse, float *scratch,
                            const int32_t *position, int64_t B, int64_t T, int64_t H, int64_t G,
                            int64_t D, int64_t window, float scale)
{
    attention_bwd<true, USUAL>(k, L, dqkv, dy, y, qkv, lse, scratch, B,
                               heads_of(T, H, G, D, scale, position, window, 0));
}

void zk_attention_capped_bwd(zk *k, const zk_launch *L, real *dqkv, const real *dy, const real *y,
                             const real *qkv, const float *lse, float *scratch,
                             const int32_t *position, int64_t B, int64_t T, int64_t H, int64_t G,
                             int64_t D, int64_t window, float scale, float cap)
{
    attention_bwd<true, CAPPED>(k, L, dqkv, dy, y, qkv, lse, scratch, B,
                                heads_of(T, H, G, D, scale, position, window, cap));
}

void zk_attention_dropped_bwd(zk *k, const zk_launch *L, real *dqkv, const real *dy, const real *y,
                              const real *qkv, const float *lse, float *scratch,
                              const int32_t *position, const int64_t *key, int64_t B, int64_t T,
                              int64_t H, int64_t G, int64_t D, int64_t window, int64_t place,
                              int64_t head, float scale, float p)
{
    heads a = heads_of(T, H, G, D, scale, position, window, 0);
    attention_bwd<true, DROPPED>(k, L, dqkv, dy, y, qkv, lse, scratch, B,
                                 dropped_heads(a, key, place, head, p));
}
}
