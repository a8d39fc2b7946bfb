/* zr_names.h -- finds tensors of a folder by the program's names, and says why one is missing. */
#ifndef ZR_NAMES_H
#define ZR_NAMES_H
#include "zr_safetensors.h"

/* Return a name without the prefix of a whole model, `model.`, `transformer.` or `gpt_neox.`. */
const char *zr_unprefixed(const char *name);
/* Find a tensor by its name, or else with a prefix removed or added; NULL: not there. */
zr_entry *zr_locate(const zr_table *t, const char *name);
/* The same for a program's tensor: the embedding and the head of a tied model are one. */
zr_entry *zr_locate_for(const zr_program *p, const zr_table *t, const char *name);
int zr_is_embedding(const char *name); /* is it the name of an embedding of tokens? */
/* Return whether it is a mask or the frequencies of attention, which older files contain. */
int zr_is_buffer(const char *name);
/* Return whether it is the head of a tied model whose embedding is there. */
int zr_is_tied_head(const zr_table *t, const zr_entry *e);
/* Return whether it has the same data as a used entry of another name. */
int zr_is_used_as(const zr_table *t, const zr_entry *e);

/* The size of a model, to tell two apart. */
typedef struct zr_extent {
    int64_t tensors, layers;
    uint64_t elements;
} zr_extent;
void zr_extent_add(zr_extent *to, const char *name, const int64_t *shape, int ndim);

/* Write the likely cause of an error to to[ZR_WHY], beginning with "; ". wanted: the program's
 * tensor `name`, which is missing (e NULL) or has another shape in entry e; NULL: the folder has
 * tensors without a place in the program. ours: size of all tensors that the program loads. */
void zr_tell_misfit(char *to, const zr_program *p, zr_extent ours, const zr_table *t,
                    const zr_tensor *wanted, const char *name, const zr_entry *e);

#endif
