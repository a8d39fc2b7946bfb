/* zr_file.c -- helpers for files: complete reads and writes, disk space, folders, messages. */
#define _GNU_SOURCE
#include "zr_file.h"
#include "zr_text.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

int zr_why(char *why, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(why, ZR_WHY, format, args);
    va_end(args);
    zr_printable(why, "");
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

/* Return n bytes of a file, followed by a 0; NULL on failure, with why set. */
static char *read_text(int fd, int64_t n, const char *file, char *why)
{
    char *text = malloc((size_t)n + 1);
    const char *is = NULL;
    if (!text) zr_why(why, "%s: out of memory", file);
    else if (zr_read_at(fd, text, n, 0)) zr_why(why, "%s: %s", file, strerror(errno));
    else if ((is = zr_foreign(text, n))) zr_why(why, "%s: is %s", file, is);
    else {
        text[n] = 0;
        return text;
    }
    free(text);
    return NULL;
}

char *zr_read_whole(const char *file, int64_t most, const char *what, int64_t *n, char *why)
{
    struct stat s;
    char *text = NULL;
    int fd = open(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &s)) zr_why(why, "%s: %s", file, strerror(errno));
    else if (!S_ISREG(s.st_mode)) zr_why(why, "%s: not a regular file", file);
    else if (s.st_size > most)
        zr_why(why, "%s: %s: %" PRId64 " bytes, but at most %" PRId64 " are read", file, what,
               (int64_t)s.st_size, most);
    else if ((text = read_text(fd, s.st_size, file, why))) *n = s.st_size;
    if (fd >= 0) close(fd);
    return text;
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

int zr_reserve(int fd, int64_t size, const char *file, char *why)
{
    struct statvfs v;
    struct stat s;
    if (fstat(fd, &s) || ftruncate(fd, s.st_size > size ? size : s.st_size))
        return zr_why(why, "%s: %s", file, strerror(errno));
    int64_t has = 512 * (int64_t)s.st_blocks;
    if (s.st_size >= size && has >= size) return 0;
    int64_t room = fstatvfs(fd, &v) ? INT64_MAX : (int64_t)v.f_bavail * (int64_t)v.f_frsize + has;
    int bad = room < size ? ENOSPC : fallocate(fd, 0, 0, size) ? errno : 0;
    if (bad == EOPNOTSUPP || bad == ENOSYS) bad = ftruncate(fd, size) ? errno : 0;
    errno = bad;
    if (bad == ENOSPC)
        return zr_why(why, "%s: %" PRId64 " bytes are needed, but the disk has %" PRId64 " free",
                      file, size, room);
    return bad ? zr_why(why, "%s: room for %" PRId64 " bytes: %s", file, size, strerror(bad)) : 0;
}

void zr_add_hash(uint64_t *hash, const void *from, size_t n)
{
    const unsigned char *s = from;
    for (size_t i = 0; i < n; i++) *hash = (*hash ^ s[i]) * 0x100000001b3;
}

void zr_text_hash(const char *text, const char *end, char hash[17])
{
    uint64_t sum = ZR_HASH;
    zr_add_hash(&sum, text, (size_t)(end - text));
    snprintf(hash, 17, "%016" PRIx64, sum);
}

int zr_beside(char *to, const char *path, const char *name, char *why)
{
    const char *slash = strrchr(path, '/');
    int folder = slash ? (int)(slash - path) + 1 : 0;
    if (snprintf(to, ZR_FILE, "%.*s%s", folder, path, name) < ZR_FILE) return 0;
    return zr_why(why, "%.200s...: the path is too long", path);
}

int zr_path(char *to, const char *dir, const char *name, char *why)
{
    if (snprintf(to, ZR_FILE, "%s/%s", dir, name) < ZR_FILE) return 0;
    return zr_why(why, "%.200s...: the path is too long", dir);
}

int zr_link(const char *dir, const char *name, const char *target, char *why)
{
    char path[ZR_FILE], part[ZR_FILE];
    if (zr_path(path, dir, name, why) || zr_path(part, dir, ".link", why)) return -1;
    unlink(part);
    if (!symlink(target, part) && !rename(part, path)) return 0;
    return zr_why(why, "%.300s: cannot be linked: %s", path, strerror(errno));
}

int zr_unlink(const char *dir, const char *name, const char *target, char *why)
{
    char path[ZR_FILE], now[ZR_FILE];
    if (zr_path(path, dir, name, why)) return -1;
    ssize_t n = readlink(path, now, sizeof now);
    if (n != (ssize_t)strlen(target) || memcmp(now, target, (size_t)n) || !unlink(path)) return 0;
    return zr_why(why, "%.300s: cannot be removed: %s", path, strerror(errno));
}

int zr_make_dir(const char *dir, char *why)
{
    char part[ZR_FILE];
    struct stat s;
    if (zr_path(part, dir, "", why)) return -1;
    for (char *slash = strchr(part + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (mkdir(part, 0777) && errno != EEXIST)
            return zr_why(why, "%s: %s", part, strerror(errno));
        *slash = '/';
    }
    if (stat(dir, &s)) return zr_why(why, "%s: %s", dir, strerror(errno));
    return S_ISDIR(s.st_mode) ? 0 : zr_why(why, "%s: not a folder", dir);
}

int zr_lock(int fd, const char *file, char *why)
{
    struct stat ours, there;
    int error = flock(fd, LOCK_EX | LOCK_NB) ? errno : 0;
    if (error && error != EWOULDBLOCK) return zr_why(why, "%s: %s", file, strerror(error));
    if (error || fstat(fd, &ours) || stat(file, &there) || ours.st_dev != there.st_dev ||
        ours.st_ino != there.st_ino)
        return zr_why(why, "%s: another run is saving there", file);
    return 0;
}

int zr_save_clear(const char *file, char *why)
{
    int fd = open(file, O_WRONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return errno == ENOENT ? 0 : zr_why(why, "%s: %s", file, strerror(errno));
    int bad = zr_lock(fd, file, why), n = 1;
    char more[ZR_FILE + 16];
    struct stat s;
    while (snprintf(more, sizeof more, "%s.%d", file, n), !lstat(more, &s)) n++;
    while (!bad && --n > 0) { /* from the last on, so that the remaining files have no gap */
        snprintf(more, sizeof more, "%s.%d", file, n);
        unlink(more);
    }
    if (!bad && unlink(file)) bad = zr_why(why, "%s: %s", file, strerror(errno));
    close(fd);
    return bad;
}
