/* amx.h -- emulates AMX for the object of kernels/cpu/tiles.h on processors without it: the
 * intrinsics of tiles, one number after the other, as in tests/kernels/pairs.c. Linux grants the
 * permission, and cpuid reports AMX unless ZR_TEST_CPU lists features without "amx" (cpuid.h).
 *
 * The use of a tile that is not configured, or with another shape than its own, ends the program.
 */
#ifndef AMX_H
#define AMX_H
#include "cpuid.h"
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { AMX_TILES = 8, AMX_ROWS = 16, AMX_WORDS = 16 };

typedef struct amx {
    uint8_t palette, start, zero[14];
    uint16_t bytes[16];
    uint8_t rows[16];
    uint32_t tile[AMX_TILES][AMX_ROWS][AMX_WORDS];
} amx;

static _Thread_local amx amx_now;

static amx *amx_whole(int t)
{
    amx *now = &amx_now;
    if (now->palette != 1 || now->bytes[t] != 4 * AMX_WORDS || now->rows[t] != AMX_ROWS) abort();
    return now;
}

static void amx_loadconfig(const void *shape)
{
    memset(&amx_now, 0, sizeof amx_now);
    memcpy(&amx_now, shape, 64);
}

static void amx_release(void) { memset(&amx_now, 0, sizeof amx_now); }

static void amx_zero(int t) { memset(amx_whole(t)->tile[t], 0, sizeof amx_now.tile[t]); }

static void amx_load(int t, const void *from, int64_t stride)
{
    amx *now = amx_whole(t);
    for (int i = 0; i < AMX_ROWS; i++)
        memcpy(now->tile[t][i], (const char *)from + i * stride, sizeof now->tile[t][i]);
}

static void amx_store(int t, void *to, int64_t stride)
{
    amx *now = amx_whole(t);
    for (int i = 0; i < AMX_ROWS; i++)
        memcpy((char *)to + i * stride, now->tile[t][i], sizeof now->tile[t][i]);
}

static float amx_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Add the products of tiles a and b to the 16 rows of sums in tile c. MXCSR flushes denormals
 * meanwhile, because the instruction does so whatever MXCSR says. A product of two bf16 that are no
 * denormals is exact, or is itself below the least normal number; fmaf rounds once. */
static void amx_multiply(int c, int a, int b)
{
    amx *now = amx_whole(c);
    unsigned before = _mm_getcsr();
    amx_whole(a), amx_whole(b);
    _mm_setcsr(0x1f80 | 0x8040);
    for (int m = 0; m < AMX_ROWS; m++) {
        float sum[2][AMX_WORDS] = {{0}};
        for (int k = 0; k < AMX_WORDS; k++) {
            uint32_t x = now->tile[a][m][k];
            for (int odd = 0; odd < 2; odd++)
                for (int n = 0; n < AMX_WORDS; n++) {
                    uint32_t y = now->tile[b][k][n];
                    sum[odd][n] =
                        __builtin_fmaf(amx_float(odd ? x & 0xffff0000 : x << 16),
                                       amx_float(odd ? y & 0xffff0000 : y << 16), sum[odd][n]);
                }
        }
        for (int n = 0; n < AMX_WORDS; n++) {
            float total = amx_float(now->tile[c][m][n]) + (sum[0][n] + sum[1][n]);
            memcpy(&now->tile[c][m][n], &total, sizeof total);
        }
    }
    _mm_setcsr(before);
}

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig amx_loadconfig
#define _tile_release amx_release
#define _tile_zero amx_zero
#define _tile_loadd amx_load
#define _tile_stored amx_store
#define _tile_dpbf16ps amx_multiply
#define __get_cpuid_count(leaf, sub, a, b, c, d)                                                   \
    (*(a) = *(b) = *(c) = 0, *(d) = cpuid_has("amx", 1) ? 1u << 24 | 1u << 22 : 0, 1)
#define syscall(...) 0

#endif
