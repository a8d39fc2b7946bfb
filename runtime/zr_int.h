/* zr_int.h -- struct zr and what the files of the runtime share; train.c never sees it.
 *
 * The files runtime/zr_*.c are the same for every target. What they ask of a target (its memory,
 * queues, collectives) is in cpu/ and in cuda/, one of which the linker puts behind this header.
 *
 * Invariants
 *  1. All state of a rank hangs off its struct zr; what ranks share hangs off struct zr_shared.
 *  2. Whoever finds that a run cannot go on calls zr_fail: the first one speaks, every rank leaves.
 *  3. The rank's own thread issues; what becomes of a command is the target's affair.
 *  4. Only a target knows where arenas lie; the rest copies with zr_read and zr_write.
 *
 * Environment
 *   ZR_TIMEOUT_S=N         a run in which nothing has moved for so long in a step or an evaluation
 *                          ends with exit code 7. Default: ten minutes in the first step, then no
 *                          less than a minute and ten times the longest that it has taken: on a
 *                          CPU any rank to end a command, on a GPU a rank to do a step (median);
 *                          on a CPU a command that uses a processor has ten times as long
 * and for tests and measurements (the targets have some of their own)
 *   ZR_SAVE_S=N            an update waits so long for a checkpoint beside its step (default: 60)
 *   ZR_SHARD_BYTES=N       --save's files have so many bytes of tensors (default: 5 GB)
 *   ZR_PEAK_GFLOPS=X       of all ranks: steps' lines and the log say which share of X is reached
 * and for ranks that a launcher starts, where its own variables do not say it
 *   ZR_RANK, ZR_WORLD_SIZE, ZR_LOCAL_RANK, ZR_LOCAL_WORLD_SIZE, ZR_ADDR=HOST:PORT
 *                          see zr_launcher.c
 *   ZR_TOKEN=WORD          ranks that have not the same are of other runs
 *   ZR_BIND=ADDRESS        rank 0 listens there alone (default: on all of its host's addresses)
 *   ZR_PORTS=FIRST-LAST    where the ports lie that nobody names (default: 20000-31999)
 *   ZR_MEET_S=N            ranks have so long to meet at the start (default: 300)
 */
#ifndef ZR_INT_H
#define ZR_INT_H
#include "zr_file.h"
#include "zr_groups.h"
#include "zr_order.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

/* Exit codes, also in --help. A run that a signal ended leaves with 128 + signal. */
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
/* What is counted as it moves: bytes from peers, collectives, bytes from and to the file. */
enum { ZR_WIRE, ZR_MESSAGES, ZR_FAR, ZR_LOADS, ZR_STORES, ZR_MOVED };
enum { ZR_OPERANDS = 16, ZR_TOLD = 512 };
enum { ZR_NO_LINE, ZR_RESULT, ZR_PROGRESS }; /* what stands on a terminal's last line */
enum { ZR_SAVING, ZR_PROFILING, ZR_TEMPS };  /* what makes a file under another name first */

/* ---- options (zr_options.c) */
typedef struct zr_options {
    zr_given data[ZR_SOURCES];
    int ndata; /* how many of these are given */
    const char *val, *eval, *load, *save, *log, *queue, *nvme, *gemms, *isa,
        *products;      /* NULL: not given */
    const char *tokens; /* "uint16", "uint32": what --data and --val hold if they do not tell */
    const char *profile, *profile_steps, *save_dtype, *adapter;
    const char *prompt, *temperature, *top_p; /* of --sample */
    double heat, share;                       /* temperature, top_p */
    const char *checkpoints, *resume, *accept_change;
    int64_t save_every, keep, keep_every, resume_step; /* 0: not given */
    int64_t max_time, grace;                           /* seconds; 0: not given */
    int64_t steps, val_every, val_tokens, verify_every, threads;
    int64_t sample, top_k, sample_seed;  /* sample_seed -1: not given */
    int64_t profile_first, profile_last; /* from 1; of --profile */
    int hash, version, help, check_launch, no_graph, tune, drop_unknown, merge;
    int mode;      /* ZR_EAGER ... from `queue` */
    int save_type; /* ZR_F32 ... from `save_dtype`; -1: as loaded */
    char **words;  /* all of the command line, then NULL */
    uint64_t seed;
} zr_options;

/* ---- what all ranks see: one mapping, made before they start */
/* What a queue of a rank does, for the parent to see (zr_stall.c). */
typedef struct zr_pulse {
    _Atomic(const char *) doing; /* a command's name; NULL: none */
    _Atomic int held;            /* that command is a wait for another queue */
    _Atomic uint32_t ended;      /* commands */
    _Atomic uint32_t waited;     /* how often it has found a peer not there yet */
} zr_pulse;

/* Where a rank is: at its start or end; between; in a step or an evaluation, where commands must
 * end; in a call of the plane (zr_plane.c), where another rank must be heard. */
enum { ZR_SILENT, ZR_BETWEEN, ZR_STEPS, ZR_AWAITS };
enum { ZR_HOST_NAME = 256, ZR_ADDRESS = 64 };

/* A rank's place: how far it has come on each queue (ZR_QUEUES: zr_barrier). */
typedef struct zr_seat {
    struct {
        _Atomic uint32_t arrived, read;
    } turn[ZR_QUEUES + 1];
    uint64_t part[2];      /* of a sum: zr_total */
    _Atomic int64_t step;  /* that it is in, or was last, from 1 */
    _Atomic int life;      /* ZR_SILENT ... */
    _Atomic int awaits;    /* the launcher's rank that it waits to hear from, and 1; 0: none */
    _Atomic int group;     /* that such a rank is waited for in */
    char host[ZR_ADDRESS]; /* a launcher's rank's; "": not known */
    zr_pulse pulse[ZR_QUEUES + 1] __attribute__((aligned(64)));
} __attribute__((aligned(64))) zr_seat;

/* What rank 0 is at, for its parent to show (zr_progress.c). */
typedef struct zr_task {
    _Atomic(const char *) what, unit; /* "validation"; of its parts; what NULL: nothing long */
    _Atomic int64_t part, parts;      /* the one it is at, from 1; 0 parts: it has none */
    _Atomic uint32_t before;          /* commands that the rank had ended when it began */
    _Atomic double since, end;        /* zr_now() then; and when the run will end, 0: unknown */
} zr_task;

typedef struct zr_shared {
    _Atomic uint32_t stop; /* 1: leave */
    _Atomic int32_t code;  /* exit code of the first failure, 0: none */
    _Atomic int64_t said;  /* the step whose checkpoint this host's ranks said not to be there */
    _Atomic int saved;     /* the weights of --save are there */
    _Atomic double asked;  /* zr_now() of the signal to save and leave; 0: there was none */
    _Atomic int left;      /* it has done so */
    _Atomic int live;      /* ZR_NO_LINE ... */
    _Atomic int writing;   /* rank 0 or the parent has its turn at the terminal */
    _Atomic double shown;  /* zr_now() of the last line of a step or of progress */
    zr_task task;
    char told[ZR_TOLD];           /* what rank 0 tells the others: zr_tell */
    char temp[ZR_TEMPS][ZR_FILE]; /* files to remove if the run ends now; "": none */
    zr_seat seat[];               /* [ranks] */
} zr_shared;

/* A signal asks the run to save and leave; the first one counts. */
static inline void zr_ask(zr_shared *s, double now)
{
    double none = 0;
    atomic_compare_exchange_strong(&s->asked, &none, now);
}

/* ---- queues */
typedef struct zr_queue {
    void *stream;                 /* for the kernels; NULL: the target has none */
    void *k;                      /* kernel context; NULL: this queue runs no kernel */
    int64_t bytes, messages, far; /* received from peers; collectives; bytes from other hosts */
    int group;                    /* that the last collective was of */
    int64_t copied;               /* bytes that zr_copy has moved */
} zr_queue;

typedef struct zr_command zr_command;
struct zr_command {
    void (*run)(zr *z, int queue, const zr_command *c);
    const char *name; /* for --profile; NULL: it is not noted */
    zr_fn *fn;
    int64_t i[ZR_OPERANDS];
};

/* ---- --profile (zr_profile.c) */
enum { ZR_MOVES = -1, ZR_WORKS = -2 }; /* zr_note.kind: no function and no wait; a function */
typedef struct zr_note {               /* of a command that a queue has run */
    const char *name;
    int64_t begin, end;  /* ns: zr_now's; on a GPU, of its events */
    int64_t step, bytes; /* moved by it: received from peers, or copied */
    int32_t queue, kind; /* kind: ZR_MOVES ..., or the queue that a wait is for */
} zr_note;

typedef struct zr_row { /* of the table */
    const char *name;
    int64_t calls, bytes;
    double seconds;
    int queue, waits;
} zr_row;

typedef struct zr_profile {
    zr_note *note; /* [room]; NULL: not asked for */
    int64_t room;
    _Atomic int64_t used;
    double (*wall)[2]; /* [steps] begin, end */
    zr_row *row;
    int rows, on; /* on: in a step that is profiled */
} zr_profile;

/* ---- progress and log (zr_progress.c, zr_log.c) */
enum { ZR_TO_STDOUT, ZR_TO_LOG, ZR_TO_PROFILE, ZR_SINKS }; /* what a run writes beside weights */
typedef struct zr_log {
    int file;                    /* JSONL, -1: none; only rank 0 has it */
    int lost[ZR_SINKS];          /* errno of its first failure: no more goes there; or 0 */
    int tty;                     /* stderr is a terminal */
    double busy, validated;      /* seconds in steps so far, in the last validation */
    double shown, shown_busy;    /* zr_now() and busy at the last line of a step */
    int64_t shown_step, skipped; /* its step; steps that changed no weight */
    int64_t untargeted;          /* steps without a target since the start */
} zr_log;

/* ---- ranks that a launcher has started, on this host or another: a target may have these */
typedef struct zr_far {
    void (*tell)(zr *z, void *what, size_t n); /* as zr_tell */
    void (*total)(zr *z, uint64_t sum[2]);     /* as zr_total */
} zr_far;

typedef struct zr_net {
    char host[ZR_HOST_NAME]; /* where rank 0 listens: names and addresses, with commas */
    int port;                /* 0: nobody has said where; then: */
    void (*ask)(zr *z);      /* by all ranks: host and port; NULL: there is nobody to ask */
    const char *rank;        /* what the launcher says; NULL: nothing, or there is none */
    int own;                 /* 1: nobody has said where, so on this host */
    uint64_t run;            /* hash of the launcher's name for it */
    int local;               /* of the lowest rank here on its host; -1: not known */
    int neighbours;          /* ranks on this host; 0: not known yet */
    int sharing;             /* and on this rank's CPUs, as far as is known */
    int *line;               /* [ranks] connections, -1: none; NULL: none at all */
    char (*end)[ZR_ADDRESS]; /* [ranks] where their other ends are */
    double until;            /* when ranks must have met; 0: they have */
} zr_net;

/* ---- what a rank's watchdog looks at (zr_watch.c) */
enum { ZR_RECENT = 32 };
typedef struct zr_watch {
    pthread_t thread;
    pthread_mutex_t lock;
    int alone, quit;            /* alone: peers may go */
    void (*look)(zr *z);        /* the target's part; NULL: none */
    double deadline;            /* by when what is waited for must be done; 0: none */
    double limit;               /* seconds it was given */
    double recent[ZR_RECENT];   /* seconds of the last steps */
    int64_t steps;              /* that have been measured */
    _Atomic(const char *) what; /* the last thing issued, and on which queue */
    _Atomic int queue;
} zr_watch;

/* ---- checkpoints (zr_checkpoint.c, zr_run.c) */
enum { ZR_STORED = 8 };
typedef struct zr_run { /* run.json */
    char *text;         /* [n] */
    int64_t n;
    int64_t *number, *sum; /* where in the text the numbers and the checksums stand */
} zr_run;

typedef struct zr_checkpoints {
    int64_t from, last;          /* the step that the run goes on from; of the newest, -1: none */
    int64_t at;                  /* the step of the one that is written */
    int beside;                  /* it is, beside the next step */
    int64_t *kept, nkept;        /* rank 0: those that may go, from the oldest on */
    int64_t rooms;               /* rank 0: folders that hold room for the next ones */
    zr_stored stored[ZR_STORED]; /* the files of each */
    zr_header header[ZR_STORED];
    int fd[ZR_STORED + 1]; /* rank 0: while they are written; of run.json, behind theirs */
    int nstored;
    int64_t tensors, bytes; /* of all files */
    uint64_t *sums;         /* [tensors] */
    zr_chunk *chunk;
    zr_run record;
    char data[ZR_TOLD];        /* what --data holds */
    const char *const *recipe; /* [nrecipe] lines: the program's, sources' weights */
    int nrecipe;
    int late;            /* the time to save in has passed (--grace): alike on all ranks */
    int64_t unsynced;    /* bytes of this rank that may not be on the disk */
    double turned;       /* zr_now() between the last two steps; 0: there was none yet */
    double saving;       /* seconds that training stood still for checkpoints since then */
    double begun, pause; /* zr_now(), and such seconds, of the one that is written */
    double waited;       /* that an update has waited for it */
    double turn, save;   /* the longest so far: from one step to the next but for these; of these */
} zr_checkpoints;

/* ---- what writes beside a step (zr_writer.c) */
typedef struct zr_writer {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    int (*work)(zr *z, char *why);
    int there, busy, quit, bad; /* bad: what work returned last */
    _Atomic int stop;           /* nobody waits for it any longer */
    double patience, ended;     /* seconds that it is waited for; zr_now() when work ended last */
    char why[ZR_WHY];
} zr_writer;

/* ---- a group, as this rank sees it (zr_groups.c) */
typedef struct zr_members {
    int ranks, place, far; /* place: this rank's; far: how many of them are on other hosts */
    int *rank;             /* [ranks] which has each place */
} zr_members;

/* ---- one rank */
typedef struct zr_target zr_target; /* what a target keeps: cpu/cpu.h, cuda/cuda.h */
typedef struct zr_disk zr_disk;     /* zr_disk.c */

struct zr {
    const zr_program *p;
    const zr_options *o;
    zr_shared *shared;
    zr_target *t;
    zr_disk *disk;     /* NULL: there is no file arena */
    int rank, ranks;   /* rank -1: the parent */
    int told_to_leave; /* the parent: a signal has asked the run to save and leave */
    int lowest, here;  /* the parent starts `here` ranks, from `lowest` on */
    int threads;       /* of a queue's kernels */
    int order; /* of products in bf16, ZR_PAIRS ...; -1: none; on a GPU that of its checkpoint */
    int cores; /* a rank's part of those that this host allows, 1 at least */
    zr_seat **seat;    /* [ranks] NULL: of a rank whose memory this one does not see */
    const zr_far *far; /* how to reach the others; NULL: all ranks are here */
    zr_members *group; /* [p->ngroups] */
    int reads_peers;   /* 0: what peers have is sent, pieces to the inbox */
    zr_net net;
    int column;           /* in p->columns, and in train.c's launch tables */
    _Atomic int64_t step; /* training step in work, from 0 */
    int64_t skips;        /* steps in a row without an effect, but for the search of a scale */
    zr_mix train, val;
    int32_t *prompt; /* of --prompt-tokens: [nprompt], room for two samples; NULL: not given */
    int64_t nprompt;
    zr_choices choices; /* --eval's */
    int64_t tries;      /* evaluations that it takes */
    int apart;          /* what is summed over all ranks is this one's own: zr_eval.c */
    zr_log log;
    zr_profile profile;
    zr_checkpoints checkpoints;
    char *words; /* of what is verified, where it is copied; NULL: nothing is */
    zr_saving saving;
    zr_writer writer;
    zr_watch watch;
    double started, ready, first; /* zr_now() at zr_main, all arenas in place, first step */
    zr_queue queue[ZR_QUEUES];
    void *workspace, *pinned_scratch; /* scratch of the kernels; NULL: the target has none */
    uint32_t barriers;                /* that this rank has come to */
    double peak;                      /* ZR_PEAK_GFLOPS; 0: not known */
    int64_t timeout;                  /* ZR_TIMEOUT_S; 0: not given */
};

/* ---- ranks (zr_ranks.c) */
/* Starts z->ranks processes, each running body; watches over them; returns the exit code. */
int zr_ranks(zr *z, void (*body)(zr *z));

/* ---- groups (zr_groups.c) */
void zr_groups_open(zr *z);

/* ---- how a run ends before its time (zr_fail.c) */
enum { ZR_LINE = 1024, ZR_SAY_MS = 1000 }; /* bytes of a last word; how long it may take */
/* "rank 3", of a launcher's ranks "rank 3 on host n7", of a rank of this host; in who[] */
const char *zr_who(const zr *z, int rank, char who[ZR_HOST_NAME]);
const char *zr_speaker(const zr *z, char who[ZR_HOST_NAME]); /* this process, as messages name it */
/* Says `rank R: what` on stderr unless another rank was first; every rank leaves with `code`. */
void zr_fail(zr *z, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4), noreturn));
/* Of a file that cannot be used, by errno (0: the file is wrong): ZR_ENVIRONMENT where it is the
 * host's disk or memory, else ZR_USER. */
int zr_code_of(int error);
/* The line is said, and then everybody leaves: whoever waits for the end of all cannot cut it
 * short. Nothing where another rank was first. */
void zr_end(zr *z, int code, const char *line, int n);
void zr_leave_if_stopped(zr *z);
/* Registers a file that this run locks, made or still to be made, to be removed should the run end
 * before the next call of this kind (ZR_SAVING ...); NULL: none. */
void zr_temp(zr *z, int of, const char *path);
double zr_now(void);                         /* seconds, monotonic */
void zr_wake(_Atomic uint32_t *word);        /* who sleeps there (zr_seats.c) */
void *zr_get(zr *z, int64_t n, size_t size); /* memory, all zero */

/* ---- the seats of all ranks (zr_seats.c) */
void zr_lives(zr *z, int life); /* where this rank is from here on: ZR_BETWEEN ... */
void zr_set(_Atomic uint32_t *word, uint32_t n);
/* A peer is not there yet: counted, for the parent (zr_stall.c) */
static inline void zr_count_wait(zr *z, int queue)
{
    zr_pulse *p = &z->shared->seat[z->rank].pulse[queue];
    atomic_fetch_add_explicit(&p->waited, 1, memory_order_relaxed);
}
/* Until *word, a peer's, has reached n. */
void zr_until(zr *z, int queue, _Atomic uint32_t *word, uint32_t n);
uint32_t zr_arrive(zr *z, int queue, uint32_t *turn); /* the next turn; returns it */
void zr_all_arrived(zr *z, int queue, uint32_t turn);
/* From the rank's own thread only, on all ranks alike: */
void zr_barrier(zr *z);
void zr_tell(zr *z, void *what, size_t n); /* what[n] = rank 0's; n <= ZR_TOLD */
void zr_total(zr *z, uint64_t sum[2]);     /* the sum over all ranks */

/* ---- the handshake (zr_handshake.c): fails where ranks have another program than rank 0; then,
 * when kernels are open, other kernels, options or data */
void zr_same_program(zr *z);
void zr_handshake(zr *z);
/* Files, their size, a hash of samples; "" where there are none */
void zr_data_text(const zr_mix *m, char text[ZR_TOLD]);
extern const char zr_digest[];  /* of the sources, 64 hex digits, by runtime/digest */
extern const char zr_release[]; /* what VERSION has */

/* ---- ranges (zr_range.c) */
void zr_find_column(zr *z); /* z->column; fails where the program has none */
const char *zr_queue_name(int queue);
/* Each fails, naming the command, where it leaves its arena. */
void zr_check_queue(zr *z, const char *what, int queue);
void zr_check_event(zr *z, const char *what, int queue, int event);
void zr_check_call(zr *z, const char *name, int queue, int n);
void zr_check_copy(zr *z, int queue, int64_t from, int64_t to, int64_t bytes);
void zr_check_gather(zr *z, int queue, int group, int64_t from, int64_t from_step, int64_t to,
                     int64_t to_step, int64_t bytes);
/* The number of the slot of the inbox that begins at `to`; fails where none does. */
int zr_inbox(zr *z, const char *what, int64_t to);
void zr_check_alltoall(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to,
                       int64_t bytes);
void zr_check_reducescatter(zr *z, int queue, int group, int64_t at, int64_t step, int64_t to,
                            int64_t bytes, int type);
void zr_check_done(zr *z, int queue, int group, int64_t at);
void zr_check_allreduce(zr *z, int queue, int group, int64_t from, int64_t to, int64_t n);
void zr_check_batch(zr *z, int64_t micro_batch, int64_t at);
void zr_check_states(zr *z); /* rows of zr_program: each master is in one */

/* ---- what is dead (zr_range.c): nothing in mode eager; in others NaN */
#define ZR_LAST zr_last(0)
/* Takes zr_last off operands of the command `what`; a bit for each that had it. Fails where that is
 * in no slot. */
uint32_t zr_unmark(zr *z, const char *what, int queue, int64_t *i, int n);
void zr_poison(zr *z, int queue, int64_t at, int64_t bytes); /* of the target's queue */
/* Takes a mark off `last`; where that operand's slot lies. 0: none is left, or mode eager. */
int zr_dying(zr *z, const char *what, int queue, const int64_t *i, uint32_t *last, int64_t *at,
             int64_t *bytes);
/* Behind the command `what`: the slots of the operands that were marked. */
static inline void zr_dead(zr *z, const char *what, int queue, const int64_t *i, uint32_t last)
{
    int64_t at, bytes;
    while (zr_dying(z, what, queue, i, &last, &at, &bytes)) zr_poison(z, queue, at, bytes);
}

/* ---- who started this process (zr_launcher.c), how its ranks meet (zr_meet.c) and talk */
void zr_refuse_launcher(zr *z);      /* fails where one has started us */
const char *zr_launched(int all);    /* a launcher's name of this rank of `all`; NULL: it has none,
                                        or is the only task's or that of a pod of several ranks */
void zr_find_launcher(zr *z);        /* lowest, here, net, far; fails where they disagree */
int zr_port_of(zr *z, uint64_t run); /* in ZR_PORTS; else none that Linux gives to who asks */
uint64_t zr_host(void);              /* this host's name, hashed */
void zr_meet(zr *z);                 /* by every rank of a launcher; net.local, .neighbours */
extern const zr_far zr_plane;        /* zr_plane.c */
void zr_plane_move(zr *z, int rank, void *at, size_t n, int out); /* n bytes from or to it */
int zr_plane_late(const zr *z);                                   /* is the time to meet over? */
void zr_plane_lost(zr *z, int rank);                              /* fails */
void zr_plane_grace(zr *z); /* whoever knows why a peer is gone has time to say it first */
void zr_plane_look(zr *z);  /* fails when a rank is gone */
void zr_plane_beat(zr *z);  /* this rank lives, to all that may wait for it */
/* All fail where two say the same of what each must have for itself; "": nothing. By all. */
void zr_plane_alone(zr *z, const char *what, const char *advice);

/* ---- how long is too long; a rank's watchdog (zr_watch.c) */
enum { ZR_TIMES = 10, ZR_UNKNOWN = -1 };
double zr_limit(const zr *z, double usual); /* seconds; usual: what it takes else */
void zr_watch_start(zr *z);
void zr_watch_also(zr *z, void (*look)(zr *z)); /* calls this, too, from here on */
void zr_watch_alone(zr *z); /* looks at no peer from here on, but at its clock */
void zr_watch_stop(zr *z);
static inline void zr_issued(zr *z, int queue,
                             const char *what) /* what is told of where it hangs */
{
    atomic_store_explicit(&z->watch.what, what, memory_order_relaxed);
    atomic_store_explicit(&z->watch.queue, queue, memory_order_relaxed);
}
void zr_expect(zr *z);                  /* what is waited for must be done in time */
void zr_met(zr *z);                     /* it is */
void zr_measure(zr *z, double seconds); /* what a step took */

/* ---- ranks that stand still (zr_stall.c) */
/* What the parent keeps of a rank, and of all. */
typedef struct zr_watched {
    pid_t pid;   /* 0: it has ended */
    int stopped; /* by a signal, and not continued */
    double cpu;  /* seconds, half-way through a quiet time; so: */
    uint32_t waited[ZR_QUEUES + 1];
} zr_watched;
typedef struct zr_stall {
    double looked;         /* when */
    double quiet, longest; /* seconds without the end of a command: now, so far */
    uint32_t moves;        /* of all ranks, when last looked */
    zr_watched *rank;      /* [here] */
} zr_stall;
int zr_stalled(zr *z, zr_stall *s, char *why); /* is it time to end the run? why[ZR_WHY] */

/* ---- the target: memory */
/* Before the ranks start: z->t, and what can be found out about room for them. */
void zr_prepare(zr *z);
void zr_open(zr *z);  /* a rank's device; what its kernels are opened with */
void zr_arena(zr *z); /* this rank's arena, all zero, and what peers share */
/* Where the rank's own thread puts the next tokens and targets, int32 [B, T] each; then they go
 * to their places in the arena, or `at` behind these, before what is issued next; so do positions
 * and keys, where the program has them. first: of the samples' numbers in the run; ZR_NO_SAMPLE of
 * those that are none to train on. */
enum { ZR_NO_SAMPLE = -1 };
void zr_batch_place(zr *z, int64_t at, int32_t **tokens, int32_t **targets);
void zr_batch_filled(zr *z, int64_t at, int64_t first);
/* Of tokens [B, T] in their documents: a sample begins one, and so does what follows `end`. */
static inline void zr_positions(const zr_program *p, const int32_t *tokens, int32_t *positions)
{
    for (int64_t i = 0; i < p->batch * p->sequence; i++)
        positions[i] = i % p->sequence && tokens[i - 1] != p->end ? positions[i - 1] + 1 : 0;
}

/* Of the samples from `first` on, int64 [B]; 0: nothing is drawn */
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
void zr_step_begin(zr *z); /* around program->step: lets test modes run ahead */
/* ZR_MAIN is empty after it; others may still do what the next step waits for. */
void zr_step_end(zr *z);
/* What zr_replay will play, made before the first step: memory that it takes is taken then. */
void zr_ready(zr *z, int graph, void (*issue)(zr *z));
void zr_finish(zr *z, int queue);                    /* this queue is empty after it */
void zr_drain(zr *z);                                /* all are */
void zr_push(zr *z, int queue, const zr_command *c); /* runs at once where the queue is inline */
extern const int zr_is_gpu;                          /* 0: the target has no options of GPUs */
void zr_epilogue(zr *z); /* what is left to say of the target, after training */

/* ---- beside a step (zr_writer.c); nothing where there is no writer */
void zr_writer_start(zr *z);
void zr_writer_stop(zr *z);
void zr_writer_begin(zr *z, int (*work)(zr *z, char *why)); /* on its own thread */
double zr_writer_wait(zr *z); /* until it is done, or given up; the seconds that took */
/* By all ranks, where the update of a step is issued: what is saved beside the step must not
 * change. A rank that waits here hangs neither to its parent nor to a watchdog. */
void zr_writer_before_update(zr *z);

/* ---- evaluations and multiple choice (zr_eval.c) */
/* tokens, targets int32 [B, T]: nothing from element `first` on */
void zr_blank(const zr *z, int64_t first, int32_t *tokens, int32_t *targets);
void zr_all_dead(zr *z);              /* when all is done: poisons all slots of what dies */
double zr_mean(zr *z, double *valid); /* the loss of all that was evaluated since `clear` */
static inline int64_t zr_address(void *p) { return (int64_t)(intptr_t)p; } /* as an operand */
void zr_eval_open(zr *z);          /* fails where the file is wrong */
void zr_eval(zr *z, int64_t step); /* nothing where --eval was not given; so many steps are done */

/* ---- the order of a CPU's products in bf16 (zr_checkpoint.c) */
/* Settles z->order: the spec's, or --products, or that of the run that goes on, or the fastest. */
void zr_settle_order(zr *z);
static inline const char *zr_order_name(int order) { return order == ZR_TILES ? "tiles" : "pairs"; }
/* Of the recipe; NULL: none beside the program's */
static inline const char *zr_order_line(const zr *z)
{
    if (z->order < 0 || z->p->order >= 0) return NULL;
    return z->order == ZR_TILES ? "train.products: \"tiles\"" : "train.products: \"pairs\"";
}

/* ---- hashes (zr_verify.c); all queues are empty */
/* The exact hash of the masters, the same however they are split. */
void zr_hash_weights(zr *z, uint64_t sum[2]);
void zr_verify_open(zr *z);
int zr_verify_due(const zr *z, int64_t steps); /* after so many steps */
/* Logs that hash; fails where a rank has another copy of what all ranks have. */
void zr_verify(zr *z);

/* ---- --profile (zr_profile.c); all of it does nothing where it was not asked for */
int64_t zr_profile_bytes(const zr *z); /* that a rank's notes take */
void zr_profile_open(zr *z);           /* fails where the file cannot be written */
void zr_profile_start(zr *z);
int zr_profile_apart(const zr *z);       /* this step is profiled, or the next one */
void zr_profile_step(zr *z, int begins); /* 1: the step begins; 0: it is over */
void zr_profile_end(zr *z);              /* after the last of its steps: the table, the file */
/* Around a command of a queue. NULL: it is not noted */
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
/* The target's clocks: for n notes at most; a profiled step begins with empty queues; the note's
 * begin or end is now, on its queue; all queues are empty: begin and end are there. */
void zr_clocks_start(zr *z, int64_t n);
void zr_clocks_step(zr *z);
void zr_clock(zr *z, zr_note *note, int end);
void zr_clocks_end(zr *z);

/* ---- the file arena (zr_disk.c) */
void zr_disk_open(zr *z); /* all of its room, all zero; fails where there is none */
/* ZR_LOAD, ZR_FETCH: bytes from `there` in the file on come to `at`; ZR_STORE: the other way. */
void zr_disk_move(zr *z, int queue, void *at, int64_t there, int64_t bytes);
int64_t zr_disk_moved(const zr *z, int queue); /* bytes so far */

/* ---- options (zr_options.c) */
void zr_parse(zr *z, zr_options *o, int argc, char **argv);
void zr_choose_threads(zr *z); /* z->threads: as told, else a part of the host's cores */
/* Those that all ranks must be given alike, in one order, each as `--steps 3`. */
void zr_options_text(const zr *z, char *text, size_t n);
void zr_help(zr *z, const char *program);
void zr_version(zr *z);
/* A setting in the environment; 0 where there is none. */
int64_t zr_setting(zr *z, const char *name, int64_t most);

/* splitmix64 */
static inline uint64_t zr_random(uint64_t *state) { return zr_mixed(*state += 0x9e3779b97f4a7c15); }

/* Does the program use this queue? */
static inline int zr_uses(const zr *z, int queue) { return z->p->queues >> queue & 1; }

/* ---- log (zr_log.c); rank 0 alone speaks. What cannot be written does not end the run. */
/* On stdout and stderr what is no text becomes '?', as do ends of lines that an operand has. */
void zr_print(zr *z, int file, const char *format, ...) __attribute__((format(printf, 3, 4)));
void zr_print_byte(zr *z, char byte); /* on stdout, as it is */
/* On stderr, whichever rank it is. */
void zr_print_any(zr *z, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A line on stderr; on a terminal another may take its place: of ZR_RESULT, of ZR_PROGRESS. */
void zr_show(zr *z, int kind, const char *line);
int64_t zr_parameters(const zr_program *p);
static inline double zr_rate(double n, double of) { return of > 0 ? n / of : 0; }
static inline double zr_gib(int64_t bytes) { return (double)bytes / (1 << 30); }
double zr_step_tokens(const zr *z);       /* of all ranks */
int64_t zr_samples(const zr_mix *m);      /* of an epoch of all sources */
void zr_lose(zr *z, int sink, int error); /* says that no more goes to ZR_TO_... */
/* Fails where s, the file `name` of `option`, is one that the run reads. */
struct stat;
void zr_refuse_inputs(zr *z, const char *option, const char *name, const struct stat *s);
/* Fails where it is what --save writes. */
void zr_refuse_saved(zr *z, const char *option, const char *name);
/* Returns `text`: a mean loss, "none" where it is of no targets. */
enum { ZR_LOSS_TEXT = 352 };
const char *zr_loss_text(char text[ZR_LOSS_TEXT], int digits, double loss, double targets);
void zr_log_open(zr *z);  /* fails where the log is another's: input, or a run's */
void zr_log_begin(zr *z); /* the run's record: it is sure to go on */
void zr_log_step(zr *z, const double report[ZR_REPORT], double seconds); /* that it took */
void zr_log_val(zr *z, int64_t step, double loss, double tokens);
void zr_log_eval(zr *z, int64_t step, int64_t right, int64_t examples);
/* seconds from its begin to its end; that training stood still for it */
void zr_log_checkpoint(zr *z, int64_t step, double seconds, double pause);
void zr_log_verified(zr *z, int64_t step, const uint64_t sum[2], double seconds);
/* moved: by this rank in all steps */
void zr_log_end(zr *z, const double report[ZR_REPORT], const int64_t moved[ZR_MOVED]);
/* Says again what was lost; fails where that is what the run was for. */
void zr_log_close(zr *z);

/* ---- what stderr shows (zr_progress.c) */
void zr_show_start(zr *z); /* what the run is, before its first step */
void zr_show_step(zr *z, const double report[ZR_REPORT]);
void zr_show_validated(zr *z, int64_t steps, double seconds); /* it took so long */
/* This rank is at `what` from here on, which has so many parts; NULL: at nothing that takes long */
void zr_progress(zr *z, const char *what, const char *unit, int64_t parts);
void zr_progress_look(zr *z); /* the parent, often: shows what takes long */

#endif
