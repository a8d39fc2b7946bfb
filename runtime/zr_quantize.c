/* zr_quantize.c -- quantizes weights as they are loaded.
 *
 * Invariants
 *  1. The bits of a chunk depend on its weights alone.
 *  2. NF4 follows bitsandbytes 0.50: a weight times the reciprocal of its block's largest magnitude
 *     goes to the nearest level, a tie to the lower one; the largest magnitudes less their mean are
 *     quantized in the same way to the dynamic 8-bit type. The mean is summed in doubles, in order.
 */
#include "zr_quantize.h"
#include "../kernels/quantized.h"
#include <math.h>

enum { MOST = ZK_NF4_CHUNK / ZK_NF4_BLOCK };

int64_t zr_stored_elements(const zr_program *p, const zr_tensor *t)
{
    int64_t n = t->ndim == 1 ? t->shape[0] : t->shape[0] * t->shape[1];
    return zr_format(p, t) ? zk_quantized_bytes(zr_format(p, t), n) / (p->type == ZR_F32 ? 4 : 2)
                           : n;
}

static float largest(const float *x, int64_t n)
{
    float most = 0;
    for (int64_t i = 0; i < n; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    return most;
}

/* Return 1 / x, or 0 where it is not finite: such weights become 0. */
static float reciprocal(float x)
{
    float y = x > 0 ? 1 / x : 0;
    return y < INFINITY ? y : 0;
}

static void put_float(uint8_t *to, float x) { memcpy(to, &x, sizeof x); }

static void quantize_int8(uint8_t *to, const float *from, int64_t n)
{
    float scale = largest(from, n) / 127, factor = reciprocal(scale);
    memset(to, 0, ZK_INT8_CHUNK);
    for (int64_t i = 0; i < n; i++) {
        float x = from[i] * factor + 0x1.8p23f; /* rounds to nearest even */
        to[i] = (uint8_t)(int8_t)(x - 0x1.8p23f);
    }
    put_float(to + ZK_INT8_CHUNK, scale);
}

/* Return the number of the nearest level. */
static int nearest_level(float x)
{
    int at = 0;
    for (uint32_t i = 0; i < 15; i++) at += x > (zk_nf4_level(i) + zk_nf4_level(i + 1)) / 2;
    return at;
}

/* Return the number of the nearest value of the dynamic type. */
static int nearest_dynamic(float x)
{
    int low = 0, high = 255;
    while (low < high) { /* the first value whose upper neighbour is not nearer */
        int mid = (low + high) / 2;
        if (x > (zk_dynamic(mid) + zk_dynamic(mid + 1)) / 2) low = mid + 1;
        else high = mid;
    }
    return low;
}

static void quantize_nf4(uint8_t *to, const float *from, int64_t n)
{
    int64_t blocks = zk_nf4_blocks(n);
    uint8_t *codes = to + ZK_NF4_BLOCK / 2 * blocks, *floats = to + zk_nf4_scale(blocks);
    float most[MOST];
    double sum = 0;
    memset(to, 0, (size_t)zk_nf4_scale(blocks));
    for (int64_t b = 0; b < blocks; b++) {
        int64_t first = ZK_NF4_BLOCK * b, some = zk_least(n - first, ZK_NF4_BLOCK);
        most[b] = largest(from + first, some);
        sum += most[b];
        float factor = reciprocal(most[b]);
        for (int64_t i = 0; i < ZK_NF4_BLOCK; i++) {
            int level = nearest_level(i < some ? from[first + i] * factor : 0);
            to[(first + i) / 2] |= (uint8_t)(level << (i % 2 ? 0 : 4));
        }
    }
    float mean = (float)(sum / (double)blocks);
    for (int64_t b = 0; b < blocks; b++) most[b] -= mean;
    float scale = largest(most, blocks), factor = reciprocal(scale);
    for (int64_t b = 0; b < blocks; b++) codes[b] = (uint8_t)nearest_dynamic(most[b] * factor);
    put_float(floats, scale);
    put_float(floats + 4, mean);
}

int64_t zr_quantize(uint8_t *to, const float *from, int64_t n, int format)
{
    int64_t each = zk_chunk(format), at = 0;
    for (int64_t i = 0; i < n; i += each) {
        int64_t some = zk_least(n - i, each);
        if (format == ZK_NF4) quantize_nf4(to + at, from + i, some);
        else quantize_int8(to + at, from + i, some);
        at += zk_chunk_bytes(format, some);
    }
    return at;
}
