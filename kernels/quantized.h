/* quantized.h -- weights stored in few bits: int8 and NF4, in chunks that are computed alone.
 *
 *   ZK_INT8  a chunk has 256 elements: int8 q[256]; float scale.  w = q * scale
 *   ZK_NF4   a chunk has up to 256 blocks of 64 elements: uint8 q[32 * blocks], two elements each,
 *            the first in the upper half; uint8 a[blocks], padded to 4 bytes; float scale, mean.
 *            w = level(q) * (dynamic(a) * scale + mean)
 *
 * ZK_NF4 is QLoRA's double quantization, by the formulas of bitsandbytes (quantize_4bit with
 * blocksize 64, compress_statistics), except that each chunk has its own mean.
 *
 * Invariants
 *  1. The bits of a chunk depend on its elements alone, so it does not matter which rank makes it.
 *  2. Every target computes a weight with the same bits: products and sums are rounded one by one.
 *  3. A chunk begins at 4 bytes. Elements after the last one of a tensor count as 0.
 */
#ifndef ZK_QUANTIZED_H
#define ZK_QUANTIZED_H
#include "scalar.h"

enum { ZK_INT8_CHUNK = 256, ZK_NF4_CHUNK = 16384, ZK_NF4_BLOCK = 64 };

/* Return the elements of a chunk. */
ZK_BOTH int64_t zk_chunk(int format) { return format == ZK_NF4 ? ZK_NF4_CHUNK : ZK_INT8_CHUNK; }

/* Return the blocks of a chunk of n elements. */
ZK_BOTH int64_t zk_nf4_blocks(int64_t n) { return (n + ZK_NF4_BLOCK - 1) / ZK_NF4_BLOCK; }

/* Return the place of a chunk's two floats. */
ZK_BOTH int64_t zk_nf4_scale(int64_t blocks)
{
    return ZK_NF4_BLOCK / 2 * blocks + (blocks + 3) / 4 * 4;
}

/* Return the bytes of a chunk of n elements. */
ZK_BOTH int64_t zk_chunk_bytes(int format, int64_t n)
{
    return format == ZK_NF4 ? zk_nf4_scale(zk_nf4_blocks(n)) + 8 : ZK_INT8_CHUNK + 4;
}

/* Return the bytes of a tensor of n elements. */
ZK_BOTH int64_t zk_quantized_bytes(int format, int64_t n)
{
    int64_t each = zk_chunk(format), rest = n % each;
    return n / each * zk_chunk_bytes(format, each) + (rest ? zk_chunk_bytes(format, rest) : 0);
}

/* Return level q of NF4 (QLoRA, appendix E), 0 <= q < 16. */
ZK_BOTH float zk_nf4_level(uint32_t q)
{
    float a = q & 1 ? -0.6961928009986877f : -1.0f;
    float b = q & 1 ? -0.39491748809814453f : -0.5250730514526367f;
    float c = q & 1 ? -0.18477343022823334f : -0.28444138169288635f;
    float d = q & 1 ? 0.0f : -0.09105003625154495f;
    float e = q & 1 ? 0.16093020141124725f : 0.07958029955625534f;
    float f = q & 1 ? 0.33791524171829224f : 0.24611230194568634f;
    float g = q & 1 ? 0.5626170039176941f : 0.44070982933044434f;
    float h = q & 1 ? 1.0f : 0.7229568362236023f;
    float ab = q & 2 ? b : a, cd = q & 2 ? d : c, ef = q & 2 ? f : e, gh = q & 2 ? h : g;
    float low = q & 4 ? cd : ab, high = q & 4 ? gh : ef;
    return q & 8 ? high : low;
}

/* Return end j of 2^k equal parts of [0.1, 1], rounded as torch.linspace rounds it. */
ZK_BOTH float zk_dynamic_end(int k, int j)
{
    int n = 1 << k;
    double step = (double)(1.0f - 0.1f) / n;
    return (float)(2 * j < n || j == 0 ? (double)0.1f + j * step : 1.0 - (n - j) * step);
}

/* Return value a of the dynamic 8-bit type of bitsandbytes (8-bit Optimizers via Block-wise
 * Quantization, 2022), 0 <= a < 256: 127 is 0, 127 - i the negative of 127 + i. */
ZK_BOTH float zk_dynamic(int a)
{
    int i = a < 127 ? 127 - a : a - 127, k = 0;
    while (i >> (k + 1)) k++;
    if (i == 0 || i == 128) return i ? 1.0f : 0.0f;
    double tens = 1;
    for (int e = k; e < 6; e++) tens *= 10;
    float unit = (float)(1 / tens);
    int j = i - (1 << k);
    float middle = (zk_dynamic_end(k, j) + zk_dynamic_end(k, j + 1)) / 2 * unit;
    return a < 127 ? -middle : middle;
}

/* ---- from stored numbers to weights. w: a chunk */
ZK_BOTH uint32_t zk_byte(const uint32_t *w, int64_t i) { return w[i / 4] >> i % 4 * 8 & 255; }

ZK_BOTH float zk_float(const uint32_t *w, int64_t i)
{
    uint32_t u = w[i / 4];
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Return the factor of a block of NF4 in a chunk with so many blocks. */
ZK_BOTH float zk_nf4_factor(const uint32_t *w, int64_t blocks, int64_t block)
{
    int64_t floats = zk_nf4_scale(blocks);
    float product =
        zk_dynamic((int)zk_byte(w, ZK_NF4_BLOCK / 2 * blocks + block)) * zk_float(w, floats);
    return product + zk_float(w, floats + 4);
}

#endif
