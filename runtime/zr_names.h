/* zr_names.h -- the tensors of a folder under the names that a program has for them, and why one is
 * not there.
 */
#ifndef ZR_NAMES_H
#define ZR_NAMES_H
#include "zr_safetensors.h"

/* A name without the prefix of a whole model, `model.` or `transformer.` */
const char *zr_unprefixed(const char *name);
/* A tensor as it is named, else with a prefix taken off or put on; NULL: it is not there. */
zr_entry *zr_locate(const zr_table *t, const char *name);
/* The same of a program's tensor: the embedding of a tied model may be there as its head alone. */
zr_entry *zr_locate_for(const zr_program *p, const zr_table *t, const char *name);
/* Is the entry a mask or frequencies of attention, which older files carry? */
int zr_is_buffer(const char *name);
/* Is it the head of a tied model, whose embedding is there? */
int zr_is_tied_head(const zr_table *t, const zr_entry *e);
/* Has it the data of an entry that is used, under another name? */
int zr_is_used_as(const zr_table *t, const zr_entry *e);

/* The size of a model, by which two are told apart */
typedef struct zr_extent {
    int64_t tensors, layers;
    uint64_t elements;
} zr_extent;
void zr_extent_add(zr_extent *to, const char *name, const int64_t *shape, int ndim);

/* to[ZR_WHY]: the usual cause of a message, from "; " on. wanted: the program's tensor `name` that
 * is missing, or has another shape in entry e unless that is NULL; NULL: tensors that the program
 * has no place for. ours: all that it loads. */
void zr_tell_misfit(char *to, const zr_program *p, zr_extent ours, const zr_table *t,
                    const zr_tensor *wanted, const char *name, const zr_entry *e);

#endif
