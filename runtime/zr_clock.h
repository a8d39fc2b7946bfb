/* zr_clock.h -- notes of commands, whose times the target takes. */
#ifndef ZR_CLOCK_H
#define ZR_CLOCK_H
#include "zr_rank.h"
#include <stdatomic.h>

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

struct zr_profile {
    zr_note *note; /* [room]; NULL: --profile was not given */
    int64_t room;
    _Atomic int64_t used;
    double (*wall)[2]; /* [steps] times of start and end */
    zr_row *row;
    int rows, on; /* on: the current step is profiled */
};

/* The target's clocks. zr_clocks_start: room for n notes. zr_clocks_step: a profiled step begins,
 * queues are empty. zr_clock: record the note's start or end on its queue. zr_clocks_end: queues
 * are empty; fill in start and end of all notes. */
void zr_clocks_start(zr *z, int64_t n);
void zr_clocks_step(zr *z);
void zr_clock(zr *z, zr_note *note, int end);
void zr_clocks_end(zr *z);

#endif
