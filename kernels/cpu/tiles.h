/* tiles.h -- blocks of bf16 products by AMX, in the object that is compiled with ZK_AMX.
 *
 * An instruction multiplies 16 x 32 by 32 x 16 elements. Starting from 0 it sums the products of
 * even k and those of odd k, each as a chain of FMAs in ascending k, adds the two sums, and adds
 * the result to the block's sum. Denormals are 0 (tdpbf16ps in Intel's manual;
 * tests/kernels/pairs.c). Other objects do the same with FMAs (linear.c).
 *
 * Invariants
 *  1. Groups of 32 elements are counted from the start of the chain, so the depth of a panel
 *     changes no bit.
 *  2. A thread has tiles configured only from tiles_begin to tiles_end; otherwise a switch to
 *     another thread would have to save 8 KB.
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
enum { GRANT = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
/* Bits of cpuid leaf 7; compilers name them differently. */
enum { HAS_TILES = 1 << 24, HAS_BF16 = 1 << 22 };

/* Return whether the processor has AMX and the system lets this process use it. The system must be
 * asked before any thread uses tiles. */
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
        uint16_t bytes[16]; /* bytes of a row */
        uint8_t rows[16];
    } eight = {.palette = 1, .bytes = {[0 ... 7] = 4 * TILE}, .rows = {[0 ... 7] = TILE}};
    _tile_loadconfig(&eight);
}

static void tiles_end(void) { _tile_release(); }

/* Continue the chains sum[BLOCK][BLOCK], rows `stride` apart, or start them if `first`, by a[depth
 * / TILE][2][TILE][TILE] and b[depth][BLOCK]. depth is in words, a multiple of TILE. A tile of a is
 * contiguous, 1 KB: rows an even number of cache lines apart load slower. Between instructions
 * f(with, rows) works on BLOCK rows of other data, which may overlap sum: they are complete before
 * the block is stored. */
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
