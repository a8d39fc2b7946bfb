/* wire.cpp -- the rings of all pairs of ranks, in a file that the ranks share. */
#include "wire.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <linux/futex.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

enum { RING = 1 << 18 };
const off_t LOCKS = (off_t)1 << 40; /* far beyond the end: bytes that are only locked */

struct alignas(64) seat {
    std::atomic<uint32_t> bell; /* rung when something moves for this rank */
    std::atomic<uint64_t> posted[WIRE_LANES];
};

struct alignas(64) ring {
    std::atomic<uint64_t> written;
    alignas(64) std::atomic<uint64_t> read;
    alignas(64) char bytes[RING];
};

struct shared {
    std::atomic<int> present;
    alignas(64) seat seats[]; /* [ranks], then ring[WIRE_LANES][ranks][ranks] */
};

void ring_bell(seat *s)
{
    s->bell++;
    syscall(SYS_futex, &s->bell, FUTEX_WAKE, 8, nullptr, nullptr, 0);
}

}

struct wire {
    int file, rank, ranks;
    uint32_t heard; /* the bell's value at the last pause */
    size_t bytes;
    std::string path;
    shared *s;
    ring *rings;
};

static ring *ring_of(wire *w, int lane, int from, int to)
{
    return &w->rings[(lane * w->ranks + from) * w->ranks + to];
}

static bool lock_own(wire *w)
{
    struct flock f = {};
    f.l_type = F_WRLCK;
    f.l_whence = SEEK_SET;
    f.l_start = LOCKS + w->rank;
    f.l_len = 1;
    return !fcntl(w->file, F_OFD_SETLK, &f);
}

bool wire_alive(wire *w, int rank)
{
    struct flock f = {};
    f.l_type = F_WRLCK;
    f.l_whence = SEEK_SET;
    f.l_start = LOCKS + rank;
    f.l_len = 1;
    return rank == w->rank || fcntl(w->file, F_OFD_GETLK, &f) || f.l_type != F_UNLCK;
}

wire *wire_open(const char *id, int rank, int ranks)
{
    const char *folder = getenv("TMPDIR");
    wire *w = new wire{
        -1, rank, ranks, 0, 0, std::string(folder ? folder : "/tmp") + "/" + id, nullptr, nullptr};
    size_t head = sizeof(shared) + (size_t)ranks * sizeof(seat);
    w->bytes = head + (size_t)(WIRE_LANES * ranks * ranks) * sizeof(ring);
    int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW;
    w->file = open(w->path.c_str(), flags | O_CREAT | O_EXCL, 0600);
    if (w->file < 0 && errno == EEXIST) w->file = open(w->path.c_str(), flags);
    void *p = MAP_FAILED;
    if (w->file >= 0 && lock_own(w) && !ftruncate(w->file, (off_t)w->bytes))
        p = mmap(nullptr, w->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, w->file, 0);
    if (p == MAP_FAILED) {
        delete w;
        return nullptr;
    }
    w->s = (shared *)p;
    w->rings = (ring *)((char *)p + head);
    if (++w->s->present == ranks) unlink(w->path.c_str());
    return w;
}

bool wire_complete(wire *w) { return w->s->present >= w->ranks; }

void wire_close(wire *w)
{
    if (!wire_complete(w)) unlink(w->path.c_str());
    munmap(w->s, w->bytes);
    close(w->file);
    delete w;
}

/* Bytes [at, at + n) of the endless sequence are in at most two pieces of the ring. */
static void copy_in(ring *r, uint64_t at, const char *p, size_t n)
{
    size_t first = std::min(n, (size_t)(RING - at % RING));
    memcpy(r->bytes + at % RING, p, first);
    memcpy(r->bytes, p + first, n - first);
}

static void copy_out(const ring *r, uint64_t at, char *p, size_t n)
{
    size_t first = std::min(n, (size_t)(RING - at % RING));
    memcpy(p, r->bytes + at % RING, first);
    memcpy(p + first, r->bytes, n - first);
}

size_t wire_send(wire *w, int lane, int to, const void *p, size_t n)
{
    ring *r = ring_of(w, lane, w->rank, to);
    uint64_t at = r->written.load();
    n = std::min(n, (size_t)(RING - (at - r->read.load())));
    if (!n) return 0;
    copy_in(r, at, (const char *)p, n);
    r->written.store(at + n);
    ring_bell(&w->s->seats[to]);
    return n;
}

size_t wire_receive(wire *w, int lane, int from, void *p, size_t n)
{
    ring *r = ring_of(w, lane, from, w->rank);
    uint64_t at = r->read.load();
    n = std::min(n, (size_t)(r->written.load() - at));
    if (!n) return 0;
    copy_out(r, at, (char *)p, n);
    r->read.store(at + n);
    ring_bell(&w->s->seats[from]);
    return n;
}

void wire_post(wire *w, int lane, uint64_t word)
{
    w->s->seats[w->rank].posted[lane] = word;
    for (int r = 0; r < w->ranks; r++) ring_bell(&w->s->seats[r]);
}

uint64_t wire_posted(wire *w, int lane, int rank) { return w->s->seats[rank].posted[lane]; }

void wire_pause(wire *w)
{
    seat *mine = &w->s->seats[w->rank];
    struct timespec most = {0, 2000000};
    if (mine->bell == w->heard)
        syscall(SYS_futex, &mine->bell, FUTEX_WAIT, w->heard, &most, nullptr, 0);
    w->heard = mine->bell;
}
