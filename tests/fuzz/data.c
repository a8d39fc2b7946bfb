/* data.c -- mutants of token files; see mutate.h. */
#include "mutate.h"
#include "zr_file.h"

enum { T = 5, VOCAB = 300, ROWS = 3 };

static int one(const uint8_t *data, size_t size)
{
    static char file[ZR_FILE];
    static int fd = -1;
    char why[ZR_WHY];
    int32_t tokens[ROWS * T], targets[ROWS * T];
    zr_data d;
    if (fd < 0) {
        snprintf(file, sizeof file, "%s/mutant.bin", workplace);
        fd = make_file(file);
    }
    fill_file(fd, data, size);
    zr_form form = {T, VOCAB, 65535, 0};
    if (zr_data_open(&d, file, &form, why)) return 0;
    int good = !zr_data_check(&d, 2, 1 << 20, 0, 1, why);
    /* what is read is sound even where the check objects */
    if (!zr_data_read(&d, 2, ROWS, tokens, targets, why))
        for (int i = 0; i < ROWS * T; i++)
            if (tokens[i] < 0 || tokens[i] >= VOCAB || targets[i] < -1 || targets[i] >= VOCAB)
                abort();
    zr_data_close(&d);
    return good;
}

#ifndef LIBFUZZER
/* llm.c's header of 16 tokens, and the 16 tokens */
#define ZEROS_8 "\0\0\0\0\0\0\0\0"
#define ZEROS_64 ZEROS_8 ZEROS_8 ZEROS_8 ZEROS_8 ZEROS_8 ZEROS_8 ZEROS_8 ZEROS_8
#define ZEROS_256 ZEROS_64 ZEROS_64 ZEROS_64 ZEROS_64
// clang-format off
#define HEAD "\x88\xd8\x34\x01\1\0\0\0\x10\0\0\0\0\0\0\0" ZEROS_8 ZEROS_8 ZEROS_8 \
    ZEROS_8 ZEROS_8 ZEROS_8 ZEROS_64 ZEROS_64 ZEROS_64 ZEROS_256 ZEROS_256 ZEROS_256
// clang-format on
#define SOME "\1\0\2\0\3\0\4\0\5\0\6\0\x2b\1\xff\xff\1\0\2\0\3\0\4\0\5\0\6\0\7\0\x2b\1"

int main(int argc, char **argv)
{
    static const bytes seeds[] = {BYTES(SOME), BYTES(HEAD SOME), BYTES(SOME SOME SOME),
                                  BYTES(SOME SOME SOME SOME SOME)};
    static const bytes words[] = {BYTES("\xff\xff"),
                                  BYTES("\x2c\1"),
                                  BYTES("\xa1\xd9\x34\x01"),
                                  BYTES("\x88\xd8\x34\x01"),
                                  BYTES("\xff\xff\xff\x7f"),
                                  BYTES("\0\0\0\x80"),
                                  BYTES("\0\0"),
                                  BYTES(HEAD)};
    return fuzz(argc, argv, seeds, 4, words, 8);
}
#endif
