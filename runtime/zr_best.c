/* zr_best.c -- the best validation of a run, and its checkpoint. */
#include "zr_best.h"
#include "zr_checkpoint.h"
#include "zr_log.h"
#include "zr_net.h"
#include "zr_progress.h"
#include "zr_queue.h"
#include "zr_rank.h"
#include "zr_seats.h"
#include <inttypes.h>
#include <math.h>
#include <unistd.h>

void zr_best_note(zr *z, double loss)
{
    zr_best *b = &z->checkpoints->best;
    b->at = z->step;
    if (isfinite(loss) && (!b->step || loss < b->loss))
        *b = (zr_best){.at = z->step, .step = z->step, .loss = loss};
    else b->worse++;
}

int64_t zr_best_load(zr *z)
{
    const zr_best *b = &z->checkpoints->best;
    if (!z->o->keep_best) return z->step;
    int there = z->rank == 0 && b->step && zr_checkpoint_is_there(z, b->step);
    zr_tell(z, &there, sizeof there);
    if (!there) {
        zr_print(z, STDERR_FILENO,
                 "--keep-best: there is no best checkpoint, so the weights are the last ones\n");
        return z->step;
    }
    zr_print(z, STDERR_FILENO, "the best validation was at step %" PRId64 ": loss %.6f\n", b->step,
             b->loss);
    if (b->step == z->step) return b->step;
    zr_checkpoint_read(z, b->step);
    z->p->publish(z);
    zr_drain(z);
    zr_barrier(z);
    zr_progress(z, NULL, NULL, 0);
    return b->step;
}
