/* zr_json.c -- a bounded JSON reader; see zr_json.h. */
#include "zr_json.h"
#include "zr_text.h"
#include <stddef.h>
#include <string.h>

enum { DEEP = 64 };

static void fail(zr_json *j, const char *error)
{
    if (!j->error) j->error = error;
}

char zr_json_peek(zr_json *j)
{
    while (j->at < j->end && *j->at && strchr(" \t\n\r", *j->at)) j->at++;
    return j->error || j->at >= j->end ? 0 : *j->at;
}

static int pass(zr_json *j, char c, const char *error)
{
    if (zr_json_peek(j) != c) fail(j, error);
    else j->at++;
    return j->error ? -1 : 0;
}

int zr_json_more(zr_json *j, char open, int64_t *n)
{
    char close = open == '{' ? '}' : ']';
    if (*n == 0 && pass(j, open, open == '{' ? "expected an object" : "expected an array"))
        return 0;
    if (zr_json_peek(j) == close) {
        j->at++;
        return 0;
    }
    if (*n > 0 && pass(j, ',', "expected a comma or the end")) return 0;
    if (zr_json_peek(j) == close) fail(j, "unexpected comma before the end");
    ++*n;
    return !j->error;
}

/* ---- strings */
/* Return the value of four hex digits at s, or -1. The NUL at the end of
 * the text stops it in time. */
static int32_t hex4(const char *s)
{
    int32_t x = 0;
    for (int i = 0; i < 4; i++) {
        char c = s[i];
        if (c >= '0' && c <= '9') x = x * 16 + (c - '0');
        else if ((c | 32) >= 'a' && (c | 32) <= 'f') x = x * 16 + ((c | 32) - 'a' + 10);
        else return -1;
    }
    return x;
}

static char *put_utf8(char *to, int32_t x)
{
    if (x < 0x80) {
        *to++ = (char)x;
        return to;
    }
    int more = x < 0x800 ? 1 : x < 0x10000 ? 2 : 3;
    *to++ = (char)((0xff00 >> (more + 1)) | (x >> (6 * more)));
    while (more--) *to++ = (char)(0x80 | ((x >> (6 * more)) & 0x3f));
    return to;
}

/* Decode the escape after a backslash to `to`; the result is never longer than the escape. */
static char *unescape(zr_json *j, char *to)
{
    static const char from[] = "\"\\/bfnrt", into[] = "\"\\/\b\f\n\r\t";
    char c = *j->at;
    const char *known = c ? strchr(from, c) : NULL;
    if (known) {
        j->at++;
        *to++ = into[known - from];
        return to;
    }
    int32_t x = c == 'u' ? hex4(j->at + 1) : -1;
    j->at += x < 0 ? 0 : 5;
    if (x >= 0xd800 && x < 0xdc00) { /* first half of a surrogate pair */
        int32_t low = j->at[0] == '\\' && j->at[1] == 'u' ? hex4(j->at + 2) : -1;
        x = low >= 0xdc00 && low < 0xe000 ? 0x10000 + ((x - 0xd800) << 10) + (low - 0xdc00) : -1;
        j->at += x < 0 ? 0 : 6;
    } else if (x >= 0xdc00 && x < 0xe000) {
        x = -1;
    }
    if (x > 0) return put_utf8(to, x);
    fail(j, "a bad escape in a string");
    return to;
}

char *zr_json_text(zr_json *j)
{
    if (pass(j, '"', "expected a string")) return NULL;
    char *text = j->at, *to = text;
    while (!j->error && *j->at != '"') {
        int n = zr_utf8((unsigned char *)j->at);
        if (j->at >= j->end) fail(j, "a string without an end");
        else if ((unsigned char)*j->at < ' ') fail(j, "a control character in a string");
        else if (n == 0) fail(j, "a string that is not UTF-8");
        else if (*j->at == '\\') j->at++, to = unescape(j, to);
        else
            while (n--) *to++ = *j->at++;
    }
    if (j->error) return NULL;
    j->at++; /* the closing quote; `to` is at or before it */
    *to = 0;
    return text;
}

char *zr_json_key(zr_json *j)
{
    char *key = zr_json_text(j);
    return pass(j, ':', "expected a colon") ? NULL : key;
}

/* ---- other values */
static int digit(char c) { return c >= '0' && c <= '9'; }

int64_t zr_json_count(zr_json *j)
{
    int64_t x = 0;
    if (!digit(zr_json_peek(j))) fail(j, "expected an integer");
    if (!j->error && *j->at == '0' && digit(j->at[1])) fail(j, "a number with a leading 0");
    while (!j->error && digit(*j->at)) {
        if (__builtin_mul_overflow(x, 10, &x) || __builtin_add_overflow(x, *j->at - '0', &x))
            fail(j, "a number beyond 2^63");
        else j->at++;
    }
    if (!j->error && strchr(".eE", *j->at) && *j->at) fail(j, "expected an integer");
    return j->error ? -1 : x;
}

static void digits(zr_json *j)
{
    if (!digit(*j->at)) fail(j, "a bad number");
    while (digit(*j->at)) j->at++;
}

static void pass_number(zr_json *j)
{
    if (*j->at == '-') j->at++;
    if (*j->at == '0') j->at++;
    else digits(j);
    if (*j->at == '.') j->at++, digits(j);
    if (*j->at == 'e' || *j->at == 'E') {
        j->at++;
        if (*j->at == '+' || *j->at == '-') j->at++;
        digits(j);
    }
}

/* Skip a value that is neither object nor array. */
static void scalar(zr_json *j)
{
    static const char *const words[] = {"true", "false", "null"};
    char c = zr_json_peek(j);
    if (c == '"') {
        zr_json_text(j);
        return;
    }
    if (c == '-' || digit(c)) {
        pass_number(j);
        return;
    }
    for (int i = 0; i < 3; i++)
        if (!strncmp(j->at, words[i], strlen(words[i]))) {
            j->at += strlen(words[i]);
            return;
        }
    fail(j, c == '{' || c == '[' ? "nested too deeply" : "expected a value");
}

void zr_json_skip(zr_json *j)
{
    char open[DEEP];
    int64_t n[DEEP];
    int depth = 0;
    do {
        char c = zr_json_peek(j);
        if ((c == '{' || c == '[') && depth < DEEP) open[depth] = c, n[depth++] = 0;
        else scalar(j);
        while (depth && !j->error && !zr_json_more(j, open[depth - 1], &n[depth - 1])) depth--;
        if (depth && open[depth - 1] == '{') zr_json_key(j);
    } while (depth && !j->error);
}

int zr_json_end(zr_json *j)
{
    if (!j->error && (zr_json_peek(j) || j->at < j->end)) fail(j, "unexpected text after the end");
    return j->error ? -1 : 0;
}

/* ---- writing */
void zr_json_quote(FILE *to, const char *text)
{
    putc('"', to);
    for (const char *s = text; *s;) {
        int n = zr_utf8((const unsigned char *)s), bare = n == 1 && (unsigned char)*s < ' ';
        if (bare) fprintf(to, "\\u%04x", *s);
        else if (n == 0) putc('?', to);
        else fprintf(to, "%s%.*s", *s == '"' || *s == '\\' ? "\\" : "", n, s);
        s += n ? n : 1;
    }
    putc('"', to);
}
