/* zr_log.h -- the output and the log of a run. Only rank 0 prints; a failed write ends no run. */
#ifndef ZR_LOG_H
#define ZR_LOG_H
#include "zr_mix.h"
#include "zr_rank.h"

/* Counters of data moved: bytes from peers, collectives, bytes from other hosts, bytes read from
 * and written to the file arena. */
enum { ZR_WIRE, ZR_MESSAGES, ZR_FAR, ZR_LOADS, ZR_STORES, ZR_MOVED };
enum { ZR_NO_LINE, ZR_RESULT, ZR_PROGRESS }; /* kinds of the last line on a terminal */
enum { ZR_TO_STDOUT, ZR_TO_LOG, ZR_TO_PROFILE, ZR_SINKS }; /* outputs of a run other than weights */

struct zr_log {
    int file; /* JSONL file; -1: none. Only rank 0 has it */
    /* errno of the first failed write, after which nothing more is written; or 0 */
    int lost[ZR_SINKS];
    int tty;                     /* 1: stderr is a terminal */
    double busy, validated;      /* seconds spent in steps so far; in the last validation */
    double shown, shown_busy;    /* zr_now(), and `busy`, at the last line of a step */
    int64_t shown_step, skipped; /* that step; number of steps that changed no weight */
    int64_t untargeted;          /* steps since the start in which no token had a target */
};

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
/* Report lost output once more. Fails if that output was the purpose of the run. */
void zr_log_close(zr *z);

#endif
