/* zr_cores.h -- what this host lets a process have: its control groups, its cores, and which of
 * them share a cache.
 *
 * `root` stands before /proc and /sys: "", but in tests.
 */
#ifndef ZR_CORES_H
#define ZR_CORES_H
#include <stdint.h>

enum { ZR_CPUS = 8192 }; /* Linux has no more */
typedef struct zr_cpus {
    uint64_t word[ZR_CPUS / 64];
} zr_cpus;

/* The number behind `key` in a file of lines "key number"; key "": the first word of the file.
 * -1 where there is none ("max", too). */
int64_t zr_number_in(const char *path, const char *key);
/* For this process's group of a controller ("memory") and all above it: a folder of files. */
void zr_groups(const char *root, const char *controller,
               void (*look)(const char *path, int version, int64_t *to), int64_t *to);

/* Those that this process may run on. 0, or -1 and errno */
int zr_cpus_allowed(zr_cpus *to);
/* Cores among these, siblings counted once, but no more than the whole CPUs of the groups' quota;
 * at least 1. */
int64_t zr_cores(const char *root, const zr_cpus *in);
/* The caches of the last level, else the nodes, whose cores an even part of `in` reaches: that of
 * `rank` of `ranks`, in order. Returns 0 where that is all of `in`. */
int zr_cpus_of(const char *root, const zr_cpus *in, int rank, int ranks, zr_cpus *to);

#endif
