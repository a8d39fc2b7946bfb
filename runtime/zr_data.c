/* zr_data.c -- token files: uint16 without a header (nanoGPT), or behind llm.c's header.
 *
 * llm.c's header is int32[256]: magic 20240520, version 1, number of tokens, zeros.
 *
 * Invariants
 *  1. Tokens are read with pread and not mapped: a file that shrinks under a run is then an error
 *     and no SIGBUS, and its pages do not count as memory of this rank.
 *  2. Every id that leaves this file is below the vocabulary, whatever became of the file.
 */
#include "zr_file.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAGIC = 20240520, HEADER = 1024, CHUNK = 16384 };

/* Files that are often taken for token files; the first `n` bytes, and what they are. */
static const struct {
    const char *bytes;
    size_t n;
    const char *what;
} foreign[] = {
    {"\xa1\xd9\x34\x01", 4, "llm.c tokens of 4 bytes (magic 20240801, Llama 3)"},
    {"\x8a\xd8\x34\x01", 4, "an llm.c evaluation file (magic 20240522)"},
    {"\xc6\xd7\x34\x01", 4, "an llm.c model (magic 20240326)"},
    {"\xc7\xd7\x34\x01", 4, "an llm.c debug state (magic 20240327)"},
    {"\xc8\xd7\x34\x01", 4, "an llm.c tokenizer (magic 20240328)"},
    {"\x8f\xd8\x34\x01", 4, "an llm.c training state (magic 20240527)"},
    {"BIN.TOK\n", 8, "llmq tokens"},
    {"MMIDIDX\0", 8, "an index of Megatron-LM (its .bin may hold the tokens)"},
    {"\x93NUMPY", 6, "a numpy array"},
};

/* Sets where the tokens lie and how many there are, in a file of `size` bytes. */
static int recognise(zr_data *d, int64_t size, char *why)
{
    int32_t head[3] = {0};
    int64_t n = size < (int64_t)sizeof head ? size : (int64_t)sizeof head;
    if (zr_read_at(d->fd, head, n, 0)) return zr_why(why, "%s: %s", d->path, strerror(errno));
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++)
        if (n >= (int64_t)foreign[i].n && !memcmp(head, foreign[i].bytes, foreign[i].n))
            return zr_why(why, "%s: is %s; needed: uint16 tokens, alone or behind llm.c's header "
                          "(magic %d)", d->path, foreign[i].what, MAGIC);
    if (n < 4 || head[0] != MAGIC) {
        if (size % 2)
            return zr_why(why, "%s: %" PRId64 " bytes, an odd number; tokens are uint16", d->path,
                          size);
        d->at = 0;
        d->count = size / 2;
        return 0;
    }
    if (size < HEADER)
        return zr_why(why, "%s: %" PRId64 " bytes, shorter than llm.c's header of %d", d->path,
                      size, HEADER);
    if (head[1] != 1)
        return zr_why(why, "%s: version %" PRId32 " in llm.c's header; only 1 is known", d->path,
                      head[1]);
    if (head[2] < 0 || size != HEADER + 2 * (int64_t)head[2])
        return zr_why(why, "%s: the header says %" PRId32 " tokens, which makes %" PRId64
                      " bytes; the file has %" PRId64,
                      d->path, head[2], HEADER + 2 * (int64_t)head[2], size);
    d->at = HEADER;
    d->count = head[2];
    return 0;
}

/* A regular file that is not empty, its tokens found, at least one sample. */
static int examine(zr_data *d, char *why)
{
    struct stat s;
    if (fstat(d->fd, &s)) return zr_why(why, "%s: %s", d->path, strerror(errno));
    if (!S_ISREG(s.st_mode)) return zr_why(why, "%s: not a regular file", d->path);
    if (s.st_size == 0) return zr_why(why, "%s: empty", d->path);
    if (recognise(d, s.st_size, why)) return -1;
    if (d->count < d->T + 1)
        return zr_why(why, "%s: %" PRId64 " tokens; one sample takes %" PRId64, d->path, d->count,
                      d->T + 1);
    d->samples = (d->count - 1) / d->T;
    return 0;
}

int zr_data_open(zr_data *d, const char *path, int64_t T, int64_t vocab, int64_t ignore, char *why)
{
    *d = (zr_data){.path = path, .T = T, .vocab = vocab, .ignore = ignore};
    /* O_NONBLOCK: a pipe must not hold us up */
    d->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (d->fd < 0) return zr_why(why, "%s: %s", path, strerror(errno));
    if (!examine(d, why)) return 0;
    zr_data_close(d);
    return -1;
}

void zr_data_close(zr_data *d)
{
    if (d->fd >= 0) close(d->fd);
    d->fd = -1;
}

/* token uint16[n] = tokens from `first` on; an id beyond the vocabulary is an error */
static int fetch(const zr_data *d, uint16_t *token, int64_t n, int64_t first, char *why)
{
    if (zr_read_at(d->fd, token, 2 * n, d->at + 2 * first))
        return zr_why(why, "%s: reading token %" PRId64 ": %s", d->path, first,
                      errno == ENODATA ? "the file has become shorter" : strerror(errno));
    for (int64_t i = 0; i < n; i++)
        if (token[i] >= d->vocab && token[i] != d->ignore)
            return zr_why(why, "%s: token %" PRId64 " is %u; the vocabulary has %" PRId64
                          " (ids 0 to %" PRId64 ")",
                          d->path, first + i, token[i], d->vocab, d->vocab - 1);
    return 0;
}

/* The part of `rank` of tokens [lo, hi). */
static int check_range(const zr_data *d, int64_t lo, int64_t hi, int rank, int ranks, char *why)
{
    uint16_t token[CHUNK];
    int64_t end = lo + (hi - lo) * (rank + 1) / ranks;
    for (int64_t i = lo + (hi - lo) * rank / ranks; i < end; i += CHUNK)
        if (fetch(d, token, end - i < CHUNK ? end - i : CHUNK, i, why)) return -1;
    return 0;
}

int zr_data_check(const zr_data *d, int64_t first, int64_t n, int rank, int ranks, char *why)
{
    if (n <= 0 || d->vocab > UINT16_MAX) return 0;
    if (n >= d->samples) return check_range(d, 0, d->samples * d->T + 1, rank, ranks, why);
    first %= d->samples;
    int64_t end = first + n, wrapped = end - d->samples;
    if (wrapped > 0 && check_range(d, 0, wrapped * d->T + 1, rank, ranks, why)) return -1;
    if (wrapped > 0) end = d->samples;
    return check_range(d, first * d->T, end * d->T + 1, rank, ranks, why);
}

/* tokens, targets int32[n] from token[n + 1] */
static void spread(const uint16_t *token, int64_t n, int64_t ignore, int32_t *tokens,
                   int32_t *targets)
{
    for (int64_t i = 0; i < n; i++) {
        tokens[i] = token[i] == ignore ? 0 : token[i];
        targets[i] = token[i + 1] == ignore ? -1 : token[i + 1];
    }
}

int zr_data_read(const zr_data *d, int64_t first, int64_t B, int32_t *tokens, int32_t *targets,
                 char *why)
{
    uint16_t token[CHUNK + 1];
    for (int64_t b = 0; b < B; b++) {
        int64_t at = (first + b) % d->samples * d->T;
        for (int64_t t = 0; t < d->T; t += CHUNK) {
            int64_t n = d->T - t < CHUNK ? d->T - t : CHUNK;
            if (fetch(d, token, n + 1, at + t, why)) return -1;
            spread(token, n, d->ignore, tokens + b * d->T + t, targets + b * d->T + t);
        }
    }
    return 0;
}
