/* data.c -- mutants of token files and of the files beside them: meta.json, labels, Megatron's
 * index; see mutate.h. An input has four parts: for the index, meta.json and the labels NUMBER\n
 * and as many bytes; then the tokens. */
#include "mutate.h"
#include "zr_data.h"
#include "zr_file.h"
#include "zr_mix.h"

enum { T = 5, VOCAB = 300, ROWS = 3, PARTS = 4 };
static const char *const names[PARTS] = {"mutant.idx", "meta.json", "labels", "mutant.bin"};

/* Returns the part after a line with its length, or nothing if there is no such line. */
static bytes part(const uint8_t **at, size_t *left)
{
    size_t n = 0, i = 0;
    while (i < *left && i < 6 && (*at)[i] >= '0' && (*at)[i] <= '9') n = 10 * n + (*at)[i++] - '0';
    if (i == 0 || i == *left || (*at)[i] != '\n' || n > *left - i - 1) return (bytes){"", 0};
    bytes found = {(const char *)*at + i + 1, n};
    *at += i + 1 + n;
    *left -= i + 1 + n;
    return found;
}

/* Fills the part's file, which is made once for all inputs. A part without bytes has no file,
 * except the tokens. */
static void put(int k, const bytes *found)
{
    static char file[PARTS][ZR_FILE], away[PARTS][ZR_FILE];
    static int fd[PARTS], there[PARTS];
    if (!*file[k]) {
        snprintf(file[k], sizeof file[k], "%s/%s", workplace, names[k]);
        snprintf(away[k], sizeof away[k], "%s/away.%s", workplace, names[k]);
        fd[k] = make_file(file[k]);
        there[k] = 1;
    }
    int wanted = found->n > 0 || k == PARTS - 1;
    if (wanted != there[k] && rename(there[k] ? file[k] : away[k], there[k] ? away[k] : file[k]))
        perror(names[k]), exit(99);
    there[k] = wanted;
    fill_file(fd[k], found->at, found->n);
}

/* Checks that reading is sound even if the check objects. */
static int read_some(const zr_mix *m)
{
    char why[ZR_WHY];
    int32_t tokens[ROWS * T], targets[ROWS * T];
    int good = !zr_mix_check(m, 1 << 20, 0, 1, why);
    if (!zr_mix_read(m, 2, ROWS, tokens, targets, why))
        for (int i = 0; i < ROWS * T; i++)
            if (tokens[i] < 0 || tokens[i] >= VOCAB || targets[i] < -1 || targets[i] >= VOCAB)
                abort();
    return good;
}

static int one(const uint8_t *data, size_t size)
{
    char why[ZR_WHY], file[ZR_FILE];
    zr_mix m = {.shuffle = 1, .seed = size};
    for (int k = 0; k < PARTS - 1; k++) {
        bytes found = part(&data, &size);
        put(k, &found);
    }
    put(PARTS - 1, &(bytes){(const char *)data, size});
    snprintf(file, sizeof file, "%s/%s", workplace, names[PARTS - 1]);
    const zr_given given[] = {{file, 3, (int)strlen(file)}, {file, 1, (int)strlen(file)}};
    zr_form form = {T, VOCAB, 65535, 0, size % 3 == 0 ? 4 : 0, 0};
    int good = !zr_mix_open(&m, given, 2, "", &form, why) && read_some(&m);
    zr_mix_close(&m);
    return good;
}

#ifndef LIBFUZZER
/* llm.c's headers of 16 tokens, llm.q's with and without a mask, and the 16 tokens of each type. */
#define ZEROS_8 "\0\0\0\0\0\0\0\0"
#define ZEROS_64 ZEROS_8 ZEROS_8 ZEROS_8 ZEROS_8 ZEROS_8 ZEROS_8 ZEROS_8 ZEROS_8
#define ZEROS_256 ZEROS_64 ZEROS_64 ZEROS_64 ZEROS_64
#define ZEROS_992                                                                                  \
    ZEROS_256 ZEROS_256 ZEROS_256 ZEROS_64 ZEROS_64 ZEROS_64 ZEROS_8 ZEROS_8 ZEROS_8 ZEROS_8
#define HEAD "\x88\xd8\x34\x01\1\0\0\0\x10\0\0\0\0\0\0\0" ZEROS_8 ZEROS_8 ZEROS_992
#define LLAMA "\xa1\xd9\x34\x01\7\0\0\0\x10\0\0\0\0\0\0\0" ZEROS_8 ZEROS_8 ZEROS_992
#define LLMQ(masks) "BIN.TOK\n\2\0\0\0\4\0\0\0\x10\0\0\0\x2c\1\0\0" masks "\0\0\0\0\0\0\0" ZEROS_992
#define SOME "\1\0\2\0\3\0\4\0\5\0\6\0\x2b\1\xff\xff\1\0\2\0\3\0\4\0\5\0\6\0\7\0\x2b\1"
#define HOLES "\xff\xff\xff\xff\3\0\4\0\5\0\6\0\x2b\1\xff\xff\xff\xff\2\0\3\0\4\0\5\0\6\0\7\0\x2b\1"
#define FOUR "\1\0\0\0\2\0\0\0\3\0\0\0\xff\xff\xff\xff\4\0\0\0\5\0\0\0\6\0\0\0\x2b\1\0\0"
/* Two sequences of 8 tokens of 2 bytes; 16 of 4 bytes in one; two entries. */
#define INDEX(code, n, more)                                                                       \
    "MMIDIDX\0\0\1\0\0\0\0\0\0\0" code n "\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0" more ZEROS_8             \
    "\2\0\0\0\0\0\0\0"
#define TWICE INDEX("\x8", "\2", "\x8\0\0\0\x8\0\0\0" ZEROS_8 "\x10\0\0\0\0\0\0\0")
#define ONCE INDEX("\4", "\1", "\x10\0\0\0" ZEROS_8)
#define META(type, ignore, labels)                                                                 \
    "{\"format\": 1, \"vocab\": 300, \"dtype\": \"" type "\", \"ignore\": " ignore                 \
    ", \"files\": {\"mutant.bin\": {\"tokens\": 16, \"labels\": " labels "}}}"

int main(int argc, char **argv)
{
    static const bytes seeds[] = {
        BYTES("0\n0\n0\n" SOME),
        BYTES("0\n0\n0\n" HEAD SOME),
        BYTES("0\n0\n0\n" SOME SOME SOME SOME SOME),
        BYTES("0\n0\n0\n" LLAMA FOUR FOUR),
        BYTES("0\n0\n0\n" LLMQ("\0") FOUR FOUR),
        BYTES("0\n0\n0\n" LLMQ("\1") FOUR FOUR "\xf7\x3c"),
        BYTES("74\n" TWICE "0\n0\n" SOME),
        BYTES("62\n" ONCE "0\n0\n" FOUR FOUR),
        BYTES("0\n119\n" META("uint16", "null", "null") "0\n" SOME),
        BYTES("0\n129\n" META("uint32", "4294967295", "\"labels\"") "64\n" FOUR FOUR FOUR FOUR),
        BYTES("0\n124\n" META("uint16", "65535", "\"labels\"") "32\n" HOLES SOME),
    };
    static const bytes words[] = {
        BYTES("\xff\xff"),
        BYTES("\x2c\1"),
        BYTES("\xa1\xd9\x34\x01"),
        BYTES("\x88\xd8\x34\x01"),
        BYTES("BIN.TOK\n"),
        BYTES("\xff\xff\xff\x7f"),
        BYTES("\0\0\0\x80"),
        BYTES("\0\0"),
        BYTES(HEAD),
        BYTES("MMIDIDX\0\0"),
        BYTES("\"labels\""),
        BYTES("null"),
        BYTES("65535"),
        BYTES("4294967295"),
        BYTES("\"../labels\""),
        BYTES("uint32"),
        BYTES("\"files\": {"),
        BYTES("18446744073709551616"),
    };
    return fuzz(argc, argv, seeds, sizeof seeds / sizeof *seeds, words,
                sizeof words / sizeof *words);
}
#endif
