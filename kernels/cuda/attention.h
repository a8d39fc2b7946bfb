/* attention.h -- the parts that the attention kernels share: shapes, which keys a row sees, and how
 * a call finds its kernel.
 *
 * There are two sets of kernels. attention.cu and attention_bwd.cu use tensor cores. They take bf16
 * or f16 heads of a multiple of 8 elements, up to 256, padded in shared memory to 64, 128 or 256:
 * the launch's tile[0]. tile[1] is the keys of a tile, forward; tile[2] is 1 where warpgroups
 * multiply (wgmma.h). attention_plain.cu (tile[0] = 0) takes all other heads, and f32.
 */
#ifndef ZK_ATTENTION_H
#define ZK_ATTENTION_H
#include "functions.h"
#include "philox.h"
#include "../drop.h"

/* Kinds of attention: with capped scores, and with dropout of probabilities. */
enum { USUAL, CAPPED, DROPPED };

/* Shapes of a call. Query head h reads key and value head h / each. A row of qkv has H query, G key
 * and G value heads of D elements. position: [B,T], or NULL: each sample is one document. Without a
 * window, `window` is T. cap: of CAPPED scores, else 0; key: [B], else NULL, d, and head, the
 * number of the call's first head among all of a sample: of DROPPED probabilities. */
struct heads {
    int T, H, G, D, each;
    float scale;
    const int32_t *position;
    int window;
    float cap;
    const int64_t *key;
    drop d;
    int head;
};

static inline heads heads_of(int64_t T, int64_t H, int64_t G, int64_t D, float scale,
                             const int32_t *position, int64_t window, float cap)
{
    return {(int)T,   (int)H,      (int)G, (int)D, (int)(H / G), scale,
            position, (int)window, cap,    NULL,   {},           0};
}

static inline heads dropped_heads(heads a, const int64_t *key, int64_t place, int64_t head, float p)
{
    a.key = key;
    a.head = (int)head;
    a.d = drop_of(place, p);
    return a;
}

/* Return the reach of row t: it sees the keys of rows t - reach .. t. Rows past the end are treated
 * as the last row. No later row sees an earlier key. */
__device__ inline int reach_of(const heads &a, int b, int t)
{
    t = min(t, a.T - 1);
    return min(a.position ? a.position[(int64_t)b * a.T + t] : t, a.window - 1);
}

__device__ inline int first_key(const heads &a, int b, int t)
{
    t = min(t, a.T - 1);
    return t - reach_of(a, b, t);
}

/* Return the first row from `start` on, in steps of `by`, whose block sees no key before `key`. */
__device__ inline int end_of_sight(const heads &a, int b, int start, int by, int key)
{
    int end = start + by;
    while (end < a.T && first_key(a, b, end) < key) end += by;
    return end;
}

/* Return whether a query `back` rows after a key does not see it. */
__device__ inline bool beyond(int back, int reach) { return (unsigned)back > (unsigned)reach; }

/* Return tanh(scale * s / cap) of a product s of query and key; cap times it is the score. */
__device__ inline float bent(const heads &a, float s)
{
    return tangent(__fdiv_rn(s * a.scale, a.cap));
}

/* Set c to the words of the probabilities of queries q, q + 8 and keys k, k + 8 (drop.h); bit 3 of
 * q and of k is 0. key: the sample's. */
__device__ inline void words_of(uint32_t (&c)[4], const heads &a, int64_t key, int h, int q, int k)
{
    words(c, (uint64_t)key, a.d.place, ((uint64_t)(a.head + h) * a.T + q) * a.T + k);
}

/* Return the factor of a probability by bit 0 of `kept`. */
__device__ inline float factor(uint32_t kept, const heads &a, int64_t seed)
{
    return kept & 1 ? seed ? a.d.scale : 1 : 0;
}

__device__ inline int qkv_stride(const heads &a) { return (a.H + 2 * a.G) * a.D; }

/* Return the address in qkv or its gradient of row t of sequence b and head `head`; key heads
 * follow query heads, and value heads follow key heads. */
template <class R> __device__ inline R *qkv_at(R *qkv, const heads &a, int b, int64_t t, int head)
{
    return qkv + ((int64_t)b * a.T + t) * qkv_stride(a) + head * a.D;
}

/* The same in y or its gradient. */
template <class R> __device__ inline R *y_at(R *y, const heads &a, int b, int64_t t, int head)
{
    return y + (((int64_t)b * a.T + t) * a.H + head) * a.D;
}

/* The same in an array of one number per query, [B,H,T]. */
template <class R> __device__ inline R *line_at(R *line, const heads &a, int b, int64_t t, int head)
{
    return line + ((int64_t)b * a.H + head) * a.T + t;
}

static const float LOG2E = 1.44269504f;
static const float LN2 = 0.693147181f;

/* Compute the two lines at the start of backward's scratch: dot = sum of dy * y,
 * and lse in powers of two. */
void attention_lines(zk *k, const zk_launch *L, int part, float *lines, const real *dy,
                     const real *y, const float *lse, int64_t B, const heads &a);

void plain_attention_fwd(zk *k, const zk_launch *L, real *y, float *lse, const real *qkv,
                         const heads &a);
void plain_attention_bwd(zk *k, const zk_launch *L, real *dqkv, const real *dy, const real *qkv,
                         const float *lse, const float *lines, const heads &a);

/* Exit with a message: the launch table asks for a kernel that is not compiled. */
[[noreturn]] inline void no_attention(const zk_launch *l, const heads &a)
{
    fprintf(stderr, "attention: no kernel with tile %dx%dx%d for heads of %d elements, scale %g\n",
            l->tile[0], l->tile[1], l->tile[2], a.D, (double)a.scale);
    fflush(stderr);
    _exit(3);
}

#endif
