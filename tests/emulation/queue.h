/* queue.h -- streams, events and graphs, shared by the stand-ins of all libraries.
 *
 * Invariants
 *  1. A lane runs its work in order; only records and waits order lanes. Each stream has a lane,
 *     and so has each stream's part of a running graph.
 *  2. A wait is for the newest record before it, chosen when the wait is issued.
 *  3. `queue_lock` guards everything. It is released between two pieces of work if nothing can go
 *     on or another thread wants it.
 *  4. Captured work is made anew by each launch of its graph.
 */
#ifndef SHIM_QUEUE_H
#define SHIM_QUEUE_H
#include "race.h"
#include "shim.h"

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

/* MOVED: a part is done */
enum progress { DONE, MOVED, NOT_YET };
typedef std::function<progress()> work; /* called until it returns DONE */
typedef std::function<work()> maker;    /* called at issue: once, or by each launch of a graph */

struct capture;
typedef std::shared_ptr<capture> capture_ref;
struct lane;

struct record {
    bool done;
    clocks after;
    double at;               /* queue_clock when it was done */
    lane *where;             /* the lane that it waits in */
    capture_ref in;          /* NULL: not captured */
    int id;                  /* if captured: its number in the capture, and the work before it */
    std::vector<int> covers; /* number of pieces of each part that come before it */
};
typedef std::shared_ptr<record> record_ref;

struct op {
    const char *name;
    work run; /* empty: a record or a wait */
    record_ref rec, wait;
    clocks issued; /* clocks of the host at issue */
    bool begun;
};

struct lane {
    int track;
    std::deque<op> ops;
    std::vector<lane *> inner; /* lanes of the graph that runs at its head */
};

struct CUstream_st {
    lane l;
    bool blocking;
    capture_ref in;
    int part; /* of the capture */
    int priority;
};

struct CUevent_st {
    record_ref newest;
    bool timing;
};

extern double queue_clock; /* the device's seconds: the simulated duration of its work so far */
extern std::recursive_mutex queue_lock;
extern std::atomic<int> queue_waiting; /* number of threads that want the lock */

struct locked : std::unique_lock<std::recursive_mutex> {
    explicit locked(std::recursive_mutex &m) : unique_lock(m, std::defer_lock)
    {
        queue_waiting++;
        lock();
        queue_waiting--;
    }
};

/* Sets the next result of cudaGetLastError. Returns its argument. */
cudaError_t queue_error(cudaError_t e);

extern int queue_blocks;       /* processors that communicators hold beside products */
extern bool queue_in_function; /* a function of cudaLaunchHostFunc runs, which may make no call */

/* Issues work, a record or a wait to a stream (NULL: the default stream), or captures it. */
cudaError_t queue_issue(cudaStream_t s, const char *name, maker make);
cudaError_t queue_record(cudaStream_t s, cudaEvent_t e);
cudaError_t queue_wait(cudaStream_t s, cudaEvent_t e);

/* ---- lanes */
void queue_add(lane *l, op o); /* issues, and runs the work that the order wants at once */
/* Runs work until `enough`; returns an error if that can never be. target: the lane to hurry, or
 * NULL. */
cudaError_t queue_drive(lane *target, const std::function<bool()> &enough);
void queue_nudge(lane *target); /* a query: any work may happen, in every order */
bool queue_empty(void);         /* no work is left */
lane *queue_lane(cudaStream_t s);
cudaStream_t queue_open(bool blocking); /* NULL: too many */
void queue_close(cudaStream_t s);

/* Waits a little for other processes; set by nccl.cpp. */
extern void (*queue_pause)(void);

/* ---- captures (graph.cpp) */
/* Reports a call that no capture allows: it spoils the capture of s, or all captures if s is
 * NULL. */
cudaError_t capture_refuse(cudaStream_t s, cudaError_t e);
bool capture_any(void);
cudaError_t capture_issue(cudaStream_t s, const char *name, maker make);
cudaError_t capture_record(cudaStream_t s, cudaEvent_t e);
cudaError_t capture_wait(cudaStream_t s, cudaEvent_t e);
bool capture_active(const capture_ref &c);

#endif
