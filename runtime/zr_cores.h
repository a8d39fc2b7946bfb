/* zr_cores.h -- the resources that this host allows a process: its control groups, its cores, and
 * which of them share a cache.
 *
 * `root` is prepended to /proc and /sys: "" except in tests.
 */
#ifndef ZR_CORES_H
#define ZR_CORES_H
#include <stdint.h>

enum { ZR_CPUS = 8192 }; /* the maximum of Linux */
typedef struct zr_cpus {
    uint64_t word[ZR_CPUS / 64];
} zr_cpus;

/* Return the number after `key` in a file of lines "key number"; with key "", the first word of the
 * file. -1 if there is none, or it is "max". */
int64_t zr_number_in(const char *path, const char *key);
/* Call look for this process's group of a controller ("memory") and all groups above it. path: the
 * group's folder. */
void zr_groups(const char *root, const char *controller,
               void (*look)(const char *path, int version, int64_t *to), int64_t *to);

/* Get the CPUs that this process may run on. Returns 0, or -1 and errno. */
int zr_cpus_allowed(zr_cpus *to);
/* Return the number of cores in a set, counting siblings once, but at most the whole CPUs of the
 * groups' quota; at least 1. */
int64_t zr_cores(const char *root, const zr_cpus *in);
/* Choose the CPUs of `rank` of `ranks`: those of the last-level caches, or else nodes, that an
 * equal part of the cores of `in` touches. Returns 0 if that is all of `in`. */
int zr_cpus_of(const char *root, const zr_cpus *in, int rank, int ranks, zr_cpus *to);

#endif
