/* zr_file.h -- files of tokens and of weights, as one rank sees them.
 *
 * Invariants
 *  1. A function that can fail returns 0, or -1 with one line of text in `why` about the error and
 *     the file. It never ends the process and never waits for another rank.
 *  2. No contents of a file can make these functions read or write out of bounds.
 *  3. No file of weights is ever half-written under its final name.
 */
#ifndef ZR_FILE_H
#define ZR_FILE_H
#include "zr.h"

enum { ZR_WHY = 1000, ZR_FILE = 4096 }; /* bytes of `why` and `note`; of a path */

static inline int64_t zr_least(int64_t a, int64_t b) { return a < b ? a : b; }
/* Format a line into why[ZR_WHY], with '?' for bytes that cannot be printed. Returns -1. */
int zr_why(char *why, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Read or write exactly n bytes at file offset `at`. Returns 0, or -1 and errno
 * (ENODATA: the file ends early). */
int zr_read_at(int fd, void *to, int64_t n, int64_t at);
int zr_write_at(int fd, const void *from, int64_t n, int64_t at);
/* Set the size of a file and allocate its space. If it cannot fit, nothing is tried, as that would
 * fill the disk for a moment. Some file systems cannot allocate in advance. */
int zr_reserve(int fd, int64_t size, const char *file, char *why);
/* FNV-1a, starting from ZR_HASH; used to compare things, not for weights. */
#define ZR_HASH 0xcbf29ce484222325
void zr_add_hash(uint64_t *hash, const void *from, size_t n);
/* Write the hash of a text, which ends before `end`, as 16 hex digits. */
void zr_text_hash(const char *text, const char *end, char hash[17]);
/* Return the kind of file that begins with these n bytes, if it is often mistaken for another, such
 * as a Git LFS pointer or a pickle; NULL: unknown (zr_foreign.c). */
const char *zr_foreign(const char *text, int64_t n);
/* Read a regular file of at most `most` bytes. Returns its text followed by a 0, to be freed, or
 * NULL and why. what: phrase about a file that is longer. */
char *zr_read_whole(const char *file, int64_t most, const char *what, int64_t *n, char *why);
/* to[ZR_FILE] = the file `name` in the folder of `path` */
int zr_beside(char *to, const char *path, const char *name, char *why);
/* to[ZR_FILE] = dir/name */
int zr_path(char *to, const char *dir, const char *name, char *why);
/* Let the link dir/name lead to `target`, in place of an older link. */
int zr_link(const char *dir, const char *name, const char *target, char *why);
/* Remove the link dir/name if it leads to `target`. */
int zr_unlink(const char *dir, const char *name, const char *target, char *why);
int zr_make_dir(const char *dir, char *why); /* makes it and the folders above it */
/* Lock an open file. Fails if its name has meanwhile come to mean another file. */
int zr_lock(int fd, const char *file, char *why);
/* Remove a file that will be made under another name, and the files of its name with .1, .2 ...,
 * unless a running process holds its lock. */
int zr_save_clear(const char *file, char *why);

#endif
