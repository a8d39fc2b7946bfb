/* zr_int.h -- struct zr and the declarations that files of the runtime share; not for train.c.
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
 * For ranks that a launcher starts, where the launcher's own variables do not say it:
 *   ZR_RANK, ZR_WORLD_SIZE, ZR_LOCAL_RANK, ZR_LOCAL_WORLD_SIZE, ZR_ADDR=HOST:PORT
 *                          see zr_launcher.c
 *   ZR_TOKEN=WORD          name of the run: ranks with another word belong to another run
 *   ZR_BIND=ADDRESS        address on which rank 0 listens (default: all addresses of its host)
 *   ZR_PORTS=FIRST-LAST    range for ports that are not given (default: 20000-31999)
 *   ZR_MEET_S=N            seconds that ranks have to meet at the start (default: 300)
 */
#ifndef ZR_INT_H
#define ZR_INT_H
#include "zr_file.h"
#include "zr_groups.h"
#include "zr_order.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

/* Exit codes, which --help lists. A run that a signal ended exits with 128 + signal. */
enum {
    ZR_OK = 0,
    ZR_USER = 2,
    ZR_ENVIRONMENT = 3,
    ZR_DISAGREE = 4,
    ZR_DIED = 5,
    ZR_HOPELESS = 6,
    ZR_STUCK = 7,
    ZR_MISCOUNTED = 8,
    ZR_REQUEUE = 75 /* EX_TEMPFAIL */
};

enum { ZR_EAGER, ZR_LATE, ZR_SHUFFLED };
/* Counters of data moved: bytes from peers, collectives, bytes from other hosts, bytes read from
 * and written to the file arena. */
enum { ZR_WIRE, ZR_MESSAGES, ZR_FAR, ZR_LOADS, ZR_STORES, ZR_MOVED };
enum { ZR_OPERANDS = 16, ZR_TOLD = 512 };
enum { ZR_NO_LINE, ZR_RESULT, ZR_PROGRESS }; /* kinds of the last line on a terminal */
enum { ZR_SAVING, ZR_PROFILING, ZR_TEMPS };  /* users of a temporary file that zr_temp registers */

/* ---- options (zr_options.c) */
typedef struct zr_options {
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
    int64_t steps, val_every, val_tokens, verify_every, threads;
    int64_t sample, top_k, sample_seed;  /* sample_seed -1: not given */
    int64_t profile_first, profile_last; /* steps of --profile, from 1 */
    int hash, version, help, check_launch, no_graph, tune, drop_unknown, merge;
    int mode;      /* ZR_EAGER ..., from `queue` */
    int save_type; /* ZR_F32 ..., from `save_dtype`; -1: as loaded */
    char **words;  /* the whole command line, then NULL */
    uint64_t seed;
} zr_options;

/* ---- memory that all ranks share: one mapping, made before they start */
/* State of a rank's queue, which the parent reads (zr_stall.c). */
typedef struct zr_pulse {
    _Atomic(const char *) doing; /* name of the command that runs; NULL: none */
    _Atomic int held;            /* 1: that command waits for another queue */
    _Atomic uint32_t ended;      /* commands completed */
    _Atomic uint32_t waited;     /* times that it found a peer not yet there */
} zr_pulse;

/* Phase of a rank: starting or ending; between steps; in a step or an evaluation, where
 * commands must complete in time; in a call of the plane (zr_plane.c) that needs an
 * answer from another rank. */
enum { ZR_SILENT, ZR_BETWEEN, ZR_STEPS, ZR_AWAITS };
enum { ZR_HOST_NAME = 256, ZR_ADDRESS = 64 };

/* Shared state of one rank: its progress on each queue (entry ZR_QUEUES: zr_barrier). */
typedef struct zr_seat {
    struct {
        _Atomic uint32_t arrived, read;
    } turn[ZR_QUEUES + 1];
    uint64_t part[2];      /* its term of the sum of zr_total */
    _Atomic int64_t step;  /* current or last training step, from 1 */
    _Atomic int life;      /* ZR_SILENT ... */
    _Atomic int awaits;    /* 1 + the launcher's rank that it waits for; 0: none */
    _Atomic int group;     /* group in which it waits for that rank */
    char host[ZR_ADDRESS]; /* host of a launcher's rank; "": not known */
    zr_pulse pulse[ZR_QUEUES + 1] __attribute__((aligned(64)));
} __attribute__((aligned(64))) zr_seat;

/* Task of rank 0 that the parent shows as progress (zr_progress.c). */
typedef struct zr_task {
    /* "validation", and the unit of its parts; what NULL: no long task */
    _Atomic(const char *) what, unit;
    /* current part, from 1, and number of parts; 0 parts: not divided */
    _Atomic int64_t part, parts;
    _Atomic uint32_t before; /* commands that the rank had completed when the task began */
    /* zr_now() at that time; expected zr_now() at the end of the run, 0: unknown */
    _Atomic double since, end;
} zr_task;

typedef struct zr_shared {
    _Atomic uint32_t stop; /* 1: every rank must exit */
    _Atomic int32_t code;  /* exit code of the first failure; 0: none */
    _Atomic int64_t said;  /* step whose checkpoint this host's ranks have reported as missing */
    _Atomic int saved;     /* 1: the weights of --save are written */
    _Atomic double asked;  /* zr_now() of the signal to save and exit; 0: none */
    _Atomic int left;      /* 1: the run has saved and exits */
    _Atomic int live;      /* ZR_NO_LINE ... */
    _Atomic int writing;   /* 1: rank 0 or the parent is writing to the terminal */
    _Atomic double shown;  /* zr_now() of the last line of a step or of progress */
    zr_task task;
    char told[ZR_TOLD];           /* message of rank 0 to the others: zr_tell */
    char temp[ZR_TEMPS][ZR_FILE]; /* files to remove if the run ends now; "": none */
    zr_seat seat[];               /* [ranks] */
} zr_shared;

/* Record that a signal asks the run to save and exit; only the first one counts. */
static inline void zr_ask(zr_shared *s, double now)
{
    double none = 0;
    atomic_compare_exchange_strong(&s->asked, &none, now);
}

/* ---- queues */
typedef struct zr_queue {
    void *stream; /* for its kernels; NULL: the target has no streams */
    void *k;      /* kernel context; NULL: the queue runs no kernels */
    /* bytes received from peers; collectives; bytes received from other hosts */
    int64_t bytes, messages, far;
    int group;      /* group of the last collective */
    int64_t copied; /* bytes moved by zr_copy */
} zr_queue;

typedef struct zr_command zr_command;
struct zr_command {
    void (*run)(zr *z, int queue, const zr_command *c);
    const char *name; /* for --profile; NULL: not noted */
    zr_fn *fn;
    int64_t i[ZR_OPERANDS];
};

/* ---- --profile (zr_profile.c) */
enum { ZR_MOVES = -1, ZR_WORKS = -2 }; /* zr_note.kind of commands that move data; of functions */
typedef struct zr_note {               /* a command that a queue has run */
    const char *name;
    int64_t begin, end;  /* ns of zr_now(); on a GPU from events */
    int64_t step, bytes; /* bytes received from peers or copied */
    int32_t queue, kind; /* kind: ZR_MOVES, ZR_WORKS, or the queue that a wait waits for */
} zr_note;

typedef struct zr_row { /* a row of the table */
    const char *name;
    int64_t calls, bytes;
    double seconds;
    int queue, waits;
} zr_row;

typedef struct zr_profile {
    zr_note *note; /* [room]; NULL: --profile was not given */
    int64_t room;
    _Atomic int64_t used;
    double (*wall)[2]; /* [steps] times of start and end */
    zr_row *row;
    int rows, on; /* on: the current step is profiled */
} zr_profile;

/* ---- progress and log (zr_progress.c, zr_log.c) */
enum { ZR_TO_STDOUT, ZR_TO_LOG, ZR_TO_PROFILE, ZR_SINKS }; /* outputs of a run other than weights */
typedef struct zr_log {
    int file; /* JSONL file; -1: none. Only rank 0 has it */
    /* errno of the first failed write, after which nothing more is written; or 0 */
    int lost[ZR_SINKS];
    int tty;                     /* 1: stderr is a terminal */
    double busy, validated;      /* seconds spent in steps so far; in the last validation */
    double shown, shown_busy;    /* zr_now(), and `busy`, at the last line of a step */
    int64_t shown_step, skipped; /* that step; number of steps that changed no weight */
    int64_t untargeted;          /* steps since the start in which no token had a target */
} zr_log;

/* ---- ranks started by a launcher, on this host or others: not every target supports them */
typedef struct zr_far {
    void (*tell)(zr *z, void *what, size_t n); /* zr_tell between them */
    void (*total)(zr *z, uint64_t sum[2]);     /* zr_total between them */
} zr_far;

typedef struct zr_net {
    char host[ZR_HOST_NAME]; /* rank 0's host: names and addresses, separated by commas */
    int port;                /* rank 0's port; 0: not given, then `ask` finds it */
    void (*ask)(zr *z); /* called by all ranks: sets host and port; NULL: there is nobody to ask */
    const char *rank;   /* rank as the launcher gives it; NULL: not given, or no launcher */
    int own;            /* 1: rank 0's address is not given, so it is this host */
    uint64_t run;       /* hash of the launcher's name of the run */
    int local;          /* local rank of the lowest rank started here; -1: not known */
    int neighbours;     /* ranks on this host; 0: not known yet */
    int sharing;        /* ranks that share this rank's CPUs, as far as is known */
    int *line;          /* [ranks] sockets, -1: none; NULL: no connections at all */
    char (*end)[ZR_ADDRESS]; /* [ranks] addresses of the peers' ends */
    double until;            /* deadline for ranks to meet; 0: they have met */
} zr_net;

/* ---- a rank's watchdog (zr_watch.c) */
enum { ZR_RECENT = 32 };
typedef struct zr_watch {
    pthread_t thread;
    pthread_mutex_t lock;
    int alone, quit;            /* alone: do not check whether peers live */
    void (*look)(zr *z);        /* the target's check; NULL: none */
    double deadline;            /* when the work waited for must be complete; 0: no deadline */
    double limit;               /* seconds allowed for it */
    double recent[ZR_RECENT];   /* seconds of each of the last steps */
    int64_t steps;              /* number of steps measured */
    _Atomic(const char *) what; /* name and queue of the last command issued */
    _Atomic int queue;
} zr_watch;

/* ---- checkpoints (zr_checkpoint.c, zr_run.c) */
enum { ZR_STORED = 8 };
typedef struct zr_run { /* contents of run.json */
    char *text;         /* [n] */
    int64_t n;
    int64_t *number, *sum; /* offsets in the text of the numbers and of the checksums */
} zr_run;

typedef struct zr_checkpoints {
    int64_t from, last;   /* step the run resumed from; step of the newest checkpoint, -1: none */
    int64_t at;           /* step of the checkpoint being written */
    int beside;           /* 1: it is being written beside the next step */
    int64_t *kept, nkept; /* rank 0: steps of the checkpoints that may be deleted, oldest first */
    int64_t rooms; /* rank 0: number of folders that reserve space for the next checkpoints */
    zr_stored stored[ZR_STORED]; /* files of each checkpoint */
    zr_header header[ZR_STORED];
    /* rank 0: open files while a checkpoint is written; the last one is run.json */
    int fd[ZR_STORED + 1];
    int nstored;
    int64_t tensors, bytes; /* totals of all files */
    uint64_t *sums;         /* [tensors] checksums */
    zr_chunk *chunk;
    zr_run record;
    char data[ZR_TOLD];        /* description of the files of --data */
    const char *const *recipe; /* [nrecipe] the program's lines, then the weights of the sources */
    int nrecipe;
    int late;         /* 1: the time to save in has passed (--grace), the same on all ranks */
    int64_t unsynced; /* bytes this rank has written that may not be on the disk yet */
    double turned;    /* zr_now() between the last two steps; 0: none yet */
    double saving;    /* seconds since then that training stood still for checkpoints */
    /* zr_now() when the current checkpoint began; seconds of `saving` it caused */
    double begun, pause;
    double waited; /* seconds that an update waited for it */
    /* longest so far: time from one step to the next without `saving`; `saving` itself */
    double turn, save;
} zr_checkpoints;

/* ---- the thread that writes checkpoints beside a step (zr_writer.c) */
typedef struct zr_writer {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    int (*work)(zr *z, char *why);
    int there, busy, quit, bad; /* bad: last result of `work` */
    _Atomic int stop;           /* 1: nobody waits for it any longer */
    double patience, ended;     /* seconds to wait for it; zr_now() when `work` last returned */
    char why[ZR_WHY];
} zr_writer;

/* ---- a group as this rank sees it (zr_groups.c) */
typedef struct zr_members {
    int ranks, place, far; /* place: of this rank; far: members on other hosts */
    int *rank;             /* [ranks] rank at each place */
} zr_members;

/* ---- one rank */
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
    int cores;         /* cores for one rank of those this host allows, at least 1 */
    zr_seat **seat;    /* [ranks] NULL: this rank cannot read that rank's memory */
    const zr_far *far; /* functions to reach the other ranks; NULL: all are on this host */
    zr_members *group; /* [p->ngroups] */
    int reads_peers;   /* 0: pieces of peers are sent to the inbox */
    zr_net net;
    int column;           /* index of the target in p->columns and in train.c's launch tables */
    _Atomic int64_t step; /* current training step, from 0 */
    /* steps in a row that changed no weight, without those that search a loss scale */
    int64_t skips;
    zr_mix train, val;
    /* [nprompt] tokens of --prompt-tokens, with room for two samples; NULL: not given */
    int32_t *prompt;
    int64_t nprompt;
    zr_choices choices; /* of --eval */
    int64_t tries;      /* number of evaluations that --eval takes */
    int apart;          /* 1: all-reduces return this rank's own sums: zr_eval.c */
    zr_log log;
    zr_profile profile;
    zr_checkpoints checkpoints;
    char *words; /* buffer to verify states that the host cannot read; NULL: not asked for */
    zr_saving saving;
    zr_writer writer;
    zr_watch watch;
    /* zr_now() when zr_main began, all arenas were in place, the first step began */
    double started, ready, first;
    zr_queue queue[ZR_QUEUES];
    void *workspace, *pinned_scratch; /* scratch memory of the kernels; NULL: the target has none */
    uint32_t barriers;                /* barriers that this rank has entered */
    double peak;                      /* ZR_PEAK_GFLOPS; 0: not known */
    int64_t timeout;                  /* ZR_TIMEOUT_S; 0: not given */
};

/* ---- ranks (zr_ranks.c) */
/* Start z->ranks processes, each of which runs body, and watch over them. Returns the exit code. */
int zr_ranks(zr *z, void (*body)(zr *z));

/* ---- groups (zr_groups.c) */
void zr_groups_open(zr *z);

/* ---- how a run ends early (zr_fail.c) */
enum { ZR_LINE = 1024, ZR_SAY_MS = 1000 }; /* bytes of the last message; ms allowed to print it */
/* Write the name of a rank to who[] and return it: "rank 3", or with a
 * launcher "rank 3 on host n7". */
const char *zr_who(const zr *z, int rank, char who[ZR_HOST_NAME]);
const char *zr_speaker(const zr *z, char who[ZR_HOST_NAME]); /* name of this process in messages */
/* Print `rank R: message` on stderr unless another rank has failed first, and
 * exit all ranks with `code`. */
void zr_fail(zr *z, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4), noreturn));
/* Return the exit code for a file that cannot be used because of errno `error` (0: its contents are
 * wrong): ZR_ENVIRONMENT if the host's disk or memory is at fault, else ZR_USER. */
int zr_code_of(int error);
/* Print the line, then make all ranks exit; the parent cannot cut the line short. Does nothing if
 * another rank was first. */
void zr_end(zr *z, int code, const char *line, int n);
void zr_leave_if_stopped(zr *z);
/* Register a temporary file that this run locks. It is removed if the run ends before the next call
 * for the same user (ZR_SAVING ...). NULL: none. */
void zr_temp(zr *z, int of, const char *path);
double zr_now(void);                         /* seconds, monotonic */
void zr_wake(_Atomic uint32_t *word);        /* wake the sleepers on *word (zr_seats.c) */
void *zr_get(zr *z, int64_t n, size_t size); /* allocate n * size bytes, all zero */

/* ---- shared state of all ranks (zr_seats.c) */
void zr_lives(zr *z, int life); /* set this rank's phase: ZR_BETWEEN ... */
void zr_set(_Atomic uint32_t *word, uint32_t n);
/* Count that a peer was not yet there, for the parent (zr_stall.c). */
static inline void zr_count_wait(zr *z, int queue)
{
    zr_pulse *p = &z->shared->seat[z->rank].pulse[queue];
    atomic_fetch_add_explicit(&p->waited, 1, memory_order_relaxed);
}
/* Wait until *word, which a peer sets, reaches n. */
void zr_until(zr *z, int queue, _Atomic uint32_t *word, uint32_t n);
/* Begin the next turn and return its number. */
uint32_t zr_arrive(zr *z, int queue, uint32_t *turn);
void zr_all_arrived(zr *z, int queue, uint32_t turn);
/* Collectives of the ranks' own threads; all ranks call them in the same order. */
void zr_barrier(zr *z);
void zr_tell(zr *z, void *what, size_t n); /* broadcast what[n] from rank 0, n <= ZR_TOLD */
void zr_total(zr *z, uint64_t sum[2]);     /* sum over all ranks */

/* ---- the handshake (zr_handshake.c): fails where a rank's program differs from rank 0's, and,
 * once kernels are open, where kernels, options or data differ */
void zr_same_program(zr *z);
void zr_handshake(zr *z);
/* Describe the data: files, their sizes, a hash of samples; "" without data. */
void zr_data_text(const zr_mix *m, char text[ZR_TOLD]);
extern const char zr_digest[];  /* digest of the sources, 64 hex digits, from runtime/digest */
extern const char zr_release[]; /* contents of VERSION */

/* ---- ranges (zr_range.c) */
void zr_find_column(zr *z); /* sets z->column; fails if the program lacks this target */
const char *zr_queue_name(int queue);
/* Check the operands of a command. Each function fails, naming the command, if
 * one is outside its arena. */
void zr_check_queue(zr *z, const char *what, int queue);
void zr_check_event(zr *z, const char *what, int queue, int event);
void zr_check_call(zr *z, const char *name, int queue, int n);
void zr_check_copy(zr *z, int queue, int64_t from, int64_t to, int64_t bytes);
void zr_check_gather(zr *z, int queue, int group, int64_t from, int64_t from_step, int64_t to,
                     int64_t to_step, int64_t bytes);
/* Return the number of the inbox slot at `to`; fails if there is none. */
int zr_inbox(zr *z, const char *what, int64_t to);
void zr_check_alltoall(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to,
                       int64_t bytes);
void zr_check_reducescatter(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to,
                            int64_t bytes, int type);
void zr_check_done(zr *z, int queue, int group, int64_t at);
void zr_check_allreduce(zr *z, int queue, int group, int64_t from, int64_t to, int64_t n);
void zr_check_batch(zr *z, int64_t micro_batch, int64_t at);
void zr_check_states(zr *z); /* each master must be in one row of zr_program.states */

/* ---- dead slots (zr_range.c): filled with NaN, except in mode eager */
#define ZR_LAST zr_last(0)
/* Remove zr_last from the operands of command `what` and return a bit for each that had it. Fails
 * if such an operand is in no slot. */
uint32_t zr_unmark(zr *z, const char *what, int queue, int64_t *i, int n);
void zr_poison(zr *z, int queue, int64_t at, int64_t bytes); /* queue a fill with NaN */
/* Take one mark from `last` and return 1 with the slot of that operand in *at and *bytes. Returns 0
 * if none is left, or in mode eager. */
int zr_dying(zr *z, const char *what, int queue, const int64_t *i, uint32_t *last, int64_t *at,
             int64_t *bytes);
/* After command `what`, poison the slots of its operands that are marked in `last`. */
static inline void zr_dead(zr *z, const char *what, int queue, const int64_t *i, uint32_t last)
{
    int64_t at, bytes;
    while (zr_dying(z, what, queue, i, &last, &at, &bytes)) zr_poison(z, queue, at, bytes);
}

/* ---- the launcher (zr_launcher.c), how ranks meet (zr_meet.c) and talk (zr_plane.c) */
void zr_refuse_launcher(zr *z); /* fails if a launcher started this process */
/* Return the rank that the launcher gave this process, of `all`; NULL without a launcher, or if it
 * started only one task, or a pod of several ranks. */
const char *zr_launched(int all);
void zr_find_launcher(zr *z);        /* sets lowest, here, net, far; fails if variables disagree */
int zr_port_of(zr *z, uint64_t run); /* a port in ZR_PORTS that Linux gives to nobody else */
uint64_t zr_host(void);              /* hash of this host's name */
void zr_meet(zr *z);          /* called by every rank of a launcher; sets net.local, .neighbours */
extern const zr_far zr_plane; /* zr_plane.c */
/* Send n bytes to the rank if `out`, else receive them from it. */
void zr_plane_move(zr *z, int rank, void *at, size_t n, int out);
int zr_plane_late(const zr *z);      /* has the deadline to meet passed? */
void zr_plane_lost(zr *z, int rank); /* fails: the rank is gone */
void zr_plane_grace(zr *z); /* give a rank that knows why a peer is gone time to report it first */
void zr_plane_look(zr *z);  /* fails if a rank is gone */
void zr_plane_beat(zr *z);  /* tell all ranks that may wait for this one that it lives */
/* Fail on all ranks if two give the same `what`, which each must have for itself; "" is
 * not checked. All ranks call it. */
void zr_plane_alone(zr *z, const char *what, const char *advice);

/* ---- timeouts; a rank's watchdog (zr_watch.c) */
enum { ZR_TIMES = 10, ZR_UNKNOWN = -1 };
/* Return a timeout in seconds. usual: the time that the work usually takes. */
double zr_limit(const zr *z, double usual);
void zr_watch_start(zr *z);
void zr_watch_also(zr *z, void (*look)(zr *z)); /* also call look from now on */
void zr_watch_alone(zr *z);                     /* stop checking peers, but not the clock */
void zr_watch_stop(zr *z);
/* Note the last command issued; a watchdog names it if it hangs. */
static inline void zr_issued(zr *z, int queue, const char *what)
{
    atomic_store_explicit(&z->watch.what, what, memory_order_relaxed);
    atomic_store_explicit(&z->watch.queue, queue, memory_order_relaxed);
}
void zr_expect(zr *z);                  /* start the clock: the work must complete in time */
void zr_met(zr *z);                     /* stop the clock */
void zr_measure(zr *z, double seconds); /* record the time of a step */

/* ---- detection of ranks that make no progress (zr_stall.c) */
/* The parent's records of one rank, and of all. */
typedef struct zr_watched {
    pid_t pid;   /* 0: the process has ended */
    int stopped; /* 1: stopped by a signal and not continued */
    double cpu;  /* CPU seconds half-way through a quiet period, as is `waited` */
    uint32_t waited[ZR_QUEUES + 1];
} zr_watched;
typedef struct zr_stall {
    double looked;         /* time of the last look */
    double quiet, longest; /* seconds without a completed command: now, longest so far */
    uint32_t moves;        /* commands completed by all ranks at the last look */
    zr_watched *rank;      /* [here] */
} zr_stall;
/* Return whether it is time to end the run, with the reason in why[ZR_WHY]. */
int zr_stalled(zr *z, zr_stall *s, char *why);

/* ---- the target: memory */
/* Make z->t before the ranks start, and check whether there is room for them. */
void zr_prepare(zr *z);
void zr_open(zr *z);  /* open a rank's device and what its kernels need */
void zr_arena(zr *z); /* allocate this rank's arena, all zero, and map what peers share */
/* Find the place for the next tokens and targets, int32 [B,T] each, which the rank's own thread
 * fills. zr_batch_filled then copies them to their places in the arena, or `at` bytes after these,
 * before any command issued later; with them go positions and keys, if the program has them. first:
 * number of the first sample in the run, or ZR_NO_SAMPLE if they are not for training. */
enum { ZR_NO_SAMPLE = -1 };
void zr_batch_place(zr *z, int64_t at, int32_t **tokens, int32_t **targets);
void zr_batch_filled(zr *z, int64_t at, int64_t first);
/* Compute each token's position in its document. A document begins with each sample
 * and after each token `end`. */
static inline void zr_positions(const zr_program *p, const int32_t *tokens, int32_t *positions)
{
    for (int64_t i = 0; i < p->batch * p->sequence; i++)
        positions[i] = i % p->sequence && tokens[i - 1] != p->end ? positions[i - 1] + 1 : 0;
}

/* Compute the random keys of the samples from `first` on, int64 [B]; 0: no dropout. */
static inline void zr_keys(const zr_program *p, int64_t first, int64_t *keys)
{
    for (int64_t b = 0; b < p->batch; b++) {
        uint64_t own = p->seed + (uint64_t)(first + b) * UINT64_C(0xd1342543de82ef95);
        keys[b] = first < 0 ? 0 : (int64_t)(own << 1 | 1);
    }
}

/* ---- the target: queues */
void zr_queues_start(zr *z);
void zr_queues_stop(zr *z);
void zr_step_begin(zr *z); /* around program->step: test modes run ahead in it */
/* Wait until ZR_MAIN is empty. Other queues may still run work that the next step waits for. */
void zr_step_end(zr *z);
/* Make the graph that zr_replay will launch before the first step, so that its
 * memory is allocated then. */
void zr_ready(zr *z, int graph, void (*issue)(zr *z));
void zr_finish(zr *z, int queue);                    /* wait until the queue is empty */
void zr_drain(zr *z);                                /* wait until all queues are empty */
void zr_push(zr *z, int queue, const zr_command *c); /* runs c at once if the queue is inline */
extern const int zr_is_gpu;                          /* 0: the target lacks a GPU's options */
void zr_epilogue(zr *z);                             /* print the target's report after training */

/* ---- writing beside a step (zr_writer.c); these do nothing if there is no writer */
void zr_writer_start(zr *z);
void zr_writer_stop(zr *z);
void zr_writer_begin(zr *z, int (*work)(zr *z, char *why)); /* start work on its thread */
double zr_writer_wait(zr *z); /* wait until it ends or is given up; returns the seconds */
/* Wait for the writer before an update is issued, on all ranks: data being saved must not change.
 * Neither the parent nor a watchdog takes a rank that waits here for a hang. */
void zr_writer_before_update(zr *z);

/* ---- evaluations and multiple choice (zr_eval.c) */
/* Make tokens and targets, int32 [B,T], empty from element `first` on. */
void zr_blank(const zr *z, int64_t first, int32_t *tokens, int32_t *targets);
void zr_all_dead(zr *z);              /* poison all slots that can die, once all work is done */
double zr_mean(zr *z, double *valid); /* mean loss of all batches evaluated since `clear` */
static inline int64_t zr_address(void *p) { return (int64_t)(intptr_t)p; } /* as an operand */
void zr_eval_open(zr *z);          /* fails if the file is wrong */
void zr_eval(zr *z, int64_t step); /* does nothing without --eval; step: steps done */

/* ---- the order of a CPU's bf16 products (zr_checkpoint.c) */
/* Set z->order: the spec's, that of --products, that of the resumed run, or the faster one. */
void zr_settle_order(zr *z);
static inline const char *zr_order_name(int order) { return order == ZR_TILES ? "tiles" : "pairs"; }
/* Return the recipe's line for the order; NULL if the program's recipe has it or there is none. */
static inline const char *zr_order_line(const zr *z)
{
    if (z->order < 0 || z->p->order >= 0) return NULL;
    return z->order == ZR_TILES ? "train.products: \"tiles\"" : "train.products: \"pairs\"";
}

/* ---- hashes (zr_verify.c); all queues must be empty */
/* Compute the exact hash of the masters, which does not depend on how they are sharded. */
void zr_hash_weights(zr *z, uint64_t sum[2]);
void zr_verify_open(zr *z);
int zr_verify_due(const zr *z, int64_t steps); /* is a check due after this number of steps? */
/* Log that hash. Fails if a rank's copy of replicated data differs. */
void zr_verify(zr *z);

/* ---- --profile (zr_profile.c); these do nothing if it is not given */
int64_t zr_profile_bytes(const zr *z); /* bytes of a rank's notes */
void zr_profile_open(zr *z);           /* fails if the file cannot be written */
void zr_profile_start(zr *z);
int zr_profile_apart(const zr *z);       /* is this step or the next one profiled? */
void zr_profile_step(zr *z, int begins); /* begins 1: the step begins; 0: it has ended */
void zr_profile_end(zr *z);              /* after the last profiled step: write table and file */
/* Return a new note for a command of a queue; NULL: the command is not noted. */
zr_note *zr_note_make(zr *z, int queue, const char *name, int kind);
void zr_note_done(zr *z, zr_note *note);
static inline zr_note *zr_note_begin(zr *z, int queue, const char *name, int kind)
{
    return z->profile.on ? zr_note_make(z, queue, name, kind) : NULL;
}
static inline void zr_note_end(zr *z, zr_note *note)
{
    if (note) zr_note_done(z, note);
}
/* The target's clocks. zr_clocks_start: room for n notes. zr_clocks_step: a profiled step begins,
 * queues are empty. zr_clock: record the note's start or end on its queue. zr_clocks_end: queues
 * are empty; fill in start and end of all notes. */
void zr_clocks_start(zr *z, int64_t n);
void zr_clocks_step(zr *z);
void zr_clock(zr *z, zr_note *note, int end);
void zr_clocks_end(zr *z);

/* ---- the file arena (zr_disk.c) */
void zr_disk_open(zr *z); /* allocate it, all zero; fails if the disk has no room */
/* Move bytes between `at` in memory and offset `there` of the file. ZR_LOAD, ZR_FETCH: read;
 * ZR_STORE: write. */
void zr_disk_move(zr *z, int queue, void *at, int64_t there, int64_t bytes);
int64_t zr_disk_moved(const zr *z, int queue); /* bytes so far */

/* ---- options (zr_options.c) */
void zr_parse(zr *z, zr_options *o, int argc, char **argv);
void zr_choose_threads(zr *z); /* sets z->threads: as given, else a share of the host's cores */
/* Write the options that all ranks must be given alike, in a fixed order, each as `--steps 3`. */
void zr_options_text(const zr *z, char *text, size_t n);
void zr_help(zr *z, const char *program);
void zr_version(zr *z);
/* Return a number from the environment, at most `most`; 0 if the variable is not set. */
int64_t zr_setting(zr *z, const char *name, int64_t most);

/* splitmix64: return the next random number */
static inline uint64_t zr_random(uint64_t *state) { return zr_mixed(*state += 0x9e3779b97f4a7c15); }

/* Return whether the program uses this queue. */
static inline int zr_uses(const zr *z, int queue) { return z->p->queues >> queue & 1; }

/* ---- log (zr_log.c); only rank 0 prints. A failed write does not end the run. */
/* Print to stdout or stderr. Bytes that are no text, and line ends within operands, become '?'. */
void zr_print(zr *z, int file, const char *format, ...) __attribute__((format(printf, 3, 4)));
void zr_print_byte(zr *z, char byte); /* to stdout, unchanged */
/* Print to stderr, on any rank. */
void zr_print_any(zr *z, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Print a line to stderr. On a terminal a line of kind ZR_RESULT or ZR_PROGRESS
 * may later be overwritten. */
void zr_show(zr *z, int kind, const char *line);
int64_t zr_parameters(const zr_program *p);
static inline double zr_rate(double n, double of) { return of > 0 ? n / of : 0; }
static inline double zr_gib(int64_t bytes) { return (double)bytes / (1 << 30); }
double zr_step_tokens(const zr *z);       /* of all ranks */
int64_t zr_samples(const zr_mix *m);      /* in an epoch of all sources */
void zr_lose(zr *z, int sink, int error); /* report once that output to sink ZR_TO_... has failed */
/* Fail if s, the file `name` of `option`, is one that the run reads. */
struct stat;
void zr_refuse_inputs(zr *z, const char *option, const char *name, const struct stat *s);
/* Fail if it is a file that --save writes. */
void zr_refuse_saved(zr *z, const char *option, const char *name);
/* Format a mean loss into `text` and return it; "none" if no token had a target. */
enum { ZR_LOSS_TEXT = 352 };
const char *zr_loss_text(char text[ZR_LOSS_TEXT], int digits, double loss, double targets);
void zr_log_open(zr *z);  /* fails if the log file is an input or another run's log */
void zr_log_begin(zr *z); /* write the run's record, once it is sure to start */
/* seconds: time of the step. */
void zr_log_step(zr *z, const double report[ZR_REPORT], double seconds);
void zr_log_val(zr *z, int64_t step, double loss, double tokens);
void zr_log_eval(zr *z, int64_t step, int64_t right, int64_t examples);
/* seconds: from its start to its end; pause: seconds that training stood still for it */
void zr_log_checkpoint(zr *z, int64_t step, double seconds, double pause);
void zr_log_verified(zr *z, int64_t step, const uint64_t sum[2], double seconds);
/* moved: by this rank in all steps */
void zr_log_end(zr *z, const double report[ZR_REPORT], const int64_t moved[ZR_MOVED]);
/* Report once more what output was lost. Fails if that output was the purpose of the run. */
void zr_log_close(zr *z);

/* ---- progress on stderr (zr_progress.c) */
void zr_show_start(zr *z); /* describe the run before its first step */
void zr_show_step(zr *z, const double report[ZR_REPORT]);
void zr_show_validated(zr *z, int64_t steps, double seconds); /* seconds: time of the validation */
/* Record that this rank begins task `what` of so many parts; NULL: no long task. */
void zr_progress(zr *z, const char *what, const char *unit, int64_t parts);
void zr_progress_look(zr *z); /* called often by the parent: shows the task */

#endif
