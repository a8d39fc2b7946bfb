/* zr_watch.h -- timeouts; a rank's watchdog. */
#ifndef ZR_WATCH_H
#define ZR_WATCH_H
#include "zr_rank.h"
#include <pthread.h>
#include <stdatomic.h>

enum { ZR_RECENT = 32 };
struct zr_watch {
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
};

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
    atomic_store_explicit(&z->watch->what, what, memory_order_relaxed);
    atomic_store_explicit(&z->watch->queue, queue, memory_order_relaxed);
}
void zr_expect(zr *z);                  /* start the clock: the work must complete in time */
void zr_met(zr *z);                     /* stop the clock */
void zr_measure(zr *z, double seconds); /* record the time of a step */

#endif
