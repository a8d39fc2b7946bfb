/* zr_foreign.c -- recognizes files of other programs by their first bytes. */
#include "zr_file.h"
#include <string.h>

#define PACKED "; unpack it, then make token files with ./run data"
#define TABLE "; convert its text to token files with ./run data"

/* Files that are often mistaken for others: n bytes at offset `at`, and the kind of the file. Each
 * entry matches at least three bytes near the beginning of the file; one in ten million files of
 * real tokens would match. */
static const struct {
    const char *bytes;
    size_t n, at;
    const char *what;
} foreign[] = {
    {"\x8a\xd8\x34\x01", 4, 0, "an llm.c evaluation file (magic 20240522); --eval takes it"},
    {"\xc6\xd7\x34\x01", 4, 0, "an llm.c model (magic 20240326)"},
    {"\xc7\xd7\x34\x01", 4, 0, "an llm.c debug state (magic 20240327)"},
    {"\xc8\xd7\x34\x01", 4, 0, "an llm.c tokenizer (magic 20240328)"},
    {"\x8f\xd8\x34\x01", 4, 0, "an llm.c training state (magic 20240527)"},
    {"MMIDIDX\0", 8, 0, "a Megatron-LM index (use the .bin beside it)"},
    {"TNTIDX\0\0", 8, 0, "an old index of fairseq or Megatron-LM (use the .bin beside it)"},
    {"\x93NUMPY", 6, 0,
     "a numpy array (.npy); write its numbers alone, x.astype('<u4').tofile(FILE), and say "
     "--tokens "
     "uint32"},
    {"PK\3\4", 4, 0, "a zip archive, such as numpy's .npz or a torch.save file"},
    {"\x80\4\x95", 3, 0, "a Python pickle"},
    {"\x80\5\x95", 3, 0, "a Python pickle"},
    {"\x80\2\x8a\x0al\xfc\x9c\x46\xf9", 9, 0, "an old torch.save file"},
    {"\x80\2]q", 4, 0, "a Python pickle"},
    {"\x80\3]q", 4, 0, "a Python pickle"},
    {"\x80\2}q", 4, 0, "a Python pickle"},
    {"\x80\3}q", 4, 0, "a Python pickle"},
    {"\x80\2c", 3, 0, "a Python pickle"},
    {"\x80\3c", 3, 0, "a Python pickle"},
    {"\x1f\x8b\x08", 3, 0, "compressed by gzip" PACKED},
    {"\x28\xb5\x2f\xfd", 4, 0, "compressed by zstd" PACKED},
    {"\xfd\x37zXZ", 6, 0, "compressed by xz" PACKED},
    {"1AY&SY", 6, 4, "compressed by bzip2" PACKED},
    {"ustar", 5, 257, "a tar archive" PACKED},
    {"PAR1", 4, 0, "a Parquet file" TABLE " parquet"},
    {"ARROW1\0\0", 8, 0, "an Arrow file" TABLE},
    {"\x89HDF\r\n\x1a\n", 8, 0, "an HDF5 file"},
    {"GGUF", 4, 0, "a llama.cpp model (GGUF)"},
    {"\0\0\0\0{\"", 6, 4, "weights (safetensors); --load takes their folder"},
    {"SQLite format 3", 16, 0, "a SQLite database"},
    {"version https://git-lfs", 23, 0,
     "a Git LFS pointer, not the file itself; run git lfs pull there"},
    {"<!DOCTYPE", 9, 0, "a web page, not the file itself"},
    {"<!doctype", 9, 0, "a web page, not the file itself"},
    {"<html", 5, 0, "a web page, not the file itself"},
};

const char *zr_foreign(const char *text, int64_t n)
{
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++)
        if (foreign[i].at + foreign[i].n <= (size_t)n &&
            !memcmp(text + foreign[i].at, foreign[i].bytes, foreign[i].n))
            return foreign[i].what;
    return NULL;
}
