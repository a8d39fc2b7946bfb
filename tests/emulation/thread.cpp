/* thread.cpp -- the thread that saves beside a step, and the work that it is ordered after: calls
 * of the lock in runtime/zr_writer.c are compiled as calls of these. */
#include "queue.h"

#include <pthread.h>
#include <unistd.h>

namespace {

clocks passed; /* clocks of all threads that have released the lock */

void take(void)
{
    locked hold(queue_lock);
    if (gettid() != getpid()) race_self = race_track = BESIDE;
    race_join(race_now[race_self], passed);
}

void give(void)
{
    locked hold(queue_lock);
    race_join(passed, race_now[race_self]);
    race_begin(race_self, "host code");
}

}

extern "C" {

int shim_lock(pthread_mutex_t *lock)
{
    int error = pthread_mutex_lock(lock);
    take();
    return error;
}

int shim_unlock(pthread_mutex_t *lock)
{
    give();
    return pthread_mutex_unlock(lock);
}

int shim_wait(pthread_cond_t *moved, pthread_mutex_t *lock)
{
    give();
    int error = pthread_cond_wait(moved, lock);
    take();
    return error;
}

int shim_timedwait(pthread_cond_t *moved, pthread_mutex_t *lock, const timespec *until)
{
    give();
    int error = pthread_cond_timedwait(moved, lock, until);
    take();
    return error;
}
}
