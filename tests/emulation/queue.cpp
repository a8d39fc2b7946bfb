/* queue.cpp -- lanes, and the executor that runs their work in the order that ZR_EMULATE names. */
#include "queue.h"
#include "order.h"

#include <chrono>
#include <thread>
#include <unistd.h>

std::recursive_mutex queue_lock;
std::atomic<int> queue_waiting;
double queue_clock;

namespace {

enum { PAUSE_US = 100, BURST = 4 };

lane first = {DEFAULT_STREAM, {}, {}};
CUstream_st *streams[STREAMS];
bool open_now;   /* whether device memory can be touched */
uint64_t drives; /* how often the host has run work */
cudaError_t last;

void add_inner(std::vector<lane *> *to, lane *l)
{
    if (!l->ops.empty()) to->push_back(l);
    for (lane *i : l->inner) add_inner(to, i);
}

/* Returns all lanes that have work, a graph's parts after the stream that it runs in. */
std::vector<lane *> busy(void)
{
    std::vector<lane *> all;
    add_inner(&all, &first);
    for (CUstream_st *s : streams)
        if (s) add_inner(&all, &s->l);
    return all;
}

progress run(lane *l, op &o)
{
    if (!o.begun) {
        race_join(race_now[l->track], o.issued);
        race_begin(l->track, o.name);
        o.begun = true;
    }
    if (!open_now) race_open(open_now = true);
    race_track = l->track;
    progress p = o.run();
    race_track = race_self;
    return p;
}

/* Does the next piece of a lane's work if it can be done now. */
progress step(lane *l)
{
    op &o = l->ops.front();
    clocks &now = race_now[l->track];
    progress p = DONE;
    if (o.wait && !o.wait->done) return NOT_YET;
    if (o.wait) {
        race_join(now, o.issued);
        race_join(now, o.wait->after);
    } else if (o.rec) {
        race_join(now, o.issued);
        o.rec->after = now;
        o.rec->at = queue_clock;
        o.rec->done = true;
    } else {
        p = run(l, o);
    }
    if (p != DONE) return p;
    l->ops.pop_front();
    queue_clock += 1e-6;
    return p;
}

/* Returns the lane that must run before `l` can go on; l itself if there is none. */
lane *hurried(lane *l)
{
    for (;;) {
        lane *next = nullptr;
        for (lane *i : l->inner)
            if (!i->ops.empty()) next = i;
        if (!next && !l->ops.empty() && l->ops.front().wait && !l->ops.front().wait->done)
            next = l->ops.front().wait->where;
        if (!next) return l;
        l = next;
    }
}

/* Runs one round over all lanes that have work, until `most` have moved. */
void round_of(bool *moved, unsigned most)
{
    std::vector<lane *> lanes = busy();
    std::vector<unsigned> order(lanes.size());
    *moved = false;
    if (order_now() == ORDER_SHUFFLED) order_of(order.data(), (unsigned)order.size());
    else
        for (unsigned i = 0; i < order.size(); i++) order[i] = i;
    for (unsigned i : order) {
        if (lanes[i]->ops.empty()) continue;
        progress p = step(lanes[i]);
        *moved |= p <= MOVED;
        if (p <= MOVED && !--most) return;
    }
}

void close_memory(void)
{
    if (open_now) race_open(open_now = false);
}

void let_go(void (*pause)(void))
{
    close_memory();
    queue_lock.unlock();
    pause();
    queue_lock.lock();
}

void pause_plain(void) { usleep(PAUSE_US); }

/* A copy of another thread need not wait until the device has no work left. */
void give_way(void)
{
    if (queue_waiting) let_go(pause_plain);
}

/* Runs everything that can run without other processes. */
void run_all(void)
{
    for (bool moved = true; moved; give_way()) round_of(&moved, 1);
    close_memory();
}

void run_some(void)
{
    bool moved = true;
    for (unsigned n = order_choice(BURST); n && moved; n--) round_of(&moved, 1);
    close_memory();
}

/* A GPU goes on while its host does something else: peers may wait for work issued here. */
void go_on_alone(void)
{
    for (uint64_t seen = 0;;) {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        locked hold(queue_lock);
        if (seen == drives) run_all();
        seen = drives;
    }
}

/* Work on the default stream comes after all work of blocking streams so far, and before their
 * next. */
void with_blocking(const std::function<void(lane *l)> &f)
{
    for (CUstream_st *s : streams)
        if (s && s->blocking && !s->in) f(&s->l);
}

void order_lanes(lane *before, lane *after)
{
    record_ref r(new record{false, {}, 0, before, nullptr, 0, {}});
    queue_add(before, {"record", nullptr, r, nullptr, {}, false});
    queue_add(after, {"wait", nullptr, nullptr, r, {}, false});
}

}

void (*queue_pause)(void) = pause_plain;

cudaError_t queue_error(cudaError_t e)
{
    locked hold(queue_lock);
    if (e != cudaSuccess) last = e;
    return e;
}

cudaError_t cudaPeekAtLastError(void) { return last; }

cudaError_t cudaGetLastError(void)
{
    locked hold(queue_lock);
    cudaError_t e = last;
    last = cudaSuccess;
    return e;
}

lane *queue_lane(cudaStream_t s) { return s ? &s->l : &first; }

bool queue_empty(void) { return busy().empty(); }

cudaStream_t queue_open(bool blocking)
{
    static bool alone;
    if (!alone) {
        std::thread(go_on_alone).detach();
        atexit([] { queue_lock.lock(); }); /* the executor does nothing from then on */
        alone = true;
    }
    for (int i = 0; i < STREAMS; i++)
        if (!streams[i])
            return streams[i] =
                       new CUstream_st{{DEFAULT_STREAM + 1 + i, {}, {}}, blocking, nullptr, 0, 0};
    return nullptr;
}

void queue_close(cudaStream_t s)
{
    queue_drive(&s->l, [s] { return s->l.ops.empty(); });
    for (CUstream_st *&other : streams)
        if (other == s) other = nullptr;
    delete s;
}

void queue_add(lane *l, op o)
{
    o.issued = race_now[race_self];
    race_begin(race_self, "host code");
    l->ops.push_back(std::move(o));
    if (order_now() == ORDER_EAGER) run_all();
    else if (order_now() == ORDER_SHUFFLED) run_some();
}

int queue_blocks;
bool queue_in_function;

static void no_function_calls(const char *what)
{
    if (queue_in_function) shim_fail("a function of cudaLaunchHostFunc calls CUDA: %s", what);
}

cudaError_t queue_drive(lane *target, const std::function<bool()> &enough)
{
    no_function_calls("waiting");
    drives++;
    while (!enough()) {
        bool moved = false;
        if (order_now() == ORDER_LATE && target && !target->ops.empty())
            moved = step(hurried(target)) <= MOVED;
        if (!moved) round_of(&moved, order_now() == ORDER_EAGER ? ~0u : 1);
        if (moved) give_way();
        else let_go(queue_pause);
    }
    close_memory();
    return cudaSuccess;
}

void queue_nudge(lane *target)
{
    bool moved = true;
    drives++;
    if (order_now() == ORDER_EAGER) run_all();
    else if (target && !target->ops.empty() && step(hurried(target)) > MOVED) round_of(&moved, 1);
    if (!moved) let_go(queue_pause);
    close_memory();
}

cudaError_t queue_issue(cudaStream_t s, const char *name, maker make)
{
    locked hold(queue_lock);
    no_function_calls(name);
    if (s && s->in) return capture_issue(s, name, std::move(make));
    if (!s && capture_any()) return capture_refuse(nullptr, cudaErrorStreamCaptureImplicit);
    lane *l = queue_lane(s);
    if (!s) with_blocking([l](lane *other) { order_lanes(other, l); });
    queue_add(l, {name, make(), nullptr, nullptr, {}, false});
    if (!s) with_blocking([l](lane *other) { order_lanes(l, other); });
    return cudaSuccess;
}

cudaError_t queue_record(cudaStream_t s, cudaEvent_t e)
{
    locked hold(queue_lock);
    no_function_calls("recording an event");
    if (s && s->in) return capture_record(s, e);
    e->newest.reset(new record{false, {}, 0, queue_lane(s), nullptr, 0, {}});
    queue_add(queue_lane(s), {"record", nullptr, e->newest, nullptr, {}, false});
    return cudaSuccess;
}

cudaError_t queue_wait(cudaStream_t s, cudaEvent_t e)
{
    locked hold(queue_lock);
    if (!e->newest) return cudaSuccess;
    if ((s && s->in) || e->newest->in) return capture_wait(s, e);
    queue_add(queue_lane(s), {"wait", nullptr, nullptr, e->newest, {}, false});
    return cudaSuccess;
}
