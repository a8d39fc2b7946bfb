/* nccl.cpp -- NCCL's communicators and collectives between processes of one host.
 *
 * Invariants
 *  1. A collective is sends and receives of every pair of ranks. All progress at once, so no order
 *     of issue that is the same on all ranks can block.
 *  2. Work of one communicator runs in the order of issue, whatever streams it is on.
 *  3. A header precedes each piece of data: ranks that make different calls get an error and end.
 *  4. A peer that is gone is an error of the communicator within a second; no collective with it
 *     ends.
 *  5. A non-blocking communicator is in progress until it has been asked at least once more: after
 *     initialisation, after a split, and at its first collective. A split returns ncclSuccess
 *     nevertheless, as NCCL's does, and is complete when all ranks of the first communicator, the
 *     only one that is split here, have come to it.
 *  6. Floats are added as in a ring: the owner's next rank first, its own numbers last, rounded to
 *     their type each time.
 *  7. A communicator takes a page of device memory, and two more at its first collective; with
 *     ZR_EMULATE_LEAK also one in every collective, which it never frees.
 *  8. Ranks issue work of all their communicators in one order, because launches may wait for each
 *     other on a GPU. Another order is a mistake, though nothing would block here. So is work of a
 *     second communicator without NCCL_LAUNCH_ORDER_IMPLICIT=1, which keeps the order.
 *  9. A communicator of a split holds as many processors as it may have blocks: maxCTAs, and for
 *     sends and receives at most NCCL_MAX_P2P_NCHANNELS, rounded up to a power of two. Of those
 *     that work on one stream, in turns, the largest counts. Work of the first communicator is
 *     taken to be on the products' own stream, and not beside them.
 * 10. NCCL does not end a communicator that a graph names, and waits without end: here that is a
 *     mistake.
 * 11. With ZR_EMULATE_TOLD every collective is named on stderr when it begins.
 * 12. The keys of a split's color are the numbers of its ranks, from 0 on, in any order. NCCL takes
 *     any keys; a program that renumbers ranks knows the new numbers, and another key is a mistake.
 * 13. A range that a communicator registers lies within one allocation of device memory, and is
 *     registered with it once and deregistered before the communicator ends. NCCL allows more; each
 *     is a mistake here. NCCL_LOCAL_REGISTER=0 registers nothing.
 */
#include <nccl.h>

#include "queue.h"
#include "wire.h"
#include "../../kernels/scalar.h"

#include <algorithm>
#include <ctime>
#include <map>
#include <sys/random.h>

namespace {

struct piece { /* one direction of one pair */
    int peer;
    char *p;
    size_t bytes, moved; /* moved: the header first */
};

struct header {
    char what[24];
    uint64_t bytes, place; /* place: among all that the rank has issued */
};

struct transfer {
    ncclComm_t comm;
    cudaStream_t stream;
    const char *what;
    std::vector<piece> sends, receives;
    std::vector<header> heads; /* of receives, in order of arrival */
    std::vector<char> room;    /* received, to be added */
    char *sum;                 /* of a reduction: the result; NULL: no result here */
    const char *own;
    size_t bytes;
    ncclDataType_t type; /* ncclInt8: nothing is added */
    uint64_t ticket, place;
    double stuck;
    bool begun;
};
typedef std::shared_ptr<transfer> transfer_ref;

int grouped;
uint64_t places; /* given to this rank's work so far */
std::vector<transfer_ref> group;
wire *present; /* the one that the executor waits for */

double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

void pause(void) { wire_pause(present); }

}

struct ncclComm {
    wire *w;
    int rank, ranks;
    bool blocking;
    ncclResult_t state;
    int lane = 0, lanes = 1; /* lanes: for the root, the number in use */
    ncclComm_t root = this;
    std::vector<int> member = {}; /* [ranks] their numbers in the root */
    int color = 0;                /* of the split that made it */
    bool connected = false;
    uint64_t issued = 0, done = 0;               /* tickets */
    ncclComm_t *child = nullptr, made = nullptr; /* a split in progress: its result */
    /* A share for each piece of work in a graph. */
    std::shared_ptr<int> named = std::make_shared<int>();
    /* of the device: its own, and its connections' */
    void *memory = race_alloc(DEVICE, 1), *more = nullptr;
    void *registered = nullptr;    /* start of the range that is registered with it */
    int blocks = 0;                /* in queue_blocks, once it works on a stream */
    cudaStream_t stream = nullptr; /* the first that it works on */
};

namespace {

/* The number in the first communicator of a rank of this one. */
int at(ncclComm_t c, int rank) { return c->member[(size_t)rank]; }

header head_of(const transfer &t, const piece &p)
{
    header h = {};
    strncpy(h.what, t.what, sizeof h.what - 1);
    h.bytes = p.bytes;
    h.place = t.place;
    return h;
}

void check_head(const transfer &t, const piece &p, const header &came)
{
    header mine = head_of(t, p);
    if (mine.bytes == came.bytes && !memcmp(mine.what, came.what, sizeof mine.what) &&
        mine.place != came.place)
        shim_fail("NCCL: %s is number %llu of rank %d and number %llu of rank %d: in orders that "
                  "differ a GPU may hang",
                  t.what, (unsigned long long)mine.place, t.comm->root->rank,
                  (unsigned long long)came.place, at(t.comm, p.peer));
    if (memcmp(&mine, &came, sizeof mine))
        shim_fail("NCCL: rank %d is in %s of %zu bytes, and rank %d in %s of %llu bytes",
                  t.comm->root->rank, t.what, p.bytes, at(t.comm, p.peer), came.what,
                  (unsigned long long)came.bytes);
}

bool over(const piece &p) { return p.moved == sizeof(header) + p.bytes; }

bool push(const transfer &t, piece *p)
{
    size_t before = p->moved;
    int peer = at(t.comm, p->peer);
    if (p->moved < sizeof(header)) {
        header h = head_of(t, *p);
        p->moved +=
            wire_send(t.comm->w, t.comm->lane, peer, (char *)&h + p->moved, sizeof h - p->moved);
    }
    if (p->moved >= sizeof(header) && !over(*p))
        p->moved += wire_send(t.comm->w, t.comm->lane, peer, p->p + p->moved - sizeof(header),
                              p->bytes + sizeof(header) - p->moved);
    return p->moved != before;
}

bool pull(transfer *t, piece *p, header *h)
{
    size_t before = p->moved;
    int peer = at(t->comm, p->peer);
    if (p->moved < sizeof(header)) {
        p->moved += wire_receive(t->comm->w, t->comm->lane, peer, (char *)h + p->moved,
                                 sizeof *h - p->moved);
        if (p->moved == sizeof(header)) check_head(*t, *p, *h);
    }
    if (p->moved >= sizeof(header) && !over(*p))
        p->moved += wire_receive(t->comm->w, t->comm->lane, peer, p->p + p->moved - sizeof(header),
                                 p->bytes + sizeof(header) - p->moved);
    return p->moved != before;
}

/* Copies pieces for this rank itself: a send goes to the receive with the same place among them. */
void copy_own(transfer *t)
{
    std::vector<piece *> to;
    for (piece &p : t->receives)
        if (p.peer == t->comm->rank) to.push_back(&p);
    size_t i = 0;
    for (piece &p : t->sends) {
        if (p.peer != t->comm->rank) continue;
        if (i == to.size() || to[i]->bytes != p.bytes)
            shim_fail("NCCL: a send of rank %d to itself has no receive of its size",
                      t->comm->root->rank);
        if (to[i]->p != p.p) memmove(to[i]->p, p.p, p.bytes);
        to[i++]->moved = p.moved = sizeof(header) + p.bytes;
    }
}

void begin(transfer *t)
{
    for (const piece &p : t->sends) race_check(p.p, p.bytes, false);
    for (const piece &p : t->receives) race_check(p.p, p.bytes, true);
    if (t->sum) {
        race_check(t->own, t->bytes, false);
        race_check(t->sum, t->bytes, true);
    }
    copy_own(t);
    t->heads.resize(t->receives.size());
    t->stuck = seconds();
    t->begun = true;
}

uint64_t plus(uint64_t a, uint64_t b) { return a + b; }

float plus(float a, float b) { return a + b; }

struct bf16 {
    uint16_t u;
};

struct f16 {
    uint16_t u;
};

bf16 plus(bf16 a, bf16 b) { return {narrow(widen(a.u) + widen(b.u))}; }

f16 plus(f16 a, f16 b) { return {narrow_f16(widen_f16(a.u) + widen_f16(b.u))}; }

template <class T> void add_all(transfer *t)
{
    std::vector<char> all = t->room;
    all.insert(all.end(), t->own, t->own + t->bytes);
    size_t n = t->bytes / sizeof(T);
    const T *x = (const T *)all.data();
    std::vector<T> sum(x, x + n);
    for (size_t i = n; i < all.size() / sizeof(T); i++) sum[i % n] = plus(sum[i % n], x[i]);
    memcpy(t->sum, sum.data(), t->bytes);
}

void add(transfer *t)
{
    if (t->type == ncclBfloat16) add_all<bf16>(t);
    else if (t->type == ncclFloat16) add_all<f16>(t);
    else if (t->type == ncclFloat32) add_all<float>(t);
    else add_all<uint64_t>(t);
}

/* Returns whether a peer of an unfinished piece is gone and has left nothing to be read. */
bool peer_gone(transfer *t)
{
    ncclComm_t c = t->comm;
    for (const piece &p : t->sends)
        if (!over(p) && !wire_alive(c->w, at(c, p.peer))) return true;
    for (size_t i = 0; i < t->receives.size(); i++) {
        piece *p = &t->receives[i];
        if (!over(*p) && !wire_alive(c->w, at(c, p->peer)) && !pull(t, p, &t->heads[i]))
            return true;
    }
    return false;
}

/* Work that waits for a peer that is gone waits without end, as on a GPU: its communicator has the
 * reason. */
progress fail(ncclComm_t c)
{
    if (c->state == ncclSuccess || c->state == ncclInProgress) c->state = ncclRemoteError;
    return NOT_YET;
}

/* ZR_EMULATE_CUT: the number of the rank's collective from which on its network is gone. */
bool cut_off(const transfer &t)
{
    const char *first = getenv("ZR_EMULATE_CUT");
    return first && t.place >= (uint64_t)atoi(first);
}

progress go_on(transfer *t)
{
    ncclComm_t c = t->comm;
    bool moved = false, all = true;
    if (c->done != t->ticket) return NOT_YET;
    present = c->w;
    if (!t->begun) begin(t);
    if (cut_off(*t)) return fail(c);
    for (piece &p : t->sends) moved |= !over(p) && push(*t, &p);
    for (size_t i = 0; i < t->receives.size(); i++)
        moved |= !over(t->receives[i]) && pull(t, &t->receives[i], &t->heads[i]);
    for (const piece &p : t->sends) all &= over(p);
    for (const piece &p : t->receives) all &= over(p);
    if (all) {
        if (t->sum) add(t);
        c->done++;
        return DONE;
    }
    if (moved) t->stuck = seconds();
    else if (seconds() - t->stuck > 0.8 && peer_gone(t)) return fail(c);
    return moved ? MOVED : NOT_YET;
}

std::vector<ncclComm_t> beside; /* communicators of splits that work on a stream */

void count_blocks(void)
{
    std::map<cudaStream_t, int> most;
    for (ncclComm_t c : beside) most[c->stream] = std::max(most[c->stream], c->blocks);
    queue_blocks = 0;
    for (const auto &each : most) queue_blocks += each.second;
}

/* A communicator of a split has work on a stream. */
void work_beside(ncclComm_t c, cudaStream_t s)
{
    if (c == c->root || std::find(beside.begin(), beside.end(), c) != beside.end()) return;
    c->stream = s;
    beside.push_back(c);
    count_blocks();
}

ncclResult_t issue(const transfer &t)
{
    static int issued;
    const char *last =
        getenv("ZR_EMULATE_NCCL_ERROR"); /* number of the collective that meets an error */
    locked hold(queue_lock);
    if (last && ++issued == atoi(last)) return ncclRemoteError;
    ncclComm_t c = t.comm;
    const char *ordered = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    if (c != c->root && (!ordered || strcmp(ordered, "1")))
        shim_fail("NCCL: %s of a second communicator without NCCL_LAUNCH_ORDER_IMPLICIT=1: a GPU "
                  "may hang",
                  t.what);
    cudaError_t e = queue_issue(t.stream, t.what, [t, named = c->named] {
        transfer_ref mine(new transfer(t));
        mine->ticket = t.comm->issued++;
        mine->place = places++;
        if (getenv("ZR_EMULATE_LEAK")) race_alloc(DEVICE, 1);
        if (getenv("ZR_EMULATE_TOLD"))
            fprintf(stderr, "rank %d begins %s\n", t.comm->root->rank, t.what);
        if (mine->sum) { /* received beside the result */
            mine->room.resize(mine->receives.size() * t.bytes);
            for (size_t i = 0; i < mine->receives.size(); i++)
                mine->receives[i].p = mine->room.data() + i * t.bytes;
        }
        return work([mine] { return go_on(mine.get()); });
    });
    if (e != cudaSuccess) return ncclUnhandledCudaError;
    work_beside(c, t.stream);
    if (!c->more) c->more = race_alloc(DEVICE, 2 * PAGE);
    if (c->connected || c->blocking) return ncclSuccess;
    c->connected = true;
    return c->state = ncclInProgress;
}

/* Submits at once, or at the end of the group, with all of the same communicator and stream. */
ncclResult_t submit(transfer t)
{
    locked hold(queue_lock);
    if (!t.comm || t.comm->state != ncclSuccess)
        return t.comm && t.comm->state != ncclInProgress ? t.comm->state : ncclInvalidUsage;
    if (!grouped) return issue(t);
    for (const transfer_ref &g : group)
        if (g->comm == t.comm && g->stream == t.stream && !g->type && !t.type) {
            g->sends.insert(g->sends.end(), t.sends.begin(), t.sends.end());
            g->receives.insert(g->receives.end(), t.receives.begin(), t.receives.end());
            return ncclSuccess;
        }
    group.push_back(transfer_ref(new transfer(std::move(t))));
    return ncclSuccess;
}

size_t size_of(ncclDataType_t t)
{
    return t == ncclInt8 || t == ncclUint8                         ? 1
           : t == ncclFloat16 || t == ncclBfloat16                 ? 2
           : t == ncclInt32 || t == ncclUint32 || t == ncclFloat32 ? 4
           : t == ncclInt64 || t == ncclUint64 || t == ncclFloat64 ? 8
                                                                   : 0;
}

transfer plain(const char *what, ncclComm_t c, cudaStream_t s)
{
    return {c, s, what, {}, {}, {}, {}, nullptr, nullptr, 0, ncclInt8, 0, 0, 0, false};
}

/* A reduction of n numbers: `from` of every rank goes to the owners, here at `to` (NULL: not here).
 * Piece p of `from`, with `step` bytes each, is owner p's. */
void reduce(transfer *t, const void *from, size_t step, int owner, void *to, size_t n,
            ncclDataType_t type)
{
    ncclComm_t c = t->comm;
    const char *x = (const char *)from;
    t->bytes = n * size_of(type);
    t->type = type;
    for (int i = 1; i < c->ranks; i++) {
        int r = (c->rank + i) % c->ranks;
        if (owner < 0 || owner == r)
            t->sends.push_back({r, (char *)x + (size_t)r * step, t->bytes, 0});
        if (owner < 0 || owner == c->rank) t->receives.push_back({r, nullptr, t->bytes, 0});
    }
    if (owner < 0 || owner == c->rank) {
        t->sum = (char *)to;
        t->own = x + (size_t)c->rank * step;
    }
}

bool is_float(ncclDataType_t t)
{
    return t == ncclFloat32 || t == ncclBfloat16 || t == ncclFloat16;
}

int blocks_of(const ncclConfig_t *config)
{
    enum { MOST = 32 };
    const char *word = getenv("NCCL_MAX_P2P_NCHANNELS");
    int all = !config || config->maxCTAs == NCCL_CONFIG_UNDEF_INT ? MOST : config->maxCTAs;
    int pairs = 1;
    while (pairs < all && pairs < (word ? atoi(word) : MOST)) pairs *= 2;
    return all > pairs ? all : pairs;
}

bool is_blocking(const ncclConfig_t *config) { return !config || config->blocking != 0; }

}

ncclResult_t ncclMemAlloc(void **p, size_t n)
{
    return cudaMalloc(p, n) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

/* ---- communicators */
ncclResult_t ncclGetVersion(int *version)
{
    const char *word = getenv("ZR_EMULATE_NCCL");
    *version = word ? atoi(word) : NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    unsigned char x[16];
    *id = {};
    if (getrandom(x, sizeof x, 0) != (ssize_t)sizeof x) return ncclSystemError;
    int n = snprintf(id->internal, sizeof id->internal, "emulated-nccl-");
    for (unsigned char byte : x)
        n += snprintf(id->internal + n, sizeof id->internal - (size_t)n, "%02x", byte);
    return ncclSuccess;
}

static ncclResult_t asked_until_done(ncclComm_t c)
{
    for (ncclResult_t state = ncclInProgress;;) {
        ncclCommGetAsyncError(c, &state);
        if (state != ncclInProgress) return state;
        wire_pause(c->w);
    }
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    *comm = nullptr;
    if (rank < 0 || rank >= ranks || !memchr(id.internal, 0, sizeof id.internal) ||
        strchr(id.internal, '/'))
        return ncclInvalidArgument;
    wire *w = wire_open(id.internal, rank, ranks);
    if (!w) return ncclSystemError;
    locked hold(queue_lock);
    present = w;
    queue_pause = pause;
    ncclComm_t c = *comm = new ncclComm{w, rank, ranks, is_blocking(config), ncclInProgress};
    for (int r = 0; r < ranks; r++) c->member.push_back(r);
    if (!c->blocking) return ncclInProgress;
    hold.unlock();
    return asked_until_done(c);
}

/* the word that a rank has posted for its split: 0, or not yet */
static uint64_t posted(ncclComm_t c, int rank) { return wire_posted(c->w, c->made->lane, rank); }

/* Sorts the ranks of this color by their keys, which become their numbers. */
static void number(ncclComm_t c)
{
    ncclComm_t made = c->made;
    std::vector<std::pair<uint32_t, int>> found;
    for (int r = 0; r < c->ranks; r++)
        if ((int)((posted(c, r) - 1) >> 32) == made->color)
            found.push_back({(uint32_t)(posted(c, r) - 1), r});
    std::sort(found.begin(), found.end());
    for (size_t i = 0; i < found.size(); i++) {
        if (found[i].first != i)
            shim_fail("NCCL: rank %d splits with color %d and key %u, and would be number %zu of "
                      "%zu",
                      found[i].second, made->color, found[i].first, i, found.size());
        if (found[i].second == c->rank) made->rank = (int)i;
        made->member.push_back(found[i].second);
    }
    made->ranks = (int)found.size();
}

/* Returns whether all ranks have come to the split in progress, if there is one. */
static bool all_split(ncclComm_t c)
{
    if (!c->child) return true;
    for (int r = 0; r < c->ranks; r++)
        if (!posted(c, r)) return false;
    number(c);
    *c->child = c->made;
    c->child = nullptr;
    return true;
}

ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *made, ncclConfig_t *config)
{
    locked hold(queue_lock);
    *made = nullptr;
    if (c->state != ncclSuccess) return ncclInvalidUsage;
    if (c != c->root || color < 0 || key < 0 || c->lanes == WIRE_LANES) return ncclInvalidArgument;
    bool blocking = config ? is_blocking(config) : c->blocking;
    c->made = new ncclComm{c->w, 0, 0, blocking, ncclSuccess};
    c->made->lane = c->lanes++;
    c->made->root = c;
    c->made->color = color;
    c->made->blocks = blocks_of(config);
    c->child = made;
    wire_post(c->w, c->made->lane, ((uint64_t)color << 32 | (uint32_t)key) + 1);
    c->state = ncclInProgress;
    if (!c->blocking) return ncclSuccess;
    hold.unlock();
    return asked_until_done(c);
}

/* A peer's network is gone: the call `at` "start" or "end" never completes. */
static bool endless(const char *at)
{
    const char *word = getenv("ZR_EMULATE_ENDLESS");
    return word && !strcmp(word, at);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *state)
{
    if (endless("start")) wire_pause(c->w); /* a caller that polls without end takes no core */
    locked hold(queue_lock);
    *state = c->state;
    if (c->state != ncclInProgress) return ncclSuccess;
    if (!endless("start") && wire_complete(c->w) && all_split(c))
        c->state = ncclSuccess; /* shown by the next query */
    return ncclSuccess;
}

static bool in_one_allocation(const void *p, size_t n)
{
    size_t bytes = 0;
    const char *first = (const char *)race_span(p, &bytes);
    return first && race_is(DEVICE, p) && (const char *)p + n <= first + bytes;
}

/* With ZR_EMULATE_TOLD it prints the registered memory. */
ncclResult_t ncclCommRegister(const ncclComm_t c, void *p, size_t n, void **handle)
{
    const char *word = getenv("NCCL_LOCAL_REGISTER");
    locked hold(queue_lock);
    *handle = nullptr;
    if (!c || !p || !n) return ncclInvalidArgument;
    if (c->state != ncclSuccess) return ncclInvalidUsage;
    if (!in_one_allocation(p, n))
        shim_fail("NCCL: rank %d registers %zu bytes that are not those of one allocation of "
                  "device memory",
                  c->root->rank, n);
    if (c->registered) shim_fail("NCCL: rank %d registers memory twice", c->root->rank);
    if (word && !strcmp(word, "0")) return ncclSuccess;
    if (getenv("ZR_EMULATE_TOLD"))
        fprintf(stderr, "rank %d registers %zu bytes\n", c->root->rank, n);
    *handle = c->registered = p;
    return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t c, void *handle)
{
    locked hold(queue_lock);
    if (!c || !handle) return ncclInvalidArgument;
    if (c->registered != handle)
        shim_fail("NCCL: rank %d deregisters memory that is not registered", c->root->rank);
    c->registered = nullptr;
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t c)
{
    while (endless("end")) pause();
    locked hold(queue_lock);
    if (c->registered)
        shim_fail("NCCL: rank %d ends a communicator with registered memory", c->root->rank);
    if (c->named.use_count() > 1)
        shim_fail("NCCL: rank %d ends a communicator that a graph names", c->rank);
    return ncclSuccess;
}

static ncclResult_t drop(ncclComm_t c)
{
    if (c->root == c && present == c->w) queue_pause = [] {};
    if (c->root == c) wire_close(c->w);
    beside.erase(std::remove(beside.begin(), beside.end(), c), beside.end());
    count_blocks();
    race_free(DEVICE, c->memory);
    race_free(DEVICE, c->more);
    delete c;
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t c)
{
    locked hold(queue_lock);
    (void)ncclCommFinalize(c);
    if (c->done != c->issued)
        queue_drive(nullptr, [c] { return c->done == c->issued || c->state != ncclSuccess; });
    return drop(c);
}

ncclResult_t ncclCommCount(const ncclComm_t c, int *n)
{
    *n = c->ranks;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t c, int *rank)
{
    *rank = c->rank;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t r)
{
    return r == ncclSuccess              ? "no error"
           : r == ncclUnhandledCudaError ? "unhandled cuda error"
           : r == ncclSystemError        ? "unhandled system error"
           : r == ncclInternalError      ? "internal error"
           : r == ncclInvalidArgument    ? "invalid argument"
           : r == ncclInvalidUsage       ? "invalid usage"
           : r == ncclRemoteError        ? "remote process exited or there was a network error"
           : r == ncclInProgress         ? "NCCL operation in progress"
                                         : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t) { return ""; }

/* ---- collectives */
ncclResult_t ncclGroupStart(void)
{
    locked hold(queue_lock);
    grouped++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    locked hold(queue_lock);
    if (!grouped) return ncclInvalidUsage;
    if (--grouped) return ncclSuccess;
    ncclResult_t all = ncclSuccess;
    for (const transfer_ref &t : group) {
        ncclResult_t r = issue(*t);
        all = r == ncclSuccess ? all : r;
    }
    group.clear();
    return all;
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t n, ncclDataType_t type, ncclComm_t c,
                           cudaStream_t s)
{
    size_t bytes = n * size_of(type);
    const char *own = (char *)to + (size_t)c->rank * bytes, *end = (char *)to + c->ranks * bytes;
    if (from != own && (char *)from < end && (char *)from + bytes > (char *)to)
        shim_fail("NCCL: rank %d gathers from memory that it gathers to, but not in place",
                  c->root->rank);
    transfer t = plain("ncclAllGather", c, s);
    for (int r = 0; r < c->ranks; r++) {
        t.sends.push_back({r, (char *)from, bytes, 0});
        t.receives.push_back({r, (char *)to + (size_t)r * bytes, bytes, 0});
    }
    return submit(std::move(t));
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t n, ncclDataType_t type, int root,
                           ncclComm_t c, cudaStream_t s)
{
    size_t bytes = n * size_of(type);
    transfer t = plain("ncclBroadcast", c, s);
    for (int r = 0; r < c->ranks && root == c->rank; r++)
        t.sends.push_back({r, (char *)from, bytes, 0});
    t.receives.push_back({root, (char *)to, bytes, 0});
    return submit(std::move(t));
}

ncclResult_t ncclAlltoAll(const void *from, void *to, size_t n, ncclDataType_t type, ncclComm_t c,
                          cudaStream_t s)
{
    size_t bytes = n * size_of(type);
    transfer t = plain("ncclAlltoAll", c, s);
    for (int r = 0; r < c->ranks; r++) {
        t.sends.push_back({r, (char *)from + (size_t)r * bytes, bytes, 0});
        t.receives.push_back({r, (char *)to + (size_t)r * bytes, bytes, 0});
    }
    return submit(std::move(t));
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t n, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t c, cudaStream_t s)
{
    if ((type != ncclInt64 && type != ncclUint64) || op != ncclSum || !n)
        return ncclInvalidArgument;
    transfer t = plain("ncclAllReduce", c, s);
    reduce(&t, from, 0, -1, to, n, type);
    return submit(std::move(t));
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t n, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t c, cudaStream_t s)
{
    if (!is_float(type) || op != ncclSum || !n) return ncclInvalidArgument;
    transfer t = plain("ncclReduceScatter", c, s);
    reduce(&t, from, n * size_of(type), -1, to, n, type);
    return submit(std::move(t));
}

ncclResult_t ncclReduce(const void *from, void *to, size_t n, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t c, cudaStream_t s)
{
    if (!is_float(type) || op != ncclSum || !n || root < 0 || root >= c->ranks)
        return ncclInvalidArgument;
    transfer t = plain("ncclReduce", c, s);
    reduce(&t, from, 0, root, to, n, type);
    return submit(std::move(t));
}

ncclResult_t ncclSend(const void *from, size_t n, ncclDataType_t type, int peer, ncclComm_t c,
                      cudaStream_t s)
{
    transfer t = plain("ncclSend/ncclRecv", c, s);
    t.sends.push_back({peer, (char *)from, n * size_of(type), 0});
    return submit(std::move(t));
}

ncclResult_t ncclRecv(void *to, size_t n, ncclDataType_t type, int peer, ncclComm_t c,
                      cudaStream_t s)
{
    transfer t = plain("ncclSend/ncclRecv", c, s);
    t.receives.push_back({peer, (char *)to, n * size_of(type), 0});
    return submit(std::move(t));
}
