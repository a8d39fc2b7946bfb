/* act.cu -- elementwise kernels: GELU, squared ReLU, scaling, caps of logits, SwiGLU, GeGLU,
 * dropout, addition, rounding, and weights from their quantized form.
 *
 *   gelu(x) = x * sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3); erf: x/2 * (1 + erf(x/sqrt(2)))
 *   relu2(x) = max(x, 0)^2; swiglu(gate, up) = gate * sigmoid(gate) * up;
 *   geglu(gate, up) = gelu(gate) * up
 *   dropout(x) = x / (1 - p) if kept, else 0
 *
 * Invariants
 *  1. The result for an element depends on that element alone, with the same bits in a pack of 16
 *     bytes and in the ragged end. All have the bits of a CPU except the tanh form and SwiGLU:
 *     their sigmoid uses the GPU's own exponential and quotient, which halves the instructions and
 *     is accurate to (|x| + 6) 2^-24.
 *  2. A thread reads its elements before it writes them, so an output may be an input where zk.h
 *     allows it.
 */
#include "functions.h"
#include "pack.h"
#include "philox.h"

#include "../drop.h" /* after cuda.h, which includes zk.h */
#include "../quantized.h"

namespace {

const float LOG2_E = 1.44269504088896340736f;

__device__ inline float sigmoid(float x) { return inverse(1.0f + power2(-LOG2_E * x)); }

/* ---- GELU. The tanh form is computed as x * sigmoid(2u), which keeps its relative accuracy
 * where 1 + tanh(u) cancels. From |x| = 16 on the sigmoid is 0 or 1 in f32, so x is clamped
 * there and u stays finite. */
const float ROOT = 1.59576912160573071176f; /* 2 sqrt(2/pi) */
const float CUBE = 0.044715f;
const float HALF_ROOT = 0.70710678118654752440f;

__device__ inline float clamped(float x)
{
    x = x > -16.0f ? x : -16.0f;
    return x < 16.0f ? x : 16.0f;
}

__device__ inline float share(float t) { return sigmoid(ROOT * fmaf(CUBE * t, t * t, t)); }

struct gelu_tanh {
    __device__ float operator()(float x) const { return x * share(clamped(x)); }
};

struct gelu_erf {
    __device__ float operator()(float x) const { return 0.5f * x * (1.0f + error(x * HALF_ROOT)); }
};

struct gelu_tanh_slope {
    __device__ float operator()(float dy, float x) const
    {
        float t = clamped(x), s = share(t), inner = ROOT * fmaf(3 * CUBE * t, t, 1.0f);
        return dy * fmaf(x * s * (1.0f - s), inner, s);
    }
};

struct gelu_erf_slope {
    __device__ float operator()(float dy, float x) const
    {
        float below = fmaf(0.5f, error(x * HALF_ROOT), 0.5f);
        float density = 0.39894228040143267794f * exponential(-0.5f * x * x);
        return dy * fmaf(x, density, below);
    }
};

/* ---- squared ReLU; NaN stays NaN */
__device__ inline float relu(float x) { return 0.0f > x ? 0.0f : x; }

struct relu2 {
    __device__ float operator()(float x) const { return relu(x) * relu(x); }
};

struct relu2_slope {
    __device__ float operator()(float dy, float x) const { return dy * (2.0f * relu(x)); }
};

struct identity {
    __device__ float operator()(float x) const { return x; }
};

/* ---- kernels of n elements with one or two inputs */
template <int V> __device__ inline int64_t first_here(void)
{
    return ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * V;
}

template <int V> __device__ inline int64_t all_here(void)
{
    return (int64_t)gridDim.x * blockDim.x * V;
}

template <class F, class T, class X> __global__ void of_one(T *y, const X *x, int64_t n)
{
    constexpr int V = wide<T>;
    for (int64_t i = first_here<V>(); i < n; i += all_here<V>()) {
        float a[V];
        fetch(a, x + i, n - i);
        for (int j = 0; j < V; j++) a[j] = F()(a[j]);
        stow(y + i, a, n - i);
    }
}

template <class F, class T> __global__ void of_two(T *y, const T *x, const T *z, int64_t n)
{
    constexpr int V = wide<T>;
    for (int64_t i = first_here<V>(); i < n; i += all_here<V>()) {
        float a[V], b[V];
        fetch(a, x + i, n - i);
        fetch(b, z + i, n - i);
        for (int j = 0; j < V; j++) a[j] = F()(a[j], b[j]);
        stow(y + i, a, n - i);
    }
}

template <class T> __global__ void scaled(T *y, const T *x, int64_t n, float scale)
{
    constexpr int V = wide<T>;
    for (int64_t i = first_here<V>(); i < n; i += all_here<V>()) {
        float a[V];
        fetch(a, x + i, n - i);
        for (int j = 0; j < V; j++) a[j] *= scale;
        stow(y + i, a, n - i);
    }
}

template <class T> __global__ void capped(T *y, const T *x, int64_t n, float cap)
{
    constexpr int V = wide<T>;
    for (int64_t i = first_here<V>(); i < n; i += all_here<V>()) {
        float a[V];
        fetch(a, x + i, n - i);
        for (int j = 0; j < V; j++) a[j] = cap * tangent(__fdiv_rn(a[j], cap));
        stow(y + i, a, n - i);
    }
}

/* ---- gates: y = f(gate) * up, where f is gelu by tanh or silu(g) = g * s with s = sigmoid(g), the
 * slope of which is s + g s (1 - s). x [M,2F], y [M,F] */
struct silu {
    __device__ float operator()(float x) const { return x * sigmoid(x); }
};

struct silu_slope {
    __device__ float operator()(float dy, float x) const
    {
        float s = sigmoid(x);
        return dy * fmaf(x * s, 1.0f - s, s);
    }
};

template <class Gate, class T, int V>
__global__ void gated_fwd(T *y, const T *x, int64_t M, int64_t F)
{
    for (int64_t m = blockIdx.x; m < M; m += gridDim.x)
        for (int64_t i = threadIdx.x * V; i < F; i += blockDim.x * V) {
            float gate[V], up[V];
            fetch(gate, x + 2 * m * F + i);
            fetch(up, x + (2 * m + 1) * F + i);
            for (int j = 0; j < V; j++) up[j] = Gate()(gate[j]) * up[j];
            stow(y + m * F + i, up);
        }
}

template <class Gate, class Slope, class T, int V>
__global__ void gated_bwd(T *dx, const T *dy, const T *x, int64_t M, int64_t F)
{
    for (int64_t m = blockIdx.x; m < M; m += gridDim.x)
        for (int64_t i = threadIdx.x * V; i < F; i += blockDim.x * V) {
            float gate[V], up[V], d[V];
            fetch(gate, x + 2 * m * F + i);
            fetch(up, x + (2 * m + 1) * F + i);
            fetch(d, dy + m * F + i);
            for (int j = 0; j < V; j++) {
                float value = Gate()(gate[j]);
                gate[j] = Slope()(d[j] * up[j], gate[j]);
                up[j] = d[j] * value;
            }
            stow(dx + 2 * m * F + i, gate);
            stow(dx + (2 * m + 1) * F + i, up);
        }
}

/* ---- dropout of samples of n elements */
template <class T, int V>
__global__ void dropped(T *y, const T *x, const int64_t *key, int64_t B, int64_t n, drop d)
{
    for (int64_t i = first_here<V>(); i < B * n; i += all_here<V>()) {
        int64_t e = i % n, own = key[i / n];
        uint32_t word[4];
        float a[V];
        fetch(a, x + i);
        for (int j = 0; own && j < V; j++) {
            if (j % 4 == 0) words(word, (uint64_t)own, d.place, (uint64_t)(e + j) / 4);
            uint32_t mine = word[j % 4];
            for (int w = 1; V == 1 && w < 4; w++) mine = e % 4 == w ? word[w] : mine;
            a[j] = mine < d.least ? 0.0f : a[j] * d.scale;
        }
        stow(y + i, a);
    }
}

/* ---- quantized weights: a pack never leaves a block */
template <class T>
__global__ void dequantized(T *y, const uint32_t *w, int64_t n, int format)
{
    constexpr int V = wide<T>;
    int64_t each = zk_chunk(format), words = zk_chunk_bytes(format, each) / 4;
    for (int64_t i = first_here<V>(); i < n; i += all_here<V>()) {
        int64_t e = i % each, size = zk_least(each, n - (i - e));
        const uint32_t *chunk = w + i / each * words;
        float a[V];
        if (format == ZK_INT8) {
            float scale = zk_float(chunk, ZK_INT8_CHUNK);
            for (int j = 0; j < V; j++) {
                uint32_t q = zk_byte(chunk, e + j);
                a[j] = (float)((int)(q ^ 128) - 128) * scale;
            }
        } else {
            float factor = zk_nf4_factor(chunk, zk_nf4_blocks(size), e / ZK_NF4_BLOCK);
            for (int j = 0; j < V; j++) {
                uint32_t both = zk_byte(chunk, (e + j) / 2);
                a[j] = zk_nf4_level(both >> (j % 2 ? 0 : 4) & 15) * factor;
            }
        }
        stow(y + i, a, n - i);
    }
}

}

extern "C" {

void zk_gelu_fwd(zk *k, const zk_launch *L, real *y, const real *x, int64_t n, int kind)
{
    if (kind == ZK_GELU_ERF)
        ZK_REAL(k, T, ZK_LAUNCH(k, L, 0, (of_one<gelu_erf, T, T>), (T *)y, (const T *)x, n));
    else ZK_REAL(k, T, ZK_LAUNCH(k, L, 0, (of_one<gelu_tanh, T, T>), (T *)y, (const T *)x, n));
}

void zk_gelu_bwd(zk *k, const zk_launch *L, real *dx, const real *dy, const real *x, int64_t n,
                 int kind)
{
    if (kind == ZK_GELU_ERF)
        ZK_REAL(k, T,
                ZK_LAUNCH(k, L, 0, (of_two<gelu_erf_slope, T>), (T *)dx, (const T *)dy,
                          (const T *)x, n));
    else
        ZK_REAL(k, T,
                ZK_LAUNCH(k, L, 0, (of_two<gelu_tanh_slope, T>), (T *)dx, (const T *)dy,
                          (const T *)x, n));
}

void zk_relu2_fwd(zk *k, const zk_launch *L, real *y, const real *x, int64_t n)
{
    ZK_REAL(k, T, ZK_LAUNCH(k, L, 0, (of_one<relu2, T, T>), (T *)y, (const T *)x, n));
}

void zk_relu2_bwd(zk *k, const zk_launch *L, real *dx, const real *dy, const real *x, int64_t n)
{
    ZK_REAL(k, T,
            ZK_LAUNCH(k, L, 0, (of_two<relu2_slope, T>), (T *)dx, (const T *)dy, (const T *)x, n));
}

void zk_scale_fwd(zk *k, const zk_launch *L, real *y, const real *x, int64_t n, float scale)
{
    ZK_REAL(k, T, ZK_LAUNCH(k, L, 0, (scaled<T>), (T *)y, (const T *)x, n, scale));
}

void zk_softcap(zk *k, const zk_launch *L, real *y, const real *x, int64_t M, int64_t V, float cap)
{
    int64_t n = M * ((V + ZK_VOCAB - 1) / ZK_VOCAB * ZK_VOCAB);
    ZK_REAL(k, T, ZK_LAUNCH(k, L, 0, (capped<T>), (T *)y, (const T *)x, n, cap));
}

void zk_scale_bwd(zk *k, const zk_launch *L, real *dx, const real *dy, int64_t n, float scale)
{
    zk_scale_fwd(k, L, dx, dy, n, scale);
}

void zk_swiglu_fwd(zk *k, const zk_launch *L, real *y, const real *x, int64_t M, int64_t F)
{
    ZK_REAL(
        k, T,
        ZK_WIDE(T, V, F, ZK_LAUNCH(k, L, 0, (gated_fwd<silu, T, V>), (T *)y, (const T *)x, M, F)));
}

void zk_swiglu_bwd(zk *k, const zk_launch *L, real *dx, const real *dy, const real *x, int64_t M,
                   int64_t F)
{
    ZK_REAL(k, T,
            ZK_WIDE(T, V, F,
                    ZK_LAUNCH(k, L, 0, (gated_bwd<silu, silu_slope, T, V>), (T *)dx, (const T *)dy,
                              (const T *)x, M, F)));
}

void zk_geglu_fwd(zk *k, const zk_launch *L, real *y, const real *x, int64_t M, int64_t F)
{
    ZK_REAL(k, T,
            ZK_WIDE(T, V, F,
                    ZK_LAUNCH(k, L, 0, (gated_fwd<gelu_tanh, T, V>), (T *)y, (const T *)x, M, F)));
}

void zk_geglu_bwd(zk *k, const zk_launch *L, real *dx, const real *dy, const real *x, int64_t M,
                  int64_t F)
{
    ZK_REAL(k, T,
            ZK_WIDE(T, V, F,
                    ZK_LAUNCH(k, L, 0, (gated_bwd<gelu_tanh, gelu_tanh_slope, T, V>), (T *)dx,
                              (const T *)dy, (const T *)x, M, F)));
}

void zk_dropout_fwd(zk *k, const zk_launch *L, real *y, const real *x, const int64_t *key,
                    int64_t B, int64_t n, int64_t place, float p)
{
    drop d = drop_of(place, p);
    ZK_REAL(
        k, T,
        ZK_WIDE(T, V, n, ZK_LAUNCH(k, L, 0, (dropped<T, V>), (T *)y, (const T *)x, key, B, n, d)));
}

void zk_dropout_bwd(zk *k, const zk_launch *L, real *dx, const real *dy, const int64_t *key,
                    int64_t B, int64_t n, int64_t place, float p)
{
    zk_dropout_fwd(k, L, dx, dy, key, B, n, place, p);
}

void zk_add(zk *k, const zk_launch *L, real *y, const real *a, const real *b, int64_t n)
{
    ZK_REAL(k, T, ZK_LAUNCH(k, L, 0, (of_two<add_of, T>), (T *)y, (const T *)a, (const T *)b, n));
}

void zk_round(zk *k, const zk_launch *L, real *y, const float *x, int64_t n)
{
    ZK_REAL(k, T, ZK_LAUNCH(k, L, 0, (of_one<identity, T, float>), (T *)y, x, n));
}

void zk_dequantize(zk *k, const zk_launch *L, real *y, const real *w, int64_t n, int64_t m,
                   int format)
{
    (void)m;
    ZK_REAL(k, T, ZK_LAUNCH(k, L, 0, (dequantized<T>), (T *)y, (const uint32_t *)w, n, format));
}
}
