/* zr_writer.h -- writing beside a step; these do nothing if there is no writer. */
#ifndef ZR_WRITER_H
#define ZR_WRITER_H
#include "zr_file.h"
#include "zr_rank.h"
#include <pthread.h>

struct zr_writer {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    int (*work)(zr *z, char *why);
    int there, busy, quit, bad; /* bad: last result of `work` */
    _Atomic int stop;           /* 1: nobody waits for it any longer */
    double patience, ended;     /* seconds to wait for it; zr_now() when `work` last returned */
    char why[ZR_WHY];
};

void zr_writer_start(zr *z);
void zr_writer_stop(zr *z);
void zr_writer_begin(zr *z, int (*work)(zr *z, char *why)); /* start work on its thread */
double zr_writer_wait(zr *z); /* wait until it ends or is given up; returns the seconds */
/* Wait for the writer before an update is issued, on all ranks: data being saved must not change.
 * Neither the parent nor a watchdog takes a rank that waits here for a hang. */
void zr_writer_before_update(zr *z);

#endif
