/* sum.cu -- sums of gradients: gradients ("leaves") by a binary counter of pending nodes (zk_push
 * in zk.h), squares exactly.
 *
 * Invariants
 *  1. A node of 2^b leaves is older + newer, its two halves in order of their leaves; the sum of
 *     whole blocks is extended likewise, as on a CPU: the bits are the same.
 *  2. A thread reads all it needs of its elements before it writes any of them, so a source may be
 *     the first node buffer.
 *  3. The square of an f32 is exact in f64. The squares of a block are added in 16 lanes, element i
 *     to lane i % 16 ascending, which are folded 8, 4, 2, 1; block sums are added as integers.
 */
#include "part.h"

#include "../limbs.h"

/* ---- leaves */
struct push {
    float *node;       /* [buffers][stride] */
    const char *src;   /* leaf i: [n] at src + i * step */
    const zk_ctl *ctl; /* has the number of earlier leaves; NULL: there are none */
    int64_t stride, step, count, n, total, mask, block;
};

enum { AHEAD = 4 }; /* leaves that a thread loads at a time */
/* Levels of a counter, for pushes of up to 8 leaves; of blocks of up to 32; of up to 4096 leaves or
 * blocks of up to 2048. */
enum { SHALLOW = 3, MIDDLE = 6, DEEPEST = 12 };

/* Return the nodes that are pending after so many leaves, a bit each. */
static __device__ int64_t pending(const push &a, int64_t leaves)
{
    return (leaves & (a.block - 1)) | (leaves < a.block ? 0 : a.block);
}

/* Return the buffer of the pending node of 2^b leaves, or of the sum of whole blocks. */
static __device__ float *buffer(const push &a, int b)
{
    return a.node + a.stride * __popcll((uint64_t)a.mask & ((1ull << b) - 1));
}

/* The binary counter of pending nodes for V elements from `at` on. With blocks of less than 2^DEEP
 * leaves, or count <= 2^DEEP leaves, only nodes below level DEEP can be both made and used by this
 * push. They are `level`, and `made` says which exist. At most one node is made above, `high` of
 * level `top`, because the next would come 2^DEEP leaves later. All other nodes are in their
 * buffers. Loops over levels have no early exit, so that levels stay in registers. */
template <int DEEP, int V> struct counter {
    float level[DEEP][V], high[V];
    uint32_t made;
    int top;
    int64_t at, left;
};

template <int DEEP, int V>
static __device__ void start(counter<DEEP, V> &c, int64_t at, int64_t left)
{
    for (int b = 0; b < DEEP; b++)
        for (int j = 0; j < V; j++) c.level[b][j] = 0;
    for (int j = 0; j < V; j++) c.high[j] = 0;
    c.made = 0, c.top = 0, c.at = at, c.left = left;
}

/* Get the node of level b < DEEP from the counter or its buffer. */
template <int DEEP, int V>
static __device__ void find(float (&node)[V], const counter<DEEP, V> &c, const push &a, int b)
{
    for (int j = 0; j < V; j++) node[j] = c.level[b][j];
    if (!(c.made >> b & 1)) fetch(node, buffer(a, b) + c.at, c.left);
}

/* x = older + x */
template <int V> static __device__ void join(float (&x)[V], const float (&older)[V])
{
    for (int j = 0; j < V; j++) x[j] = older[j] + x[j];
}

/* Add leaf number `leaf`, whose elements are x; x is overwritten. */
template <int DEEP, int V>
static __device__ void take(counter<DEEP, V> &c, const push &a, int64_t leaf, float (&x)[V])
{
    int stop = __ffsll(~leaf | a.block) - 1, b = DEEP; /* the level where the carry stops */
    /* one more if that is the level of whole blocks */
    int joins = stop + (leaf >= a.block && a.block >> stop == 1);
    float older[V];
#pragma unroll
    for (int i = 0; i < DEEP; i++) {
        if (i < joins) {
            find(older, c, a, i);
            join(x, older);
        }
        for (int j = 0; j < V; j++) c.level[i][j] = i == stop ? x[j] : c.level[i][j];
    }
    c.made = stop < DEEP ? (c.made >> stop | 1) << stop : 0;
    if (stop < DEEP) return;
    for (; b < joins; b++) {
        fetch(older, buffer(a, b) + c.at, c.left);
        join(x, older);
    }
    for (int j = 0; j < V; j++) c.high[j] = x[j];
    c.top = stop;
}

/* Store the nodes made by this push to their buffers, as more leaves will come. */
template <int DEEP, int V> static __device__ void keep(const counter<DEEP, V> &c, const push &a)
{
#pragma unroll
    for (int b = 0; b < DEEP; b++)
        if (c.made >> b & 1) stow(buffer(a, b) + c.at, c.level[b], c.left);
    if (c.top) stow(buffer(a, c.top) + c.at, c.high, c.left);
}

/* After the last leaf, add the pending nodes `have`, newest first, into the first buffer. The
 * newest is taken as it is. */
template <int DEEP, int V>
static __device__ void finish(const counter<DEEP, V> &c, const push &a, int64_t have)
{
    float acc[V] = {}, node[V];
    int newest = __ffsll(have) - 1;
#pragma unroll
    for (int b = 0; b < DEEP; b++)
        if (have >> b & 1) {
            find(node, c, a, b);
            for (int j = 0; j < V; j++) acc[j] = b == newest ? node[j] : node[j] + acc[j];
        }
    for (int b = DEEP; have >> b; b++)
        if (have >> b & 1) {
            for (int j = 0; j < V; j++) node[j] = c.high[j];
            if (b != c.top) fetch(node, buffer(a, b) + c.at, c.left);
            for (int j = 0; j < V; j++) acc[j] = b == newest ? node[j] : node[j] + acc[j];
        }
    stow(a.node + c.at, acc, c.left);
}

template <class T, int DEEP, int V> static __global__ void __launch_bounds__(256) push_tree(push a)
{
    int64_t lo = a.ctl ? a.ctl->leaves : 0, threads = (int64_t)gridDim.x * blockDim.x;
    for (int64_t at = V * ((int64_t)blockIdx.x * blockDim.x + threadIdx.x); at < a.n;
         at += V * threads) {
        counter<DEEP, V> c;
        start(c, at, a.n - at);
        for (int64_t i = 0; i < a.count; i += AHEAD) {
            float x[AHEAD][V];
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
                if (i + j < a.count)
                    fetch(x[j], (const T *)(a.src + (i + j) * a.step) + at, c.left);
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
                if (i + j < a.count) take(c, a, lo + i + j, x[j]);
        }
        if (lo + a.count < a.total) keep(c, a);
        else finish(c, a, pending(a, lo + a.count));
    }
}

/* Return the leaves of the largest tree of which a push may make a node: its own leaves, or less
 * than two blocks. */
static int64_t deepest(int64_t count, int64_t block) { return zk_least(count, 2 * block - 1); }

template <class T, int V>
static void push_packs(zk *k, const zk_launch *L, const push &a)
{
    int64_t most = deepest(a.count, a.block);
    if (most <= 1 << SHALLOW) ZK_LAUNCH(k, L, 0, (push_tree<T, SHALLOW, V>), a);
    else if (most <= 1 << MIDDLE) ZK_LAUNCH(k, L, 0, (push_tree<T, MIDDLE, V>), a);
    else ZK_LAUNCH(k, L, 0, (push_tree<T, DEEPEST, V>), a);
}

template <class T> static void push_leaves(zk *k, const zk_launch *L, const push &a)
{
    uint64_t nodes = (uintptr_t)a.node | (uint64_t)a.stride * sizeof(float);
    uint64_t leaves = (uintptr_t)a.src | (uint64_t)a.step;
    if (nodes % sizeof(pack<float, 4>) || leaves % sizeof(pack<T, 4>)) push_packs<T, 1>(k, L, a);
    else push_packs<T, 4>(k, L, a);
}

/* Return the bytes from each source to the next. Exits if the sources are not evenly spaced or
 * exceed the levels, as the sum would be wrong. */
static int64_t spacing(const void *const *src, int64_t count, int64_t block)
{
    int64_t step = count > 1 ? (const char *)src[1] - (const char *)src[0] : 0, even = 1;
    for (int64_t i = 1; i < count; i++)
        even &= (const char *)src[i] == (const char *)src[0] + i * step;
    if (even && deepest(count, block) <= 1 << DEEPEST) return step;
    fprintf(stderr, "zk_push: %lld sources in blocks of %lld, %s evenly spaced\n", (long long)count,
            (long long)block, even ? "though" : "not");
    _exit(3);
}

void zk_push(zk *k, const zk_launch *L, float *node, int64_t stride, const void *const *src,
             int64_t count, int full, int64_t n, const zk_ctl *ctl, int64_t total, int64_t mask,
             int64_t block)
{
    // clang-format off
    push a = {node, (const char *)src[0], ctl, stride, spacing(src, count, block), count, n, total,
              mask, block};
    // clang-format on
    if (full) push_leaves<float>(k, L, a);
    else ZK_REAL(k, T, push_leaves<T>(k, L, a));
}

static __global__ void count_leaves(zk_ctl *ctl, int64_t leaves)
{
    if (threadIdx.x == 0) ctl->leaves += leaves;
}

void zk_count(zk *k, const zk_launch *L, zk_ctl *ctl, int64_t leaves)
{
    ZK_LAUNCH(k, L, 0, count_leaves, ctl, leaves);
}

/* ---- squares. Four threads sum a block, with four lanes each; a warp
 * takes EIGHT blocks at once. */
enum { FOUR = 4, EIGHT = ZK_WARP / FOUR };

/* Return the sum of the squares of g [n], n <= ZK_BLOCK, in each of the four threads, of which this
 * is number `quarter`. */
template <class T> static __device__ double square_block(const T *g, int n, int quarter)
{
    double lane[FOUR] = {0, 0, 0, 0};
#pragma unroll 4
    for (int i = FOUR * quarter; i < n; i += FOUR * FOUR) {
        float x[FOUR];
        fetch(x, g + i, n - i);
        for (int j = 0; j < FOUR; j++) lane[j] += (double)x[j] * (double)x[j];
    }
    for (int apart = FOUR / 2; apart; apart /= 2)
        for (int j = 0; j < FOUR; j++) lane[j] += __shfl_xor_sync((unsigned)ZK_ALL, lane[j], apart);
    return lane[0] + lane[2] + (lane[1] + lane[3]);
}

/* Add s to the thread block's limbs; the entry after them counts values that cannot be split. */
static __device__ void add_limbs(unsigned long long *limb, double s)
{
    uint32_t digit[3];
    int at;
    if (!limbs_split(s, &at, digit)) {
        atomicAdd(limb + ZK_LIMBS, 1ull);
        return;
    }
    for (int i = 0; i < 3; i++)
        if (digit[i]) atomicAdd(limb + at + i, (unsigned long long)digit[i]);
}

template <class T>
static __global__ void __launch_bounds__(128)
    squares(int64_t *sums, const T *g, span_list spans, int64_t first, int64_t n)
{
    __shared__ unsigned long long limb[ZK_LIMBS + 1];
    int lane = lane_here(), group = lane / FOUR;
    zk_span own = spans.span[lane];
    for (int i = (int)threadIdx.x; i <= ZK_LIMBS; i += (int)blockDim.x) limb[i] = 0;
    __syncthreads();
    int64_t step = EIGHT * ZK_BLOCK;
    for (int64_t at = warp_here() * step; at < n; at += warps_here() * step) {
        const T *mine = g + at + group * ZK_BLOCK;
        int have = 0;
        for (int i = 0; i < EIGHT && at + i * ZK_BLOCK < n; i++) {
            block_part part;
            if (find_part(&part, own, first + at + i * ZK_BLOCK) && group == i)
                have = (int)zk_least(part.n, n - at - i * ZK_BLOCK);
        }
        double sum = square_block(mine, have, lane % FOUR);
        if (lane % FOUR == 0 && have > 0) add_limbs(limb, sum);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i <= ZK_LIMBS; i += (int)blockDim.x)
        if (limb[i])
            atomicAdd((unsigned long long *)sums + (i < ZK_LIMBS ? ZK_NORM + i : ZK_NONFINITE),
                      limb[i]);
}

template <class T>
static void square_all(zk *k, const zk_launch *L, int64_t *sums, const T *g, const zk_span *spans,
                       int64_t nspans, int64_t first, int64_t n)
{
    for (int64_t i = 0; i < nspans; i += ZK_WARP)
        ZK_LAUNCH(k, L, 0, squares<T>, sums, g, some_spans(spans + i, nspans - i), first, n);
}

void zk_square_sum(zk *k, const zk_launch *L, int64_t *sums, const void *g, const zk_span *spans,
                   int64_t nspans, int64_t first, int64_t n, int full)
{
    if (full) square_all(k, L, sums, (const float *)g, spans, nspans, first, n);
    else ZK_REAL(k, T, square_all(k, L, sums, (const T *)g, spans, nspans, first, n));
}
