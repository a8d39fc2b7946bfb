/* zr_choices.c -- a file of multiple choice in llm.c's format, read and checked.
 *
 * The header is 256 int32: a magic number, the version, the number of examples, the bytes of the
 * longest. Examples are uint16: 65535; the example's bytes, including these words; its number; the
 * number of the right completion; the number of completions; the length and tokens of the context;
 * the length and tokens of each completion.
 *
 * Invariants
 *  1. Examples are read with pread, as tokens are: a file that shrinks during a run is an error.
 *  2. Every number is checked before it is used, also when an example is read again, because the
 *     file may have changed.
 *  3. Memory is allocated only when a file is opened.
 */
#include "zr_choices.h"
#include "zr_data.h"
#include "zr_file.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { EVAL_MAGIC = 20240522, EVAL_VERSION = 1, EVAL_HEADER = 1024 };
/* Largest number of examples; largest bytes of one. */
enum { EXAMPLES = UINT16_MAX, BYTES = UINT16_MAX };
/* Words of an example. The context's length is at OF_CONTEXT; its tokens
 * and the completions follow. */
enum { BEGINS, OF_BYTES, OF_NUMBER, OF_LABEL, OF_COUNT, OF_CONTEXT };
/* bytes of the smallest example: a context and a completion of one token each */
enum { LEAST = 2 * (OF_CONTEXT + 4) };

__attribute__((format(printf, 4, 5))) static int wrong_example(const zr_choices *c, int64_t i,
                                                               char *why, const char *format, ...)
{
    char text[ZR_WHY];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return zr_why(why, "%s: example %" PRId64 ": %s", c->path, i, text);
}

/* ---- an example */

/* Check a length at word `at` and the tokens after it. Returns the word after them, or -1. */
static int64_t check_tokens_at(const zr_choices *c, int64_t i, const char *what, int64_t at,
                               char *why)
{
    char beyond[ZR_BEYOND];
    const uint16_t *w = c->word;
    int64_t left = w[OF_BYTES] / 2 - at;
    if (left < 1) return wrong_example(c, i, why, "ends before its %s", what);
    int64_t n = w[at], end = at + 1 + n;
    if (n < 1) return wrong_example(c, i, why, "a %s without a token", what);
    if (n > left - 1)
        return wrong_example(c, i, why, "a %s of %" PRId64 " tokens, where %" PRId64 " are left",
                             what, n, left - 1);
    for (int64_t k = at + 1; k < end; k++)
        if (w[k] >= c->vocab)
            return wrong_example(c, i, why, "token %" PRId64 " of a %s is %d; %s", k - at - 1, what,
                                 w[k], zr_beyond(beyond, w[k], 0, c->vocab));
    return end;
}

/* Check an example after its first two words. */
static int check_example(const zr_choices *c, int64_t i, char *why)
{
    const uint16_t *w = c->word;
    if (w[OF_NUMBER] != i)
        return wrong_example(c, i, why, "its number is %d, but must be %" PRId64, w[OF_NUMBER], i);
    if (w[OF_LABEL] >= w[OF_COUNT])
        return wrong_example(c, i, why,
                             "the right completion is number %d, but there are %d, counted from 0",
                             w[OF_LABEL], w[OF_COUNT]);
    int64_t at = check_tokens_at(c, i, "context", OF_CONTEXT, why);
    for (int k = 0; k < w[OF_COUNT] && at >= 0; k++) {
        int64_t begin = at;
        at = check_tokens_at(c, i, "completion", begin, why);
        if (at >= 0 && w[OF_CONTEXT] + w[begin] > c->T + 1)
            return wrong_example(c, i, why,
                                 "a context of %d tokens and a completion of %d; the model's "
                                 "sequence has room for %" PRId64,
                                 w[OF_CONTEXT], w[begin], c->T + 1);
    }
    if (at >= 0 && at != w[OF_BYTES] / 2)
        return wrong_example(c, i, why, "%d bytes; its tokens end at %" PRId64, w[OF_BYTES],
                             2 * at);
    return at < 0 ? -1 : 0;
}

/* Read example i, which begins at at[i]; the file has `room` bytes from there on. */
static int read_example(zr_choices *c, int64_t i, int64_t room, char *why)
{
    uint16_t *w = c->word;
    if (room < LEAST)
        return wrong_example(c, i, why, "the file ends %" PRId64 " bytes after its start", room);
    if (zr_read_at(c->fd, w, 4, c->at[i])) return wrong_example(c, i, why, "%s", strerror(errno));
    if (w[BEGINS] != UINT16_MAX)
        return wrong_example(c, i, why, "begins with %d, not with %d", w[BEGINS], UINT16_MAX);
    int bytes = w[OF_BYTES];
    if (bytes % 2 || bytes < LEAST || bytes > c->longest)
        return wrong_example(c, i, why,
                             "%d bytes; must be an even number from %d to %" PRId64
                             ", the longest according to the header",
                             bytes, LEAST, c->longest);
    if (bytes > room)
        return wrong_example(c, i, why, "%d bytes, of which the file has %" PRId64, bytes, room);
    if (zr_read_at(c->fd, w + 2, bytes - 4, c->at[i] + 4))
        return wrong_example(c, i, why, "%s", strerror(errno));
    return check_example(c, i, why);
}

int zr_choices_read(zr_choices *c, int64_t i, char *why)
{
    int64_t room = c->at[i + 1] - c->at[i];
    if (read_example(c, i, room, why)) return -1;
    if (c->word[OF_BYTES] != room || c->word[OF_COUNT] != c->count[i])
        return wrong_example(c, i, why, "the file has changed");
    c->label = c->word[OF_LABEL];
    c->next = OF_CONTEXT + 1 + c->word[OF_CONTEXT];
    return 0;
}

void zr_choices_next(zr_choices *c, int32_t *tokens, int32_t *targets)
{
    const uint16_t *context = c->word + OF_CONTEXT + 1, *completion = c->word + c->next + 1;
    int64_t m = context[-1], n = completion[-1];
    for (int64_t i = 0; i < m; i++) tokens[i] = context[i];
    for (int64_t i = 0; i < n; i++) {
        if (i < n - 1) tokens[m + i] = completion[i];
        targets[m - 1 + i] = completion[i];
    }
    c->next += 1 + n;
}

/* ---- the file */

static int choices_header(zr_choices *c, int64_t size, char *why)
{
    int32_t head[4] = {0};
    if (zr_read_at(c->fd, head, zr_least(size, sizeof head), 0))
        return zr_why(why, "%s: %s", c->path, strerror(errno));
    const char *foreign = head[0] == EVAL_MAGIC ? NULL : zr_foreign_file(c->fd, size);
    if (foreign)
        return zr_why(why, "%s: is %s, not llm.c's multiple-choice format", c->path, foreign);
    if (size < EVAL_HEADER)
        return zr_why(why,
                      "%s: %" PRId64 " bytes; the header of llm.c's multiple-choice format has %d",
                      c->path, size, EVAL_HEADER);
    if (head[0] != EVAL_MAGIC || head[1] != EVAL_VERSION)
        return zr_why(why,
                      "%s: magic %d, version %d; llm.c's multiple-choice format has %d, version %d "
                      "(./run eval converts JSON lines)",
                      c->path, (int)head[0], (int)head[1], EVAL_MAGIC, EVAL_VERSION);
    if (head[2] < 1 || head[2] > EXAMPLES || head[2] > (size - EVAL_HEADER) / LEAST)
        return zr_why(why, "%s: %d examples, none or too many for its %" PRId64 " bytes", c->path,
                      (int)head[2], size);
    if (head[3] < LEAST || head[3] > BYTES)
        return zr_why(why, "%s: the longest example has %d bytes; it must have %d to %d", c->path,
                      (int)head[3], LEAST, BYTES);
    c->n = head[2];
    c->longest = head[3];
    return 0;
}

static int find_examples(zr_choices *c, int64_t size, char *why)
{
    c->at = calloc((size_t)c->n + 1, sizeof *c->at);
    c->count = calloc((size_t)c->n, sizeof *c->count);
    c->word = calloc(BYTES / 2 + 1, sizeof *c->word);
    if (!c->at || !c->count || !c->word) return zr_why(why, "%s: out of memory", c->path);
    c->at[0] = EVAL_HEADER;
    for (int64_t i = 0; i < c->n; i++) {
        if (read_example(c, i, size - c->at[i], why)) return -1;
        c->count[i] = c->word[OF_COUNT];
        c->at[i + 1] = c->at[i] + c->word[OF_BYTES];
    }
    if (c->at[c->n] == size) return 0;
    return zr_why(why, "%s: %" PRId64 " bytes; its %" PRId64 " examples end at %" PRId64, c->path,
                  size, c->n, c->at[c->n]);
}

int zr_choices_open(zr_choices *c, const char *path, int64_t T, int64_t vocab, char *why)
{
    struct stat s;
    *c = (zr_choices){.path = path, .T = T, .vocab = vocab};
    /* O_NONBLOCK: opening a pipe must not block */
    c->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    int bad = c->fd < 0 || fstat(c->fd, &s) ? zr_why(why, "%s: %s", path, strerror(errno))
              : !S_ISREG(s.st_mode)         ? zr_why(why, "%s: not a regular file", path)
                                            : choices_header(c, s.st_size, why);
    if (!bad && !find_examples(c, s.st_size, why)) return 0;
    zr_choices_close(c);
    return -1;
}

void zr_choices_close(zr_choices *c)
{
    if (c->fd >= 0) close(c->fd);
    free(c->at);
    free(c->count);
    free(c->word);
    *c = (zr_choices){.fd = -1};
}
