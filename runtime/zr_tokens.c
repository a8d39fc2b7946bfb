/* zr_tokens.c -- finds the place and the type of the tokens in a file: from the meta.json of its
 * folder, Megatron's index beside it, its own header, the user's option, or its contents.
 *
 * llm.c's header is int32[256]: magic, version, number of tokens, zeros. llm.q's also has 1024
 * bytes: "BIN.TOK\n", then int32 version, bytes of a token, number of tokens, vocabulary, and
 * whether a mask follows the tokens: a bit per token, the lowest bit of a byte first, 1 for a
 * target. An index of Megatron-LM (indexed_dataset.py) is "MMIDIDX\0\0", uint64 version, uint8
 * type, uint64 number of sequences n and of entries m, int32 length[n], int64 offset[n], int64
 * entry[m]; data after these is ignored. Its arrays begin at byte 34.
 *
 * Invariants
 *  1. Files are long enough for the tokens, labels and mask found in them.
 */
#include "zr_data.h"
#include "zr_file.h"
#include "zr_json.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEADER = 1024, INDEX = 34, META_MAX = 1 << 20 }; /* bytes */

/* llm.c's headers */
static const struct {
    int32_t magic, version;
    int width;
} headers[] = {{20240520, 1, 2}, {20240801, 7, 4}};

/* Set the tokens: `count` tokens of `width` bytes from `at` on, and `behind` more bytes, must be
 * the whole file. what: the source of these numbers. */
static int set_tokens(zr_data *d, int64_t size, int width, int64_t at, int64_t count,
                      int64_t behind, const char *what, char *why)
{
    int64_t end = at + behind;
    d->width = width;
    d->at = at;
    d->count = count;
    if (count >= 0 && count <= (INT64_MAX - end) / width && size == end + width * count) return 0;
    return zr_why(why,
                  "%s: %s says %" PRId64 " tokens of %d bytes, which does not match the %" PRId64
                  " bytes that the file has",
                  d->path, what, count, width, size);
}

/* Set tokens that begin at the first byte. The type given for them is compared with their looks. */
static int headerless(zr_data *d, int64_t size, int width, char *why)
{
    if (zr_looks(d, size, width, why)) return -1;
    if (!width) width = 2;
    if (size % width)
        return zr_why(why, "%s: %" PRId64 " bytes, %s; tokens are uint%d", d->path, size,
                      width == 2 ? "an odd number" : "not a multiple of 4", 8 * width);
    return set_tokens(d, size, width, 0, size / width, 0, "its size", why);
}

static int short_of(const zr_data *d, int64_t size, const char *whose, char *why)
{
    return zr_why(why, "%s: has only %" PRId64 " of the %d bytes of %s header; the file is cut off",
                  d->path, size, HEADER, whose);
}

static int unknown(const zr_data *d, int32_t version, const char *whose, int32_t known, char *why)
{
    return zr_why(why, "%s: version %" PRId32 " in %s header; only %" PRId32 " is known", d->path,
                  version, whose, known);
}

static int of_llmq(zr_data *d, int64_t size, const int32_t head[8], char *why)
{
    if (size < HEADER) return short_of(d, size, "llm.q's", why);
    if (head[2] != 2) return unknown(d, head[2], "llm.q's", 2, why);
    if (head[3] != 4)
        return zr_why(why, "%s: %" PRId32 " bytes a token in llm.q's header; only 4 are known",
                      d->path, head[3]);
    int64_t count = head[4], mask = head[6] ? count / 8 + (count % 8 != 0) : 0;
    if (set_tokens(d, size, 4, HEADER, count, mask, "llm.q's header", why)) return -1;
    if (head[6]) d->mask = HEADER + 4 * count;
    return 0;
}

/* Set the tokens from the header of the file. Returns 1 if it has none. */
static int by_header(zr_data *d, int64_t size, char *why)
{
    int32_t head[8] = {0};
    int64_t n = zr_least(size, sizeof head);
    if (zr_read_at(d->fd, head, n, 0)) return zr_why(why, "%s: %s", d->path, strerror(errno));
    const char *foreign = zr_foreign_file(d->fd, size);
    if (foreign)
        return zr_why(
            why,
            "%s: is %s; it must hold uint16 or uint32 tokens, optionally after a header of "
            "llm.c or llm.q",
            d->path, foreign);
    if (n >= 8 && !memcmp(head, "BIN.TOK\n", 8)) return of_llmq(d, size, head, why);
    size_t k = 0, all = sizeof headers / sizeof *headers;
    while (k < all && (n < 4 || head[0] != headers[k].magic)) k++;
    if (k == all) return 1;
    if (size < HEADER) return short_of(d, size, "llm.c's", why);
    if (head[1] != headers[k].version)
        return unknown(d, head[1], "llm.c's", headers[k].version, why);
    return set_tokens(d, size, headers[k].width, HEADER, head[2], 0, "the header", why);
}

/* ---- Megatron's index: x.idx beside x.bin */

static uint64_t number_at(const unsigned char *from)
{
    uint64_t x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* Return the bytes of a token of a type; 0: not supported. */
static int megatron_width(unsigned type) { return type == 8 ? 2 : type == 4 ? 4 : 0; }

/* Read the index `file`, open as fd with `size` bytes. Its sequences must
 * end where the .bin ends. */
static int read_megatron(zr_data *d, int64_t bin, const char *file, int fd, int64_t size, char *why)
{
    unsigned char head[INDEX];
    int32_t length;
    int64_t first, last;
    if (zr_read_at(fd, head, INDEX, 0)) return zr_why(why, "%s: %s", file, strerror(errno));
    uint64_t version = number_at(head + 9), n = number_at(head + 18), m = number_at(head + 26);
    int width = megatron_width(head[17]);
    if (version != 1) return zr_why(why, "%s: version %" PRIu64 "; only 1 is known", file, version);
    if (!width)
        return zr_why(why, "%s: tokens of type %d; supported: 8 (uint16) or 4 (int32)", file,
                      head[17]);
    uint64_t room = (uint64_t)(size - INDEX);
    if (n == 0 || n > room / 12 || m > (room - 12 * n) / 8)
        return zr_why(why,
                      "%s: %" PRIu64 " sequences and %" PRIu64
                      " entries, too many or none for its %" PRId64 " bytes",
                      file, n, m, size);
    int64_t lengths = INDEX, offsets = lengths + 4 * (int64_t)n, end = offsets + 8 * (int64_t)n;
    if (zr_read_at(fd, &length, 4, offsets - 4) || zr_read_at(fd, &first, 8, offsets) ||
        zr_read_at(fd, &last, 8, end - 8))
        return zr_why(why, "%s: %s", file, strerror(errno));
    if (first != 0 || length < 0 || last < 0 || last != bin - width * (int64_t)length)
        return zr_why(why,
                      "%s: its sequences lie from byte %" PRId64 " to %" PRId64 " + %d * %" PRId32
                      " of the .bin, which has %" PRId64,
                      file, first, last, width, length, bin);
    if (bin % width)
        return zr_why(why, "%s: %" PRId64 " bytes, not a multiple of the %d of a token", d->path,
                      bin, width);
    return set_tokens(d, bin, width, 0, bin / width, 0, file, why);
}

int zr_index_path(char *to, const char *path)
{
    size_t n = strlen(path);
    if (n < 4 || n >= ZR_FILE || strcmp(path + n - 4, ".bin")) return -1;
    memcpy(to, path, n - 4);
    memcpy(to + n - 4, ".idx", 5);
    return 0;
}

/* Refuse the index that fairseq and Megatron-LM used before MMIDIDX ("lazy", "cached"):
 * "TNTIDX\0\0", uint64 version, and the same types as uint64. */
static int refuse_old(const char *file, int fd, char *why)
{
    unsigned char head[24];
    if (zr_read_at(fd, head, sizeof head, 0)) return zr_why(why, "%s: %s", file, strerror(errno));
    uint64_t type = number_at(head + 16);
    int width = type < 256 ? megatron_width((unsigned)type) : 0;
    if (!width)
        return zr_why(why,
                      "%s: an old index (TNTIDX), of tokens of type %" PRIu64
                      "; supported: 8 (uint16) or 4 (int32)",
                      file, type);
    return zr_why(
        why,
        "%s: an old index (TNTIDX), which is not supported; without it, and with --tokens "
        "uint%d, the .bin is one stream of tokens",
        file, 8 * width);
}

/* Set the tokens from the index beside the file. Returns 1 if there is none. */
static int by_index(zr_data *d, int64_t bin, char *why)
{
    char file[ZR_FILE], magic[9] = "";
    struct stat s;
    if (zr_index_path(file, d->path)) return 1;
    int fd = open(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK), found = 1;
    if (fd < 0) return 1;
    int whole = !fstat(fd, &s) && S_ISREG(s.st_mode) && s.st_size >= INDEX &&
                !zr_read_at(fd, magic, sizeof magic, 0);
    if (whole && !memcmp(magic, "MMIDIDX\0", sizeof magic))
        found = read_megatron(d, bin, file, fd, s.st_size, why);
    if (whole && !memcmp(magic, "TNTIDX\0", 8)) found = refuse_old(file, fd, why);
    close(fd);
    return found;
}

/* ---- meta.json in the file's folder */

/* Entries for this file; -1, NULL: not given. ours: the text has a key of ours. */
typedef struct meta {
    int64_t format, vocab, ignore, end, tokens, sequence;
    const char *dtype, *labels;
    int named, ours;
} meta;

static int64_t count_of(zr_json *j)
{
    char next = zr_json_peek(j);
    if (next >= '0' && next <= '9') return zr_json_count(j);
    zr_json_skip(j);
    return -1;
}

static const char *text_of(zr_json *j)
{
    if (zr_json_peek(j) == '"') return zr_json_text(j);
    zr_json_skip(j);
    return NULL;
}

static void read_named(zr_json *j, meta *m)
{
    int64_t n = 0;
    m->named = 1;
    while (zr_json_more(j, '{', &n)) {
        const char *key = zr_json_key(j);
        if (!key) return;
        if (!strcmp(key, "tokens")) m->tokens = count_of(j);
        else if (!strcmp(key, "labels")) m->labels = text_of(j);
        else zr_json_skip(j);
    }
}

static void read_meta_files(zr_json *j, const char *name, meta *m)
{
    int64_t n = 0;
    while (zr_json_more(j, '{', &n)) {
        const char *key = zr_json_key(j);
        if (!key) return;
        if (!strcmp(key, name) && zr_json_peek(j) == '{') read_named(j, m);
        else zr_json_skip(j);
    }
}

static void read_meta(zr_json *j, const char *name, meta *m)
{
    int64_t n = 0;
    while (zr_json_more(j, '{', &n)) {
        const char *key = zr_json_key(j);
        if (!key) return;
        if (!strcmp(key, "format")) m->format = count_of(j);
        else if (!strcmp(key, "vocab")) m->vocab = count_of(j);
        else if (!strcmp(key, "ignore")) m->ignore = count_of(j);
        else if (!strcmp(key, "end")) m->end = count_of(j);
        else if (!strcmp(key, "sequence")) m->sequence = count_of(j);
        else if (!strcmp(key, "dtype")) m->dtype = text_of(j);
        else if (strcmp(key, "files")) {
            zr_json_skip(j);
            continue;
        } else if (zr_json_peek(j) == '{') read_meta_files(j, name, m);
        else zr_json_skip(j);
        m->ours = 1;
    }
}

/* Open the file of labels beside the tokens, which must be as long. */
static int open_labels(zr_data *d, const char *file, const meta *m, int64_t size, char *why)
{
    const char *path = d->labels_path;
    struct stat s;
    int64_t hole = d->width == 2 ? UINT16_MAX : UINT32_MAX;
    if (strchr(m->labels, '/'))
        return zr_why(why, "%s: labels: %.80s is outside its folder", file, m->labels);
    if (m->ignore != hole)
        return zr_why(why, "%s: ignore: required with labels of %s: %" PRId64, file, m->dtype,
                      hole);
    if (zr_beside(d->labels_path, d->path, m->labels, why)) return -1;
    d->labels = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (d->labels < 0 || fstat(d->labels, &s)) return zr_why(why, "%s: %s", path, strerror(errno));
    if (!S_ISREG(s.st_mode)) return zr_why(why, "%s: not a regular file", path);
    if (s.st_size == size) return 0;
    return zr_why(why, "%s: %" PRId64 " bytes; it must have as many as the tokens, %" PRId64, path,
                  (int64_t)s.st_size, size);
}

static int take_meta(zr_data *d, int64_t size, const zr_form *f, const char *file, const meta *m,
                     char *why)
{
    static const char *const types[] = {"uint16", "uint32"};
    int type = 0;
    while (type < 2 && (!m->dtype || strcmp(m->dtype, types[type]))) type++;
    if (m->format != 1) return zr_why(why, "%s: format: must be 1", file);
    if (type == 2) return zr_why(why, "%s: dtype: must be \"uint16\" or \"uint32\"", file);
    if (m->tokens < 0) return zr_why(why, "%s: tokens: must be an integer", file);
    if (m->vocab > d->vocab)
        return zr_why(why,
                      "%s: its vocabulary has %" PRId64 " tokens, but the model's has %" PRId64
                      ": set model.vocab to %" PRId64 "; for weights to load use gen/zgen's "
                      "--from DIR --vocab %" PRId64,
                      file, m->vocab, d->vocab, m->vocab, m->vocab);
    if (f->end >= 0 && m->end >= 0 && m->end != f->end)
        return zr_why(why,
                      "%s: end: documents end with token %" PRId64 ", but data.end is %" PRId64,
                      file, m->end, f->end);
    if (m->sequence >= 0 && m->sequence != f->T)
        return zr_why(why,
                      "%s: sequence: documents are packed into samples of %" PRId64
                      " tokens, but train.sequence is %" PRId64,
                      file, m->sequence, f->T);
    if (set_tokens(d, size, type ? 4 : 2, 0, m->tokens, 0, file, why)) return -1;
    return m->labels ? open_labels(d, file, m, size, why) : 0;
}

int zr_meta_path(char *to, const char *path)
{
    char why[ZR_WHY];
    return zr_beside(to, path, "meta.json", why);
}

/* Set the tokens from meta.json. Returns 1 if it does not describe this file; another program's
 * file is ignored. */
static int by_meta(zr_data *d, int64_t size, const zr_form *f, char *why)
{
    char file[ZR_FILE];
    struct stat s;
    int64_t n;
    const char *slash = strrchr(d->path, '/');
    if (zr_meta_path(file, d->path) || stat(file, &s) || !S_ISREG(s.st_mode) ||
        s.st_size > META_MAX)
        return 1;
    char *text = zr_read_whole(file, META_MAX, "no meta.json of token files", &n, why);
    if (!text) return -1;
    zr_json j = {text, text + n, NULL};
    meta m = {.format = -1, .vocab = -1, .ignore = -1, .end = -1, .tokens = -1, .sequence = -1};
    read_meta(&j, slash ? slash + 1 : d->path, &m);
    int bad = zr_json_end(&j);
    int found = bad && m.ours
                    ? zr_why(why, "%s: byte %" PRId64 ": %s", file, (int64_t)(j.at - text), j.error)
                : m.named ? take_meta(d, size, f, file, &m, why)
                          : 1;
    free(text);
    return found;
}

int zr_find_tokens(zr_data *d, int64_t size, const zr_form *f, char *why)
{
    int found = by_meta(d, size, f, why);
    if (found > 0) found = by_index(d, size, why);
    if (found > 0) found = by_header(d, size, why);
    return found > 0 ? headerless(d, size, f->width, why) : found;
}
