/* wire.h -- bytes between the processes of a job: a ring for every pair of ranks and communicator.
 *
 * Invariants
 *  1. The memory is a file that all ranks map, named by the job's id. The first rank makes it
 *     (O_EXCL), and it loses its name once all ranks have it.
 *  2. Nothing blocks: bytes that do not fit or have not arrived are tried again.
 *  3. A rank holds a lock on its byte of the file as long as its process lives.
 *  4. A word that a rank has posted for a communicator stays.
 */
#ifndef SHIM_WIRE_H
#define SHIM_WIRE_H
#include <cstddef>
#include <cstdint>

enum { WIRE_LANES = 16 }; /* communicators of a rank of a job */
struct wire;

wire *wire_open(const char *id, int rank, int ranks); /* NULL: errno has the reason */
void wire_close(wire *w);
bool wire_complete(wire *w); /* whether all ranks have come */
bool wire_alive(wire *w, int rank);
/* Returns how many of n bytes were taken just now. */
size_t wire_send(wire *w, int lane, int to, const void *p, size_t n);
size_t wire_receive(wire *w, int lane, int from, void *p, size_t n);
/* A word, not 0, for all ranks to read; 0 stands for a rank that has posted none. */
void wire_post(wire *w, int lane, uint64_t word);
uint64_t wire_posted(wire *w, int lane, int rank);
void wire_pause(wire *w); /* until something moves, for two milliseconds at most */

#endif
