/* context.c -- the CPU target: the plain name of every kernel, and its kernel context.
 *
 * Invariants
 *  1. A plain name and its zk_host_ twin run code of the same object.
 */
#include "cpu.h"

#include <pthread.h>
#include <string.h>

#define PLAIN_POINTER(name) ZK_POINTER(name, name)
ZK_KERNELS(PLAIN_POINTER)

#define OF_PAIRS(name) void name##_avx512bf16(void);
#define OF_TILES(name) void name##_amx(void);
ZK_PRODUCTS(OF_PAIRS)
ZK_PRODUCTS(OF_TILES)
ZK_TILED(OF_TILES)

static void choose(void)
{
    const char *object = zk_host_object();
    int narrow = !strcmp(object, "avx2"), pairs = !strcmp(object, "avx512bf16");
    int tiles = !strcmp(object, "amx");
#define SET(name) jump_##name = narrow ? name##_avx2 : name##_avx512;
#define SET_PAIRS(name) jump_##name = pairs ? name##_avx512bf16 : jump_##name;
#define SET_TILES(name) jump_##name = tiles ? name##_amx : jump_##name;
    ZK_KERNELS(SET)
    ZK_PRODUCTS(SET_PAIRS)
    ZK_PRODUCTS(SET_TILES)
    ZK_TILED(SET_TILES)
}

const char *zk_target(void) { return "cpu"; }

const char *zk_object(void) { return zk_host_object(); }

int zk_gemms(int what, const char *path, char *why, size_t n)
{
    (void)what, (void)path, (void)why, (void)n;
    return 0;
}

uint64_t zk_algorithms(zk *k)
{
    (void)k;
    return 0;
}

void zk_probe(zk *k, real *y, const real *x, const real *w, int64_t n)
{
    (void)k, (void)y, (void)x, (void)w, (void)n;
}

int zk_products(zk *k, int order)
{
    if (order >= 0) {
        k->products = order;
        if (!zk_host_panels(k)) return -1;
    }
    return zk_host_products();
}

int64_t zk_overhead(int threads) { return zk_host_overhead(threads); }

zk *zk_open(void *stream, void *device, void *host, int dtype, int column, int threads,
            const char **why)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)stream, (void)device, (void)host;
    zk *k = zk_host_open(dtype, column, threads, why);
    if (k) pthread_once(&once, choose);
    return k;
}

void zk_close(zk *k) { zk_host_close(k); }
