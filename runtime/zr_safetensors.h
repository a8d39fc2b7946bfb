/* zr_safetensors.h -- the tensors in a folder of safetensors files, by name.
 *
 * A file is: u64 N; N bytes of JSON {name: {dtype, shape, data_offsets}}; the data without holes.
 */
#ifndef ZR_SAFETENSORS_H
#define ZR_SAFETENSORS_H
#include "zr_file.h"

enum { ZR_DIMS = 8, ZR_HEADER_MAX = 100000000 };

typedef struct zr_entry {
    const char *name;
    int64_t shape[ZR_DIMS];
    int64_t begin, end; /* offsets in the file */
    int32_t dtype, ndim, file, used;
    const struct zr_packed *packed; /* zr_packed.h; NULL: the file has its elements as they are */
} zr_entry;

typedef struct zr_table {
    zr_entry *entries; /* [n], sorted by name */
    int64_t n;
    struct zr_source {
        const char *name;
        char *header; /* the text of the names */
        int fd;
    } *files;
    int64_t nfiles;
    char *index; /* model.safetensors.index.json, or NULL */
    struct zr_mapped {
        const char *name;
        int64_t file;
    } *map; /* [nmap] entries of its weight_map */
    int64_t nmap;
    struct zr_alias {
        /* tensors that share their memory; the file has the data of `kept` */
        const char *name, *kept;
        int64_t file;
    } *aliases; /* [naliases] all of a file's __metadata__, which may have other entries */
    int64_t naliases;
    struct zr_packed *packed; /* [npacked] */
    int64_t npacked;
} zr_table;

/* Read and check the headers of all files. After a failure nothing is open. */
int zr_table_open(zr_table *t, const char *dir, char *why);
/* One file only. */
int zr_table_open_file(zr_table *t, const char *dir, const char *name, char *why);
void zr_table_close(zr_table *t);
zr_entry *zr_table_find(const zr_table *t, const char *name); /* NULL: not there */
/* Return whether two entries are the same tensor; packed ones never are. */
int zr_table_equal(const zr_table *t, const zr_entry *a, const zr_table *u, const zr_entry *b);
const char *zr_dtype_name(int dtype);
/* ---- names in a folder of weights */
#define ZR_CONFIG "config.json"
#define ZR_SINGLE "model.safetensors"
/* Of several files model-00001-of-00003.safetensors. */
#define ZR_INDEX "model.safetensors.index.json"
#define ZR_ADAPTER_CONFIG "adapter_config.json"
#define ZR_ADAPTER_MODEL "adapter_model.safetensors"
#define ZR_PART "." ZR_SINGLE ".part" /* first temporary file of a save; ".1" the next */
/* Files beside the weights that are copied unchanged when saving, then NULL. */
extern const char *const zr_copied[];
int zr_is_shard(const char *name);
int zr_is_saved(const char *name); /* may a save have a file of this name? */
/* Read a file of at most ZR_HEADER_MAX bytes, followed by a 0. Returns NULL on failure. */
char *zr_file_text(const char *file, int64_t *n, char *why);

/* Write a shape as "[2, 3]" to text[n] and return it. */
char *zr_shape_text(char *text, int n, const int64_t *shape, int ndim);

#endif
