/* wire.h -- bytes between the processes of a job: a ring for every pair of ranks and communicator.
 *
 * Invariants
 *  1. The memory is a file that all ranks map; its name comes of the job's id, the first rank makes
 *     it (O_EXCL), and it has no name any more once all have it.
 *  2. Nothing blocks: what does not fit or is not there yet is tried again.
 *  3. A rank holds a lock on its byte of the file as long as its process lives.
 *  4. What a rank has posted for a communicator stays there.
 */
#ifndef SHIM_WIRE_H
#define SHIM_WIRE_H
#include <cstddef>
#include <cstdint>

enum { WIRE_LANES = 16 }; /* communicators that a rank of a job has */
struct wire;

wire *wire_open(const char *id, int rank, int ranks); /* NULL: errno says why */
void wire_close(wire *w);
bool wire_complete(wire *w); /* all ranks have come */
bool wire_alive(wire *w, int rank);
/* How many of n bytes were taken just now. */
size_t wire_send(wire *w, int lane, int to, const void *p, size_t n);
size_t wire_receive(wire *w, int lane, int from, void *p, size_t n);
/* A word, not 0, for all ranks to read; of a rank that has posted none, 0. */
void wire_post(wire *w, int lane, uint64_t word);
uint64_t wire_posted(wire *w, int lane, int rank);
void wire_pause(wire *w); /* until something moves, for two milliseconds at most */

#endif
