/* zr_data.c -- token files: uint16 without a header (nanoGPT), or behind llm.c's header.
 *
 * llm.c's header is int32[256]: magic 20240520, version 1, number of tokens, zeros.
 *
 * Invariants
 *  1. Tokens are read with pread and not mapped: a file that shrinks under a run is then an error
 *     and no SIGBUS, and its pages do not count as memory of this rank.
 *  2. Every id that leaves this file is below the vocabulary, whatever became of the file.
 *  3. What a start reads is bounded, however long the file is.
 */
#include "zr_file.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAGIC = 20240520, HEADER = 1024, CHUNK = 16384 }; /* CHUNK: tokens, read at once */
/* A start checks this many tokens (64 MiB), then up to CHUNK at each of so many places. */
enum { WHOLE = 32 << 20, PLACES = 256 };
/* 16-bit words (a MiB) that a guess looks at; fewer than so many tell nothing. */
enum { LOOK = 1 << 19, FEWEST = 64, MARK = 0xfeff }; /* MARK: of UTF-16's byte order */

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

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Bytes of x[n] that are no letter of any text: codes below the space but for white space */
static int64_t control_codes(const unsigned char *x, int64_t n)
{
    int64_t codes = 0;
    for (int64_t i = 0; i < n; i++) codes += x[i] < '\t' || (x[i] > '\r' && x[i] < ' ');
    return codes;
}

/* Zeros among every second of word[n] */
static int64_t zeros_from(int64_t first, const uint16_t *word, int64_t n)
{
    int64_t zeros = 0;
    for (int64_t i = first; i < n; i += 2) zeros += word[i] == 0;
    return zeros;
}

/* A file without a header may hold something else. Of bytes of tokens a tenth and more are control
 * codes, for both halves of 16 bits take all values and the upper ones are small more often; of
 * text, whatever its alphabet, hardly any, but where its letters have 16 bits, too: a mark at its
 * begin says so. The upper halves of wider integers are zeros, the lower
 * ones seldom: of padding as many are 0 in either place. */
static int guess(const zr_data *d, int64_t size, char *why)
{
    uint16_t word[CHUNK];
    int64_t codes = 0, odd = 0, even = 0, marked = 0, n = least(size / 2, LOOK);
    if (n < FEWEST) return 0;
    for (int64_t i = 0; i < n; i += CHUNK) {
        int64_t some = least(n - i, CHUNK);
        if (zr_read_at(d->fd, word, 2 * some, 2 * i))
            return zr_why(why, "%s: %s", d->path, strerror(errno));
        if (i == 0) marked = *word == MARK || *word == (MARK >> 8 | (MARK & 0xff) << 8);
        codes += control_codes((const unsigned char *)word, 2 * some);
        even += zeros_from(0, word, some);
        odd += zeros_from(1, word, some);
    }
    if (marked || 100 * codes < 2 * n)
        return zr_why(why,
                      "%s: looks like %stext: tokenise it first; needed: uint16 tokens (if "
                      "they are, insist with --tokens uint16)",
                      d->path, marked ? "UTF-16 " : "");
    if (10 * odd > 3 * (n / 2) && 4 * even < 3 * odd)
        return zr_why(why,
                      "%s: looks like uint32 or int64 (%" PRId64 " %% of the odd 16-bit words "
                      "are 0); needed: uint16 tokens (if they are, insist with --tokens uint16)",
                      d->path, 100 * odd / (n / 2));
    return 0;
}

/* Tokens from the first byte on. */
static int headerless(zr_data *d, int64_t size, int sure, char *why)
{
    if (!sure && guess(d, size, why)) return -1;
    if (size % 2)
        return zr_why(why, "%s: %" PRId64 " bytes, an odd number; tokens are uint16", d->path,
                      size);
    d->at = 0;
    d->count = size / 2;
    return 0;
}

/* Sets where the tokens lie and how many there are, in a file of `size` bytes. */
static int recognise(zr_data *d, int64_t size, int sure, char *why)
{
    int32_t head[3] = {0};
    int64_t n = least(size, sizeof head);
    if (zr_read_at(d->fd, head, n, 0)) return zr_why(why, "%s: %s", d->path, strerror(errno));
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++)
        if (n >= (int64_t)foreign[i].n && !memcmp(head, foreign[i].bytes, foreign[i].n))
            return zr_why(why,
                          "%s: is %s; needed: uint16 tokens, alone or behind llm.c's header "
                          "(magic %d)",
                          d->path, foreign[i].what, MAGIC);
    if (n < 4 || head[0] != MAGIC) return headerless(d, size, sure, why);
    if (size < HEADER)
        return zr_why(why, "%s: %" PRId64 " bytes, shorter than llm.c's header of %d", d->path,
                      size, HEADER);
    if (head[1] != 1)
        return zr_why(why, "%s: version %" PRId32 " in llm.c's header; only 1 is known", d->path,
                      head[1]);
    if (head[2] < 0 || size != HEADER + 2 * (int64_t)head[2])
        return zr_why(why,
                      "%s: the header says %" PRId32 " tokens, which makes %" PRId64
                      " bytes; the file has %" PRId64,
                      d->path, head[2], HEADER + 2 * (int64_t)head[2], size);
    d->at = HEADER;
    d->count = head[2];
    return 0;
}

/* A regular file that is not empty, its tokens found, at least one sample. */
static int examine(zr_data *d, int sure, char *why)
{
    struct stat s;
    if (fstat(d->fd, &s)) return zr_why(why, "%s: %s", d->path, strerror(errno));
    if (!S_ISREG(s.st_mode)) return zr_why(why, "%s: not a regular file", d->path);
    if (s.st_size == 0) return zr_why(why, "%s: empty", d->path);
    if (recognise(d, s.st_size, sure, why)) return -1;
    if (d->count < d->T + 1)
        return zr_why(why, "%s: %" PRId64 " tokens; one sample takes %" PRId64, d->path, d->count,
                      d->T + 1);
    d->samples = (d->count - 1) / d->T;
    return 0;
}

int zr_data_open(zr_data *d, const char *path, int64_t T, int64_t vocab, int64_t ignore, int sure,
                 char *why)
{
    *d = (zr_data){.path = path, .T = T, .vocab = vocab, .ignore = ignore};
    /* O_NONBLOCK: a pipe must not hold us up */
    d->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (d->fd < 0) return zr_why(why, "%s: %s", path, strerror(errno));
    if (!examine(d, sure, why)) return 0;
    zr_data_close(d);
    return -1;
}

void zr_data_close(zr_data *d)
{
    if (d->fd >= 0) close(d->fd);
    d->fd = -1;
}

/* Whether one of token[n] is beyond the vocabulary. The loop has no way out, so it takes many at
 * once. */
static int beyond(const zr_data *d, const uint16_t *token, int64_t n)
{
    uint16_t most = (uint16_t)least(d->vocab - 1, UINT16_MAX), bad = 0;
    uint16_t ignore = d->ignore < 0 ? most : (uint16_t)d->ignore;
    for (int64_t i = 0; i < n; i++) bad |= (token[i] > most) & (token[i] != ignore);
    return bad;
}

/* token uint16[n] = tokens from `first` on; an id beyond the vocabulary is an error */
static int read_tokens(const zr_data *d, uint16_t *token, int64_t n, int64_t first, char *why)
{
    if (zr_read_at(d->fd, token, 2 * n, d->at + 2 * first))
        return zr_why(why, "%s: reading token %" PRId64 ": %s", d->path, first,
                      errno == ENODATA ? "the file has become shorter" : strerror(errno));
    if (!beyond(d, token, n)) return 0;
    int64_t i = 0;
    while (!beyond(d, token + i, 1)) i++;
    return zr_why(
        why, "%s: token %" PRId64 " is %u; the vocabulary has %" PRId64 " (ids 0 to %" PRId64 ")",
        d->path, first + i, token[i], d->vocab, d->vocab - 1);
}

/* Tokens [lo, hi). */
static int check_all(const zr_data *d, int64_t lo, int64_t hi, char *why)
{
    uint16_t token[CHUNK];
    for (int64_t i = lo; i < hi; i += CHUNK)
        if (read_tokens(d, token, least(hi - i, CHUNK), i, why)) return -1;
    return 0;
}

/* The part of `rank` of what a start checks of tokens [lo, hi). */
static int check_range(const zr_data *d, int64_t lo, int64_t hi, int rank, int ranks, char *why)
{
    int64_t whole = least(hi - lo, WHOLE), rest = hi - lo - whole;
    if (check_all(d, lo + whole * rank / ranks, lo + whole * (rank + 1) / ranks, why)) return -1;
    for (int64_t i = rank; i < PLACES; i += ranks) {
        int64_t at = lo + whole + rest * i / PLACES, next = lo + whole + rest * (i + 1) / PLACES;
        if (check_all(d, at, least(at + CHUNK, next), why)) return -1;
    }
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
            int64_t n = least(d->T - t, CHUNK);
            if (read_tokens(d, token, n + 1, at + t, why)) return -1;
            spread(token, n, d->ignore, tokens + b * d->T + t, targets + b * d->T + t);
        }
    }
    return 0;
}
