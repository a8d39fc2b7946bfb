/* race.h -- who has touched which device or pinned memory, and what that is ordered after.
 *
 * Invariants
 *  1. A track is what runs in order: a thread of the host, a stream, a stream's part of graphs. A piece of work
 *     is an epoch of its track; race_now[t][u] is the newest epoch of u that t is ordered after.
 *  2. Every 16 bytes have a cell: the last write, and the reads since. Two accesses of
 *     different tracks, one a write, that no event or wait orders end the process with
 *     SHIM_MISTAKE, whatever order they ran in.
 *  3. Device memory can be touched by work only: it is closed while none runs.
 */
#ifndef SHIM_RACE_H
#define SHIM_RACE_H
#include <array>
#include <cstddef>
#include <cstdint>

enum { STREAMS = 11, TRACKS = 3 + 2 * STREAMS, HOST = 0, BESIDE = 1, DEFAULT_STREAM = 2 };
typedef std::array<uint32_t, TRACKS> clocks;

extern clocks race_now[TRACKS];
extern thread_local int race_self;  /* HOST, or BESIDE: its thread that saves beside a step */
extern thread_local int race_track; /* what this thread does just now; itself by default */

void race_join(clocks &to, const clocks &from);
void race_begin(int track, const char *name); /* a new epoch: a piece of work, for reports */
/* The present track reads or writes n bytes; memory that is neither device nor pinned is not looked
 * at. */
void race_check(const void *p, size_t n, bool write);

/* ---- memory */
enum room { DEVICE, PINNED };
/* 256-byte aligned; NULL: no room. Pinned memory is filled with NaN; a page of the device's is at its
 * first touch: who writes there has called race_check. Of the device's free memory pages are taken.
 */
enum { PAGE = 2 << 20 };
void *race_alloc(room r, size_t bytes);
bool race_free(room r, void *p); /* false: nothing was allocated there */
bool race_is(room r, const void *p);
void race_free_bytes(size_t *free, size_t *total); /* of the device */
void race_open(bool open);                         /* whether device memory can be touched */

#endif
