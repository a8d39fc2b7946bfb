/* rope.cu -- rotary position embedding: the table of cosines and sines, and the rotation of query
 * and key heads.
 *
 *   y1 = x1 cos(a) - x2 sin(a); y2 = x2 cos(a) + x1 sin(a); a = position * freq[i]
 *   x1, x2: elements i and i + D/2 of a head; zk_rope_part: of its first W, or 2i and 2i + 1
 *
 * Invariants
 *  1. Angles are products position * frequency in f64; only their sine and cosine are rounded to
 *     f32. The bits of table and rotation are those of a CPU.
 *  2. A thread reads both elements of its pairs before it writes them, so y may be `in`.
 */
#include "pack.h"

#include "../scalar.h"

namespace {

enum { SOME = 256 }; /* frequencies per launch, passed as a kernel parameter */

struct frequencies {
    double of[SOME];
};

/* Fill the table [T, half, 2] for pairs from .. from + n - 1. */
__global__ void fill_table(float *table, frequencies some, int64_t T, int half, int from, int n)
{
    int64_t all = T * n, step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t j = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; j < all; j += step) {
        int64_t t = j / n;
        int i = (int)(j % n);
        double angle = (double)t * some.of[i];
        float *to = table + 2 * (t * half + from + i);
        to[0] = (float)zk_cos(angle);
        to[1] = (float)zk_sin(angle);
    }
}

/* Rotate V pairs: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin). angle: [V,2]. */
template <int V>
__device__ inline void turn(float (&x1)[V], float (&x2)[V], const float (&angle)[2 * V], float sign)
{
    for (int j = 0; j < V; j++) {
        float c = angle[2 * j], s = sign * angle[2 * j + 1], a = x1[j], b = x2[j];
        x1[j] = fmaf(a, c, -(b * s));
        x2[j] = fmaf(b, c, a * s);
    }
}

/* y, in: [M, (H + 2*G) * 2*half]; turned = H + G, copied = G. The table's row is position[m], or,
 * without position, the row of m in its sample. */
template <class T, int V>
__global__ void turn_heads(T *y, const T *in, const float *table, const int32_t *position,
                           int64_t M, int64_t length, int turned, int copied, int half, float sign)
{
    int each = half / V, values = copied * 2 * half;
    for (int64_t m = blockIdx.x; m < M; m += gridDim.x) {
        int64_t at = m * (turned + copied) * 2 * half, after = at + (int64_t)turned * 2 * half;
        const float *angles = table + (position ? position[m] : m % length) * half * 2;
        for (int i = (int)threadIdx.x; i < turned * each; i += (int)blockDim.x) {
            int c = i % each * V;
            int64_t first = at + (int64_t)(i / each) * 2 * half + c;
            float x1[V], x2[V], angle[2 * V];
            fetch(x1, in + first);
            fetch(x2, in + first + half);
            fetch(angle, angles + 2 * c);
            turn(x1, x2, angle, sign);
            stow(y + first, x1);
            stow(y + first + half, x2);
        }
        for (int i = (int)threadIdx.x * V; y != in && i < values; i += (int)blockDim.x * V)
            stow(y + after + i, load<V>(in + after + i));
    }
}

/* The rotation of zk_rope_part. y, in: [M, (turned + copied) * D]; the first 2*half elements of a head
 * are rotated. */
template <class T, int V, int PAIRS>
__global__ void turn_parts(T *y, const T *in, const float *table, const int32_t *position,
                           int64_t M, int64_t length, int turned, int copied, int D, int half,
                           float factor, float sign)
{
    int each = half / V, rest = D - 2 * half;
    for (int64_t m = blockIdx.x; m < M; m += gridDim.x) {
        int64_t at = m * (turned + copied) * D, after = at + (int64_t)turned * D;
        const float *angles = table + (position ? position[m] : m % length) * half * 2;
        for (int i = (int)threadIdx.x; i < turned * each; i += (int)blockDim.x) {
            int c = i % each * V;
            int64_t head = at + (int64_t)(i / each) * D;
            int64_t first = head + (PAIRS == ZK_ADJACENT ? 2 * c : c);
            int64_t second = PAIRS == ZK_ADJACENT ? first + V : first + half;
            float a[V], b[V], angle[2 * V];
            fetch(a, in + first);
            fetch(b, in + second);
            fetch(angle, angles + 2 * c);
            for (int j = 0; j < 2 * V; j++) angle[j] *= factor;
            if constexpr (PAIRS == ZK_ADJACENT) {
                float x1[V], x2[V];
                for (int j = 0; j < V; j++) {
                    x1[j] = 2 * j < V ? a[2 * j % V] : b[2 * j % V];
                    x2[j] = 2 * j + 1 < V ? a[(2 * j + 1) % V] : b[(2 * j + 1) % V];
                }
                turn(x1, x2, angle, sign);
                for (int j = 0; j < V; j++) {
                    a[j] = j % 2 ? x2[j / 2] : x1[j / 2];
                    b[j] = (V + j) % 2 ? x2[(V + j) / 2] : x1[(V + j) / 2];
                }
            } else {
                turn(a, b, angle, sign);
            }
            stow(y + first, a);
            stow(y + second, b);
        }
        for (int i = (int)threadIdx.x * V; y != in && i < turned * rest; i += (int)blockDim.x * V) {
            int64_t e = at + (int64_t)(i / rest) * D + 2 * half + i % rest;
            stow(y + e, load<V>(in + e));
        }
        for (int i = (int)threadIdx.x * V; y != in && i < copied * D; i += (int)blockDim.x * V)
            stow(y + after + i, load<V>(in + after + i));
    }
}

}

extern "C" {

void zk_rope_table(zk *k, const zk_launch *L, float *table, const double *freq, int64_t T,
                   int64_t D)
{
    int half = (int)(D / 2);
    for (int from = 0; from < half; from += SOME) {
        int n = half - from < SOME ? half - from : SOME;
        frequencies some = {};
        memcpy(some.of, freq + from, n * sizeof *freq);
        ZK_LAUNCH(k, L, 0, fill_table, table, some, T, half, from, n);
    }
}

void zk_rope_packed(zk *k, const zk_launch *L, real *y, const real *in, const float *table,
                    const int32_t *position, int64_t B, int64_t T, int64_t H, int64_t G, int64_t D,
                    int sign)
{
    int turned = (int)(H + G), copied = (int)G, half = (int)(D / 2);
    ZK_REAL(k, R,
            ZK_WIDE(R, V, half,
                    ZK_LAUNCH(k, L, 0, (turn_heads<R, V>), (R *)y, (const R *)in, table, position,
                              B * T, T, turned, copied, half, (float)sign)));
}

void zk_rope_part(zk *k, const zk_launch *L, real *y, const real *in, const float *table,
                  const float *table2, const int32_t *position, int64_t B, int64_t T, int64_t H,
                  int64_t G, int64_t D, int64_t W, int pairs, int which, float factor,
                  float factor2, int sign)
{
    int turned = (int)(H + G), copied = (int)G, half = which ? (int)(W / 2) : 0;
    const float *by = which == 2 ? table2 : table;
    float times = which == 2 ? factor2 : factor;
    if (pairs == ZK_ADJACENT)
        ZK_REAL(k, R,
                ZK_WIDE(R, V, D % wide<R> ? D : half,
                        ZK_LAUNCH(k, L, 0, (turn_parts<R, V, ZK_ADJACENT>), (R *)y, (const R *)in,
                                  by, position, B * T, T, turned, copied, (int)D, half, times,
                                  (float)sign)));
    else
        ZK_REAL(k, R,
                ZK_WIDE(R, V, D % wide<R> ? D : half,
                        ZK_LAUNCH(k, L, 0, (turn_parts<R, V, ZK_HALVES>), (R *)y, (const R *)in, by,
                                  position, B * T, T, turned, copied, (int)D, half, times,
                                  (float)sign)));
}

void zk_rope(zk *k, const zk_launch *L, real *y, const real *in, const float *table, int64_t B,
             int64_t T, int64_t H, int64_t G, int64_t D, int sign)
{
    zk_rope_packed(k, L, y, in, table, NULL, B, T, H, G, D, sign);
}
}
