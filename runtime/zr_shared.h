/* zr_shared.h -- memory that all ranks of this host share: one mapping, made before they start. */
#ifndef ZR_SHARED_H
#define ZR_SHARED_H
#include "zr_fail.h"
#include "zr_file.h"
#include <stdatomic.h>

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
enum { ZR_TOLD = 512, ZR_ADDRESS = 64 };

/* Shared state of one rank: its progress on each queue (entry ZR_QUEUES: zr_barrier). */
typedef struct zr_seat {
    struct {
        _Atomic uint32_t arrived, read;
    } turn[ZR_QUEUES + 1];
    uint64_t part[2];       /* its term of the sum of zr_total */
    _Atomic int64_t step;   /* current or last training step, from 1 */
    _Atomic int life;       /* ZR_SILENT ... */
    _Atomic int64_t awaits; /* the launcher's rank that it waits for and the group, by zr_awaits */
    char host[ZR_ADDRESS];  /* host of a launcher's rank; "": not known */
    zr_pulse pulse[ZR_QUEUES + 1] __attribute__((aligned(64)));
} __attribute__((aligned(64))) zr_seat;

/* Task of rank 0 that the parent shows as progress (zr_progress.c). */
typedef struct zr_task {
    /* "validation", and the unit of its parts; NULL: no long task */
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

#endif
