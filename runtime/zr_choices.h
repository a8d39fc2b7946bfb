/* zr_choices.h -- multiple choice: a file like llm.c's of HellaSwag.
 *
 * The invariants are those of zr_file.h.
 */
#ifndef ZR_CHOICES_H
#define ZR_CHOICES_H
#include "zr_file.h"

typedef struct zr_choices {
    const char *path;
    int fd; /* -1: no file */
    int64_t T, vocab;
    int64_t n, longest; /* number of examples; largest bytes of one */
    int64_t *at;        /* [n + 1] offset of each example */
    uint16_t *count;    /* [n] number of completions of each */
    uint16_t *word;     /* words of the example read last */
    int64_t label;      /* number of its right completion */
    int64_t next;       /* word at which the next completion begins */
} zr_choices;

/* Open a file and check all of it. `path` must outlive c. */
int zr_choices_open(zr_choices *c, const char *path, int64_t T, int64_t vocab, char *why);
int zr_choices_read(zr_choices *c, int64_t i, char *why); /* reads example i < n */
/* Write the next of its count[i] completions, after the context, to tokens, targets int32[T]. Only
 * elements that are read, or are targets, are written. */
void zr_choices_next(zr_choices *c, int32_t *tokens, int32_t *targets);
void zr_choices_close(zr_choices *c);

#endif
