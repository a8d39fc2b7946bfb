/* zr_cores.c -- reads /proc and /sys: control groups, cores, caches and NUMA nodes.
 *
 * Invariants
 *  1. Files that cannot be read limit nothing: every CPU then counts as a core, and all share one
 *     cache.
 */
#define _GNU_SOURCE
#include "zr_cores.h"
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

enum { PATH = 4096, LINE = 4096, NODES = 1024 };

int64_t zr_number_in(const char *path, const char *key)
{
    FILE *f = fopen(path, "re");
    char line[256];
    int64_t value = -1, found;
    size_t n = strlen(key);
    while (f && value < 0 && fgets(line, sizeof line, f))
        if (!strncmp(line, key, n) && sscanf(line + n, " %" SCNd64, &found) == 1) value = found;
    if (f) fclose(f);
    return value;
}

/* ---- control groups */

/* Return the group in a line of /proc/self/cgroup if it is of version 2 or of this controller:
 * "0::/a", "4:cpu,cpuacct:/a". NULL: it is not. */
static char *group_of(char *line, const char *controller, int *version)
{
    char *names = strchr(line, ':'), *group = names ? strchr(names + 1, ':') : NULL, *rest;
    if (!group) return NULL;
    *group++ = 0;
    group[strcspn(group, "\n")] = 0;
    *version = strcmp(line, "0:") ? 1 : 2;
    if (*version == 2) return group;
    for (char *s = strtok_r(names + 1, ",", &rest); s; s = strtok_r(NULL, ",", &rest))
        if (!strcmp(s, controller)) return group;
    return NULL;
}

void zr_groups(const char *root, const char *controller,
               void (*look)(const char *path, int version, int64_t *to), int64_t *to)
{
    char path[PATH + LINE], line[LINE];
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f)) {
        int version;
        char *group = group_of(line, controller, &version);
        if (!group) continue;
        size_t top = (size_t)snprintf(path, sizeof path, "%s/sys/fs/cgroup", root);
        snprintf(path + top, sizeof path - top, "%s%s%s", version == 2 ? "" : "/",
                 version == 2 ? "" : controller, group);
        for (char *end; strlen(path) >= top; *end = 0) {
            look(path, version, to);
            end = strrchr(path, '/');
        }
    }
    if (f) fclose(f);
}

/* Lower *to to the whole CPUs of the quota of the group at `path`: time / period. */
static void look_at_quota(const char *path, int version, int64_t *to)
{
    char file[PATH + LINE + 32];
    int64_t quota = -1, period = -1;
    snprintf(file, sizeof file, "%s/%s", path, version == 2 ? "cpu.max" : "cpu.cfs_quota_us");
    FILE *f = fopen(file, "re");
    if (f && fscanf(f, "%" SCNd64 " %" SCNd64, &quota, &period) < 1) quota = -1; /* "max" */
    if (f) fclose(f);
    snprintf(file, sizeof file, "%s/cpu.cfs_period_us", path);
    if (version == 1) period = zr_number_in(file, "");
    if (quota > 0 && period > 0 && quota / period < *to) *to = quota / period;
}

/* ---- sets of CPUs */

static int has(const zr_cpus *in, int cpu) { return in->word[cpu / 64] >> cpu % 64 & 1; }

static void add_cpu(zr_cpus *to, int cpu) { to->word[cpu / 64] |= (uint64_t)1 << cpu % 64; }

static int first_of(const zr_cpus *in)
{
    int cpu = 0;
    while (cpu < ZR_CPUS && !has(in, cpu)) cpu++;
    return cpu;
}

int zr_cpus_allowed(zr_cpus *to)
{
    memset(to, 0, sizeof *to);
    return sched_getaffinity(0, sizeof *to, (cpu_set_t *)to);
}

/* Read the CPUs of `in` from a file like "0-3,8". Returns whether there are any. */
static int read_list(const char *path, const zr_cpus *in, zr_cpus *to)
{
    FILE *f = fopen(path, "re");
    int from, until, next = ',', any = 0;
    memset(to, 0, sizeof *to);
    while (f && next == ',' && fscanf(f, "%d", &from) == 1) {
        until = from;
        next = fgetc(f);
        if (next == '-' && fscanf(f, "%d", &until) == 1) next = fgetc(f);
        for (int cpu = from; cpu >= 0 && cpu <= until && cpu < ZR_CPUS; cpu++)
            if (has(in, cpu)) {
                add_cpu(to, cpu);
                any = 1;
            }
    }
    if (f) fclose(f);
    return any;
}

/* The same for a file of one CPU. */
static int read_own(const char *root, int cpu, const char *name, const zr_cpus *in, zr_cpus *to)
{
    char path[PATH];
    snprintf(path, sizeof path, "%s/sys/devices/system/cpu/cpu%d/%s", root, cpu, name);
    return read_list(path, in, to);
}

/* ---- cores */

static int64_t count_cores(const char *root, const zr_cpus *in)
{
    zr_cpus siblings;
    int64_t cores = 0;
    for (int cpu = 0; cpu < ZR_CPUS; cpu++) {
        if (!has(in, cpu)) continue;
        int known = read_own(root, cpu, "topology/core_cpus_list", in, &siblings) ||
                    read_own(root, cpu, "topology/thread_siblings_list", in, &siblings);
        cores += !known || first_of(&siblings) == cpu;
    }
    return cores;
}

int64_t zr_cores(const char *root, const zr_cpus *in)
{
    int64_t cores = count_cores(root, in);
    zr_groups(root, "cpu", look_at_quota, &cores);
    return cores > 1 ? cores : 1;
}

/* ---- caches and NUMA nodes */

/* Find the CPUs of `in` that share a cache, or else a node, with a CPU of it. */
static void find_near(const char *root, int cpu, const zr_cpus *in, zr_cpus *to)
{
    char path[PATH];
    if (read_own(root, cpu, "cache/index3/shared_cpu_list", in, to) && has(to, cpu)) return;
    for (int node = 0; node < NODES; node++) {
        snprintf(path, sizeof path, "%s/sys/devices/system/node/node%d/cpulist", root, node);
        if (read_list(path, in, to) && has(to, cpu)) return;
    }
    *to = *in;
}

int zr_cpus_of(const char *root, const zr_cpus *in, int rank, int ranks, zr_cpus *to)
{
    zr_cpus left = *in, near;
    int64_t cores = count_cores(root, in), seen = 0;
    int64_t from = cores * rank / ranks, until = cores * (rank + 1) / ranks;
    if (until == from) until++; /* more ranks than cores */
    memset(to, 0, sizeof *to);
    for (int cpu; (cpu = first_of(&left)) < ZR_CPUS;) {
        find_near(root, cpu, &left, &near);
        int64_t begin = seen;
        seen += count_cores(root, &near);
        for (int i = 0; i < ZR_CPUS / 64; i++) {
            if (begin < until && seen > from) to->word[i] |= near.word[i];
            left.word[i] &= ~near.word[i];
        }
    }
    return memcmp(to, in, sizeof *to) != 0;
}
