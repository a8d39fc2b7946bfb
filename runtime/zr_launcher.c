/* zr_launcher.c -- the launcher of this process: this rank's number, and the address of rank 0.
 *
 * The first of the sources below that gives a rank and a number of ranks is used; without any, the
 * program starts all ranks on this host. Rank 0 listens at ZR_ADDR=HOST:PORT, or, if that is not
 * set, at the address that the launcher gives.
 *
 * Kubernetes counts pods, not GPUs. If a launcher gives no local rank, and the program's number of
 * ranks is a multiple of the launcher's, each of the launcher's ranks is a pod. Every pod then
 * starts the same number of ranks, with a GPU each.
 *
 * Invariants
 *  1. Only the environment is read.
 */
#define _GNU_SOURCE
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_net.h"
#include "zr_options.h"
#include "zr_rank.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Linux assigns ports from 32768 on to programs that ask for any. */
enum { PORT = 29411, LOW = 20000, SPAN = 12000, STEP = 977, MOST_PORT = 65535 };

/* Variables that give the rank, the number of ranks, the rank on this host and the number of
 * ranks there, and the name of the run, the same on all ranks ("": none; Slurm's port is
 * derived from job and step). */
static const struct source {
    const char *rank, *ranks, *local, *neighbours, *run;
    int pods;  /* without `local` a rank may be a pod */
    int whole; /* without `local` the variables are another launcher's */
} sources[] = {
    {"ZR_RANK", "ZR_WORLD_SIZE", "ZR_LOCAL_RANK", "ZR_LOCAL_WORLD_SIZE", "", 1, 0},
    /* torchrun, deepspeed, PyTorchJob */
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", 1, 0},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE", 0, 0},
    /* Hydra (MPICH, Intel MPI), also within Slurm, whose own numbers are then those of the proxies;
     * PALS. Slurm's pmi2 plugin sets only the first two; its other variables are below. */
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID", 0, 1},
    {"PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", "PMI_JOBID", 0, 1},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "", 0, 0},
    /* Kubernetes, an indexed Job */
    {"JOB_COMPLETION_INDEX", "ZR_WORLD_SIZE", "ZR_LOCAL_RANK", "ZR_LOCAL_WORLD_SIZE", "", 1, 0},
};

static int is_set(const char *name)
{
    const char *text = getenv(name);
    return text && *text;
}

static int number_of(zr *z, const char *name) { return (int)zr_setting(z, name, 1 << 24); }

/* ---- where rank 0 listens */

/* Return the first host of Slurm's list: n1,n2 or n[03-17,20]-ib or r[1-2]n[1-8]. */
static void first_host(const char *list, char *host, size_t n)
{
    size_t length = 0;
    while (*list && *list != ',' && length < n - 1) {
        if (*list != '[') {
            host[length++] = *list++;
            continue;
        }
        size_t digits = strcspn(++list, "-,]");
        length += (size_t)snprintf(host + length, n - length, "%.*s", (int)digits, list);
        if (length > n - 1) length = n - 1;
        list += strcspn(list, "]");
        list += *list == ']';
    }
    host[length] = 0;
}

/* Parse HOST:PORT or [ADDRESS]:PORT. */
static void take_address(zr *z, const char *text)
{
    const char *colon = strrchr(text, ':'), *host = text;
    char *end = "";
    long port = colon ? strtol(colon + 1, &end, 10) : 0;
    ptrdiff_t n = colon ? colon - text : 0;
    if (n > 2 && *text == '[' && colon[-1] == ']') {
        host++;
        n -= 2;
    }
    if (n < 1 || n >= ZR_HOST_NAME || *host == '[' || *end || port < 1 || port > MOST_PORT)
        zr_fail(z, ZR_USER, "ZR_ADDR %s: must be HOST:PORT", text);
    snprintf(z->net->host, ZR_HOST_NAME, "%.*s", (int)n, host);
    z->net->port = (int)port;
}

/* Take MASTER_ADDR and a port. torchrun's own store uses MASTER_PORT, so
 * the adjacent port is taken. */
static void take_master(zr *z)
{
    int port = (int)zr_setting(z, "MASTER_PORT", MOST_PORT);
    if (is_set("TORCHELASTIC_RUN_ID")) port += port < MOST_PORT ? 1 : -1;
    snprintf(z->net->host, ZR_HOST_NAME, "%s", getenv("MASTER_ADDR"));
    z->net->port = port;
}

int zr_port_of(zr *z, uint64_t run)
{
    int first = LOW, last = LOW + SPAN - 1, n = 0;
    const char *text = getenv("ZR_PORTS");
    if (text && *text &&
        (sscanf(text, "%5d-%5d%n", &first, &last, &n) != 2 || text[n] || first < 1 ||
         last < first || last > MOST_PORT))
        zr_fail(z, ZR_USER, "ZR_PORTS %s: must be FIRST-LAST, ports from 1 to %d", text, MOST_PORT);
    return first + (int)(run % (uint64_t)(last - first + 1));
}

/* Take host and port from Slurm. Steps of one job may run at the same time, so each has its own
 * port. The ranks of an mpirun belong to several steps: on mpirun's own host to the job's,
 * elsewhere to those it started there. */
static void take_slurm(zr *z, const char *list)
{
    int alike = !strcmp(list, "SLURM_STEP_NODELIST");
    int64_t job = zr_setting(z, "SLURM_JOB_ID", INT32_MAX);
    int64_t step = alike ? zr_setting(z, "SLURM_STEP_ID", UINT32_MAX) : 0;
    first_host(getenv(list), z->net->host, ZR_HOST_NAME);
    z->net->port = zr_port_of(z, (uint64_t)(job + STEP * step));
}

static void name_run(zr *z, const struct source *s)
{
    const char *names[] = {*s->run ? getenv(s->run) : NULL, getenv("ZR_TOKEN")};
    z->net->run = ZR_HASH;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i]) zr_add_hash(&z->net->run, names[i], strlen(names[i]) + 1);
}

/* All ranks are on this host. Where MPI names runs, each has its own port. */
static void take_own(zr *z)
{
    z->net->own = 1;
    z->net->port = z->net->ask || is_set("ZR_PORTS") ? zr_port_of(z, z->net->run) : PORT;
}

static void find_address(zr *z, const struct source *s)
{
    int slurm = !strcmp(s->rank, "SLURM_PROCID");
    int near = is_set(s->neighbours) ? number_of(z, s->neighbours) : z->here;
    snprintf(z->net->host, ZR_HOST_NAME, "%s", is_set("ZR_BIND") ? getenv("ZR_BIND") : "127.0.0.1");
    if (is_set("ZR_ADDR")) take_address(z, getenv("ZR_ADDR"));
    else if (is_set("MASTER_ADDR") && is_set("MASTER_PORT")) take_master(z);
    else if (slurm && is_set("SLURM_STEP_NODELIST")) take_slurm(z, "SLURM_STEP_NODELIST");
    else if (near == z->ranks) take_own(z);
    else if (is_set("SLURM_JOB_NODELIST")) take_slurm(z, "SLURM_JOB_NODELIST");
    else if (z->net->ask) z->net->port = 0;
    else
        zr_fail(z, ZR_USER,
                "%d of %d ranks are known to be on this host%s%s, and the address of "
                "rank 0 is not known; set ZR_ADDR=HOST:PORT on all ranks, with rank 0's host",
                near, z->ranks, *s->neighbours ? " by " : "", s->neighbours);
}

/* ---- which rank */

static void unlike(zr *z, const char *ranks, const char *name)
{
    zr_fail(z, ZR_DISAGREE,
            "the launcher has %s ranks (%s), but this program is made for %d; generate it with "
            "cluster.ranks=%s, or unset %s to start all ranks on this host",
            ranks, name, z->ranks, ranks, name);
}

void zr_refuse_launcher(zr *z)
{
    for (const struct source *s = sources; s < sources + sizeof sources / sizeof *sources; s++) {
        const char *text = getenv(s->ranks);
        if (!text || !*text) continue;
        long size = strtol(text, NULL, 10);
        if (size == 1) continue; /* one task: the same as no launcher */
        if (size != z->ranks) unlike(z, text, s->ranks);
        zr_fail(z, ZR_DISAGREE,
                "%s=%s: this program starts its %d ranks itself; run it once, without a launcher",
                s->ranks, text, z->ranks);
    }
}

static const struct source *find_source(void)
{
    for (const struct source *s = sources; s < sources + sizeof sources / sizeof *sources; s++)
        if (is_set(s->rank) && is_set(s->ranks) && (!s->whole || is_set(s->local))) return s;
    return NULL;
}

/* Return whether each of the launcher's ranks may be a pod that starts as
 * many ranks as every other. */
static int are_pods(const struct source *s, int ranks, int all)
{
    return s->pods && !is_set(s->local) && ranks > 0 && all % ranks == 0;
}

const char *zr_launched(int all)
{
    const struct source *s = find_source();
    int ranks = s ? atoi(getenv(s->ranks)) : 1;
    return ranks == 1 || (ranks != all && are_pods(s, ranks, all)) ? NULL : getenv(s->rank);
}

void zr_find_launcher(zr *z)
{
    const struct source *s = find_source();
    int ranks = s ? number_of(z, s->ranks) : 1;
    if (!s || (ranks == 1 && z->ranks > 1)) return; /* one task: the same as no launcher */
    int pods = are_pods(s, ranks, z->ranks);
    if (ranks != z->ranks && !pods) unlike(z, getenv(s->ranks), s->ranks);
    z->here = pods ? z->ranks / ranks : 1;
    z->lowest = number_of(z, s->rank) * z->here;
    z->net->sharing = z->here;
    if (z->lowest >= z->ranks)
        zr_fail(z, ZR_DISAGREE, "%s=%s: is out of range: there are %d ranks", s->rank,
                getenv(s->rank), ranks);
    z->net->local = is_set(s->local) ? number_of(z, s->local) : z->ranks > 1 ? -1 : 0;
    name_run(z, s);
    find_address(z, s);
    if (z->ranks > 1) z->far = &zr_plane;
}
