/* mutate.h -- deterministic mutants of given bytes: a failure can be repeated by its number.
 * With -DLIBFUZZER the including file is a libFuzzer harness instead:
 *
 *   clang -g -fsanitize=fuzzer,address,undefined -DLIBFUZZER -Iruntime tests/fuzz/X.c \
 *     runtime/zr_X.c and the other files that tests/lib/files.py names for it
 *
 *   X DIR MUTANTS SECONDS [FROM]    prints `tried N accepted M`; works in DIR (libFuzzer: in /tmp)
 *
 * The including file defines `seeds`, `words` and int one(const uint8_t *data, size_t size): 1 when
 * the reader took it.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { LARGEST = 1 << 16 };

typedef struct bytes {
    const char *at;
    size_t n;
} bytes;

#define BYTES(s) {s, sizeof s - 1}

static const char *workplace = "/tmp";

static int one(const uint8_t *data, size_t size);

/* Makes a file in memory under the name `file`, because a disk is slow. */
static int make_file(const char *file)
{
    char target[64];
    int fd = memfd_create("mutant", 0);
    snprintf(target, sizeof target, "/proc/self/fd/%d", fd);
    unlink(file);
    if (fd >= 0 && !symlink(target, file)) return fd;
    perror(file);
    exit(99);
}

static void fill_file(int fd, const void *data, size_t size)
{
    if (!ftruncate(fd, (off_t)size) && pwrite(fd, data, size, 0) == (ssize_t)size) return;
    perror("mutant");
    exit(99);
}

#ifdef LIBFUZZER
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    one(data, size);
    return 0;
}
#else
static uint64_t state;

static size_t chance(size_t n) /* below n */
{
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return n ? (size_t)((z ^ z >> 31) % n) : 0;
}

/* Replaces `old` bytes at `at` of data[n] by those of `with`. Returns the new length. */
static size_t replace(uint8_t *data, size_t n, size_t at, size_t old, const void *with,
                      size_t length)
{
    if (n - old + length > LARGEST) return n;
    memmove(data + at + length, data + at + old, n - at - old);
    memcpy(data + at, with, length);
    return n - old + length;
}

static size_t mutate(uint8_t *data, size_t n, const bytes *words, size_t nwords)
{
    uint8_t copy[64], c = (uint8_t)chance(256);
    size_t at = chance(n + 1), length = chance(n - at + 1);
    const bytes *word = &words[chance(nwords)];
    switch (chance(7)) {
    case 0:
        if (at < n) data[at] ^= (uint8_t)(1u << chance(8));
        return n;
    case 1: return replace(data, n, at, at < n, &c, 1);
    case 2: return replace(data, n, at, 0, word->at, word->n);
    case 3: return replace(data, n, at, word->n < n - at ? word->n : n - at, word->at, word->n);
    case 4: return replace(data, n, at, length < 20 ? length : chance(20) % (length + 1), "", 0);
    case 5: return chance(4) ? n : at;
    default:
        length = length < sizeof copy ? length : sizeof copy;
        memcpy(copy, data + at, length);
        return replace(data, n, chance(n + 1), 0, copy, length);
    }
}

/* Mutant number i of the seeds. */
static int mutant(uint64_t i, const bytes *seeds, size_t nseeds, const bytes *words, size_t nwords)
{
    static uint8_t data[LARGEST];
    state = i * 0x2545f4914f6cdd1d;
    const bytes *seed = &seeds[chance(nseeds)];
    size_t n = seed->n, rounds = chance(4) + (i >= nseeds);
    memcpy(data, seed->at, n);
    while (rounds--) n = mutate(data, n, words, nwords);
    uint8_t *exact = malloc(n ? n : 1);
    memcpy(exact, data, n);
    int accepted = one(exact, n);
    free(exact);
    return accepted;
}

static int fuzz(int argc, char **argv, const bytes *seeds, size_t nseeds, const bytes *words,
                size_t nwords)
{
    if (argc < 4) return 99;
    workplace = argv[1];
    uint64_t from = argc > 4 ? strtoull(argv[4], NULL, 10) : 0, i = from, accepted = 0;
    time_t end = time(NULL) + atoi(argv[3]);
    for (; i < from + strtoull(argv[2], NULL, 10) && time(NULL) < end; i++)
        accepted += (uint64_t)mutant(i, seeds, nseeds, words, nwords);
    printf("tried %llu accepted %llu\n", (unsigned long long)(i - from),
           (unsigned long long)accepted);
    return 0;
}
#endif
