/* peak.c -- the machine's f32 GEMM rate by our own kernel: what a share of the peak is a share of.
 *
 * peak [RANKS [N [SECONDS]]] prints GFLOP/s, summed over RANKS processes of one thread that each
 * multiply N x N matrices for SECONDS at the same time; the best product of each counts.
 */
#include <stdio.h>
#include <stdlib.h>
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

static float *matrix(int64_t n)
{
    float *m = aligned_alloc(64, (size_t)(n * n) * sizeof(float)); /* [n,n] */
    if (!m) {
        perror("peak");
        exit(1);
    }
    for (int64_t i = 0; i < n * n; i++) m[i] = (float)(i % 7) - 3.0f;
    return m;
}

/* The best rate of one process, GFLOP/s. */
static double measure(int64_t n, double seconds)
{
    const char *why = NULL;
    zk *k = zk_open(NULL, NULL, NULL, ZK_F32, 0, 1, &why);
    if (!k) {
        fprintf(stderr, "peak: %s\n", why);
        exit(1);
    }
    float *y = matrix(n), *x = matrix(n), *w = matrix(n); /* [n,n] each */
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
    if (ranks < 1 || ranks > 1024 || n < 16 || n > 16384) {
        fprintf(stderr, "usage: peak [RANKS [N [SECONDS]]]\n");
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
            rate[r] = measure(n, seconds);
            _exit(0);
        }
    }
    for (int r = 0, status; r < ranks; r++)
        if (wait(&status) < 0 || status != 0) return 1;
    for (int r = 0; r < ranks; r++) sum += rate[r];
    printf("%.1f\n", sum);
    return 0;
}
