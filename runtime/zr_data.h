/* zr_data.h -- files of tokens. Sample i (of `samples`, then from the start again) is
 * tokens[i*T .. i*T+T].
 *
 * The invariants are those of zr_file.h.
 */
#ifndef ZR_DATA_H
#define ZR_DATA_H
#include "zr_file.h"

typedef struct zr_data {
    const char *path;
    int fd, labels; /* labels: file with one label per token; -1: none */
    int width;      /* bytes of a token: 2 (uint16) or 4 (uint32) */
    int part;       /* the start checks 1/part of the bytes that it checks of a single file */
    int64_t at;     /* file offset of the first token */
    int64_t mask;   /* file offset of the mask, a bit per token, 0: not a target; 0: no mask */
    int64_t count, samples; /* number of tokens; of samples of T tokens and one more */
    int64_t T, vocab, ignore;
    char labels_path[ZR_FILE];
} zr_data;

/* Requirements of a program. ignore: token that is never a target (-1: none; in a file of uint32
 * the largest uint32 unless the spec names one). end: last token of each document, if documents are
 * masked from each other, else -1. width: bytes of a token if the file does not tell; 0: uint16.
 * part: see zr_data; 0: 1. */
typedef struct zr_form {
    int64_t T, vocab, ignore, end;
    int width, part;
} zr_form;

/* Open a token file. `path` must outlive d. */
int zr_data_open(zr_data *d, const char *path, const zr_form *f, char *why);
/* to[ZR_FILE] = the file beside a token file that may describe it. Returns 0, or -1: none. */
int zr_meta_path(char *to, const char *path);
int zr_index_path(char *to, const char *path); /* Megatron's index */
/* zr_foreign for a file of `size` bytes. */
const char *zr_foreign_file(int fd, int64_t size);
/* Refuse a file without a header that looks like something other than tokens of `width` bytes;
 * width 0 means uint16. Returns 0, or -1 and why. */
int zr_looks(const zr_data *d, int64_t size, int width, char *why);
/* Write to `to`, and return, the size of the vocabulary and the remedy for a token beyond it.
 * width: bytes of a token; 0: data.ignore cannot help. */
enum { ZR_BEYOND = 320 };
const char *zr_beyond(char to[ZR_BEYOND], int64_t id, int width, int64_t vocab);
/* Find tokens, labels and mask in an open file of `size` bytes (zr_tokens.c). */
int zr_find_tokens(zr_data *d, int64_t size, const zr_form *f, char *why);
/* Look for tokens beyond the vocabulary in samples first .. first+n-1: in their first 64 MiB and at
 * places of the rest, the share of `rank` of `ranks`. zr_data_read checks all that it reads. */
int zr_data_check(const zr_data *d, int64_t first, int64_t n, int rank, int ranks, char *why);
/* Read tokens, targets int32 [B,T] of samples first .. first+B-1. Ignored
 * tokens: input 0, target -1. */
int zr_data_read(const zr_data *d, int64_t first, int64_t B, int32_t *tokens, int32_t *targets,
                 char *why);
void zr_data_close(zr_data *d);

#endif
