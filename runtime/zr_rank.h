/* zr_rank.h -- struct zr, the state of one rank; not for train.c.
 *
 * The files runtime/zr_*.c are the same for every target. The functions that a target provides
 * (memory, queues, collectives) are in cpu/ and in cuda/; the linker takes one of the two.
 *
 * Invariants
 *  1. All state of a rank is in its struct zr; state that ranks share is in struct zr_shared.
 *  2. Code that finds that a run cannot go on calls zr_fail: the first caller prints its message,
 *     and every rank exits.
 *  3. Only the rank's own thread issues commands; the target decides how they run.
 *  4. Only the target knows the addresses of arenas; other files copy with zr_read and zr_write.
 */
#ifndef ZR_RANK_H
#define ZR_RANK_H
#include "zr.h"

/* Each is defined in the header of its own part. */
typedef struct zr_options zr_options;
typedef struct zr_shared zr_shared;
typedef struct zr_seat zr_seat;
typedef struct zr_far zr_far;
typedef struct zr_members zr_members;
typedef struct zr_net zr_net;
typedef struct zr_mix zr_mix;
typedef struct zr_choices zr_choices;
typedef struct zr_log zr_log;
typedef struct zr_profile zr_profile;
typedef struct zr_checkpoints zr_checkpoints;
typedef struct zr_saving zr_saving;
typedef struct zr_writer zr_writer;
typedef struct zr_watch zr_watch;
typedef struct zr_queue zr_queue;
typedef struct zr_target zr_target; /* state of the target: cpu/cpu.h, cuda/cuda.h */
typedef struct zr_disk zr_disk;     /* state of the file arena: zr_disk.c */

struct zr {
    const zr_program *p;
    const zr_options *o;
    zr_shared *shared;
    zr_target *t;
    zr_disk *disk;     /* NULL: there is no file arena */
    int rank, ranks;   /* rank -1: the parent process */
    int told_to_leave; /* the parent: a signal has asked the run to save and exit */
    int lowest, here;  /* the parent starts `here` ranks, the first of which is `lowest` */
    int threads;       /* threads of the kernels of one queue */
    /* order of bf16 products: ZR_PAIRS ...; -1: none; on a GPU the order of its checkpoint */
    int order;
    int nccl;            /* version of NCCL: 22809 is 2.28.9; 0: a CPU */
    uint64_t algorithms; /* of a GPU's products: p->algorithms; 0: not chosen yet, or a CPU */
    int cores;           /* cores for one rank of those this host allows, at least 1 */
    zr_seat **seat;      /* [ranks] NULL: this rank cannot read that rank's memory */
    const zr_far *far;   /* functions to reach the other ranks; NULL: all are on this host */
    zr_members *group;   /* [p->ngroups] */
    int reads_peers;     /* 0: pieces of peers are sent to the inbox */
    zr_net *net;
    int column;           /* index of the target in p->columns and in train.c's launch tables */
    _Atomic int64_t step; /* current training step, from 0 */
    /* steps in a row that changed no weight, without those that search a loss scale */
    int64_t skips;
    zr_mix *train, *val;
    /* [nprompt] tokens of --prompt-tokens, with room for two samples; NULL: not given */
    int32_t *prompt;
    int64_t nprompt;
    int32_t *whole;      /* [3T] a sample's tokens, targets, positions; NULL: samples are not cut */
    zr_choices *choices; /* of --eval */
    int64_t tries;       /* number of evaluations that --eval takes */
    int apart;           /* 1: all-reduces add the ranks of a sample alone: zr_eval.c */
    zr_log *log;
    zr_profile *profile;
    zr_checkpoints *checkpoints;
    char *words; /* buffer to verify states that the host cannot read; NULL: not asked for */
    zr_saving *saving;
    zr_writer *writer;
    zr_watch *watch;
    /* zr_now() when zr_main began, all arenas were in place, the first step began */
    double started, ready, first;
    zr_queue *queue;                  /* [ZR_QUEUES] */
    void *workspace, *pinned_scratch; /* scratch memory of the kernels; NULL: the target has none */
    uint32_t barriers;                /* barriers that this rank has entered */
    double peak;                      /* ZR_PEAK_GFLOPS; 0: not known */
    int64_t timeout;                  /* ZR_TIMEOUT_S; 0: not given */
};

/* Return whether the program uses this queue. */
static inline int zr_uses(const zr *z, int queue) { return z->p->queues >> queue & 1; }

#endif
