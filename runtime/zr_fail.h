/* zr_fail.h -- how a run ends early: exit codes, the last message, functions for all files. */
#ifndef ZR_FAIL_H
#define ZR_FAIL_H
#include "zr.h"

/* Exit codes: the source of the lists in --help (zr_options.c) and docs/running.md. A run that a
 * signal ended exits with 128 + signal. */
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

enum { ZR_HOST_NAME = 256 };
enum { ZR_LINE = 1024, ZR_SAY_MS = 1000 };  /* bytes of the last message; ms allowed to print it */
enum { ZR_SAVING, ZR_PROFILING, ZR_TEMPS }; /* users of a temporary file that zr_temp registers */

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
void zr_wake(_Atomic uint32_t *word);        /* wake the sleepers on *word */
void *zr_get(zr *z, int64_t n, size_t size); /* allocate n * size bytes, all zero */

#endif
