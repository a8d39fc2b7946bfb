/* tiles.h -- blocks of bf16 products by AMX, in the object that is compiled with ZK_AMX.
 *
 * An instruction multiplies 16 x 32 by 32 x 16 elements: from 0 on it sums the products of even k
 * and those of odd k, each a chain of fused multiply-adds in ascending k, then adds the two, and
 * their sum to the block's. Denormals are 0 (tdpbf16ps in Intel's manual; tests/kernels/pairs.c).
 * Other objects do the same by FMAs (linear.c).
 *
 * Invariants
 *  1. Groups of 32 elements begin at the chain's first, so no depth of a panel changes a bit.
 *  2. A thread has tiles from tiles_begin to tiles_end alone: what it would have to keep of them at
 *     a switch to another thread is 8 KB.
 */
#ifndef ZK_TILES_H
#define ZK_TILES_H
#include "cpu.h"

enum { GROUP = 32 };
typedef void beside(void *with, int64_t rows);

#ifdef ZK_AMX
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { TILES = 1, TILE = 16, BLOCK = 2 * TILE };
enum { GRANT = 0x1023, TILE_DATA = 18 };          /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
enum { HAS_TILES = 1 << 24, HAS_BF16 = 1 << 22 }; /* of cpuid's leaf 7; compilers differ in names */

/* Whether the processor has them, and the system lets this process use them, as it must be asked
 * to before any thread does */
int ZK(zk_tiles)(void)
{
    unsigned a, b, c, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & HAS_TILES && d & HAS_BF16 &&
           !syscall(SYS_arch_prctl, GRANT, TILE_DATA);
}

static void tiles_begin(void)
{
    static const struct {
        uint8_t palette, start, zero[14];
        uint16_t bytes[16]; /* of a row */
        uint8_t rows[16];
    } eight = {.palette = 1, .bytes = {[0 ... 7] = 4 * TILE}, .rows = {[0 ... 7] = TILE}};
    _tile_loadconfig(&eight);
}

static void tiles_end(void) { _tile_release(); }

/* sum[BLOCK][BLOCK], rows `stride` apart, carries on (first: begins) its chains by
 * a[depth / TILE][2][TILE][TILE] and b[depth][BLOCK]; depth in words, a multiple of TILE. A tile
 * of a is a run of 1 KB: rows that lie an even number of cache lines apart load slower. Between
 * instructions f(with, rows) works on BLOCK rows of something else, which may lie in sum: all of
 * them before the block is stored. */
static void multiply_tiles(float *sum, int64_t stride, const float *a, const float *b,
                           int64_t depth, int first, beside *f, void *with)
{
    int64_t share = zk_pieces(BLOCK * TILE, depth);
    float *below = sum + TILE * stride;
    int64_t width = stride * 4, line = BLOCK * 4, row = TILE * 4;
    if (first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sum, width);
        _tile_loadd(1, sum + TILE, width);
        _tile_loadd(2, below, width);
        _tile_loadd(3, below + TILE, width);
    }
    for (int64_t k = 0; k < depth; k += TILE, a += 2 * TILE * TILE, b += TILE * BLOCK) {
        _tile_loadd(4, a, row);
        _tile_loadd(5, a + TILE * TILE, row);
        _tile_loadd(6, b, line);
        _tile_loadd(7, b + TILE, line);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        f(with, share);
    }
    _tile_stored(0, sum, width);
    _tile_stored(1, sum + TILE, width);
    _tile_stored(2, below, width);
    _tile_stored(3, below + TILE, width);
}

#else
enum { TILES = 0, BLOCK = 0 };
static void tiles_begin(void) {}
static void tiles_end(void) {}
static void multiply_tiles(float *sum, int64_t stride, const float *a, const float *b,
                           int64_t depth, int first, beside *f, void *with)
{
    (void)sum, (void)stride, (void)a, (void)b, (void)depth, (void)first, (void)f, (void)with;
}
#endif

#endif
