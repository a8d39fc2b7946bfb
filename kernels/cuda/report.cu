/* report.cu -- results that a run reads back from the device: reports, means, a sampled token.
 *
 * Each function waits for all earlier work of the stream; none is part of a step. The data passes
 * through the pinned scratch, and the host computes the result with the functions of a CPU.
 */
#include "cuda.h"

#include "../draw.h"
#include "../step.h"

void zk_report(zk *k, const zk_ctl *ctl, double *out)
{
    zk_to_host(k, k->host, ctl, sizeof *ctl);
    step_report((const zk_ctl *)k->host, out);
}

void zk_mean(zk *k, const int64_t *sums, double *loss, double *valid)
{
    zk_to_host(k, k->host, sums, ZK_SUMS * sizeof *sums);
    step_mean((const int64_t *)k->host, loss, valid);
}

int32_t zk_sample(zk *k, const real *logits, int64_t V, float temperature, int64_t top_k,
                  double top_p, double u)
{
    zk_to_host(k, k->host, logits, (size_t)V * (k->dtype == ZK_F32 ? 4 : 2));
    return draw(k->host, k->dtype, V, temperature, top_k, top_p, u);
}
