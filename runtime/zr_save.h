/* zr_save.h -- weights: a folder as transformers writes it, masters under Hugging Face's names.
 *
 * Saving takes four steps, with a barrier of all ranks after each: every rank opens, rank 0 begins,
 * every rank writes its part into files whose names begin with zr_save_temp's, rank 0 ends. If any
 * rank failed (ok = 0) nothing is left behind; else the files get their names. A program with
 * adapters saves these, as PEFT does, unless they are merged: then every rank first writes its part
 * of the adapters into a file that is removed at the end, and adds them after a barrier.
 *
 * The invariants are those of zr_file.h.
 */
#ifndef ZR_SAVE_H
#define ZR_SAVE_H
#include "zr_safetensors.h"
#include "zr_weights.h"

typedef struct zr_saving {
    const zr_program *p;
    const char *dir;
    zr_stored stored;
    struct zr_saved {
        char name[48];
        zr_header h; /* tensors 0: the header is the whole file */
    } *file;         /* [n]; the first is renamed last: model.safetensors, or the index */
    int n, shards;   /* number of files; number of files with tensors */
    int added;       /* index of the file of adapters to merge; 0: none */
    /* Made at the start, so that a save at the end needs little memory. loaded: the folder of
     * --load, if --merge reads weights there that the program has quantized */
    zr_table loaded;
    zr_chunk *chunk;
} zr_saving;

/* Open a save. merge: merge the adapters. from: the folder that was loaded, or NULL. type: of all
 * tensors, ZR_F32 ...; -1: as in `types`, which must live as long, or f32 if that is NULL. most:
 * bytes of tensors in a file. note[ZR_WHY] of rank 0: files that the folder lacks, or "". */
int zr_save_open(zr_saving *s, const zr_program *p, int rank, const char *dir, const char *from,
                 int merge, int type, const uint8_t *types, int64_t most, char *note, char *why);
void zr_save_close(zr_saving *s);
/* path[ZR_FILE] of the first temporary file. */
int zr_save_temp(char *path, const char *dir, char *why);
int zr_save_begin(const zr_saving *s, char *why);
int zr_save_adapters(const zr_saving *s, zr *z, int rank, char *why); /* for merging */
int zr_save_part(zr_saving *s, zr *z, int rank, char *why);
/* End a save. ok: all ranks have written all parts; the files then stay even if this fails, and
 * `why` names them. */
int zr_save_end(const zr_saving *s, int ok, char *why);

/* Compare dir/config.json with the program's. Returns 1 with the differences in note[ZR_WHY]; 0:
 * none, or no such file; -1: not readable. */
int zr_config_differs(const zr_program *p, const char *dir, char *note, char *why);

#endif
