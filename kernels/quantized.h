/* quantized.h -- weights stored in few bits: int8 and NF4, in chunks that are computed alone.
 *
 *   ZK_INT8  a chunk has 256 elements: int8 q[256]; float scale.  w = q * scale
 *   ZK_NF4   a chunk has up to 256 blocks of 64 elements: uint8 q[32 * blocks], two elements each,
 *            the first in the upper half; uint8 a[blocks], padded to 4 bytes; float scale, mean.
 *            w = level[q] * (dynamic[a] * scale + mean)
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
ZK_BOTH int64_t zk_chunk(int kind) { return kind == ZK_NF4 ? ZK_NF4_CHUNK : ZK_INT8_CHUNK; }

/* Return the blocks of a chunk of n elements. */
ZK_BOTH int64_t zk_nf4_blocks(int64_t n) { return (n + ZK_NF4_BLOCK - 1) / ZK_NF4_BLOCK; }

/* Return the place of a chunk's two floats. */
ZK_BOTH int64_t zk_nf4_scale(int64_t blocks)
{
    return ZK_NF4_BLOCK / 2 * blocks + (blocks + 3) / 4 * 4;
}

/* Return the bytes of a chunk of n elements. */
ZK_BOTH int64_t zk_chunk_bytes(int kind, int64_t n)
{
    return kind == ZK_NF4 ? zk_nf4_scale(zk_nf4_blocks(n)) + 8 : ZK_INT8_CHUNK + 4;
}

/* Return the bytes of a tensor of n elements. */
ZK_BOTH int64_t zk_quantized_bytes(int kind, int64_t n)
{
    int64_t each = zk_chunk(kind), rest = n % each;
    return n / each * zk_chunk_bytes(kind, each) + (rest ? zk_chunk_bytes(kind, rest) : 0);
}

/* The 16 levels of NF4 (QLoRA, appendix E). */
#define ZK_NF4_LEVELS                                                                              \
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,                      \
        -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,                 \
        0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,    \
        0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f

/* The dynamic 8-bit type of bitsandbytes from 0 on (Dettmers 2022): value 127 + i is number i,
 * value 127 - i its negative. */
#define ZK_DYNAMIC                                                                                 \
    0.0f, 5.5000004e-7f, 3.2500002e-6f, 7.75e-6f, 2.1249998e-5f, 4.375e-5f, 6.625e-5f, 8.875e-5f,  \
        1.5625001e-4f, 2.6875004e-4f, 3.8125002e-4f, 4.9375003e-4f, 6.062501e-4f, 7.1875006e-4f,   \
        8.3125e-4f, 9.437501e-4f, 0.0012812499f, 0.00184375f, 0.00240625f, 0.00296875f,            \
        0.0035312497f, 0.00409375f, 0.0046562497f, 0.0052187503f, 0.00578125f, 0.00634375f,        \
        0.00690625f, 0.00746875f, 0.00803125f, 0.00859375f, 0.009156249f, 0.00971875f,             \
        0.01140625f, 0.01421875f, 0.01703125f, 0.019843752f, 0.02265625f, 0.02546875f,             \
        0.028281251f, 0.03109375f, 0.03390625f, 0.036718752f, 0.03953125f, 0.042343747f,           \
        0.04515625f, 0.04796875f, 0.05078125f, 0.05359375f, 0.05640625f, 0.059218753f,             \
        0.06203125f, 0.06484375f, 0.067656256f, 0.070468746f, 0.07328125f, 0.07609375f,            \
        0.07890625f, 0.08171876f, 0.08453125f, 0.08734375f, 0.09015625f, 0.092968754f,             \
        0.09578126f, 0.09859375f, 0.107031256f, 0.12109375f, 0.13515624f, 0.14921875f,             \
        0.16328125f, 0.17734376f, 0.19140625f, 0.20546874f, 0.21953125f, 0.23359375f, 0.24765624f, \
        0.26171875f, 0.27578127f, 0.28984374f, 0.30390626f, 0.31796873f, 0.33203125f, 0.34609374f, \
        0.36015624f, 0.37421876f, 0.38828123f, 0.40234375f, 0.41640624f, 0.43046874f, 0.44453126f, \
        0.45859373f, 0.47265625f, 0.4867187f, 0.50078124f, 0.5148437f, 0.5289062f, 0.54296875f,    \
        0.5570313f, 0.5710938f, 0.58515626f, 0.5992187f, 0.61328125f, 0.6273438f, 0.6414063f,      \
        0.65546876f, 0.6695312f, 0.68359375f, 0.6976563f, 0.7117188f, 0.72578126f, 0.7398437f,     \
        0.75390625f, 0.7679688f, 0.78203124f, 0.79609376f, 0.8101562f, 0.82421875f, 0.8382813f,    \
        0.85234374f, 0.86640626f, 0.8804687f, 0.89453125f, 0.9085938f, 0.92265624f, 0.93671876f,   \
        0.9507812f, 0.96484375f, 0.9789063f, 0.99296874f, 1.0f

/* ---- from numbers to weights. level, dynamic: the tables */
ZK_BOTH float zk_float_at(const uint8_t *at)
{
    float x;
    memcpy(&x, at, sizeof x);
    return x;
}

/* Return the factor of a block of a chunk with so many blocks. */
ZK_BOTH float zk_nf4_factor(const uint8_t *chunk, int64_t blocks, int64_t block,
                            const float *dynamic)
{
    const uint8_t *floats = chunk + zk_nf4_scale(blocks);
    int a = chunk[ZK_NF4_BLOCK / 2 * blocks + block];
    float x = a < 127 ? -dynamic[127 - a] : dynamic[a - 127];
    float product = x * zk_float_at(floats);
    return product + zk_float_at(floats + 4);
}

/* Return element i of a block. */
ZK_BOTH float zk_nf4_weight(const uint8_t *block, int i, float factor, const float *level)
{
    return level[block[i / 2] >> (i % 2 ? 0 : 4) & 15] * factor;
}

#endif
