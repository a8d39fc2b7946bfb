/* launcher.c -- who has started this process: its rank among all, and where rank 0 is to be found.
 *
 * The first of the sources below that has a rank and a number of ranks counts; without any the
 * program starts all ranks on this host. Rank 0 listens at ZR_ADDR=HOST:PORT; where that is not
 * given, at what the launcher says.
 *
 * Kubernetes counts pods, not GPUs: where a rank comes without one on its host, and the program
 * has a multiple of the launcher's ranks, each of these is a pod and starts as many ranks, a GPU
 * each.
 *
 * Invariants
 *  1. Only the environment is looked at.
 */
#define _GNU_SOURCE
#include "cuda.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PORT = 29411, LOW = 20000, SPAN = 20000 };

/* What names the rank, the ranks, the rank among those of this host, and how many these are; pods:
 * without the rank on its host a rank may be a pod. */
static const struct source {
    const char *rank, *ranks, *local, *beside;
    int pods;
} sources[] = {
    {"ZR_RANK", "ZR_WORLD_SIZE", "ZR_LOCAL_RANK", "ZR_LOCAL_WORLD_SIZE", 1},
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", 1},      /* torchrun, PyTorchJob */
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", 0},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", 0},        /* MPICH */
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", 0},
    /* Kubernetes, indexed */
    {"JOB_COMPLETION_INDEX", "ZR_WORLD_SIZE", "ZR_LOCAL_RANK", "ZR_LOCAL_WORLD_SIZE", 1},
};

static int given(const char *name)
{
    const char *text = getenv(name);
    return text && *text;
}

static int number(zr *z, const char *name) { return (int)zr_setting(z, name, 1 << 24); }

/* ---- where rank 0 listens */

/* The first host of Slurm's list: n1,n2 or n[03-17,20]. */
static void first_host(const char *list, char *host, size_t n)
{
    size_t stem = strcspn(list, "[,");
    size_t digits = list[stem] == '[' ? strcspn(list + stem + 1, "-,]") : 0;
    snprintf(host, n, "%.*s%.*s", (int)stem, list, (int)digits,
             digits ? list + stem + 1 : "");
}

static void find_address(zr *z, const struct source *s)
{
    char *host = z->t->host0;
    const char *text = getenv("ZR_ADDR"), *colon = text ? strrchr(text, ':') : NULL;
    z->t->port0 = PORT;
    snprintf(host, ZR_HOST_NAME, "127.0.0.1");
    if (text && *text) {
        char *end = "";
        long port = colon ? strtol(colon + 1, &end, 10) : 0;
        if (!colon || *end || port < 1 || port > 65535 || colon - text >= ZR_HOST_NAME)
            zr_fail(z, ZR_USER, "ZR_ADDR %s: HOST:PORT is needed", text);
        snprintf(host, ZR_HOST_NAME, "%.*s", (int)(colon - text), text);
        z->t->port0 = (int)port;
    } else if (given("MASTER_ADDR") && given("MASTER_PORT")) {
        /* torchrun's own store has MASTER_PORT */
        snprintf(host, ZR_HOST_NAME, "%s", getenv("MASTER_ADDR"));
        z->t->port0 = (number(z, "MASTER_PORT") + given("TORCHELASTIC_RUN_ID")) % 65536;
    } else if (!strcmp(s->rank, "SLURM_PROCID") && given("SLURM_STEP_NODELIST")) {
        first_host(getenv("SLURM_STEP_NODELIST"), host, ZR_HOST_NAME);
        z->t->port0 = LOW + number(z, "SLURM_JOB_ID") % SPAN;
    } else {
        z->t->host_is_own = 1;
    }
}

/* ---- which rank */

void zr_find_launcher(zr *z)
{
    for (const struct source *s = sources; s < sources + sizeof sources / sizeof *sources; s++) {
        if (!given(s->rank) || !given(s->ranks)) continue;
        int ranks = number(z, s->ranks);
        if (ranks == 1 && z->ranks > 1) return;      /* one task: as if there were no launcher */
        int pods = s->pods && !given(s->local) && ranks > 0 && z->ranks % ranks == 0;
        z->here = pods ? z->ranks / ranks : 1;
        if (ranks != z->ranks && !pods)
            zr_fail(z, ZR_DISAGREE,
                    "the launcher has %d ranks (%s), this program is made for %d; generate it with "
                    "cluster.ranks=%d, or unset %s to start all ranks on this host",
                    ranks, s->ranks, z->ranks, ranks, s->ranks);
        z->lowest = number(z, s->rank) * z->here;
        if (z->lowest >= z->ranks)
            zr_fail(z, ZR_DISAGREE, "%s=%s: there are %d ranks", s->rank, getenv(s->rank), ranks);
        if (pods) z->beside = z->here;
        if (given(s->beside) && number(z, s->beside)) z->beside = number(z, s->beside);
        z->t->local = given(s->local) ? number(z, s->local) : 0;
        find_address(z, s);
        if (z->ranks > 1) z->far = &zr_plane;
        return;
    }
}
