/* zr_weights.h -- a state of the model's tensors as safetensors files, under their own names.
 *
 * The invariants are those of zr_file.h.
 */
#ifndef ZR_WEIGHTS_H
#define ZR_WEIGHTS_H
#include "zr_lora.h"

enum { ZR_ALL = 0, ZR_BASE = 1, ZR_ADAPTERS = 2, ZR_LOW = 3 };
typedef struct zr_stored {
    const char *file;     /* name of the file: FILE.safetensors */
    const char *what;     /* the field `what` of zr_state */
    int32_t type;         /* type stored: ZR_F32, ZR_BF16, ZR_F16 */
    int32_t alone;        /* only tensors whose state is of this type */
    const uint8_t *types; /* type of each tensor, instead of `type`; or NULL */
    /* ZR_BASE: without adapters; ZR_ADAPTERS: adapters and tensors trained whole, whose names begin
     * with zr_program.lead; ZR_LOW: adapters alone */
    int32_t part;
    zr_merge *merge; /* adapters added while writing, or NULL */
    /* the folder of --load, which has the weights that the run holds quantized; or NULL */
    const struct zr_table *loaded;
} zr_stored;
extern const zr_stored zr_masters, zr_adapters, zr_low; /* of each `part` but ZR_ALL */

typedef struct zr_header {
    char *text;             /* [n] beginning of the file */
    int64_t n, data;        /* bytes of text; bytes of all tensors */
    int64_t first, tensors; /* number of its first tensor among all; number of its tensors */
} zr_header;
typedef struct zr_chunk zr_chunk; /* buffer for elements */
zr_chunk *zr_chunk_new(void);     /* to be freed; NULL: out of memory */

/* Make the header for tensors from `first` on: at least one, and more while they fit into `most`
 * bytes. Returns -1 if out of memory. */
int zr_stored_open(zr_header *h, const zr_program *p, const zr_stored *f, int64_t first,
                   int64_t most);
/* Open a file, or make it, write the header and allocate its space. Returns its descriptor, which
 * holds a lock, or -1. */
int zr_stored_begin(const zr_header *h, const char *file, char *why);
/* Write this rank's part and sync it to the disk. sums[tensors], or NULL: receives the part of this
 * rank's elements in each tensor's checksum. */
int zr_stored_write(zr *z, const zr_program *p, const zr_stored *f, const zr_header *h, int rank,
                    const char *file, zr_chunk *c, uint64_t *sums, char *why);
/* Read this rank's part from dir/FILE.safetensors. sums: as above. */
int zr_stored_read(zr *z, const zr_program *p, const zr_stored *f, int rank, const char *dir,
                   uint64_t *sums, char *why);
/* Write the name of the n-th tensor to to[size]. */
void zr_stored_name(const zr_program *p, const zr_stored *f, int64_t n, char *to, size_t size);
/* Call take(to, name), unless NULL, for each tensor in the order of sums. Returns their number. */
int zr_stored_names(const zr_program *p, const zr_stored *f,
                    void (*take)(void *to, const char *name), void *to);
/* types[zr_stored_names] = the types of the tensors in dir's files */
int zr_stored_types(const zr_program *p, const zr_stored *f, const char *dir, uint8_t *types,
                    char *why);

/* Read this rank's masters from dir/model.safetensors, or from the files that
 * dir/model.safetensors.index.json names, in F32, BF16 or F16. Tensors without a place in the model
 * are an error unless `drop`, except buffers and a head that repeats the embedding. note[ZR_WHY] of
 * rank 0: tensors left out, or "". After -1 no master has changed, unless reading itself failed. */
int zr_load(const zr_program *p, zr *z, int rank, const char *dir, int drop, char *note, char *why);
/* The same for adapters, from dir/adapter_model.safetensors; note: see zr_adapter_fits. Weights of
 * the base may lie beside them if they equal those in the folder `base` to the bit. */
int zr_load_adapters(const zr_program *p, zr *z, int rank, const char *dir, const char *base,
                     char *note, char *why);

#endif
