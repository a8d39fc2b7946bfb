/* zr_text.h -- UTF-8, and the characters that a terminal may show. */
#ifndef ZR_TEXT_H
#define ZR_TEXT_H
#include <string.h>

/* Return the length of the UTF-8 sequence at s; 0 if it is none (overlong,
 * surrogate, beyond 10FFFF). */
static inline int zr_utf8(const unsigned char *s)
{
    int n = s[0] < 0x80 ? 1 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
    if ((s[0] >= 0x80 && s[0] < 0xc2) || s[0] > 0xf4) return 0;
    for (int i = 1; i < n; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f)) return 0;
    if ((s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] > 0x8f)) return 0;
    return n;
}

/* Return whether the sequence of n bytes at s is a control code: C0, DEL or C1, or one that ends a
 * line or changes its direction (U+061C, U+200E and F, U+2028 to E, U+2066 to 9). */
static inline int zr_is_control(const unsigned char *s, int n)
{
    if (n == 1) return *s < ' ' || *s == 0x7f;
    if (n == 2) return (s[0] == 0xc2 && s[1] < 0xa0) || (s[0] == 0xd8 && s[1] == 0x9c);
    if (s[0] != 0xe2 || n != 3) return 0;
    return (s[1] == 0x80 && (s[2] == 0x8e || s[2] == 0x8f || (s[2] >= 0xa8 && s[2] <= 0xae))) ||
           (s[1] == 0x81 && s[2] >= 0xa6 && s[2] <= 0xa9);
}

/* Replace control codes and bytes that are not UTF-8 by '?', in texts of users and files. but:
 * control codes that stay. */
static inline void zr_printable(char *text, const char *but)
{
    for (char *s = text; *s;) {
        int n = zr_utf8((unsigned char *)s), keep = strchr(but, *s) != NULL;
        if (n > 0 && (keep || !zr_is_control((unsigned char *)s, n))) s += n;
        else
            for (int i = n ? n : 1; i > 0; i--) *s++ = '?';
    }
}

#endif
