/* zr_json.h -- reads JSON from memory, a value at a time, for headers of weights; writes strings.
 *
 * Invariants
 *  1. The text is [at, end] and *end is 0; strings are decoded in place.
 *  2. After the first error every call fails; `error` describes it, and `at` is its position.
 *  3. There is no recursion: nesting deeper than 64 is an error.
 */
#ifndef ZR_JSON_H
#define ZR_JSON_H
#include <stdint.h>
#include <stdio.h>

typedef struct zr_json {
    char *at, *end;
    const char *error; /* NULL: no error so far */
} zr_json;

char zr_json_peek(zr_json *j); /* next character after blanks; 0: end or error */
/* Iterate over an object or array (open '{' or '['): return 1 while there is another element to
 * read. *n counts them and must be 0 at the first call. */
int zr_json_more(zr_json *j, char open, int64_t *n);
char *zr_json_key(zr_json *j);     /* reads a string and its colon */
char *zr_json_text(zr_json *j);    /* reads a string: UTF-8 without NUL; NULL on error */
int64_t zr_json_count(zr_json *j); /* reads an integer >= 0 below 2^63; -1 on error */
void zr_json_skip(zr_json *j);     /* skips any value */
int zr_json_end(zr_json *j);       /* checks that only blanks are left; 0, or -1 */
/* Writes a string; '?' for bytes that are not UTF-8. */
void zr_json_quote(FILE *to, const char *text);

#endif
