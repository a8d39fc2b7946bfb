/* zr.h -- all that a training program may see of the runtime.
 *
 * Invariants
 *  1. The runtime decides nothing: every size, offset, order and event comes from train.c.
 *  2. Work on a queue runs in the order of issue; an event is CUDA's: zr_wait waits for the newest
 *     zr_record of that event issued before it (none: no wait).
 *  3. Every rank issues the same collectives in the same order on each queue.
 *  4. Offsets and sizes are bytes in the rank's arena unless said otherwise; all are 64 bit. What
 *     ZR_HOST works on lies in its host arena, what is stored in its file arena.
 *  5. Nothing is allocated between the first step and the last.
 */
#ifndef ZR_H
#define ZR_H
#include <stddef.h>
#include <stdint.h>

#define ZR_ABI 21
typedef struct zr zr; /* one rank */

/* ZR_HOST's functions run on the host's processor, on the host arena. */
enum { ZR_MAIN = 0, ZR_GATHER = 1, ZR_REDUCE = 2, ZR_SUM = 3, ZR_HOST = 4 };
enum { ZR_UP = 5, ZR_DOWN = 6, ZR_LOAD = 7, ZR_STORE = 8, ZR_FETCH = 9, ZR_QUEUES = 10 };
enum { ZR_TAKE = 0, ZR_TIME = 1, ZR_END = 2 }; /* of zr_program.gemms */
enum { ZR_BEGIN = 0, ZR_MICRO_BATCH = 1, ZR_UPDATE = 2, ZR_EVAL = 3, ZR_GRAPHS = 4 };

/* A piece of work: k is the queue's kernel context (NULL for queues that only move: ZR_GATHER,
 * ZR_REDUCE and those from ZR_UP on), a the queue's arena, i the operands given to zr_call. */
typedef void zr_fn(zr *z, void *k, void *a, const int64_t *i);
/* Where operand n of the function `name` lies, which is an offset; fails if not in the arena. */
void *zr_at(zr *z, void *k, void *a, const int64_t *i, int n, const char *name);

/* ---- queues */
void zr_wait(zr *z, int queue, int event);
void zr_record(zr *z, int queue, int event);
static inline void zr_wait_n(zr *z, int queue, int n, const int *event)
{
    for (int i = 0; i < n; i++) zr_wait(z, queue, event[i]);
}
/* What `queue` has so far comes before what `other` gets from now on. */
#define zr_before(z, queue, other, event) (zr_record(z, queue, event), zr_wait(z, other, event))
#define zr_waits(z, queue, ...) /* for each of these events */                                     \
    zr_wait_n(z, queue, (int)(sizeof((const int[]){__VA_ARGS__}) / sizeof(int)),                   \
              (const int[]){__VA_ARGS__})
/* n <= 12 operands, copied; name: of the function, for profilers and the watchdog */
void zr_call_n(zr *z, int queue, zr_fn *fn, const char *name, int n, const int64_t *i);
#define zr_call(z, queue, fn, ...)                                                                 \
    zr_call_n(z, queue, fn, #fn, (int)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)),  \
              (const int64_t[]){__VA_ARGS__})
/* The steps that issue(z) issues on all queues, the same whenever it is called; of a training step
 * ZR_UPDATE alone changes states. A GPU records them as graph `graph`, which it plays from then on:
 * a wait for what came before issue is none. A program with ZR_HOST is issued anew there, too. */
void zr_replay(zr *z, int graph, void (*issue)(zr *z));
/* Around operands, zr_copy's from, zr_done's at: their slot is dead behind it; tests poison it */
#define zr_last(at) ((at) + (INT64_C(1) << 62))
/* ZR_UP: to `to` of the arena from `from` of the host arena; ZR_DOWN: the other way. ZR_LOAD,
 * ZR_FETCH: to `to` of the host arena from `from` of the file arena; ZR_STORE: the other way. */
void zr_copy(zr *z, int queue, int64_t from, int64_t to, int64_t bytes);

/* ---- collectives over a group (of zr_program.groups) of R ranks, of which r is this one */
int zr_rank(const zr *z);
int zr_place(const zr *z, int group); /* this rank's number in it */
/* piece p of `to` (at to + p*to_step, bytes long) = rank p's piece at from + p*from_step. Complete
 * when this rank has all pieces and every peer has read this rank's. In place where both agree. */
void zr_gather(zr *z, int queue, int group, int64_t from, int64_t from_step, int64_t to,
               int64_t to_step, int64_t bytes);
/* Rank p's piece for this rank lies at at + r*step of rank p. After it, zr_sources of `to`, a slot
 * of the inbox, has R pointers to `bytes` each, in order of rank, good until its zr_done, on any
 * queue: on a CPU to where the pieces lie, on a GPU to where they have come, to + p*bytes. */
void zr_alltoall(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to, int64_t bytes);
/* As zr_alltoall, but one source has come: NCCL's own sum, of numbers of a type, of all ranks'
 * pieces, in an order that only equal GPUs and libraries repeat. A CPU has none. */
enum { ZR_PAIRS, ZR_TILES }; /* orders of products in bf16, as zk_products has them */
enum { ZR_F32 = 0, ZR_BF16 = 1, ZR_F16 = 2, ZR_I64 = 3, ZR_F64 = 4 };
void zr_reducescatter(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to,
                      int64_t bytes, int type);
const void *const *zr_sources(zr *z, int64_t to);
void zr_done(zr *z, int queue, int group, int64_t to, int64_t at); /* all owners have read `at` */
/* int64 to[n] = exact sums of all ranks' from[n]. */
void zr_allreduce(zr *z, int queue, int group, int64_t from, int64_t to, int64_t n);

/* ---- data: a micro-batch's tokens, targets, positions and keys; or `at` behind their places */
void zr_batch(zr *z, int64_t micro_batch);
void zr_batch_at(zr *z, int64_t micro_batch, int64_t at);

/* ---- what the program tells the runtime */
typedef struct zr_group { /* the first: all ranks */
    const char *name;
    int32_t ranks;
} zr_group;
/* An axis along which the ranks of a group differ: so many places, `stride` ranks from each to the
 * next. Of a group's axes the last counts fastest; the first group has none, and all ranks. */
typedef struct zr_axis {
    int32_t group, size, stride;
} zr_axis;
/* What a run keeps from step to step, and "params", what publish makes of masters for all ranks. A
 * row is of every instance of a flat: elements [first, first + n) of each shard that a rank has,
 * where shard i is elements [i*shard, (i+1)*shard) of the flat. over: the group of R ranks whose
 * place r has shards [r*K, (r+1)*K) one after the other, K = ranks / R; -1: every rank has all. A
 * rank answers for the shard that is its place in zr_program.owners. A shard may be in two rows, in
 * order. flat -1: a number of no flat, the same on every rank. */
typedef struct zr_state {
    const char *what; /* "master", parameters too that have no other; "exp_avg" ...; "step" ... */
    /* instance i has its first element (of its first shard) at at + i*stride, in bytes of the arena
     * of ZR_MAIN or ZR_HOST or, where queue is ZR_STORE, of the file arena */
    int64_t at, stride, shard, first, n;
    int32_t flat, count, over, queue, type; /* type: of an element, ZR_F32 ... */
    /* of masters, else NULL: hashes elements of the shard that this rank owns. Operands: the place
     * of the first (in the rank's first shard), instance, uint64_t[2] to add to, the number of the
     * first, n (of a tile) */
    zr_fn *hash;
} zr_state;

/* A tensor of the weights' file. `name` holds one %d for the layer where count > 1 (else none).
 * Instance i: flat instance i*flat_step of flat `flat`, elements from offset + i*offset_step on; a
 * flat_step above 1: of so many instances as if they were one. */
typedef struct zr_tensor {
    const char *name;
    int64_t offset, offset_step;
    int64_t shape[2];                            /* row-major; ndim 1: shape[0] alone */
    int32_t ndim, flat, flat_step, count, first; /* first: the number of instance 0's layer */
} zr_tensor;

/* A target of the plan, a column of its launch tables: bytes; an allowance for NCCL beside it */
typedef struct zr_column {
    const char *name; /* "cpu", "sm_90" ... */
    int64_t arena, nccl;
} zr_column;

/* What a step reports, in this order; the scale is of its gradients, 0: there is none. */
enum { ZR_STEP, ZR_LOSS, ZR_NORM, ZR_LR, ZR_VALID, ZR_SKIPPED, ZR_SCALE, ZR_REPORT };
/* Why it was skipped: no finite gradient, or no target; a lower scale comes next; there is none. */
enum { ZR_APPLIED = 0, ZR_FAULTY = 1, ZR_RESCALED = 2, ZR_LOWEST = 3 };

/* To draw behind the last one whose target the last evaluation did not ignore; u in [0, 1) */
typedef struct zr_draw {
    double temperature, top_p, u;
    int32_t top_k, token; /* token: the result */
} zr_draw;

/* A function of ZR_MAIN, for --profile: which part of a step it is ("forward"; what is not listed:
 * "step"), the flops of a call, 0 where they do not count. It is called for so many units in turn,
 * `times` for each; negative: from the last to the first; 0: for one, or no number to tell. */
typedef struct zr_function {
    const char *name, *part;
    double flops;
    int32_t units, times;
} zr_function;

/* A zr_fn here runs on ZR_MAIN; its operands are pointers of the host. */
typedef struct zr_program {
    uint32_t abi;                /* ZR_ABI */
    const char *name, *summary;  /* of the spec; in a line, how it is trained */
    const char *plan, *layout;   /* SHA-256, 64 hex digits */
    const char *memory, *config; /* a line for --version; Hugging Face's config.json or NULL */
    const char *adapter, *lead;  /* PEFT's adapter_config.json or NULL; its names' beginning */
    int64_t shared, hosted; /* bytes: that peers read of an arena, its first; of the host arena */
    /* bytes of the file arena, 0: none; the directory for it; blocks that it moves in, and how many
     * at once; bytes read and written in a training step; where in the host arena a tile of masters
     * that lie in the file comes, and elements of a tile */
    int64_t filed, block, depth, loads, stores, brought, tile;
    const char *folder;
    uint32_t queues; /* those that it uses: 1 << ZR_MAIN ... */
    /* Of a GPU: where launches' workspace lies in the arena; bytes of the pinned host arena; places
     * in it for batches, and scratch. Unless peers' memory is read: slots for pieces. */
    int64_t workspace, host, pinned_batch, pinned_batch_step, pinned_scratch, inbox, inbox_step;
    int32_t margin, blocks, channels; /* SMs that products leave; NCCL's: 0 blocks: any */
    int32_t type, ncolumns, inboxes, ranks, events, pinned_batches; /* type: of parameters */
    int64_t micro_batches, batch, sequence, vocab;                  /* A; B; T; V */
    int64_t ignore, skips; /* never a target, -1: none; ZR_FAULTY steps in a row that end the run */
    uint64_t shuffle, seed; /* 1: of each epoch the samples' order is drawn, by the seed */
    int64_t tokens, targets, positions, keys; /* int32[B*T] each; int64[B], 0: there are none */
    int64_t packed, end;    /* 1: positions are there; they begin anew behind the token `end` */
    double flops, lora;     /* a global step's, 6N per token + attention; adapters' alpha / rank */
    int64_t wire, messages; /* bytes received and collectives, per rank and training step */
    int64_t commands;       /* of a rank in a training step, waits among them */
    const char *const *recipe; /* lines `key: value`: all that the weights' bits depend on */
    const zr_column *columns;
    const zr_group *groups;
    const zr_state *states;
    const zr_tensor *tensors;
    const zr_function *functions;
    const int64_t (*slots)[3]; /* at, bytes of each, how many: what they hold dies */
    const zr_axis *axes;
    const uint32_t *meets; /* [ngroups] queues of its collectives, bits; NULL: all that are used */
    int64_t far;           /* of wire, bytes from other hosts */
    int32_t owners, local; /* the group in whose order ranks own shards; ranks of a host, 0: all */
    int32_t naxes, ngroups, nstates, nrecipe, ntensors, nfunctions, nslots;
    /* for ZR_MAIN, ZR_SUM and ZR_HOST; stream, device and host scratch: of a GPU, else NULL */
    void *(*open)(int queue, void *stream, void *device, void *host, int column, int threads,
                  const char **why);
    void (*close)(int queue, void *k);
    const char *(*target)(void), *(*object)(void); /* that this process runs on */
    /* Of bf16, else NULL: sets the order in which a CPU's products are summed (zk_products). The
     * order that the spec names; below 0: a run settles it. */
    int (*products)(void *k, int order);
    int32_t order;
    int64_t (*overhead)(int threads); /* bytes the kernels take at start outside the arena */
    /* The table of a GPU's algorithms in file `path`: ZR_TAKE it; ZR_TIME products to make one;
     * ZR_END of both. Returns 0; 1 and what there is to say in why[n]; -1 and what is wrong. */
    int (*gemms)(int what, const char *path, char *why, size_t n);
    void (*init)(zr *z);    /* masters = initial values */
    void (*publish)(zr *z); /* masters -> everything made from them (after init and load) */
    void (*step)(zr *z);    /* one training step: zr_batch and work for every micro-batch, update */
    zr_fn *report;          /* double[ZR_REPORT] */
    zr_fn *clear;           /* sums of an evaluation = 0 */
    void (*eval)(zr *z);    /* forward and loss of the tokens in place; adds to the sums */
    void (*total)(zr *z);   /* sums over all ranks */
    zr_fn *mean;            /* double *loss, *valid: of these */
    zr_fn *sample;          /* zr_draw * */
} zr_program;

#define ZR_TABLE(name) .name = name, .n##name = sizeof name / sizeof *name

/* The whole run: options, ranks, data, loop, log. Returns the exit code. */
int zr_main(int argc, char **argv, const zr_program *p);

#endif
