/* zr_options.h -- the command line and settings in the environment.
 *
 * Environment
 *   ZR_TIMEOUT_S=N         end the run with exit code 7 when a step or an evaluation has made no
 *                          progress for N seconds. Default: ten minutes in the first step, later
 *                          ten times the longest time seen, at least one minute. On a CPU that is
 *                          the time of a command on any rank, and a command that uses a processor
 *                          has ten times as long; on a GPU, the median time of a rank's steps
 * For tests and measurements (targets have some of their own):
 *   ZR_SAVE_S=N            seconds an update waits for a checkpoint to be written (default: 60)
 *   ZR_SHARD_BYTES=N       bytes of tensors in one file of --save (default: 5 GB)
 *   ZR_PEAK_GFLOPS=X       peak of all ranks: step lines and the log give the share of it reached
 * For ranks that a launcher starts, if its own variables do not give these values:
 *   ZR_RANK, ZR_WORLD_SIZE, ZR_LOCAL_RANK, ZR_LOCAL_WORLD_SIZE, ZR_ADDR=HOST:PORT
 *                          see zr_launcher.c
 *   ZR_TOKEN=WORD          name of the run: ranks with another word belong to another run
 *   ZR_BIND=ADDRESS        address on which rank 0 listens (default: all addresses of its host)
 *   ZR_PORTS=FIRST-LAST    range for ports that are not given (default: 20000-31999)
 *   ZR_MEET_S=N            seconds that ranks have to meet at the start (default: 300)
 */
#ifndef ZR_OPTIONS_H
#define ZR_OPTIONS_H
#include "zr_mix.h"
#include "zr_rank.h"

enum { ZR_MOST_STEPS = 1000000000 };
enum { ZR_EAGER, ZR_LATE, ZR_SHUFFLED };

struct zr_options {
    zr_given data[ZR_SOURCES];
    int ndata; /* number of entries in use */
    const char *val, *eval, *load, *save, *log, *queue, *nvme, *gemms, *isa,
        *products; /* NULL: not given */
    /* "uint16" or "uint32": type of the tokens in --data and --val files that do not name it */
    const char *tokens;
    const char *profile, *profile_steps, *save_dtype, *adapter;
    const char *prompt, *temperature, *top_p; /* of --sample */
    double heat, share;                       /* values of `temperature` and `top_p` */
    const char *checkpoints, *resume, *accept_change;
    int64_t save_every, keep, keep_every, resume_step; /* 0: not given */
    int64_t max_time, grace;                           /* seconds; 0: not given */
    int64_t steps, epochs, val_every, val_tokens, verify_every, threads, patience;
    int64_t sample, top_k, sample_seed;  /* sample_seed -1: not given */
    int64_t profile_first, profile_last; /* steps of --profile, from 1 */
    int hash, version, help, check_launch, check_gpus, no_graph, tune, drop_unknown, merge,
        keep_best;
    int mode;      /* ZR_EAGER ..., from `queue` */
    int save_type; /* ZR_F32 ..., from `save_dtype`; -1: as loaded */
    char **words;  /* the whole command line, then NULL */
    uint64_t seed;
};

void zr_parse(zr *z, zr_options *o, int argc, char **argv);
void zr_choose_threads(zr *z); /* sets z->threads: as given, else a share of the host's cores */
/* Write the options that all ranks must be given alike, in a fixed order, each as `--steps 3`. */
void zr_options_text(const zr *z, char *text, size_t n);
void zr_help(zr *z, const char *program);
void zr_version(zr *z);
/* Return a number from the environment, at most `most`; 0 if the variable is not set. */
int64_t zr_setting(zr *z, const char *name, int64_t most);

#endif
