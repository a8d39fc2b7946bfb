/* zr_disk.c -- the file arena of a rank: one file, allocated in full, read and written in blocks.
 *
 * The file is unlinked as soon as it is open, so nothing is left behind however a run ends. Blocks
 * go through io_uring if the kernel allows it, several at once; else the calling thread reads and
 * writes. They bypass the page cache if the file system supports that.
 *
 * Invariants
 *  1. Space is allocated at the start if the file system supports that (zr_reserve): a full disk
 *     shows here and not in a step.
 *  2. Each queue that copies from or to the file has a ring, and the thread that saves beside a
 *     step, whose bytes count for no queue, has another. One thread at a time moves data for a
 *     queue.
 *  3. Nothing is allocated after zr_disk_open.
 */
#define _GNU_SOURCE
#include "zr_disk.h"
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_log.h"
#include "zr_options.h"
#include "zr_progress.h"
#include "zr_range.h"
#include "zr_rank.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/io_uring.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Movers: the queues, then the thread that saves beside a step. */
enum { PAGE = 4096, BESIDE = ZR_QUEUES, MOVERS };

/* A block in flight: the part that is left. */
typedef struct piece {
    char *at;
    int64_t there, left;
} piece;

typedef struct ring {
    int fd;
    unsigned depth, waiting; /* waiting: entries not yet submitted to the kernel */
    _Atomic unsigned *sq_tail, *cq_head, *cq_tail;
    unsigned *array, sq_mask, cq_mask;
    struct io_uring_sqe *sqe;
    struct io_uring_cqe *cqe;
    piece *piece; /* [depth] */
    int *idle;    /* [depth] numbers of free pieces; the first depth - busy are valid */
} ring;

struct zr_disk {
    char path[ZR_FILE]; /* the path it had */
    int plain, direct;  /* files: through the page cache; past it, or -1 if not supported */
    int uring;
    ring ring[MOVERS];
    _Atomic int64_t moved[MOVERS]; /* bytes moved */
};

static int mover(int queue) { return zr_is_beside() ? BESIDE : queue; }

/* ---- rings */

static void *map_ring(int fd, size_t bytes, off_t what)
{
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, what);
}

/* Open a ring. Returns 0, or -1 if the kernel provides none. */
static int open_ring(zr *z, ring *r)
{
    struct io_uring_params p = {0};
    const unsigned need = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_RW_CUR_POS;
    r->depth = (unsigned)z->p->depth;
    r->fd = (int)syscall(SYS_io_uring_setup, r->depth, &p);
    if (r->fd < 0) return -1;
    size_t sq = p.sq_off.array + p.sq_entries * sizeof(unsigned);
    size_t cq = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
    char *at = map_ring(r->fd, sq > cq ? sq : cq, IORING_OFF_SQ_RING);
    r->sqe = map_ring(r->fd, p.sq_entries * sizeof *r->sqe, IORING_OFF_SQES);
    if ((p.features & need) != need || at == MAP_FAILED || r->sqe == MAP_FAILED) {
        close(r->fd);
        return -1;
    }
    r->sq_tail = (_Atomic unsigned *)(at + p.sq_off.tail);
    r->cq_head = (_Atomic unsigned *)(at + p.cq_off.head);
    r->cq_tail = (_Atomic unsigned *)(at + p.cq_off.tail);
    r->array = (unsigned *)(at + p.sq_off.array);
    r->sq_mask = *(unsigned *)(at + p.sq_off.ring_mask);
    r->cq_mask = *(unsigned *)(at + p.cq_off.ring_mask);
    r->cqe = (struct io_uring_cqe *)(at + p.cq_off.cqes);
    r->piece = zr_get(z, r->depth, sizeof *r->piece);
    r->idle = zr_get(z, r->depth, sizeof *r->idle);
    for (unsigned i = 0; i < r->depth; i++) r->idle[i] = (int)i;
    return 0;
}

static void submit(ring *r, int fd, int op, int i)
{
    unsigned tail = atomic_load_explicit(r->sq_tail, memory_order_relaxed), n = tail & r->sq_mask;
    const piece *p = &r->piece[i];
    r->sqe[n] = (struct io_uring_sqe){(uint8_t)op,
                                      .fd = fd,
                                      .off = (uint64_t)p->there,
                                      .addr = (uint64_t)(uintptr_t)p->at,
                                      .len = (uint32_t)p->left,
                                      .user_data = (uint64_t)i};
    r->array[n] = n;
    atomic_store_explicit(r->sq_tail, tail + 1, memory_order_release);
    r->waiting++;
}

/* Submit waiting entries, and wait until one completes. Returns 0, or -1 and errno. */
static int tell_kernel(ring *r)
{
    long n = syscall(SYS_io_uring_enter, r->fd, r->waiting, 1, IORING_ENTER_GETEVENTS, NULL, 0);
    if (n < 0) return errno == EINTR || errno == EAGAIN || errno == EBUSY ? 0 : -1;
    r->waiting -= (unsigned)n;
    return 0;
}

/* Account for a result. Returns 1: done; 0: the rest must be submitted again; -1 and errno. */
static int advance(piece *p, int result)
{
    if (result == -EINTR || result == -EAGAIN) return 0;
    errno = result < 0 ? -result : ENODATA;
    if (result <= 0) return -1;
    p->at += result;
    p->there += result;
    p->left -= result;
    return p->left == 0;
}

static int by_ring(ring *r, int fd, int op, piece all, int64_t block)
{
    unsigned busy = 0;
    while (all.left > 0 || busy) {
        for (; all.left > 0 && busy < r->depth; busy++) {
            int64_t n = all.left < block ? all.left : block;
            int i = r->idle[r->depth - busy - 1];
            r->piece[i] = (piece){all.at, all.there, n};
            all = (piece){all.at + n, all.there + n, all.left - n};
            submit(r, fd, op, i);
        }
        if (tell_kernel(r)) return -1;
        unsigned head = atomic_load_explicit(r->cq_head, memory_order_relaxed);
        for (; head != atomic_load_explicit(r->cq_tail, memory_order_acquire); head++) {
            const struct io_uring_cqe *c = &r->cqe[head & r->cq_mask];
            int i = (int)c->user_data, end = advance(&r->piece[i], c->res);
            if (end < 0) return -1;
            if (end) r->idle[r->depth - busy--] = i;
            else submit(r, fd, op, i);
        }
        atomic_store_explicit(r->cq_head, head, memory_order_release);
    }
    return 0;
}

/* ---- moving */

void zr_disk_move(zr *z, int queue, void *at, int64_t there, int64_t bytes)
{
    struct zr_disk *d = z->disk;
    int store = zr_queues[queue].to == ZR_FILED;
    int whole = ((uintptr_t)at | (uint64_t)there | (uint64_t)bytes) % PAGE == 0;
    int fd = whole && d->direct >= 0 ? d->direct : d->plain, bad;
    if (d->uring)
        bad = by_ring(&d->ring[mover(queue)], fd, store ? IORING_OP_WRITE : IORING_OP_READ,
                      (piece){at, there, bytes}, z->p->block);
    else bad = store ? zr_write_at(fd, at, bytes, there) : zr_read_at(fd, at, bytes, there);
    if (bad)
        zr_fail(z, ZR_ENVIRONMENT, "%s %" PRId64 " bytes at %" PRId64 " of %s: %s",
                store ? "writing" : "reading", bytes, there, d->path,
                errno == ENODATA ? "the file is too short" : strerror(errno));
    atomic_fetch_add_explicit(&d->moved[mover(queue)], bytes, memory_order_relaxed);
}

int64_t zr_disk_moved(const zr *z, int queue)
{
    return z->disk ? atomic_load_explicit(&z->disk->moved[queue], memory_order_relaxed) : 0;
}

/* ---- start */

/* Return whether a mover needs a ring. States are read on ZR_LOAD and written on ZR_STORE, even if
 * the program does not use these queues (zr_read, zr_write). */
static int has_ring(const zr *z, int mover)
{
    if (mover == BESIDE) return z->o->save_every != 0;
    if (mover == ZR_LOAD || mover == ZR_STORE) return 1;
    const zr_queue_row *q = &zr_queues[mover];
    return zr_uses(z, mover) && (q->from == ZR_FILED || q->to == ZR_FILED);
}

/* Open the file past the page cache, if a page can be read that way; else return -1. */
static int open_direct(zr *z, int plain)
{
    char link[64];
    void *page = NULL;
    snprintf(link, sizeof link, "/proc/self/fd/%d", plain);
    int fd = open(link, O_RDWR | O_DIRECT | O_CLOEXEC);
    if (posix_memalign(&page, PAGE, PAGE)) zr_fail(z, ZR_ENVIRONMENT, "out of memory");
    if (fd >= 0 && zr_read_at(fd, page, PAGE, 0)) {
        close(fd);
        fd = -1;
    }
    free(page);
    return fd;
}

void zr_disk_open(zr *z)
{
    char why[ZR_WHY];
    const char *dir = z->o->nvme ? z->o->nvme : z->p->folder;
    if (!z->p->filed && z->o->nvme)
        zr_fail(z, ZR_USER, "--nvme %s: this program does not offload to a file", z->o->nvme);
    if (!z->p->filed) return;
    struct zr_disk *d = z->disk = zr_get(z, 1, sizeof *d);
    if (snprintf(d->path, ZR_FILE, "%s/.zr-rank%d-XXXXXX", dir, z->rank) >= ZR_FILE)
        zr_fail(z, ZR_USER, "--nvme %.200s...: the path is too long", dir);
    d->plain = mkostemp(d->path, O_CLOEXEC);
    if (d->plain < 0 || unlink(d->path))
        zr_fail(z, ZR_ENVIRONMENT, "creating a file in %s: %s; set another folder with --nvme DIR",
                dir, strerror(errno));
    if (zr_reserve(d->plain, z->p->filed, d->path, why))
        zr_fail(z, ZR_ENVIRONMENT, "%s; set another disk with --nvme DIR", why);
    d->direct = open_direct(z, d->plain);
    d->uring = 1;
    for (int m = 0; m < MOVERS; m++)
        if (d->uring && has_ring(z, m)) d->uring = !open_ring(z, &d->ring[m]);
    zr_print(z, STDERR_FILENO,
             "file arena: %" PRId64 " bytes a rank in %s, by %s, %s the page cache\n", z->p->filed,
             dir, d->uring ? "io_uring" : "reads and writes", d->direct >= 0 ? "past" : "through");
}
