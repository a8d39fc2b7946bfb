/* zr_file.c -- what all readers of files need: whole reads, lines of text about what is wrong. */
#include "zr_file.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

int zr_why(char *why, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(why, ZR_WHY, format, args);
    va_end(args);
    /* Names come from files of others: no control codes to the terminal. */
    for (char *s = why; *s; s++)
        if ((unsigned char)*s < ' ' || (unsigned char)*s > '~') *s = '?';
    return -1;
}

int zr_read_at(int fd, void *to, int64_t n, int64_t at)
{
    for (char *s = to; n > 0;) {
        ssize_t got = pread(fd, s, (size_t)n, at);
        if (got < 0 && errno == EINTR) continue;
        if (got == 0) errno = ENODATA;
        if (got <= 0) return -1;
        s += got;
        at += got;
        n -= got;
    }
    return 0;
}

int zr_write_at(int fd, const void *from, int64_t n, int64_t at)
{
    for (const char *s = from; n > 0;) {
        ssize_t put = pwrite(fd, s, (size_t)n, at);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return -1;
        s += put;
        at += put;
        n -= put;
    }
    return 0;
}
