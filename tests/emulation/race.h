/* race.h -- records the accesses to device and pinned memory, and the work that orders them.
 *
 * Invariants
 *  1. A track runs in order: a thread of the host, a stream, or a stream's part of graphs. A piece
 *     of work is an epoch of its track; race_now[t][u] is the newest epoch of u that t is ordered
 *     after.
 *  2. Every 16 bytes have a cell: the last write, and the reads since. Two accesses of different
 *     tracks, one a write, that no event or wait orders end the process with SHIM_MISTAKE, whatever
 *     order they ran in.
 *  3. Only work may touch device memory: it is inaccessible while none runs.
 */
#ifndef SHIM_RACE_H
#define SHIM_RACE_H
#include <array>
#include <cstddef>
#include <cstdint>

enum { STREAMS = 11, TRACKS = 3 + 2 * STREAMS, HOST = 0, BESIDE = 1, DEFAULT_STREAM = 2 };
typedef std::array<uint32_t, TRACKS> clocks;

extern clocks race_now[TRACKS];
extern thread_local int race_self;  /* HOST, or BESIDE: the thread that saves beside a step */
extern thread_local int race_track; /* track of this thread's present work; itself by default */

void race_join(clocks &to, const clocks &from);
/* Begins an epoch: a piece of work, named for reports */
void race_begin(int track, const char *name);
/* The present track reads or writes n bytes. Memory that is neither device nor pinned is
 * ignored. */
void race_check(const void *p, size_t n, bool write);

/* ---- memory */
enum room { DEVICE, PINNED };
/* Memory is 256-byte aligned; NULL: no room. Pinned memory is filled with NaN. A page of device
 * memory is filled at its first touch, so a writer there must have called race_check. Pages are
 * taken from the device's free memory. */
enum { PAGE = 2 << 20 };
void *race_alloc(room r, size_t bytes);
bool race_free(room r, void *p); /* false: no allocation begins there */
bool race_is(room r, const void *p);
/* The first byte of the allocation around p, and its size; NULL: there is none. */
const void *race_span(const void *p, size_t *bytes);
void race_free_bytes(size_t *free, size_t *total); /* of the device */
void race_open(bool open);                         /* makes device memory accessible or not */

#endif
