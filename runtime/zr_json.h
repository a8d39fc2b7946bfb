/* zr_json.h -- reads JSON from memory, a value at a time, for the headers of weights' files;
 * writes strings.
 *
 * Invariants
 *  1. The text lies in [at, end] and *end is 0; strings are decoded in place.
 *  2. After the first error every call fails; `error` says what is wrong, `at` where.
 *  3. No recursion: nesting deeper than 64 is an error.
 */
#ifndef ZR_JSON_H
#define ZR_JSON_H
#include <stdint.h>
#include <stdio.h>

typedef struct zr_json {
    char *at, *end;
    const char *error; /* NULL: none so far */
} zr_json;

char zr_json_peek(zr_json *j); /* what comes next but blanks; 0: the end, or an error */
/* Goes through an object or array (open '{' or '['): 1 while there is another element to read.
 * *n counts them and is 0 before the first call. */
int zr_json_more(zr_json *j, char open, int64_t *n);
char *zr_json_key(zr_json *j);                  /* a string and its colon */
char *zr_json_text(zr_json *j);                 /* a string, UTF-8, no NUL inside; NULL on error */
int64_t zr_json_count(zr_json *j);              /* an integer >= 0 below 2^63; -1 on error */
void zr_json_skip(zr_json *j);                  /* any value */
int zr_json_end(zr_json *j);                    /* only blanks are left; 0, or -1 */
void zr_json_quote(FILE *to, const char *text); /* what is not UTF-8 as '?' */

#endif
