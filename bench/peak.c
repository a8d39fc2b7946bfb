/* peak.c -- the machine's GEMM rate by our own kernel: what a share of the peak is a share of.
 *
 * peak [RANKS [N [SECONDS [bf16]]]] prints GFLOP/s, summed over RANKS processes of one thread that
 * each multiply N x N matrices of f32, or of bf16 in the order that is faster here, for SECONDS at
 * the same time; the best product of each counts.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "zk.h"

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* [n,n]; small whole numbers are the same in both types, but for the low half */
static void *matrix(int64_t n, int type)
{
    size_t bytes = type == ZK_F32 ? 4 : 2;
    char *m = aligned_alloc(64, (size_t)(n * n) * bytes);
    if (!m) {
        perror("peak");
        exit(1);
    }
    for (int64_t i = 0; i < n * n; i++) {
        float x = (float)(i % 7) - 3.0f;
        memcpy(m + (size_t)i * bytes, (char *)&x + (4 - bytes), bytes);
    }
    return m;
}

/* The best rate of one process, GFLOP/s. */
static double measure(int64_t n, double seconds, int type)
{
    const char *why = NULL;
    zk *k = zk_open(NULL, NULL, NULL, type, 0, 1, &why);
    if (!k) {
        fprintf(stderr, "peak: %s\n", why);
        exit(1);
    }
    zk_products(k, zk_products(k, -1));
    void *y = matrix(n, type), *x = matrix(n, type), *w = matrix(n, type);
    double best = 1e30, end = now() + seconds;
    do {
        double t = now();
        zk_linear_fwd(k, NULL, y, x, w, NULL, n, n, n, ZK_IN_OUT);
        t = now() - t;
        best = t < best ? t : best;
    } while (now() < end);
    zk_close(k);
    return 2e-9 * (double)n * (double)n * (double)n / best;
}

int main(int argc, char **argv)
{
    int ranks = argc > 1 ? atoi(argv[1]) : 1;
    int64_t n = argc > 2 ? atoll(argv[2]) : 2048;
    double seconds = argc > 3 ? atof(argv[3]) : 1.0, sum = 0.0;
    int type = argc > 4 && !strcmp(argv[4], "bf16") ? ZK_BF16 : ZK_F32;
    if (ranks < 1 || ranks > 1024 || n < 16 || n > 16384) {
        fprintf(stderr, "usage: peak [RANKS [N [SECONDS [bf16]]]]\n");
        return 2;
    }
    double *rate = mmap(NULL, 1024 * sizeof(double), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0); /* [ranks] */
    if (rate == MAP_FAILED) {
        perror("peak");
        return 1;
    }
    for (int r = 0; r < ranks; r++) {
        pid_t pid = fork();
        if (pid < 0) {
            perror("peak");
            return 1;
        }
        if (pid == 0) {
            rate[r] = measure(n, seconds, type);
            _exit(0);
        }
    }
    for (int r = 0, status; r < ranks; r++)
        if (wait(&status) < 0 || status != 0) return 1;
    for (int r = 0; r < ranks; r++) sum += rate[r];
    printf("%.1f\n", sum);
    return 0;
}
