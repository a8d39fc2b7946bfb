/* sum.c -- checksums of a file's elements, for test_checksum.py.
 *
 *   sum FILE WIDTH FIRST    without AVX-512, and with it if the processor has it: a line each
 */
#include "zr_sum.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    static char data[1 << 16];
    FILE *file = argc == 4 ? fopen(argv[1], "rb") : NULL;
    if (!file) return 99;
    int64_t bytes = (int64_t)fread(data, 1, sizeof data, file);
    int64_t width = atoll(argv[2]), first = atoll(argv[3]);
    fclose(file);
    printf("%016" PRIx64 "\n", zr_sum_plain(data, width, first, bytes / width));
    if (zr_has_avx512())
        printf("%016" PRIx64 "\n", zr_sum_avx512(data, width, first, bytes / width));
    return 0;
}
