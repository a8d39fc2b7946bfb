/* zr_looks.c -- recognizes the contents of a file without a description: another program's file,
 * text, or tokens of another type than expected.
 *
 * Invariants
 *  1. A rule refuses only data that tokenizers hardly ever write, and says why. A file with a
 *     description is not judged: one named by a meta.json or Megatron's index, or with the header
 *     of llm.c or llm.q.
 */
#include "zr_data.h"
#include "zr_file.h"
#include "zr_mix.h"
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* 16-bit words to look at (a MiB), and the fewest that allow a judgement. MARK: UTF-16's byte order
 * mark. SMALL: upper halves of tokens are below it, for any vocabulary up to 2^20. */
enum { LOOK = 1 << 19, FEWEST = 64, MARK = 0xfeff, SMALL = 16 };

const char *zr_foreign_file(int fd, int64_t size)
{
    char head[264];
    int64_t n = zr_least(size, sizeof head);
    if (zr_read_at(fd, head, n, 0)) return NULL; /* reading on will report the error */
    return zr_foreign(head, n);
}

/* ---- numbers of another type. A file is read as 16-bit words w[n], n a multiple of 4. */

typedef struct looks {
    const uint16_t *w;
    int64_t n;
    int small; /* upper halves of tokens are below it */
} looks;

/* Count the zeros among every second word from `first` on. */
static int64_t zeros(const looks *l, int first)
{
    int64_t found = 0;
    for (int64_t i = first; i < l->n; i += 2) found += l->w[i] == 0;
    return found;
}

static int swapped(unsigned x) { return (int)((x & 0xff) << 8 | x >> 8); }

/* Return whether it may be the upper half of a token, or of -1 or -100, which
 * often mark ignored targets. */
static int is_upper(const looks *l, uint16_t word, int big)
{
    int x = big ? swapped(word) : word;
    return x < l->small || x == UINT16_MAX;
}

/* Count such words among every second word from `first` on. */
static int64_t uppers(const looks *l, int first, int big)
{
    int64_t found = 0;
    for (int64_t i = first; i < l->n; i += 2) found += is_upper(l, l->w[i], big);
    return found;
}

/* Return whether every second 32-bit word is 0 or -1, the others are tokens, and more than a
 * quarter of these is neither 0 nor -1: as uint32, every second token would have to be token 0. */
static int is_int64(const looks *l, int big)
{
    int64_t pairs = l->n / 4, other = 0;
    for (int64_t i = 0; i < pairs; i++) {
        const uint16_t *high = l->w + 4 * i + 2 * !big, *low = l->w + 4 * i + 2 * big;
        uint16_t sign = high[0];
        if (sign != high[1] || (sign != 0 && sign != UINT16_MAX)) return 0;
        if (!is_upper(l, low[!big], big)) return 0;
        other += low[0] != sign || low[1] != sign;
    }
    return 4 * other > pairs;
}

/* Return whether 99 of 100 of every second 16-bit word are upper halves of tokens and half of the
 * others are not, or 99 of 100 are zeros and a quarter of the others are not. As uint16, every
 * second token would have to be one of the first 16, or token 0. */
static int is_uint32(const looks *l, int big)
{
    int64_t pairs = l->n / 2;
    if (100 * uppers(l, !big, big) < 99 * pairs) return 0;
    if (2 * uppers(l, big, big) < pairs) return 1;
    return 100 * zeros(l, !big) >= 99 * pairs && 4 * zeros(l, big) < 3 * pairs;
}

static double float_at(const uint16_t *w, int words)
{
    double x = 0;
    uint32_t bits = (uint32_t)w[words - 1] << 16 | (words == 2 ? *w : 0);
    float narrow;
    memcpy(&narrow, &bits, sizeof narrow);
    if (words == 4) memcpy(&x, w, sizeof x);
    return words == 4 ? x : narrow;
}

/* Return whether, as floats of so many words (1: bfloat16), at least half are not 0 and 99 of 100
 * are integers, as tokens are, or of the size of weights with at least a quarter of either sign. As
 * uint16, one of every `words` tokens would have to be in 16256 .. 19327 or in two bands around
 * 14000 and 47000, where no frequent tokens are; as uint32 they are beyond any vocabulary. */
static int is_float(const looks *l, int words)
{
    int64_t all = l->n / words, whole = 0, sized = 0, other = 0, negative = 0;
    for (int64_t i = 0; i < all; i++) {
        double x = float_at(l->w + words * i, words), size = fabs(x);
        whole += size < 0x1p24 && size == (double)(int64_t)size;
        sized += x == 0 || (size > 0x1p-40 && size < 0x1p10);
        other += x != 0;
        negative += x < 0;
    }
    if (2 * other <= all) return 0;
    if (100 * whole >= 99 * all) return 1;
    return 100 * sized >= 99 * all && 4 * negative > other && 4 * negative < 3 * other;
}

/* Return whether no lower byte is above 127, and the lower and the upper bytes have nearly the same
 * counts of each value (one in 8 may differ), with at least three values. In uint16, lower bytes
 * take all values, or upper ones are mostly the smallest. */
static int is_uint8(const looks *l)
{
    int64_t lower[256] = {0}, upper[256] = {0}, apart = 0;
    int values = 0;
    for (int64_t i = 0; i < l->n; i++) {
        lower[l->w[i] % 256]++;
        upper[l->w[i] / 256]++;
    }
    for (int x = 0; x < 256; x++) {
        if (x >= 128 && lower[x]) return 0;
        values += lower[x] > 0;
        apart += lower[x] > upper[x] ? lower[x] - upper[x] : upper[x] - lower[x];
    }
    return values >= 3 && 8 * apart < 2 * l->n;
}

enum { NARROWER = ZR_WHY / 2 };
#define INT64 "int64 (every second 32-bit word is 0)"
#define AGAIN "; write them as uint16 or uint32, little endian"

static const char *as_floats(const looks *l)
{
    return is_float(l, 4)   ? "float64" AGAIN
           : is_float(l, 1) ? "bfloat16" AGAIN
           : is_float(l, 2) ? "float32" AGAIN
                            : NULL;
}

/* Return the likely type of w, if it is not uint16; NULL: it may be. */
static const char *no_uint16(const looks *l, char text[NARROWER])
{
    const char *floats = as_floats(l);
    if (floats) return floats;
    if (is_int64(l, 0)) return INT64 AGAIN;
    if (is_int64(l, 1)) return "int64, big endian" AGAIN;
    if (is_uint32(l, 1)) return "uint32, big endian" AGAIN;
    if (is_uint8(l)) return "uint8" AGAIN;
    if (!is_uint32(l, 0)) return NULL;
    snprintf(text, NARROWER,
             "uint32 (%" PRId64 " %% of the odd 16-bit words are below %d): --tokens uint32",
             100 * uppers(l, 1, 0) / (l->n / 2), l->small);
    return text;
}

/* The same for uint32. Except for int64, only if more than one in 10 upper halves is that of no
 * token: these are beyond any vocabulary, so no file that could be trained on is refused. */
static const char *no_uint32(const looks *l)
{
    if (is_int64(l, 0)) return INT64 AGAIN;
    if (10 * uppers(l, 1, 0) >= 9 * (l->n / 2)) return NULL;
    const char *floats = as_floats(l);
    if (floats) return floats;
    if (is_int64(l, 1)) return "int64, big endian" AGAIN;
    if (is_uint32(l, 1)) return "uint32, big endian" AGAIN;
    if (is_uint8(l)) return "uint8" AGAIN;
    return "uint16 (as uint32 they are beyond any vocabulary): --tokens uint16";
}

/* ---- text */

/* Count the bytes of x[n] that occur in no text: control codes other than white space, and 255, of
 * which ignored targets are made. */
static int64_t control_codes(const unsigned char *x, int64_t n)
{
    int64_t codes = 0;
    for (int64_t i = 0; i < n; i++)
        codes += x[i] < '\t' || (x[i] > '\r' && x[i] < ' ') || x[i] == 255;
    return codes;
}

/* Return the kind of text of x[n]; NULL: none. At least a tenth of the bytes of tokens are control
 * codes, because both halves of 16 bits take all values and the upper ones are mostly small. Text
 * of any alphabet has hardly any, except with 16-bit letters, which a mark at the beginning shows.
 * As a uint16 token the mark is one of the last 600 of 65536; as the lower half of a uint32 no
 * letter follows it. */
static const char *kind_of_text(const unsigned char *x, int64_t n, int width)
{
    int first = x[0] | x[1] << 8, second = x[2] | x[3] << 8;
    int64_t i = 0;
    if ((first == MARK || first == swapped(MARK)) && (width != 4 || second >= SMALL))
        return "UTF-16 text";
    if (100 * control_codes(x, n) >= n) return NULL;
    while (i < n && (x[i] == ' ' || (x[i] >= '\t' && x[i] <= '\r'))) i++;
    return i < n && (x[i] == '{' || x[i] == '[') ? "JSON" : "text";
}

static int held_against(const zr_data *d, const uint16_t *w, int64_t n, int width, char *why)
{
    char text[NARROWER];
    /* a prompt has no samples, and no meta.json is read for it */
    const char *way = d->T ? "; if these are tokens, describe them in a meta.json beside them" : "";
    looks l = {w, n / 4 * 4, SMALL};
    while (l.small <= d->vocab >> 16) l.small *= 2;
    const char *looks_like = kind_of_text((const unsigned char *)w, 2 * n, width);
    if (looks_like)
        return zr_why(why, "%s: looks like %s; convert it to token files with ./run data %s%s",
                      d->path, looks_like, *looks_like == 'J' ? "jsonl" : "text", way);
    looks_like = width == 4 ? no_uint32(&l) : no_uint16(&l, text);
    return looks_like ? zr_why(why, "%s: looks like %s%s", d->path, looks_like, way) : 0;
}

const char *zr_beyond(char to[ZR_BEYOND], int64_t id, int width, int64_t vocab)
{
    int n = snprintf(to, ZR_BEYOND,
                     "the vocabulary has %" PRId64 " (ids 0 to %" PRId64 "): ", vocab, vocab - 1);
    size_t left = (size_t)(ZR_BEYOND - n);
    int64_t negative = id - ((int64_t)1 << 8 * width);
    if (negative == -1 || negative == -100)
        snprintf(to + n, left,
                 "it is %" PRId64 ", which other programs use for tokens that are not targets; "
                 "here use data.ignore: %" PRId64 " in the spec",
                 negative, id);
    else if (id >= 2 * vocab && id >= 1 << 20)
        snprintf(to + n, left,
                 "no tokenizer has so many tokens; the file probably has another type "
                 "(uint16 or uint32)");
    else
        snprintf(to + n, left,
                 "the model's embedding has no more rows. For a tokenizer with more tokens, "
                 "including added ones, set model.vocab to its size; for weights to load use "
                 "gen/zgen's --from DIR --vocab N, which adds their rows");
    return to;
}

int zr_looks(const zr_data *d, int64_t size, int width, char *why)
{
    int64_t n = zr_least(size / 2, LOOK / zr_least(d->part, ZR_SOURCES));
    if (n < FEWEST) return 0;
    uint16_t *w = malloc((size_t)(2 * n));
    if (!w) return zr_why(why, "%s: out of memory", d->path);
    int bad = zr_read_at(d->fd, w, 2 * n, 0) ? zr_why(why, "%s: %s", d->path, strerror(errno))
                                             : held_against(d, w, n, width, why);
    free(w);
    return bad;
}
