/* graph.cpp -- captures the work of streams into graphs and launches these again.
 *
 * Invariants
 *  1. A stream joins a capture by waiting for an event that was recorded in it. At the end all work
 *     of such streams must come before the end of the stream that began.
 *  2. A graph's parts have tracks of their own: uncaptured work of the same stream is ordered with
 *     them only through the stream in which the graph is launched.
 */
#include "queue.h"

#include <algorithm>

struct item {
    int part;
    const char *name;
    maker make; /* empty: a record or a wait of that number */
    int rec, wait;
};

struct capture {
    std::vector<cudaStream_t> streams; /* of each part; 0 is where the capture began */
    /* For each part, how much work of each part comes before */
    std::vector<std::vector<int>> knows;
    std::vector<int> tracks;
    std::vector<item> items;
    int records;
    bool active, spoiled;
    cudaStreamCaptureMode mode;
    int graphs; /* number of its graphs; events may outlive them */
};

struct CUgraph_st {
    capture_ref what;
};

struct CUgraphExec_st {
    capture_ref what;
    void *memory; /* of the device, for the launches of its nodes */
};

namespace {

std::vector<capture_ref> active;

int enlist(const capture_ref &c, cudaStream_t s, std::vector<int> knows)
{
    int part = (int)c->streams.size();
    c->streams.push_back(s);
    c->tracks.push_back(s->l.track + STREAMS);
    knows.resize((size_t)part + 1, 0);
    c->knows.push_back(std::move(knows));
    s->in = c;
    s->part = part;
    return part;
}

void learn(std::vector<int> *to, const std::vector<int> &from)
{
    if (to->size() < from.size()) to->resize(from.size(), 0);
    for (size_t i = 0; i < from.size(); i++) (*to)[i] = std::max((*to)[i], from[i]);
}

void dismiss(const capture_ref &c)
{
    for (cudaStream_t s : c->streams) s->in = nullptr;
    c->active = false;
    active.erase(std::find(active.begin(), active.end(), c));
}

bool joined(const capture &c)
{
    std::vector<int> all = c.knows[0];
    all.resize(c.streams.size(), 0);
    for (size_t p = 1; p < c.streams.size(); p++)
        if (all[p] < c.knows[p][p]) return false;
    return true;
}

/* A running graph: its lanes live until all of them are empty. */
struct flight {
    std::vector<lane> lanes;
    bool begun;
};

/* Returns the work that runs a flight from the head of lane `l`. */
progress fly(flight *f, lane *l)
{
    if (!f->begun) {
        for (lane &part : f->lanes) {
            race_join(race_now[part.track], race_now[l->track]);
            l->inner.push_back(&part);
        }
        f->begun = true;
        return MOVED;
    }
    for (const lane &part : f->lanes)
        if (!part.ops.empty()) return NOT_YET;
    l->inner.clear();
    for (const lane &part : f->lanes) race_join(race_now[l->track], race_now[part.track]);
    return DONE;
}

std::shared_ptr<flight> ready(const capture &c)
{
    std::shared_ptr<flight> f(new flight{std::vector<lane>(c.streams.size()), false});
    std::vector<record_ref> records((size_t)c.records);
    for (size_t p = 0; p < c.streams.size(); p++) f->lanes[p].track = c.tracks[p];
    for (const item &i : c.items) {
        lane *where = &f->lanes[(size_t)i.part];
        op o = {i.name, nullptr, nullptr, nullptr, race_now[race_self], false};
        if (i.rec >= 0)
            o.rec = records[(size_t)i.rec] =
                record_ref(new record{false, {}, 0, where, nullptr, 0, {}});
        else if (i.wait >= 0) o.wait = records[(size_t)i.wait];
        else o.run = i.make();
        where->ops.push_back(std::move(o));
    }
    return f;
}

}

bool capture_active(const capture_ref &c) { return c && c->active; }

bool capture_any(void)
{
    for (const capture_ref &c : active)
        if (c->mode != cudaStreamCaptureModeRelaxed) return true;
    return false;
}

cudaError_t capture_refuse(cudaStream_t s, cudaError_t e)
{
    for (const capture_ref &c : active)
        if (s ? s->in == c : c->mode != cudaStreamCaptureModeRelaxed) c->spoiled = true;
    return queue_error(e);
}

cudaError_t capture_issue(cudaStream_t s, const char *name, maker make)
{
    capture &c = *s->in;
    c.items.push_back({s->part, name, std::move(make), -1, -1});
    c.knows[(size_t)s->part][(size_t)s->part]++;
    return c.spoiled ? queue_error(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
}

cudaError_t capture_record(cudaStream_t s, cudaEvent_t e)
{
    capture &c = *s->in;
    int id = c.records++;
    e->newest.reset(new record{false, {}, 0, nullptr, s->in, id, c.knows[(size_t)s->part]});
    c.items.push_back({s->part, "record", nullptr, id, -1});
    return cudaSuccess;
}

cudaError_t capture_wait(cudaStream_t s, cudaEvent_t e)
{
    record &r = *e->newest;
    if (!r.in) return capture_refuse(s, cudaErrorStreamCaptureIsolation);
    if (!r.in->active) return queue_error(cudaErrorCapturedEvent);
    if (!s) return capture_refuse(nullptr, cudaErrorStreamCaptureImplicit);
    if (s->in && s->in != r.in) return capture_refuse(nullptr, cudaErrorStreamCaptureMerge);
    if (!s->in) enlist(r.in, s, {});
    learn(&s->in->knows[(size_t)s->part], r.covers);
    s->in->items.push_back({s->part, "wait", nullptr, -1, r.id});
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode)
{
    locked hold(queue_lock);
    if (!s) return queue_error(cudaErrorStreamCaptureUnsupported);
    if (s->in) return capture_refuse(s, cudaErrorIllegalState);
    capture_ref c(new capture{});
    c->active = true;
    c->mode = mode;
    enlist(c, s, {});
    active.push_back(c);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph)
{
    locked hold(queue_lock);
    *graph = nullptr;
    if (!s || !s->in) return queue_error(cudaErrorIllegalState);
    capture_ref c = s->in;
    if (s->part) return capture_refuse(s, cudaErrorStreamCaptureUnmatched);
    dismiss(c);
    if (c->spoiled) return queue_error(cudaErrorStreamCaptureInvalidated);
    if (!joined(*c)) return queue_error(cudaErrorStreamCaptureUnjoined);
    c->graphs++;
    *graph = new CUgraph_st{c};
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus *status)
{
    locked hold(queue_lock);
    *status = !s || !s->in     ? cudaStreamCaptureStatusNone
              : s->in->spoiled ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode)
{
    *mode = cudaStreamCaptureModeGlobal;
    return cudaSuccess;
}

/* Without the flag a GPU silently drops the streams' priorities. */
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    locked hold(queue_lock);
    for (cudaStream_t s : graph->what->streams)
        if (s->priority && !(flags & cudaGraphInstantiateFlagUseNodePriority))
            shim_fail("a graph of streams with priorities is made ready without its nodes'");
    graph->what->graphs++;
    *exec = new CUgraphExec_st{graph->what, race_alloc(DEVICE, 1)};
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *n)
{
    if (nodes) return queue_error(cudaErrorNotSupported);
    *n = 0;
    for (const item &i : graph->what->items) *n += i.make != nullptr;
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s)
{
    locked hold(queue_lock);
    if (s && s->in) return capture_refuse(s, cudaErrorStreamCaptureUnsupported);
    lane *l = queue_lane(s);
    capture_ref c = exec->what;
    return queue_issue(s, "graph", [c, l] {
        std::shared_ptr<flight> f = ready(*c);
        return work([f, l] { return fly(f.get(), l); });
    });
}

/* The last graph releases the objects that the work names. */
template <class G> static cudaError_t drop(G *graph)
{
    locked hold(queue_lock);
    if (!--graph->what->graphs) graph->what->items.clear();
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return drop(graph); }

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    race_free(DEVICE, exec->memory);
    return drop(exec);
}
