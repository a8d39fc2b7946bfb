/* zr.h -- the runtime's interface to a training program; train.c sees nothing else of it.
 *
 * Invariants
 *  1. The runtime decides nothing: every size, offset, order and event comes from train.c.
 *  2. Commands of a queue run in the order of issue. Events work as in CUDA: zr_wait waits for
 *     the newest zr_record of the event issued before it, and for nothing if there is none.
 *  3. On each queue every rank issues the same collectives in the same order.
 *  4. Offsets and sizes are in bytes and have 64 bits. Offsets count from the start of the rank's
 *     arena, in operands of ZR_HOST from the start of its host arena, and in operands that name
 *     stored data from the start of its file arena.
 *  5. Nothing is allocated between the first step and the last.
 *
 * No function returns an error: one that fails prints a message and ends the run on all ranks.
 */
#ifndef ZR_H
#define ZR_H
#include <stddef.h>
#include <stdint.h>

#define ZR_ABI 28
typedef struct zr zr; /* the state of one rank */

/* The queues in the order of their numbers: name, the arenas that its commands read and write, 1 if
 * it runs kernels, and its place in the order in which mode late empties the queues, consumers
 * before producers. A queue between two arenas copies (zr_copy). Collectives are on the first three
 * queues. Functions of ZR_HOST run on the host's processor. */
#define ZR_EACH_QUEUE(ROW)                                                                         \
    ROW(ZR_MAIN, "main", ZR_ARENA, ZR_ARENA, 1, 0)                                                 \
    ROW(ZR_GATHER, "gather", ZR_ARENA, ZR_ARENA, 0, 9)                                             \
    ROW(ZR_REDUCE, "reduce", ZR_ARENA, ZR_ARENA, 0, 8)                                             \
    ROW(ZR_SUM, "sum", ZR_ARENA, ZR_ARENA, 1, 7)                                                   \
    ROW(ZR_HOST, "host", ZR_HOSTED, ZR_HOSTED, 1, 3)                                               \
    ROW(ZR_UP, "up", ZR_HOSTED, ZR_ARENA, 0, 2)                                                    \
    ROW(ZR_DOWN, "down", ZR_ARENA, ZR_HOSTED, 0, 4)                                                \
    ROW(ZR_LOAD, "load", ZR_FILED, ZR_HOSTED, 0, 5)                                                \
    ROW(ZR_STORE, "store", ZR_HOSTED, ZR_FILED, 0, 1)                                              \
    ROW(ZR_FETCH, "fetch", ZR_FILED, ZR_HOSTED, 0, 6)
enum { ZR_ARENA, ZR_HOSTED, ZR_FILED }; /* a rank's arena, its host arena, its file arena */
#define ZR_NUMBER(queue, ...) queue,
enum { ZR_EACH_QUEUE(ZR_NUMBER) ZR_QUEUES };
enum { ZR_COLLECTIVES = ZR_REDUCE + 1 };       /* queues that may have collectives */
enum { ZR_TAKE = 0, ZR_TIME = 1, ZR_END = 2 }; /* first argument of zr_program.gemms */
/* Sections of a step that zr_replay can record as graphs. */
enum { ZR_BEGIN = 0, ZR_MICRO_BATCH = 1, ZR_UPDATE = 2, ZR_EVAL = 3, ZR_GRAPHS = 4 };

/* A function that a queue runs. k: the queue's kernel context, or NULL on queues that only move
 * data. a: the arena of the queue. i: the operands given to zr_call. */
typedef void zr_fn(zr *z, void *k, void *a, const int64_t *i);
/* Return the address in arena a of operand n of function `name`, where i[n] is an offset. Fails if
 * it is outside the arena. */
void *zr_at(zr *z, void *k, void *a, const int64_t *i, int n, const char *name);

/* ---- queues */
void zr_wait(zr *z, int queue, int event);
void zr_record(zr *z, int queue, int event);
void zr_wait_n(zr *z, int queue, int n, const int *event); /* wait for each of event[n] */
/* Make the next commands of `other` wait for all commands issued to `queue` so far. */
#define zr_before(z, queue, other, event) (zr_record(z, queue, event), zr_wait(z, other, event))
#define zr_waits(z, queue, ...)                                                                    \
    zr_wait_n(z, queue, (int)(sizeof((const int[]){__VA_ARGS__}) / sizeof(int)),                   \
              (const int[]){__VA_ARGS__})
/* Issue fn with n <= 16 operands, which are copied. name: the function's name as profilers and the
 * watchdog print it. */
void zr_call_n(zr *z, int queue, zr_fn *fn, const char *name, int n, const int64_t *i);
#define zr_call(z, queue, fn, ...)                                                                 \
    zr_call_n(z, queue, fn, #fn, (int)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)),  \
              (const int64_t[]){__VA_ARGS__})
/* Issue the commands of issue(z), which are the same at every call. On a GPU the first call
 * captures them as CUDA graph `graph`, and every call launches the graph. A wait in it for an event
 * recorded outside of it has no effect. A program that uses ZR_HOST is issued anew every time, on a
 * GPU too. Of the graphs of a training step only ZR_UPDATE changes states. */
void zr_replay(zr *z, int graph, void (*issue)(zr *z));
/* Mark an operand of a call, `from` of zr_copy or `at` of zr_done as the last use of its slot:
 * after the command the contents are dead. Test modes overwrite them with NaN. */
#define zr_last(at) ((at) + (INT64_C(1) << 62))
/* Copy bytes from offset `from` of the arena that the queue reads to offset `to` of the one that it
 * writes. */
void zr_copy(zr *z, int queue, int64_t from, int64_t to, int64_t bytes);

/* ---- collectives. `group` is an index of zr_program.groups; R is its number of ranks, r this
 * rank's place in it. */
int zr_rank(const zr *z);
int zr_place(const zr *z, int group); /* r */
/* All-gather: copy piece p, `bytes` at from + p*from_step in the arena of rank p, to to +
 * p*to_step, for each p of the group. Complete when this rank has all pieces and every peer has
 * read this rank's piece. In place where the two addresses are the same. */
void zr_gather(zr *z, int queue, int group, int64_t from, int64_t from_step, int64_t to,
               int64_t to_step, int64_t bytes);
/* Exchange: copy the piece for this rank, `bytes` at from + r*from_step in the arena of rank p, to
 * to + p*to_step, for each p of the group. Complete as zr_gather. */
void zr_exchange(zr *z, int queue, int group, int64_t from, int64_t from_step, int64_t to,
                 int64_t to_step, int64_t bytes);
/* All-to-all, the first half of a reduce-scatter: rank p offers its piece for this rank,
 * `bytes` at at + r*step of its arena. `to` is a slot of the inbox. Afterwards zr_sources(z,
 * to) has R pointers to the pieces in order of rank, valid on any queue until zr_done of the
 * same `to`. On a CPU they point to peers' memory where it can be read; elsewhere piece p has
 * been received at to + p*bytes. */
void zr_alltoall(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to, int64_t bytes);
enum { ZR_PAIRS, ZR_TILES }; /* orders of products in bf16: see zk_products in zk.h */
/* Types of elements. */
enum { ZR_F32 = 0, ZR_BF16 = 1, ZR_F16 = 2, ZR_I64 = 3, ZR_F64 = 4 };
/* NCCL's reduce-scatter: as zr_alltoall, but the only source is the sum of all ranks' pieces, which
 * are elements of `type`. NCCL's order of summation repeats only on equal GPUs with the same NCCL.
 * Fails on a CPU. */
void zr_reducescatter(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to,
                      int64_t bytes, int type);
/* Return the pieces that the inbox slot `to` holds: one pointer for each rank. */
const void *const *zr_sources(zr *z, int64_t to);
/* Set to[n] to pointers that are `step` bytes apart, and return it. */
static inline const void *const *zr_spaced(const void **to, const char *first, int64_t step,
                                           int64_t n)
{
    for (int64_t j = 0; j < n; j++) to[j] = first + j * step;
    return to;
}
/* Wait until every rank of the group has read its piece at `at`, and free the inbox slot `to`. */
void zr_done(zr *z, int queue, int group, int64_t to, int64_t at);
/* All-reduce: int64 to[n] = the sum of from[n] over the ranks. `to` may be `from`. */
void zr_allreduce(zr *z, int queue, int group, int64_t from, int64_t to, int64_t n);

/* ---- data */
/* Copy the tokens, targets, positions and keys of a micro-batch to their places in the arena. */
void zr_batch(zr *z, int64_t micro_batch);
/* The same, each `at` bytes after its place. */
void zr_batch_at(zr *z, int64_t micro_batch, int64_t at);

/* ---- the tables of a program */
/* A group of ranks. Group 0 is all ranks. */
typedef struct zr_group {
    const char *name;
    int32_t ranks;
} zr_group;

/* An axis of the grid of ranks along which the ranks of a group differ. A group's last axis varies
 * fastest. Group 0 has no rows: it is all ranks in order. */
typedef struct zr_axis {
    int32_t group, /* index of the group */
        size,      /* number of places along the axis */
        stride;    /* distance in ranks from one place to the next */
} zr_axis;

/* A state: data that a run keeps from step to step, or "params", which publish makes of the
 * masters. A row describes elements [first, first + n) of each shard of a flat that a rank has, for
 * all its instances; shard i is elements [i*shard, (i+1)*shard) of the flat. A shard may be split
 * over two rows, in order. A rank saves and hashes the shard that is its place in
 * zr_program.owners. */
typedef struct zr_state {
    const char *what; /* "master" (also parameters without other masters), "exp_avg", "step" ... */
    int64_t at,       /* offset of the first element of instance 0 in the arena of `queue` */
        stride,       /* bytes from one instance to the next */
        shard,        /* elements of a shard */
        first,        /* first element of the row in each shard */
        n;            /* elements of the row in each shard */
    int32_t flat,     /* number of the flat; -1: one number that is the same on every rank */
        count,        /* instances */
        over,         /* group whose R ranks share the flat: the rank at place r has shards [r*K,
                         (r+1)*K) one after the other, K = ranks / R; -1: every rank has all */
        queue,        /* arena: ZR_MAIN, ZR_HOST, or ZR_STORE for the file arena */
        type;         /* type of an element: ZR_F32 ... */
    /* Hash elements of the shard that this rank owns; NULL where the row has no masters. Operands:
     * the offset of the first element in the rank's first shard, the instance, the uint64_t[2] to
     * add to, the number of the first element, the number of elements (of a tile). */
    zr_fn *hash;
} zr_state;

/* A tensor of the weights' file. Instance i has its elements in instance i*flat_step of the flat,
 * from offset + i*offset_step on. */
typedef struct zr_tensor {
    const char *name;   /* with one %d for the layer where count > 1 */
    int64_t offset,     /* first element in the flat */
        offset_step;    /* elements from one instance to the next */
    int64_t shape[2];   /* row-major; ndim 1 uses shape[0] alone */
    int32_t ndim, flat, /* number of the flat */
        flat_step,      /* instances of the flat per tensor; above 1 they count as one flat */
        count,          /* instances of the tensor */
        first;          /* layer of instance 0 */
} zr_tensor;

/* Marks of a tensor, a bit each. ZR_WHOLE: it is trained beside adapters, and their files have it.
 * ZR_TIED: they have it once more, as the head. ZR_GROWN: it has a row by token, and --load adds
 * the rows that a folder lacks. */
enum { ZR_WHOLE = 1, ZR_TIED = 2, ZR_GROWN = 4 };

/* A target of the plan: a column of its launch tables. */
typedef struct zr_column {
    const char *name; /* "cpu", "sm_90" ... */
    int64_t arena,    /* bytes of a rank's arena */
        nccl;         /* bytes beside the arena that are reserved for NCCL */
    double predicted; /* seconds of a training step on the spec's cluster.device; 0: unknown */
} zr_column;

/* Numbers that a step reports, as double[ZR_REPORT]. ZR_SCALE: the loss scale, 0 without one. */
enum { ZR_STEP, ZR_LOSS, ZR_NORM, ZR_LR, ZR_VALID, ZR_SKIPPED, ZR_SCALE, ZR_REPORT };
/* Values of ZR_SKIPPED. ZR_FAULTY: a gradient was not finite, or no token had a target.
 * ZR_RESCALED: a gradient was not finite, and the loss scale drops. ZR_LOWEST: the
 * scale cannot drop further. */
enum { ZR_APPLIED = 0, ZR_FAULTY = 1, ZR_RESCALED = 2, ZR_LOWEST = 3 };

/* A request to sample the token after the last one whose target the last evaluation counted. */
typedef struct zr_draw {
    double temperature, top_p, u; /* u: a random number in [0, 1) */
    int32_t top_k, token;         /* token: the result */
} zr_draw;

/* A function of ZR_MAIN as --profile reports it. */
typedef struct zr_function {
    const char *name, *part; /* part: of a step, "forward" ...; functions not listed are "step" */
    double flops;            /* of one call; 0: not counted */
    int32_t units,           /* units it is called for in turn, from the last if negative; 0: one */
        times;               /* calls for each unit */
} zr_function;

/* The program: constants, tables and functions of train.c. A zr_fn here runs on ZR_MAIN; its
 * operands are addresses in the host's memory. */
typedef struct zr_program {
    uint32_t abi;        /* ZR_ABI */
    const char *name,    /* name of the spec */
        *summary;        /* one line: how the model is trained */
    const char *plan,    /* SHA-256 of the plan, in hex */
        *layout;         /* SHA-256 of the places and owners of all parameters, in hex */
    const char *memory,  /* one line for --version: where memory goes */
        *config;         /* Hugging Face's config.json, or NULL */
    const char *adapter, /* PEFT's adapter_config.json, or NULL */
        *lead,           /* prefix of the names of an adapter's tensors */
        *second;         /* adapters' second name of a ZR_TIED tensor, or NULL */
    const char *text,    /* the text of this train.c, for ranks to compare */
        *text_end;
    int64_t shared,        /* bytes at the start of an arena that peers read */
        hosted;            /* bytes of the host arena */
    int64_t filed,         /* bytes of the file arena; 0: there is none */
        block,             /* bytes of one transfer between file and memory */
        depth,             /* transfers in flight */
        loads,             /* bytes read from the file in a training step */
        stores,            /* bytes written to it in a training step */
        brought,           /* offset in the host arena for a tile of masters read from the file */
        tile;              /* elements of a tile */
    const char *folder;    /* folder of the file arena */
    uint32_t queues;       /* queues in use, a bit each: 1 << ZR_MAIN ... */
    int64_t workspace,     /* GPU: offset of the kernels' workspace in the arena */
        host,              /* GPU: bytes of pinned host memory, the host arena included */
        pinned_batch,      /* GPU: offset in it of the first slot for a batch */
        pinned_batch_step, /* GPU: bytes from one slot to the next */
        pinned_scratch,    /* GPU: offset in it of the scratch that kernels write for the host */
        inbox,             /* offset of the first inbox slot, for pieces of peers whose memory
                              cannot be read */
        inbox_step;        /* bytes from one inbox slot to the next */
    int32_t margin,        /* GPU: SMs that matrix products leave free */
        blocks,            /* GPU: thread blocks of an NCCL communicator; 0: NCCL chooses */
        channels;          /* GPU: NCCL's channels for sends and receives within the margin */
    int32_t type,          /* type of parameters and activations: ZR_F32, ZR_BF16 or ZR_F16 */
        ncolumns,          /* length of `columns` */
        inboxes,           /* number of inbox slots */
        ranks,             /* number of ranks */
        events,            /* number of events */
        pinned_batches;    /* GPU: number of pinned slots for batches */
    int64_t micro_batches, /* A: micro-batches of a rank in a step */
        batch,             /* B: sequences of a micro-batch */
        sequence,          /* T: tokens of a sequence */
        sequence_blocks,   /* n: blocks of a sequence, each of which is a micro-batch; 0: one */
        context,           /* ranks that share the blocks of a sequence; 0: each has whole ones */
        sharing,           /* index of the group of these ranks, if there are several */
        batch_step,        /* bytes from a micro-batch in the arena to the next */
        vocab,             /* V: size of the vocabulary */
        vocab_from,        /* rows of a folder that --load grows to V; 0: it has V rows */
        vocab_drawn;       /* 1: the rows that it lacks have initial values; 0: its rows' mean */
    int64_t ignore,        /* token that is never a target; -1: none */
        skips;             /* ZR_FAULTY steps in a row that end the run */
    uint64_t shuffle,      /* 1: the order of samples is drawn anew for each epoch */
        seed;              /* seed of that order and of dropout */
    int64_t tokens,        /* offset of the tokens in the arena, int32 [B,T] */
        targets,           /* offset of the targets, int32 [B,T] */
        positions,         /* offset of the positions, int32 [B,T]; 0: there are none */
        documents,         /* offset of the positions of whole samples, int32 [B,T], beside blocks
                              of them; 0: there are none */
        keys,              /* offset of the samples' random keys, int64 [B]; 0: there are none */
        sample_keys,       /* offset of the keys of whole samples, int64 [B], beside blocks of them;
                              0: there are none */
        sample_targets;    /* offset of their targets, int32 [B,T]; 0: there are none */
    int64_t packed,        /* 1: positions restart at each document */
        end;               /* token that ends a document */
    double flops,          /* of a step of all ranks: 6N per token, plus attention */
        lora;              /* factor of the products of adapters */
    int64_t wire,          /* bytes that a rank receives in a training step */
        messages;          /* collectives of a rank in a training step */
    int64_t commands;      /* commands of a rank in a training step, with waits, without records */
    const char *const *recipe; /* `key: value` lines: all that determines the weights' bits */
    const zr_column *columns;  /* targets */
    const zr_group *groups;    /* groups of ranks */
    const zr_state *states;    /* data that a run keeps */
    const zr_tensor *tensors;  /* tensors of the weights' file */
    /* [ntensors] how each is quantized: ZK_INT8, ZK_NF4, or 0; NULL: none is */
    const uint8_t *formats;
    /* [ntensors] number of heads if the file's rows are [head][q, k, v] and here [q, k, v][head];
     * 0: rows have one order; NULL: all are 0 */
    const int32_t *heads;
    const uint8_t *marks; /* [ntensors] ZR_WHOLE ..., or 0; NULL: all are 0 */
    int64_t (*quantized)(int format, int64_t n), /* zk_quantized, zk_host_quantize, zk_host_keep */
        (*quantize)(uint8_t *to, const float *from, int64_t n, int format),
        (*keep)(uint8_t *to, const uint8_t *codes, const uint8_t *factors, const float *scale,
                int64_t n, int format);
    int (*keeps)(int format, int64_t block, int64_t nested); /* zk_host_keeps */
    const zr_function *functions;                            /* functions for --profile */
    const int64_t (*slots)[3]; /* {offset, bytes, number} of each class of slots that can die */
    const zr_axis *axes;       /* axes of all groups */
    /* [ngroups] queues on which a group has collectives, a bit each; NULL: on all in use */
    const uint32_t *meets;
    int64_t far;    /* bytes of `wire` that come from other hosts */
    int32_t owners, /* group whose order is the order of the shards that ranks own */
        local;      /* ranks of a host; 0: all ranks are on one */
    /* lengths of the tables above */
    int32_t naxes, ngroups, nstates, nrecipe, ntensors, nfunctions, nslots;
    /* Open a kernel context for ZR_MAIN, ZR_SUM or ZR_HOST. stream, device and host: the queue's
     * stream and its scratch on a GPU, else NULL. Return NULL and set *why on failure. */
    void *(*open)(int queue, void *stream, void *device, void *host, int column, int threads,
                  const char **why);
    void (*close)(int queue, void *k);
    const char *(*target)(void), /* zk_target: target that this process runs on */
        *(*object)(void);        /* zk_object: kernel object that it runs */
    /* zk_products: set the order in which a CPU sums products in bf16; NULL without bf16 */
    int (*products)(void *k, int order);
    int32_t order;                    /* order that the spec names; below 0: the run chooses */
    int64_t (*overhead)(int threads); /* bytes that the kernels allocate at start */
    /* zk_gemms: ZR_TAKE the table of GEMM algorithms from file `path`; ZR_TIME
     * products to make one; ZR_END finishes either. Return 0; 1 with a message in
     * why[n]; or -1 with an error there. */
    int (*gemms)(int what, const char *path, char *why, size_t n);
    /* zk_algorithms: hash of the algorithms of a GPU's products since the last call */
    uint64_t (*algorithms)(void *k);
    /* zk_probe: multiply two square matrices of parameters' type, to measure a GPU */
    void (*probe)(void *k, void *y, const void *x, const void *w, int64_t n);
    void (*init)(zr *z);    /* set the masters to their initial values */
    void (*publish)(zr *z); /* make parameters from masters, after init or loading */
    void (*step)(zr *z);    /* issue one training step: all micro-batches, then the update */
    zr_fn *report;          /* write double[ZR_REPORT] */
    zr_fn *clear;           /* set the sums of an evaluation to 0 */
    void (*eval)(zr *z);    /* add the loss of the batch in the arena to those sums */
    void (*total)(zr *z);   /* sum them over all ranks */
    zr_fn *mean;            /* write their mean: double *loss, *valid */
    zr_fn *sample;          /* sample a token: zr_draw * */
} zr_program;

/* Embed the text of the C file that contains this, as zr_text up to zr_text_end. The assembler
 * reads the file by the name that the compiler was given. */
#define ZR_OWN_TEXT                                                                                \
    __asm__(".pushsection .rodata\n"                                                               \
            ".globl zr_text, zr_text_end\n"                                                        \
            "zr_text: .incbin \"" __FILE__ "\"\n"                                                  \
            "zr_text_end: .byte 0\n"                                                               \
            ".popsection\n");                                                                      \
    extern const char zr_text[], zr_text_end[]

/* Initialise a table of zr_program and its length. */
#define ZR_TABLE(name) .name = name, .n##name = sizeof name / sizeof *name

/* Run the program: options, ranks, data, training loop, log. Returns the exit code. */
int zr_main(int argc, char **argv, const zr_program *p);

#endif
