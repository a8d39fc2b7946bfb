/* zr_data.c -- the samples of a token file, read and checked.
 *
 * Invariants
 *  1. Tokens are read with pread, not mapped: a file that shrinks during a run is then an error
 *     instead of a SIGBUS, and its pages do not count as memory of this rank.
 *  2. Every token that leaves this file is below the vocabulary size, even if the file changes.
 *  3. The bytes read at the start are bounded, however long the file is.
 */
#include "zr_data.h"
#include "zr_file.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The start checks WHOLE bytes (64 MiB), then up to CHUNK tokens at each of PLACES places; with
 * several sources each gets its share. ONCE: tokens read at once. */
enum { WHOLE = 64 << 20, PLACES = 256, CHUNK = 16384, ONCE = 4096 };

/* Return the token that is never a target; unless the spec names one, the largest of the type. */
static int64_t never(const zr_form *f, int width)
{
    int64_t usual = f->vocab <= UINT16_MAX ? UINT16_MAX : -1;
    return width == 4 && f->ignore == usual ? UINT32_MAX : f->ignore;
}

/* Check that the file is regular and not empty, find its tokens, and
 * require at least one sample. */
static int examine(zr_data *d, const zr_form *f, char *why)
{
    struct stat s;
    if (fstat(d->fd, &s)) return zr_why(why, "%s: %s", d->path, strerror(errno));
    if (!S_ISREG(s.st_mode)) return zr_why(why, "%s: not a regular file", d->path);
    if (s.st_size == 0) return zr_why(why, "%s: empty", d->path);
    if (zr_find_tokens(d, s.st_size, f, why)) return -1;
    d->ignore = never(f, d->width);
    if (d->count < d->T + 1)
        return zr_why(why, "%s: %" PRId64 " tokens; one sample needs %" PRId64, d->path, d->count,
                      d->T + 1);
    d->samples = (d->count - 1) / d->T;
    return 0;
}

int zr_data_open(zr_data *d, const char *path, const zr_form *f, char *why)
{
    int part = f->part ? f->part : 1;
    *d = (zr_data){.path = path, .T = f->T, .vocab = f->vocab, .labels = -1, .part = part};
    /* O_NONBLOCK: opening a pipe must not block */
    d->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (d->fd < 0)
        return zr_why(why, "%s: %s%s", path, strerror(errno),
                      errno == ENOENT ? "; ./run data makes one from text" : "");
    if (!examine(d, f, why)) return 0;
    zr_data_close(d);
    return -1;
}

void zr_data_close(zr_data *d)
{
    if (d->fd >= 0) close(d->fd);
    if (d->labels >= 0) close(d->labels);
    d->fd = d->labels = -1;
}

/* ---- tokens as stored in a file: x[n] of uint16 or uint32 */

typedef union raw {
    uint16_t two[ONCE + 1];
    uint32_t four[ONCE + 1];
    unsigned char bits[(ONCE + 1) / 8 + 2];
} raw;

static int64_t raw_at(const zr_data *d, const raw *x, int64_t i)
{
    return d->width == 2 ? x->two[i] : x->four[i];
}

/* to[n] = x[n], with -1 for `ignore`. Returns whether a token is beyond the vocabulary. The loops
 * have no early exit, so that they vectorize. */
#define WIDEN(x)                                                                                   \
    for (int64_t i = 0; i < n; i++) {                                                              \
        int64_t hole = (x)[i] == d->ignore;                                                        \
        bad |= (x)[i] >= d->vocab && !hole;                                                        \
        to[i] = hole ? -1 : (int32_t)(x)[i];                                                       \
    }
static int widen(const zr_data *d, const raw *x, int64_t n, int32_t *to)
{
    int bad = 0;
    if (d->width == 2) WIDEN(x->two) else WIDEN(x->four) return bad;
}

/* Read bytes from offset `at` of the file `name`; the first token among them is `first`. */
static int read_raw(int fd, const char *name, raw *x, int64_t bytes, int64_t at, int64_t first,
                    char *why)
{
    if (!zr_read_at(fd, x, bytes, at)) return 0;
    return zr_why(why, "%s: reading token %" PRId64 ": %s", name, first,
                  errno == ENODATA ? "the file has become shorter" : strerror(errno));
}

/* Set target[n] to -1 where the label is the ignored one. Other labels must equal the tokens. */
static int read_labels(const zr_data *d, int32_t *target, int64_t n, int64_t first, char *why)
{
    raw x;
    const int64_t hole = d->width == 2 ? UINT16_MAX : UINT32_MAX;
    if (read_raw(d->labels, d->labels_path, &x, d->width * n, d->width * first, first, why))
        return -1;
    for (int64_t i = 0; i < n; i++) {
        int64_t label = raw_at(d, &x, i), token = target[i] < 0 ? d->ignore : target[i];
        if (label != hole && label != token)
            return zr_why(
                why,
                "%s: the label of token %" PRId64 " is %" PRId64 ", neither the token, %" PRId64
                ", nor %" PRId64 "%s",
                d->labels_path, first + i, label, token, hole,
                label == hole - 99 ? " (it is PyTorch's -100; replace it with that number)" : "");
        if (label == hole) target[i] = -1;
    }
    return 0;
}

/* The same where the bit of the mask, which follows the tokens, is 0. */
static int read_mask(const zr_data *d, int32_t *target, int64_t n, int64_t first, char *why)
{
    raw x;
    int64_t byte = first / 8, bytes = (first + n + 7) / 8 - byte;
    if (read_raw(d->fd, d->path, &x, bytes, d->mask + byte, first, why)) return -1;
    for (int64_t i = 0; i < n; i++) {
        int64_t bit = first + i - 8 * byte;
        if (!(x.bits[bit / 8] >> bit % 8 & 1)) target[i] = -1;
    }
    return 0;
}

/* Return whether all of x[n], at least 16, would be tokens with their bytes swapped. */
static int is_big_endian(const zr_data *d, const raw *x, int64_t n)
{
    int64_t i = 0, most = d->vocab;
    while (i < n &&
           (d->width == 2 ? __builtin_bswap16(x->two[i]) : __builtin_bswap32(x->four[i])) < most)
        i++;
    return i == n && n >= 16;
}

/* Report the token of x[n] that is beyond the vocabulary. */
static int refuse_token(const zr_data *d, const raw *x, int64_t n, int64_t first, char *why)
{
    char beyond[ZR_BEYOND];
    int64_t i = 0;
    while (raw_at(d, x, i) < d->vocab || raw_at(d, x, i) == d->ignore) i++;
    int64_t id = raw_at(d, x, i);
    zr_beyond(beyond, id, d->width, d->vocab);
    return zr_why(why, "%s: token %" PRId64 " is %" PRId64 "; %s", d->path, first + i, id,
                  is_big_endian(d, x, n) ? "the file is big endian, but must be little endian"
                                         : beyond);
}

/* Read token, target int32[n], n <= ONCE + 1, from token `first` on: ids, or -1 for no token or no
 * target. A token beyond the vocabulary is an error. */
static int read_tokens(const zr_data *d, int32_t *token, int32_t *target, int64_t n, int64_t first,
                       char *why)
{
    raw x;
    if (read_raw(d->fd, d->path, &x, d->width * n, d->at + d->width * first, first, why)) return -1;
    if (widen(d, &x, n, token)) return refuse_token(d, &x, n, first, why);
    memcpy(target, token, (size_t)n * sizeof *token);
    if (d->labels >= 0) return read_labels(d, target, n, first, why);
    return d->mask ? read_mask(d, target, n, first, why) : 0;
}

/* ---- the check at the start */

/* Check tokens [lo, hi). */
static int check_all(const zr_data *d, int64_t lo, int64_t hi, char *why)
{
    int32_t token[ONCE], target[ONCE];
    for (int64_t i = lo; i < hi; i += ONCE)
        if (read_tokens(d, token, target, zr_least(hi - i, ONCE), i, why)) return -1;
    return 0;
}

/* n * i / places, rounded down, without overflow of n * i */
static int64_t up_to(int64_t n, int64_t i, int64_t places)
{
    return n / places * i + n % places * i / places;
}

/* Check the share of `rank` in tokens [lo, hi). */
static int check_range(const zr_data *d, int64_t lo, int64_t hi, int rank, int ranks, char *why)
{
    int64_t whole = zr_least(hi - lo, WHOLE / d->width / d->part), rest = hi - lo - whole;
    int64_t places = PLACES / d->part;
    if (check_all(d, lo + whole * rank / ranks, lo + whole * (rank + 1) / ranks, why)) return -1;
    for (int64_t i = rank; i < places; i += ranks) {
        int64_t at = lo + whole + up_to(rest, i, places);
        int64_t next = lo + whole + up_to(rest, i + 1, places);
        if (check_all(d, at, zr_least(at + CHUNK, next), why)) return -1;
    }
    return 0;
}

int zr_data_check(const zr_data *d, int64_t first, int64_t n, int rank, int ranks, char *why)
{
    int all_are = d->width == 2 && d->vocab > UINT16_MAX && d->labels < 0;
    if (n <= 0 || all_are) return 0;
    if (n >= d->samples) return check_range(d, 0, d->samples * d->T + 1, rank, ranks, why);
    first %= d->samples;
    int64_t end = first + n, wrapped = end - d->samples;
    if (wrapped > 0 && check_range(d, 0, wrapped * d->T + 1, rank, ranks, why)) return -1;
    if (wrapped > 0) end = d->samples;
    return check_range(d, first * d->T, end * d->T + 1, rank, ranks, why);
}

int zr_data_read(const zr_data *d, int64_t first, int64_t B, int32_t *tokens, int32_t *targets,
                 char *why)
{
    int32_t token[ONCE + 1], target[ONCE + 1];
    for (int64_t b = 0; b < B; b++) {
        int64_t at = (first + b) % d->samples * d->T;
        for (int64_t t = 0; t < d->T; t += ONCE) {
            int64_t n = zr_least(d->T - t, ONCE), to = b * d->T + t;
            if (read_tokens(d, token, target, n + 1, at + t, why)) return -1;
            for (int64_t i = 0; i < n; i++) tokens[to + i] = token[i] < 0 ? 0 : token[i];
            memcpy(targets + to, target + 1, (size_t)n * sizeof *target);
        }
    }
    return 0;
}
