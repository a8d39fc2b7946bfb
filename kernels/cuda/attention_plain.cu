/* attention_plain.cu -- causal attention in f32 for heads of any size, and, for all kernels, the
 * lines of y and lse that backward starts from.
 *
 *   s = scale * q . k^T; p = exp(s - lse); y = p . v; lse = logsumexp(s)
 *   dp = dy . v^T; dot = sum(dy * y); ds = p * (dp - dot)
 *   dv = p^T . dy; dk = scale * ds^T . q; dq = scale * ds . k
 *
 * Invariants
 *  1. Tiles are SIDE x SIDE scores, 4 x 4 per thread: rows ty + 16i, columns tx + 16j, so that the
 *     16 threads of a row are half a warp. Every sum is one ascending FMA chain over keys, or over
 *     heads of the group and then queries.
 *  2. A head wider than C is read C elements at a time, and a block sums C columns of its gradients
 *     or of y. Shared memory holds two tiles [SIDE][C] and two of scores for any D.
 *  3. A score is rounded to f32 after scaling, in backward as in forward. Hidden scores are
 *     -infinity. Rows and columns past the end are 0.
 */
#include "attention.h"
#include "functions.h"
#include "pack.h"
#include "team.h"
#include "../scalar.h"

#include <float.h>

namespace {

enum { SIDE = 64, LINE = SIDE + 4, SPLIT = 16, BLOCK = SPLIT * SPLIT };

struct alignas(16) four {
    float x[4];
};

__device__ inline four four_at(const float *p) { return *reinterpret_cast<const four *>(p); }

/* Thread (ty, tx) of a block, and the block's shared memory: two tiles
 * [SIDE][C + 4] and two of scores. */
template <int C> struct plain {
    static constexpr int PAD = C + 4; /* rows 4 banks apart */
    int ty, tx;
    float *a, *b, *p, *ds;
    __device__ plain(float *shared)
        : ty((int)threadIdx.x / SPLIT), tx((int)threadIdx.x % SPLIT), a(shared), b(a + SIDE * PAD),
          p(b + SIDE * PAD), ds(p + SIDE * LINE)
    {
    }

    /* Copy `rows` rows of `columns` elements into a tile [SIDE][C]. */
    template <class R>
    __device__ void copy(float *to, const R *from, int64_t stride, int rows, int columns) const
    {
        for (int i = (int)threadIdx.x; i < SIDE * C; i += BLOCK) {
            int row = i / C, c = i % C;
            to[row * PAD + c] = row < rows && c < columns ? get(from[row * stride + c]) : 0;
        }
    }

    /* s += rows of a . rows of b */
    __device__ void dot_rows(float (&s)[4][4]) const
    {
        for (int c = 0; c < C; c += 4) {
            four x[4], z[4];
            for (int i = 0; i < 4; i++) {
                x[i] = four_at(a + (ty + SPLIT * i) * PAD + c);
                z[i] = four_at(b + (tx + SPLIT * i) * PAD + c);
            }
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    for (int e = 0; e < 4; e++) s[i][j] = fmaf(x[i].x[e], z[j].x[e], s[i][j]);
        }
    }

    /* to += x[SIDE][SIDE] . from[SIDE][C]; a thread has columns 4 tx + 64 j + e */
    __device__ void add_product(float (&to)[4][C / SPLIT], const float *x, const float *from) const
    {
        for (int n = 0; n < SIDE; n++)
            for (int j = 0; j < C / SIDE; j++) {
                four z = four_at(from + n * PAD + 4 * tx + SIDE * j);
                for (int i = 0; i < 4; i++)
                    for (int e = 0; e < 4; e++)
                        to[i][4 * j + e] =
                            fmaf(x[(ty + SPLIT * i) * LINE + n], z.x[e], to[i][4 * j + e]);
            }
    }

    /* Store x * factor, rounded, to `rows` rows of `columns` elements. */
    template <class R>
    __device__ void store(R *to, int64_t stride, int rows, int columns,
                          const float (&x)[4][C / SPLIT], const float *factor) const
    {
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < C / SPLIT; j++) {
                int row = ty + SPLIT * i, c = 4 * tx + j / 4 * SIDE + j % 4;
                if (row < rows && c < columns) put(to + row * stride + c, x[i][j] * factor[i]);
            }
    }
};

/* s = rows of x . rows of z over a whole head, C elements at a time; x_stride and z_stride are
 * elements from one row to the next. */
template <int C, class R>
__device__ inline void head_dots(const plain<C> &w, float (&s)[4][4], const R *x, int64_t x_stride,
                                 int x_rows, const R *z, int64_t z_stride, int z_rows, int d)
{
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) s[i][j] = 0;
    for (int c = 0; c < d; c += C) {
        __syncthreads();
        w.copy(w.a, x + c, x_stride, x_rows, d - c);
        w.copy(w.b, z + c, z_stride, z_rows, d - c);
        __syncthreads();
        w.dot_rows(s);
    }
}

/* Return the maximum, or the sum, over the 16 threads of a row. */
__device__ inline float row_max(float x)
{
    for (int apart = SPLIT / 2; apart; apart /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, apart));
    return x;
}

__device__ inline float row_sum(float x)
{
    for (int apart = SPLIT / 2; apart; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
    return x;
}

/* Draw which of a thread's probabilities are kept: bit 4i + j is that of query q + 16i and key
 * k + 16j of head h. seed: the sample's key; 0 keeps all. */
__device__ inline uint32_t draw(const heads &a, int64_t seed, int h, int q, int k)
{
    if (!seed) return ~0u;
    uint32_t kept = 0;
#pragma unroll 1
    for (int n = 0; n < 16; n++) {
        uint32_t c[4];
        words_of(c, a, seed, h, (q & ~8) + n / 4 * SPLIT, (k & ~8) + n % 4 * SPLIT);
        kept |= (uint32_t)((q & 8 ? k & 8 ? c[3] : c[2] : k & 8 ? c[1] : c[0]) >= a.d.least) << n;
    }
    return kept;
}

/* ---- forward */
/* Write p = exp(score - top), times its factor if DROPPED, to w.p for the products s of q and k, and
 * rescale the old sums. top is finite. back: rows from the tile's first key to its first query;
 * kept, seed: of factor. */
template <int C, int KIND>
__device__ inline void weigh(const plain<C> &w, float (&s)[4][4], float (&sum)[4][C / SPLIT],
                             float (&top)[4], float (&total)[4], const heads &a, int back,
                             const int (&reach)[4], uint32_t kept, int64_t seed)
{
    for (int i = 0; i < 4; i++) {
        float high = top[i], part = 0;
        for (int j = 0; j < 4; j++) {
            bool hidden = beyond(back + w.ty + SPLIT * i - w.tx - SPLIT * j, reach[i]);
            float x = KIND == CAPPED ? a.cap * bent(a, s[i][j]) : s[i][j] * a.scale;
            s[i][j] = hidden ? -INFINITY : x;
            high = fmaxf(high, s[i][j]);
        }
        high = row_max(high);
        for (int j = 0; j < 4; j++) {
            float p = exponential(s[i][j] - high);
            part += p;
            if (KIND == DROPPED) p *= factor(kept >> (4 * i + j), a, seed);
            w.p[(w.ty + SPLIT * i) * LINE + w.tx + SPLIT * j] = p;
        }
        float shrink = exponential(top[i] - high);
        top[i] = high;
        total[i] = fmaf(total[i], shrink, row_sum(part));
        for (int c = 0; c < C / SPLIT; c++) sum[i][c] *= shrink;
    }
}

/* Grid: blocks of queries from the last; parts of D times H; B. */
template <class R, int C, int KIND>
__global__ void __launch_bounds__(BLOCK) plain_forward(R *y, float *lse, const R *qkv, heads a)
{
    ZK_SHARED(float, shared);
    plain<C> w(shared);
    int parts = (a.D + C - 1) / C, h = (int)blockIdx.y / parts, b = (int)blockIdx.z;
    int column = (int)blockIdx.y % parts * C, kv = a.H + h / (a.H / a.G), stride = qkv_stride(a);
    int first = (int)(gridDim.x - 1 - blockIdx.x) * SIDE, left = a.T - first;
    float top[4], total[4] = {}, sum[4][C / SPLIT] = {};
    int reach[4], start = first_key(a, b, first) / SIDE * SIDE;
    int64_t seed = KIND == DROPPED ? a.key[b] : 0;
    for (int i = 0; i < 4; i++) {
        top[i] = -FLT_MAX;
        reach[i] = reach_of(a, b, first + w.ty + SPLIT * i);
    }
    for (int j = start; j <= first; j += SIDE) {
        float s[4][4];
        const R *k = qkv_at(qkv, a, b, j, kv);
        uint32_t kept = KIND == DROPPED ? draw(a, seed, h, first + w.ty, j + w.tx) : 0;
        head_dots<C>(w, s, qkv_at(qkv, a, b, first, h), stride, left, k, stride, a.T - j, a.D);
        weigh<C, KIND>(w, s, sum, top, total, a, first - j, reach, kept, seed);
        __syncthreads();
        w.copy(w.b, k + a.G * a.D + column, stride, a.T - j, a.D - column);
        __syncthreads();
        w.add_product(sum, w.p, w.b);
    }
    for (int i = 0; i < 4; i++) {
        int row = w.ty + SPLIT * i;
        if (w.tx == 0 && column == 0 && row < left)
            line_at(lse, a, b, first, h)[row] = top[i] + (float)zk_log(total[i]);
        total[i] = 1 / total[i];
    }
    w.store(y_at(y, a, b, first, h) + column, a.H * a.D, left, a.D - column, sum, total);
}

/* ---- backward */
/* Return element i of a line, or 0 past the end. */
__device__ inline float line_or_0(const float *line, int i, int n) { return i < n ? line[i] : 0; }

/* Compute p and ds / scale of a query (dot, lse) and a key from q . k and dy . v. f: the factor of
 * a DROPPED p, with which p is returned. */
template <int KIND>
__device__ inline void gradient(float *p, float *ds, float s, float dp, float dot, float lse,
                                float f, const heads &a, bool hidden)
{
    float t = KIND == CAPPED ? bent(a, s) : 0;
    *p = hidden ? 0 : exponential((KIND == CAPPED ? a.cap * t : s * a.scale) - lse);
    *ds = *p * ((KIND == DROPPED ? f * dp : dp) - dot);
    if (KIND == CAPPED) *ds *= fmaf(-t, t, 1.0f);
    if (KIND == DROPPED) *p *= f;
}

/* Grid: blocks of keys; parts of D times G; B. */
template <class R, int C, int KIND>
__global__ void __launch_bounds__(BLOCK)
    plain_keys_bwd(R *dqkv, const R *dy, const R *qkv, const float *dots, const float *lse, heads a)
{
    ZK_SHARED(float, shared);
    plain<C> w(shared);
    int parts = (a.D + C - 1) / C, group = (int)blockIdx.y / parts, b = (int)blockIdx.z;
    int column = (int)blockIdx.y % parts * C, stride = qkv_stride(a), each = a.H / a.G;
    int first = (int)blockIdx.x * SIDE, left = a.T - first, y_stride = a.H * a.D;
    const R *k = qkv_at(qkv, a, b, first, a.H + group), *v = k + a.G * a.D;
    float dk[4][C / SPLIT] = {}, dv[4][C / SPLIT] = {};
    int end = min(a.T, end_of_sight(a, b, first, SIDE, first + SIDE));
    int64_t seed = KIND == DROPPED ? a.key[b] : 0;
    for (int h = group * each; h < (group + 1) * each; h++)
        for (int i = first; i < end; i += SIDE) {
            float s[4][4], dp[4][4];
            int rows = a.T - i, reach[4];
            for (int n = 0; n < 4; n++) reach[n] = reach_of(a, b, i + w.tx + SPLIT * n);
            const R *q = qkv_at(qkv, a, b, i, h), *g = y_at(dy, a, b, i, h);
            const float *dot = line_at(dots, a, b, i, h), *top = line_at(lse, a, b, i, h);
            head_dots<C>(w, s, k, stride, left, q, stride, rows, a.D);
            head_dots<C>(w, dp, v, stride, left, g, y_stride, rows, a.D);
            uint32_t kept = KIND == DROPPED ? draw(a, seed, h, i + w.tx, first + w.ty) : 0;
            for (int m = 0; m < 4; m++)
                for (int n = 0; n < 4; n++) {
                    int key = w.ty + SPLIT * m, query = w.tx + SPLIT * n, at = key * LINE + query;
                    float f = KIND == DROPPED ? factor(kept >> (4 * n + m), a, seed) : 1;
                    gradient<KIND>(w.p + at, w.ds + at, s[m][n], dp[m][n],
                                   line_or_0(dot, query, rows), line_or_0(top, query, rows), f, a,
                                   beyond(i + query - first - key, reach[n]) || query >= rows);
                }
            __syncthreads();
            w.copy(w.a, q + column, stride, rows, a.D - column);
            w.copy(w.b, g + column, y_stride, rows, a.D - column);
            __syncthreads();
            w.add_product(dk, w.ds, w.a);
            w.add_product(dv, w.p, w.b);
        }
    const float by[4] = {a.scale, a.scale, a.scale, a.scale}, one[4] = {1, 1, 1, 1};
    R *to = qkv_at(dqkv, a, b, first, a.H + group) + column;
    w.store(to, stride, left, a.D - column, dk, by);
    w.store(to + a.G * a.D, stride, left, a.D - column, dv, one);
}

/* Grid: blocks of queries from the last; parts of D times H; B. */
template <class R, int C, int KIND>
__global__ void __launch_bounds__(BLOCK)
    plain_queries_bwd(R *dqkv, const R *dy, const R *qkv, const float *dots, const float *lse,
                      heads a)
{
    ZK_SHARED(float, shared);
    plain<C> w(shared);
    int parts = (a.D + C - 1) / C, h = (int)blockIdx.y / parts, b = (int)blockIdx.z;
    int column = (int)blockIdx.y % parts * C, kv = a.H + h / (a.H / a.G), stride = qkv_stride(a);
    int first = (int)(gridDim.x - 1 - blockIdx.x) * SIDE, left = a.T - first, y_stride = a.H * a.D;
    const R *q = qkv_at(qkv, a, b, first, h), *g = y_at(dy, a, b, first, h);
    const float *dot = line_at(dots, a, b, first, h), *top = line_at(lse, a, b, first, h);
    float dq[4][C / SPLIT] = {};
    int reach[4], start = first_key(a, b, first) / SIDE * SIDE;
    int64_t seed = KIND == DROPPED ? a.key[b] : 0;
    for (int m = 0; m < 4; m++) reach[m] = reach_of(a, b, first + w.ty + SPLIT * m);
    for (int j = start; j <= first; j += SIDE) {
        float s[4][4], dp[4][4], p;
        const R *k = qkv_at(qkv, a, b, j, kv);
        head_dots<C>(w, s, q, stride, left, k, stride, a.T - j, a.D);
        head_dots<C>(w, dp, g, y_stride, left, k + a.G * a.D, stride, a.T - j, a.D);
        uint32_t kept = KIND == DROPPED ? draw(a, seed, h, first + w.ty, j + w.tx) : 0;
        for (int m = 0; m < 4; m++)
            for (int n = 0; n < 4; n++) {
                int query = w.ty + SPLIT * m, key = w.tx + SPLIT * n;
                float f = KIND == DROPPED ? factor(kept >> (4 * m + n), a, seed) : 1;
                gradient<KIND>(&p, w.ds + query * LINE + key, s[m][n], dp[m][n],
                               line_or_0(dot, query, left), line_or_0(top, query, left), f, a,
                               beyond(first + query - j - key, reach[m]) || query >= left);
            }
        __syncthreads();
        w.copy(w.b, k + column, stride, a.T - j, a.D - column);
        __syncthreads();
        w.add_product(dq, w.ds, w.b);
    }
    const float by[4] = {a.scale, a.scale, a.scale, a.scale};
    w.store(qkv_at(dqkv, a, b, first, h) + column, stride, left, a.D - column, dq, by);
}

/* Compute lines[0] = sum of dy * y for each query and lines[1] = lse in powers of two, with a team
 * of `threads` for each query and head, which reads V elements at a time. */
template <class R, int V>
__global__ void query_lines(float *lines, const R *dy, const R *y, const float *lse, int64_t n,
                            int threads, heads a)
{
    team t = my_team(threads);
    for (int64_t first = (int64_t)blockIdx.x * t.teams; first < n;
         first += (int64_t)gridDim.x * t.teams) {
        int64_t i = first + t.rank;
        float sum = 0, g[V], x[V];
        for (int d = V * t.lane; i < n && d < a.D; d += V * threads) {
            fetch(g, dy + i * a.D + d);
            fetch(x, y + i * a.D + d);
            for (int j = 0; j < V; j++) sum = fmaf(g[j], x[j], sum);
        }
        sum = team_sum(t, sum);
        int64_t m = i / a.H, to = (m / a.T * a.H + i % a.H) * a.T + m % a.T;
        if (i < n && t.lane == 0) {
            lines[to] = sum;
            lines[n + to] = lse[to] * LOG2E;
        }
    }
}

}

/* C is the launch's tile[1]. */
template <class R, int C>
static void forward(zk *k, const zk_launch *L, R *y, float *lse, const R *qkv, const heads &a)
{
    if (a.cap > 0) ZK_LAUNCH(k, L, 0, (plain_forward<R, C, CAPPED>), y, lse, qkv, a);
    else if (a.key) ZK_LAUNCH(k, L, 0, (plain_forward<R, C, DROPPED>), y, lse, qkv, a);
    else ZK_LAUNCH(k, L, 0, (plain_forward<R, C, USUAL>), y, lse, qkv, a);
}

void plain_attention_fwd(zk *k, const zk_launch *L, real *y, float *lse, const real *qkv,
                         const heads &a)
{
    const zk_launch *l = &L[k->column];
    if (l->part[0].block != BLOCK) no_attention(l, a);
    if (l->tile[1] == 64) ZK_REAL(k, R, (forward<R, 64>(k, L, (R *)y, lse, (const R *)qkv, a)));
    else if (l->tile[1] == 128)
        ZK_REAL(k, R, (forward<R, 128>(k, L, (R *)y, lse, (const R *)qkv, a)));
    else no_attention(l, a);
}

template <class R, int C, int KIND>
static void backward_as(zk *k, const zk_launch *L, R *dqkv, const R *dy, const R *qkv,
                        const float *lse, const float *dots, const heads &a)
{
    ZK_LAUNCH(k, L, 1, (plain_keys_bwd<R, C, KIND>), dqkv, dy, qkv, dots, lse, a);
    ZK_LAUNCH(k, L, 2, (plain_queries_bwd<R, C, KIND>), dqkv, dy, qkv, dots, lse, a);
}

template <class R, int C>
static void backward(zk *k, const zk_launch *L, real *dqkv, const real *dy, const real *qkv,
                     const float *lse, const float *dots, const heads &a)
{
    auto run = a.cap > 0 ? backward_as<R, C, CAPPED>
               : a.key   ? backward_as<R, C, DROPPED>
                         : backward_as<R, C, USUAL>;
    run(k, L, (R *)dqkv, (const R *)dy, (const R *)qkv, lse, dots, a);
}

void plain_attention_bwd(zk *k, const zk_launch *L, real *dqkv, const real *dy, const real *qkv,
                         const float *lse, const float *lines, const heads &a)
{
    const zk_launch *l = &L[k->column];
    if (l->part[1].block != BLOCK || l->part[2].block != BLOCK) no_attention(l, a);
    if (l->tile[1] == 64) ZK_REAL(k, R, (backward<R, 64>(k, L, dqkv, dy, qkv, lse, lines, a)));
    else if (l->tile[1] == 128)
        ZK_REAL(k, R, (backward<R, 128>(k, L, dqkv, dy, qkv, lse, lines, a)));
    else no_attention(l, a);
}

/* Return the threads of a team for rows of `packs`: a power of two, at most a warp. */
static int team_for(int packs)
{
    int threads = 1;
    while (threads < packs && threads < ZK_WARP) threads *= 2;
    return threads;
}

void attention_lines(zk *k, const zk_launch *L, int part, float *lines, const real *dy,
                     const real *y, const float *lse, int64_t B, const heads &a)
{
    ZK_REAL(k, R,
            ZK_WIDE(R, V, a.D,
                    ZK_LAUNCH(k, L, part, (query_lines<R, V>), lines, (const R *)dy, (const R *)y,
                              lse, B * a.T * a.H, team_for(a.D / V), a)));
}
