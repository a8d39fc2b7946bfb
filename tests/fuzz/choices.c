/* choices.c -- mutants of files of multiple choice; see mutate.h. */
#include "mutate.h"
#include "zr_choices.h"
#include "zr_file.h"

enum { T = 6, VOCAB = 300, AROUND = 4 };

/* Checks that only tokens of the vocabulary are written, and none outside the row. */
static void take_completion(zr_choices *c)
{
    int32_t tokens[T + AROUND], targets[T + AROUND];
    int found = 0;
    for (int i = 0; i < T + AROUND; i++) tokens[i] = targets[i] = -7;
    zr_choices_next(c, tokens, targets);
    for (int i = 0; i < T + AROUND; i++) {
        int empty = tokens[i] == -7 && targets[i] == -7, target = targets[i] != -7;
        if (i >= T ? !empty : !empty && (tokens[i] < 0 || tokens[i] >= VOCAB)) abort();
        if (target && (targets[i] < 0 || targets[i] >= VOCAB)) abort();
        found += target;
    }
    if (!found) abort();
}

static int one(const uint8_t *data, size_t size)
{
    static char file[ZR_FILE];
    static int fd = -1;
    char why[ZR_WHY];
    zr_choices c;
    if (fd < 0) {
        snprintf(file, sizeof file, "%s/mutant", workplace);
        fd = make_file(file);
    }
    fill_file(fd, data, size);
    if (zr_choices_open(&c, file, T, VOCAB, why)) return 0;
    for (int64_t i = 0; i < c.n; i++) {
        if (zr_choices_read(&c, i, why)) abort();
        if (c.label >= c.count[i]) abort();
        for (int k = 0; k < c.count[i]; k++) take_completion(&c);
    }
    zr_choices_close(&c);
    return 1;
}

#ifndef LIBFUZZER
#define ZEROS_8 "\0\0\0\0\0\0\0\0"
#define ZEROS_64 ZEROS_8 ZEROS_8 ZEROS_8 ZEROS_8 ZEROS_8 ZEROS_8 ZEROS_8 ZEROS_8
#define ZEROS_256 ZEROS_64 ZEROS_64 ZEROS_64 ZEROS_64
#define ZEROS_1008                                                                                 \
    ZEROS_256 ZEROS_256 ZEROS_256 ZEROS_64 ZEROS_64 ZEROS_64 ZEROS_8 ZEROS_8 ZEROS_8 ZEROS_8       \
        ZEROS_8 ZEROS_8
#define HEAD(n) "\x8a\xd8\x34\x01\1\0\0\0" n "\0\0\0\x1a\0\0\0" ZEROS_1008
/* Contexts of two tokens; completions of one and of two; the example's number. */
#define EXAMPLE(n) "\xff\xff\x1a\0" n "\0\1\0\2\0\2\0\1\0\2\0\1\0\3\0\2\0\4\0\x2b\1"
#define SMALL "\xff\xff\x12\0\0\0\0\0\1\0\1\0\1\0\1\0\2\0"

int main(int argc, char **argv)
{
    static const bytes seeds[] = {
        BYTES(HEAD("\1") SMALL),
        BYTES(HEAD("\1") EXAMPLE("\0")),
        BYTES(HEAD("\3") EXAMPLE("\0") EXAMPLE("\1") EXAMPLE("\2")),
    };
    static const bytes words[] = {
        BYTES("\xff\xff"), BYTES("\0\0"),         BYTES("\1\0"),
        BYTES("\x2c\1"),   BYTES("\x1a\0"),       BYTES("\xff\xff\xff\x7f"),
        BYTES("\7\0"),     BYTES(EXAMPLE("\1")),  BYTES("\0\0\0\x80"),
        BYTES(HEAD("\2")), BYTES("\xff\xff\x12"),
    };
    return fuzz(argc, argv, seeds, sizeof seeds / sizeof *seeds, words,
                sizeof words / sizeof *words);
}
#endif
