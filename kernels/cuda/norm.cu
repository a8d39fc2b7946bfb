/* norm.cu -- layer norm, RMS norm and the RMS norm of query and key heads, forward and backward.
 *
 *   y = hat * w + b, hat = (x - mean) * rstd, rstd = 1 / sqrt(mean((x - mean)^2) + eps)
 *   dx = rstd * (g - mean(g) - hat * mean(g * hat)), g = dy * w; dw = sum(dy * hat); db = sum(dy)
 *   RMS norm (CENTRED = 0): the same without mean, mean(g) and b. stat: mean and rstd; r is rstd.
 *   rmsnorm1, qknorm1 (plus): 1 + w in place of w; a layer norm without w: 1.
 *
 * Invariants
 *  1. A run is C elements that are normalized together, by one team: the threads of a part of a
 *     warp (a power of two), or of a whole block. The launch's tile is {threads of a team, packs of
 *     a row that a thread keeps}. A run is read once and kept; without kept packs, as for wide or
 *     odd rows, it is read again.
 *  2. All teams of a warp iterate the same number of times; an idle team joins every shuffle with
 *     zero elements.
 *  3. dw and db: a team adds its runs in ascending order, and a block adds its teams' sums and
 *     stores them to device scratch, lines [2][blocks][C]. A second launch adds the blocks' sums in
 *     one order. So bits depend only on shapes and the launch table.
 *  4. Backward recomputes the normalized value from x and the f32 mean and rstd.
 *  5. A tensor that is added to a run, before or after the norm, is read once and added to the
 *     rounded value: the bits are those of zk_add.
 */
#include "pack.h"
#include "team.h"

namespace {

enum { KEPT = 4, COLUMNS = 32, FOLD_THREADS = 1024 };

/* Limits for the compiler: threads of a block, and blocks of an SM that
 * registers must suffice for. */
constexpr int most_threads(int N) { return N ? 256 : 512; }
constexpr int most_back(int N, int centred) { return N == KEPT && centred ? 192 : most_threads(N); }
constexpr int blocks_back(int N) { return N ? 2 : 1; }

/* The runs of a row. A row of `stride` elements holds H query, G key and G value runs of C
 * elements; a plain norm has one run. blockIdx.y selects the kind of run of a block. */
struct layout {
    static constexpr int plus = 0;
    int64_t M, stride;
    int C, H, G;
};

/* The same for norms whose factors are 1 + w. */
struct one_plus : layout {
    static constexpr int plus = 1;
};

struct place {
    int64_t at, stat; /* offset of the first element; index in stat */
    int C;            /* 0: no run */
};

__device__ inline int heads_here(const layout &l) { return blockIdx.y ? l.G : l.H; }

__device__ inline place find(const layout &l, int64_t run)
{
    int heads = heads_here(l), first = blockIdx.y ? l.H + (int)(blockIdx.y - 1) * l.G : 0;
    int64_t m = run / heads;
    int h = first + (int)(run - m * heads);
    return {m * l.stride + (int64_t)h * l.C, m * (l.H + l.G) + h, m < l.M ? l.C : 0};
}

/* A row that holds a query run of C elements, then a key and a value run of K elements, K <= C. */
struct uneven : layout {
    int K;
};

__device__ inline int width_here(const layout &l) { return l.C; }

__device__ inline int width_here(const uneven &l) { return blockIdx.y ? l.K : l.C; }

__device__ inline place find(const uneven &l, int64_t run)
{
    int64_t first = blockIdx.y ? l.C + (int64_t)(blockIdx.y - 1) * l.K : 0;
    return {run * l.stride + first, 2 * run + blockIdx.y, run < l.M ? width_here(l) : 0};
}

/* ---- teams */
/* Call f(j, c) for each pack of this thread: the j-th kept pack, elements c
 * .. c + V - 1 of the run. */
template <int V, int N, class F> __device__ inline void each(const team &t, int C, F f)
{
    if (N) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            int c = (t.lane + j * t.threads) * V;
            if (c < C) f(j, c);
        }
    } else {
        for (int c = t.lane * V; c < C; c += t.threads * V) f(0, c);
    }
}

template <class T, int V>
__device__ inline pack<T, V> sum_of(const pack<T, V> &a, const pack<T, V> &b)
{
    float x[V];
    pack<T, V> sum;
    for (int i = 0; i < V; i++) x[i] = get(a, i) + get(b, i);
    put(&sum, x);
    return sum;
}

/* This thread's packs of a run: N kept ones, or read again from p. */
template <class T, int V, int N> struct line {
    pack<T, V> kept[N ? N : 1];
    const T *p = nullptr;

    __device__ inline void start(const team &t, const T *from, int C)
    {
        p = from;
        for (int j = 0; j < N; j++) {
            int c = (t.lane + j * t.threads) * V;
            kept[j] = c < C ? load<V>(p + c) : pack<T, V>{};
        }
    }

    __device__ inline pack<T, V> stored(int j, int c) const { return N ? kept[j] : load<V>(p + c); }

    __device__ inline void read(float (&x)[V], int j, int c) const
    {
        pack<T, V> all = stored(j, c);
        for (int i = 0; i < V; i++) x[i] = get(all, i);
    }

    /* Add `more` [C] to the run, and store the sum to `to` [C]. */
    __device__ inline void add(const team &t, T *to, const T *more, int C)
    {
        line other;
        other.start(t, more, C);
        each<V, N>(t, C, [&](int j, int c) {
            kept[j] = sum_of(stored(j, c), other.stored(j, c));
            stow(to + c, kept[j]);
        });
        p = to;
    }
};

template <class T, int V, int N>
__device__ inline void copy_run(const team &t, T *to, const T *from, int C)
{
    each<V, N>(t, C, [&](int, int c) { stow(to + c, load<V>(from + c)); });
}

/* ---- forward. w and b are for kind 0, wk for kind 1; kind 2 is copied */
template <int V, int N, class T>
__device__ inline float mean_of(const team &t, const line<T, V, N> &row, int C)
{
    float sum = 0, x[V];
    each<V, N>(t, C, [&](int j, int c) {
        row.read(x, j, c);
        for (int i = 0; i < V; i++) sum += x[i];
    });
    return team_sum(t, sum);
}

template <int V, int N, class T>
__device__ inline float squares_of(const team &t, const line<T, V, N> &row, int C, float mean)
{
    float sum = 0, x[V];
    each<V, N>(t, C, [&](int j, int c) {
        row.read(x, j, c);
        for (int i = 0; i < V; i++) sum = fmaf(x[i] - mean, x[i] - mean, sum);
    });
    return team_sum(t, sum);
}

/* The factors of V columns. */
template <int PLUS, int CENTRED, int V, class T>
__device__ inline void factors(float (&x)[V], const T *w, int c)
{
    if (!CENTRED || w) fetch(x, w + c);
    else
        for (int i = 0; i < V; i++) x[i] = 1.0f;
    for (int i = 0; PLUS && i < V; i++) x[i] += 1.0f;
}

/* y = (x - mean) * r * w + b */
template <int PLUS, int CENTRED, int V, int N, class T>
__device__ inline void scale(const team &t, T *y, const line<T, V, N> &row, int C, float mean,
                             float r, const T *w, const T *b)
{
    each<V, N>(t, C, [&](int j, int c) {
        float x[V], scale[V], bias[V] = {};
        row.read(x, j, c);
        factors<PLUS, CENTRED>(scale, w, c);
        if (b) fetch(bias, b + c);
        for (int i = 0; i < V; i++) x[i] = fmaf((x[i] - mean) * r, scale[i], bias[i]);
        stow(y + c, x);
    });
}

template <class T, int V, int N, int CENTRED, class A>
__global__ void __launch_bounds__(most_threads(N), 2)
    norm_fwd(T *y, float *stat, T *sum, const T *x, const T *more, const T *w, const T *wk,
             const T *b, A l, int threads, float eps)
{
    team t = my_team(threads);
    int64_t runs = l.M * heads_here(l);
    for (int64_t first = (int64_t)blockIdx.x * t.teams; first < runs;
         first += (int64_t)gridDim.x * t.teams) {
        place at = find(l, first + t.rank);
        if (blockIdx.y == 2) {
            copy_run<T, V, N>(t, y + at.at, x + at.at, at.C);
            continue;
        }
        line<T, V, N> row;
        row.start(t, x + at.at, at.C);
        if (more) row.add(t, sum + at.at, more + at.at, at.C);
        float mean = CENTRED ? __fdiv_rn(mean_of(t, row, at.C), (float)width_here(l)) : 0;
        float square = __fdiv_rn(squares_of(t, row, at.C, mean), (float)width_here(l));
        float r = __fdiv_rn(1.0f, __fsqrt_rn(square + eps));
        scale<A::plus, CENTRED>(t, y + at.at, row, at.C, mean, r, blockIdx.y ? wk : w, b);
        if (t.lane == 0 && at.C && CENTRED) stat[2 * at.stat] = mean;
        if (t.lane == 0 && at.C) stat[CENTRED ? 2 * at.stat + 1 : at.stat] = r;
    }
}

/* ---- backward: dx = r * (g - mean(g) - hat * mean(g * hat)), g = dy * w; RMS norm: no mean(g) */

/* This thread's packs of its team's sums over runs: dw of dy * hat, db of dy. They are kept in
 * registers, or in scratch at to [C] and to + apart [C]. */
template <int V, int N, int CENTRED> struct sums {
    float dw[N ? N : 1][V], db[CENTRED && N ? N : 1][V];
    float *to = nullptr;
    int64_t apart = 0;

    __device__ inline void start(const team &t, float *at, int64_t away, int C)
    {
        to = at, apart = away;
        for (int i = 0; i < (N ? N : 1) * V; i++) dw[i / V][i % V] = 0;
        for (int i = 0; i < (CENTRED && N ? N : 1) * V; i++) db[i / V][i % V] = 0;
        if (!N)
            each<V, N>(t, C, [&](int, int c) {
                stow(to + c, dw[0]);
                if (CENTRED) stow(to + apart + c, db[0]);
            });
    }

    __device__ inline void add(int j, int c, const float (&dy)[V], const float (&hat)[V])
    {
        if (!N) fetch(dw[j], to + c);
        if (!N && CENTRED) fetch(db[j], to + apart + c);
        for (int i = 0; i < V; i++) dw[j][i] = fmaf(dy[i], hat[i], dw[j][i]);
        for (int i = 0; CENTRED && i < V; i++) db[j][i] += dy[i];
        if (!N) stow(to + c, dw[j]);
        if (!N && CENTRED) stow(to + apart + c, db[j]);
    }
};

/* Add the teams' sums of one array in order of teams, in shared memory, and store them to `to` [C].
 * A single team needs no shared memory. */
template <int V, int N>
__device__ inline void add_teams(const team &t, float *to, const float (&mine)[N][V], int C)
{
    ZK_SHARED(float, sum);
    for (int i = 0; i < t.teams; i++) {
        if (t.rank == i)
            each<V, N>(t, C, [&](int j, int c) {
                float x[V] = {};
                if (i) fetch(x, sum + c);
                for (int e = 0; e < V; e++) x[e] += mine[j][e];
                if (i == t.teams - 1) stow(to + c, x);
                else
                    for (int e = 0; e < V; e++) sum[c + e] = x[e];
            });
        __syncthreads();
    }
}

/* Add one run's part to the sums, and compute its dx (+ more). */
template <int PLUS, class T, int V, int N, int CENTRED>
__device__ inline void run_back(const team &t, T *dx, const T *dy, const T *more, const T *x,
                                const T *w, sums<V, N, CENTRED> &sum, int C, float width,
                                float mean, float r)
{
    line<T, V, N> up, row, rest;
    up.start(t, dy, C);
    row.start(t, x, C);
    if (more) rest.start(t, more, C);
    float all = 0, dot = 0;
    float d[V], hat[V], scale[V];
    auto read = [&](int j, int c) {
        up.read(d, j, c);
        row.read(hat, j, c);
        factors<PLUS, CENTRED>(scale, w, c);
        for (int i = 0; i < V; i++) hat[i] = (hat[i] - mean) * r;
    };
    each<V, N>(t, C, [&](int j, int c) {
        read(j, c);
        sum.add(j, c, d, hat);
        for (int i = 0; i < V; i++) {
            all += d[i] * scale[i];
            dot = fmaf(d[i] * scale[i], hat[i], dot);
        }
    });
    all = CENTRED ? __fdiv_rn(team_sum(t, all), width) : 0;
    dot = -__fdiv_rn(team_sum(t, dot), width);
    each<V, N>(t, C, [&](int j, int c) {
        read(j, c);
        for (int i = 0; i < V; i++) d[i] = fmaf(hat[i], dot, d[i] * scale[i] - all) * r;
        pack<T, V> out;
        put(&out, d);
        stow(dx + c, more ? sum_of(out, rest.stored(j, c)) : out);
    });
}

template <class T, int V, int N, int CENTRED, class A>
__global__ void __launch_bounds__(most_back(N, CENTRED), blocks_back(N))
    norm_bwd(T *dx, float *part, const T *dy, const T *more, const T *x, const float *stat,
             const T *w, const T *wk, A l, int threads)
{
    team t = my_team(threads);
    int64_t runs = l.M * heads_here(l), apart = (int64_t)gridDim.x * l.C; /* distance of lines */
    float *to = part + blockIdx.y * apart + (int64_t)blockIdx.x * l.C;
    sums<V, N, CENTRED> sum;
    if (blockIdx.y < 2) sum.start(t, to, apart, width_here(l));
    for (int64_t first = (int64_t)blockIdx.x * t.teams; first < runs;
         first += (int64_t)gridDim.x * t.teams) {
        place at = find(l, first + t.rank);
        if (blockIdx.y == 2) {
            copy_run<T, V, N>(t, dx + at.at, dy + at.at, at.C);
            continue;
        }
        float mean = CENTRED && at.C ? stat[2 * at.stat] : 0;
        float r = at.C ? stat[CENTRED ? 2 * at.stat + 1 : at.stat] : 0;
        run_back<A::plus, T, V, N>(t, dx + at.at, dy + at.at, more ? more + at.at : more, x + at.at,
                                   blockIdx.y ? wk : w, sum, at.C, (float)width_here(l), mean, r);
    }
    if (N && blockIdx.y < 2) {
        add_teams(t, to, sum.dw, width_here(l));
        if (CENTRED) add_teams(t, to + apart, sum.db, width_here(l));
    }
}

/* dw [C], second [K] = the sums over blocks of the lines of `part` [2][blocks][C]. COLUMNS adjacent
 * threads have one column each; rows of such threads take blocks in turn. */
template <class T>
__global__ void __launch_bounds__(FOLD_THREADS)
    norm_fold(T *dw, T *second, const float *part, int C, int K, int blocks)
{
    __shared__ float sum[FOLD_THREADS];
    int t = (int)threadIdx.x, rows = (int)blockDim.x / COLUMNS, c = (int)blockIdx.x * COLUMNS;
    T *out = blockIdx.y ? second : dw;
    const float *from = part + (int64_t)blockIdx.y * blocks * C;
    int width = blockIdx.y ? K : C;
    float s = 0;
    c += t % COLUMNS;
#pragma unroll 4
    for (int i = t / COLUMNS; i < blocks; i += rows) s += c < width ? from[(int64_t)i * C + c] : 0;
    sum[t] = s;
    __syncthreads();
    for (int i = 1; t < COLUMNS && i < rows; i++) s += sum[i * COLUMNS + t];
    if (t < COLUMNS && c < width && out) put(out + c, s);
}

/* ---- calls */

/* Run the statement with N as the number of packs of V elements that the launch keeps;
 * with V = 1 none is kept. */
#define NORM_KEPT(V, N, packs, ...)                                                                \
    do {                                                                                           \
        if ((packs) == KEPT) {                                                                     \
            constexpr int N = V > 1 ? KEPT : 0;                                                    \
            __VA_ARGS__;                                                                           \
        } else if ((packs) == 1) {                                                                 \
            constexpr int N = V > 1 ? 1 : 0;                                                       \
            __VA_ARGS__;                                                                           \
        } else {                                                                                   \
            constexpr int N = 0;                                                                   \
            __VA_ARGS__;                                                                           \
        }                                                                                          \
    } while (0)

int narrow(const layout &l) { return l.C; }

int narrow(const uneven &l) { return l.K; }

template <class T, int CENTRED, class A>
void forward(zk *k, const zk_launch *L, real *y, float *stat, real *sum, const real *x,
             const real *more, const real *w, const real *wk, const real *b, const A &l, float eps)
{
    const int32_t *tile = L[k->column].tile;
    ZK_WIDE(T, V, l.C | narrow(l),
            NORM_KEPT(V, N, tile[1],
                      ZK_LAUNCH(k, L, 0, (norm_fwd<T, V, N, CENTRED, A>), (T *)y, stat, (T *)sum,
                                (const T *)x, (const T *)more, (const T *)w, (const T *)wk,
                                (const T *)b, l, tile[0], eps)));
}

/* second: db or dwk. */
template <class T, int CENTRED, class A>
void backward(zk *k, const zk_launch *L, real *dx, real *dw, real *second, const real *dy,
              const real *more, const real *x, const float *stat, const real *w, const real *wk,
              const A &l)
{
    const int32_t *tile = L[k->column].tile;
    float *part = (float *)k->device;
    ZK_WIDE(T, V, l.C | narrow(l),
            NORM_KEPT(V, N, tile[1],
                      ZK_LAUNCH(k, L, 0, (norm_bwd<T, V, N, CENTRED, A>), (T *)dx, part,
                                (const T *)dy, (const T *)more, (const T *)x, stat, (const T *)w,
                                (const T *)wk, l, tile[0])));
    if (dw || second)
        ZK_LAUNCH(k, L, 1, (norm_fold<T>), (T *)dw, (T *)second, part, l.C, narrow(l),
                  L[k->column].part[0].x);
}

layout plain(int64_t M, int64_t C) { return {M, C, (int)C, 1, 0}; }

layout heads(int64_t M, int64_t H, int64_t G, int64_t D)
{
    return {M, (H + 2 * G) * D, (int)D, (int)H, (int)G};
}

uneven whole(int64_t M, int64_t H, int64_t G, int64_t D)
{
    return {{M, (H + 2 * G) * D, (int)(H * D), 1, 1}, (int)(G * D)};
}

}

extern "C" {

void zk_layernorm_fwd(zk *k, const zk_launch *L, real *y, float *stat, real *sum, const real *x,
                      const real *more, const real *w, const real *b, int64_t M, int64_t C,
                      float eps)
{
    ZK_REAL(k, T, forward<T, 1>(k, L, y, stat, sum, x, more, w, NULL, b, plain(M, C), eps));
}

void zk_layernorm_bwd(zk *k, const zk_launch *L, real *dx, real *dw, real *db, const real *dy,
                      const real *more, const real *x, const float *stat, const real *w,
                      float *scratch, int64_t M, int64_t C)
{
    (void)scratch;
    ZK_REAL(k, T, backward<T, 1>(k, L, dx, dw, db, dy, more, x, stat, w, NULL, plain(M, C)));
}

void zk_rmsnorm_fwd(zk *k, const zk_launch *L, real *y, float *stat, real *sum, const real *x,
                    const real *more, const real *w, int64_t M, int64_t C, float eps)
{
    ZK_REAL(k, T, forward<T, 0>(k, L, y, stat, sum, x, more, w, NULL, NULL, plain(M, C), eps));
}

void zk_rmsnorm_bwd(zk *k, const zk_launch *L, real *dx, real *dw, const real *dy, const real *more,
                    const real *x, const float *stat, const real *w, float *scratch, int64_t M,
                    int64_t C)
{
    (void)scratch;
    ZK_REAL(k, T, backward<T, 0>(k, L, dx, dw, NULL, dy, more, x, stat, w, NULL, plain(M, C)));
}

void zk_rmsnorm1_fwd(zk *k, const zk_launch *L, real *y, float *stat, real *sum, const real *x,
                     const real *more, const real *w, int64_t M, int64_t C, float eps)
{
    ZK_REAL(k, T,
            forward<T, 0>(k, L, y, stat, sum, x, more, w, NULL, NULL, one_plus{plain(M, C)}, eps));
}

void zk_rmsnorm1_bwd(zk *k, const zk_launch *L, real *dx, real *dw, const real *dy,
                     const real *more, const real *x, const float *stat, const real *w,
                     float *scratch, int64_t M, int64_t C)
{
    (void)scratch;
    ZK_REAL(k, T,
            backward<T, 0>(k, L, dx, dw, NULL, dy, more, x, stat, w, NULL, one_plus{plain(M, C)}));
}

void zk_qknorm_fwd(zk *k, const zk_launch *L, real *y, float *stat, const real *in, const real *wq,
                   const real *wk, int64_t M, int64_t H, int64_t G, int64_t D, float eps)
{
    ZK_REAL(k, T,
            forward<T, 0>(k, L, y, stat, NULL, in, NULL, wq, wk, NULL, heads(M, H, G, D), eps));
}

void zk_qknorm_bwd(zk *k, const zk_launch *L, real *din, real *dwq, real *dwk, const real *dy,
                   const real *in, const float *stat, const real *wq, const real *wk,
                   float *scratch, int64_t M, int64_t H, int64_t G, int64_t D)
{
    (void)scratch;
    ZK_REAL(k, T,
            backward<T, 0>(k, L, din, dwq, dwk, dy, NULL, in, stat, wq, wk, heads(M, H, G, D)));
}

void zk_qknorm1_fwd(zk *k, const zk_launch *L, real *y, float *stat, const real *in, const real *wq,
                    const real *wk, int64_t M, int64_t H, int64_t G, int64_t D, float eps)
{
    ZK_REAL(k, T,
            forward<T, 0>(k, L, y, stat, NULL, in, NULL, wq, wk, NULL, one_plus{heads(M, H, G, D)},
                          eps));
}

void zk_qknorm1_bwd(zk *k, const zk_launch *L, real *din, real *dwq, real *dwk, const real *dy,
                    const real *in, const float *stat, const real *wq, const real *wk,
                    float *scratch, int64_t M, int64_t H, int64_t G, int64_t D)
{
    (void)scratch;
    ZK_REAL(k, T,
            backward<T, 0>(k, L, din, dwq, dwk, dy, NULL, in, stat, wq, wk,
                           one_plus{heads(M, H, G, D)}));
}

void zk_qknorm_whole_fwd(zk *k, const zk_launch *L, real *y, float *stat, const real *in,
                         const real *wq, const real *wk, int64_t M, int64_t H, int64_t G, int64_t D,
                         float eps)
{
    ZK_REAL(k, T,
            forward<T, 0>(k, L, y, stat, NULL, in, NULL, wq, wk, NULL, whole(M, H, G, D), eps));
}

void zk_qknorm_whole_bwd(zk *k, const zk_launch *L, real *din, real *dwq, real *dwk, const real *dy,
                         const real *in, const float *stat, const real *wq, const real *wk,
                         int64_t M, int64_t H, int64_t G, int64_t D)
{
    ZK_REAL(k, T,
            backward<T, 0>(k, L, din, dwq, dwk, dy, NULL, in, stat, wq, wk, whole(M, H, G, D)));
}
}
