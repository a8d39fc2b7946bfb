/* zr_lora.h -- LoRA adapters.
 *
 * The invariants are those of zr_file.h.
 */
#ifndef ZR_LORA_H
#define ZR_LORA_H
#include "zr_file.h"

typedef struct zr_merge zr_merge;
struct zr_table;

int zr_is_adapter(const char *name);
/* Return the bytes of p->lead before a tensor's name; the head's name
 * lacks the model's own part. */
int zr_adapter_lead(const zr_program *p, const char *name);
/* Refuse tensors that are not of the program's adapters, because leaving one out would make another
 * model, but for weights of the base that equal those in the folder `base`; and two values of a
 * tied weight. t: dir's adapters, in which those of the program are marked as used. */
int zr_judge_adapters(const zr_program *p, const struct zr_table *t, const char *dir,
                      const char *base, char *why);
/* Check that dir/adapter_config.json describes the program's adapters. base: the argument of
 * --load, or NULL. note[ZR_WHY]: differences without effect; unchanged if there are none. */
int zr_adapter_fits(const zr_program *p, const char *dir, const char *base, char *note, char *why);
zr_merge *zr_merge_new(const zr_program *p);
int zr_merge_open(zr_merge *m, const char *path, char *why);
void zr_merge_close(zr_merge *m);
/* Load the adapters of this tensor. Returns 0 if it has none, -1 and errno on failure. */
int zr_merge_take(zr_merge *m, const char *name);
/* w[n], from its element `first` on, += scale * B A */
void zr_merge_add(const zr_merge *m, float *w, int64_t first, int64_t n);

#endif
