/* tune.cu -- the table of algorithms for cuBLASLt's products: found by timing, kept in a file.
 *
 * A file is text: a line with the GPU and the library that it is for; a line per product, with the
 * eight words of its cublasLtMatmulAlgo_t ("can be trivially serialized and later restored for use
 * with the same version of cuBLAS library", cublasLt.h); and a checksum of all bytes before.
 *
 * Invariants
 *  1. A process has one GPU and one table. For products not in the table the library chooses.
 *  2. A table is used unchanged or not at all, and only by the GPU and library that it names.
 *  3. No file is ever half-written under its final name.
 */
#include "cuda.h"
#include "tune.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_PRODUCTS = 256, MOST_BYTES = 1 << 20, LINE = 512 };

static struct {
    bool timing, used;
    int n, found, other; /* products; lookups that were found or not */
    uint64_t sum;
    tuned row[MOST_PRODUCTS];
} table;

bool tune_timing(void) { return table.timing; }

uint64_t tune_sum(void) { return table.used ? table.sum : 0; }

void tune_add(const tuned &t)
{
    if (table.n < MOST_PRODUCTS) table.row[table.n++] = t;
}

const uint64_t *tune_find(const char *key)
{
    for (int i = 0; table.used && i < table.n; i++)
        if (!strcmp(table.row[i].key, key)) {
            table.found++;
            return table.row[i].algo;
        }
    table.other++;
    return NULL;
}

uint64_t tune_hash(const void *p, size_t n)
{
    uint64_t sum = 0xcbf29ce484222325ull;
    const unsigned char *byte = (const unsigned char *)p;
    for (size_t i = 0; i < n; i++) sum = (sum ^ byte[i]) * 0x100000001b3ull;
    return sum;
}

/* ---- the text of the file */

/* Describe the device that a table is for: the current GPU and the library. */
static void describe_device(char line[LINE])
{
    int device = 0;
    cudaDeviceProp p = {};
    zk_must(cudaGetDevice(&device), "asking for the device");
    zk_must(cudaGetDeviceProperties(&p, device), "asking for the device");
    snprintf(line, LINE, "gemms of %s, %d SMs, cuBLASLt %zu", p.name, p.multiProcessorCount,
             cublasLtGetVersion());
}

static void print(FILE *f)
{
    char line[LINE];
    describe_device(line);
    fprintf(f, "%s\n", line);
    for (const tuned *t = table.row; t < table.row + table.n; t++) {
        fprintf(f, "%s :", t->key);
        for (uint64_t word : t->algo) fprintf(f, " %016llx", (unsigned long long)word);
        fprintf(f, " : %.2f us, the first choice %.2f\n", t->us, t->first);
    }
}

static bool parse(char *line, tuned *t)
{
    char *at = strstr(line, " : ");
    if (!at || at - line >= TUNE_KEY) return false;
    *t = {};
    memcpy(t->key, line, (size_t)(at - line));
    at += 2;
    for (uint64_t &word : t->algo) {
        char *end = at;
        word = strtoull(at, &end, 16);
        if (end == at) return false;
        at = end;
    }
    return !strncmp(at, " : ", 3);
}

static int say(int result, char *why, size_t n, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

static int say(int result, char *why, size_t n, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(why, n, format, list);
    va_end(list);
    return result;
}

/* Return the whole file, which the caller frees, or NULL with errno set. */
static char *load(const char *path, size_t *n)
{
    FILE *f = fopen(path, "re");
    char *text = f ? (char *)malloc(MOST_BYTES) : NULL;
    *n = text ? fread(text, 1, MOST_BYTES - 1, f) : 0;
    int error = f && ferror(f) ? errno : 0;
    if (f) fclose(f);
    if (text) text[*n] = 0;
    if (!error) return text;
    free(text);
    errno = error;
    return NULL;
}

/* Check that the text is complete: its last line is the sum of the others. Cuts that line off. */
static bool whole(char *text, size_t n)
{
    char *last = n && text[n - 1] == '\n' ? text + n - 1 : text;
    while (last > text && last[-1] != '\n') last--;
    char line[LINE];
    table.sum = tune_hash(text, (size_t)(last - text));
    snprintf(line, sizeof line, "sum %016llx\n", (unsigned long long)table.sum);
    bool good = last > text && !strcmp(last, line) && strlen(text) == n;
    *last = 0;
    return good;
}

static int take_table(char *text, size_t n, const char *path, char *why, size_t room)
{
    char mine[LINE], *rest = NULL;
    if (strncmp(text, "gemms of ", 9) || !whole(text, n))
        return say(-1, why, room, "%s: not a table of algorithms, or damaged; write it with --tune",
                   path);
    describe_device(mine);
    char *line = strtok_r(text, "\n", &rest);
    if (strcmp(line, mine))
        return say(1, why, room, "%s: has the %s; this is %s, whose library makes its own choices",
                   path, line, mine + 9);
    for (int number = 2; (line = strtok_r(NULL, "\n", &rest)); number++) {
        if (table.n == MOST_PRODUCTS || !parse(line, &table.row[table.n]))
            return say(-1, why, room, "%s:%d: not a product and its algorithm", path, number);
        table.n++;
    }
    table.used = true;
    return 0;
}

static int keep_table(const char *path, char *why, size_t room)
{
    char *text = NULL, temp[4096];
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    if (f) {
        print(f);
        fclose(f);
    }
    snprintf(temp, sizeof temp, "%s.part", path);
    FILE *to = text ? fopen(temp, "we") : NULL;
    bool good = to && fwrite(text, 1, n, to) == n &&
                fprintf(to, "sum %016llx\n", (unsigned long long)tune_hash(text, n)) > 0;
    free(text);
    if ((to && fclose(to)) || !good || rename(temp, path)) {
        say(-1, why, room, "%s: %s", path, strerror(errno));
        unlink(temp);
        return -1;
    }
    double all = 0, first = 0;
    for (const tuned *t = table.row; t < table.row + table.n; t++) all += t->us, first += t->first;
    return say(1, why, room, "%s: %d products take %.1f us, %.1f with the library's first choices",
               path, table.n, all, first);
}

int zk_gemms(int what, const char *path, char *why, size_t n)
{
    if (what == ZK_TIME) {
        table.timing = true;
        return 0;
    }
    if (what == ZK_END)
        return table.timing ? keep_table(path, why, n)
                            : say(1, why, n, "%s: has %d of %d products", path, table.found,
                                  table.found + table.other);
    size_t bytes = 0;
    char *text = load(path, &bytes);
    if (!text) return say(-1, why, n, "%s: %s", path, strerror(errno));
    int result = take_table(text, bytes, path, why, n);
    free(text);
    return result;
}
