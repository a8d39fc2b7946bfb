/* heads.cu -- sorts heads by the rank of a context group that they go to, and back. A block of
 * threads has a row.
 *
 * Invariants
 *  1. The copies of a key or value head are added in ascending order in f32, as on a CPU.
 */
#include "pack.h"

namespace {

/* whole: [M, H + 2*G, D]; part: [ranks, M, (H + 2*G*copies) / ranks, D] */
struct heads {
    int64_t M;
    int H, G, D, ranks, copies;
};

/* Return the first element in `part` of copy c of a row's head. */
__device__ inline int64_t part(const heads &a, int64_t m, int head, int c)
{
    int h = a.H / a.ranks, g = a.G * a.copies / a.ranks;
    int values = head >= a.H + a.G, keys = head >= a.H;
    int count = keys ? g : h, place = keys ? h + values * g : 0;
    int v = keys ? (head - a.H - values * a.G) * a.copies + c : head;
    return ((v / count * a.M + m) * (h + 2 * g) + place + v % count) * a.D;
}

template <class T, int V> __global__ void cut(T *y, const T *x, heads a)
{
    int all = a.H + 2 * a.G, each = a.D / V;
    for (int64_t m = blockIdx.x; m < a.M; m += gridDim.x)
        for (int i = (int)threadIdx.x; i < all * each; i += (int)blockDim.x) {
            int head = i / each, at = i % each * V;
            pack<T, V> one = load<V>(x + (m * all + head) * a.D + at);
            for (int c = 0; c < (head < a.H ? 1 : a.copies); c++)
                *reinterpret_cast<pack<T, V> *>(y + part(a, m, head, c) + at) = one;
        }
}

template <class T, int V> __global__ void join(T *y, const T *x, heads a)
{
    int all = a.H + 2 * a.G, each = a.D / V;
    for (int64_t m = blockIdx.x; m < a.M; m += gridDim.x)
        for (int i = (int)threadIdx.x; i < all * each; i += (int)blockDim.x) {
            int head = i / each, at = i % each * V;
            float sum[V], more[V];
            fetch<V>(sum, x + part(a, m, head, 0) + at);
            for (int c = 1; c < (head < a.H ? 1 : a.copies); c++) {
                fetch<V>(more, x + part(a, m, head, c) + at);
                for (int j = 0; j < V; j++) sum[j] += more[j];
            }
            stow<V>(y + (m * all + head) * a.D + at, sum);
        }
}

}

extern "C" {

void zk_cut_heads_fwd(zk *k, const zk_launch *L, real *y, const real *x, int64_t M, int64_t H,
                      int64_t G, int64_t D, int64_t ranks, int64_t copies)
{
    heads a = {M, (int)H, (int)G, (int)D, (int)ranks, (int)copies};
    ZK_REAL(k, R, ZK_WIDE(R, V, D, ZK_LAUNCH(k, L, 0, (cut<R, V>), (R *)y, (const R *)x, a)));
}

void zk_cut_heads_bwd(zk *k, const zk_launch *L, real *dx, const real *dy, int64_t M, int64_t H,
                      int64_t G, int64_t D, int64_t ranks, int64_t copies)
{
    heads a = {M, (int)H, (int)G, (int)D, (int)ranks, (int)copies};
    ZK_REAL(k, R, ZK_WIDE(R, V, D, ZK_LAUNCH(k, L, 0, (join<R, V>), (R *)dx, (const R *)dy, a)));
}

void zk_join_heads(zk *k, const zk_launch *L, real *y, const real *x, int64_t M, int64_t H,
                   int64_t D, int64_t ranks, int sign)
{
    heads a = {M, (int)H, 0, (int)D, (int)ranks, 1};
    if (sign > 0)
        ZK_REAL(k, R, ZK_WIDE(R, V, D, ZK_LAUNCH(k, L, 0, (join<R, V>), (R *)y, (const R *)x, a)));
    else ZK_REAL(k, R, ZK_WIDE(R, V, D, ZK_LAUNCH(k, L, 0, (cut<R, V>), (R *)y, (const R *)x, a)));
}
}
