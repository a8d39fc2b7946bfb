/* zr_file.h -- files of tokens and of weights, as one rank sees them.
 *
 * Invariants
 *  1. A function that can fail returns 0, or -1 with one line of text in `why` about the error and
 *     the file. It never ends the process and never waits for another rank.
 *  2. No contents of a file can make these functions read or write out of bounds.
 *  3. No file of weights is ever half-written under its final name.
 */
#ifndef ZR_FILE_H
#define ZR_FILE_H
#include "zr.h"

enum { ZR_WHY = 1000, ZR_FILE = 4096 }; /* bytes of `why` and `note`; of a path */

static inline int64_t zr_least(int64_t a, int64_t b) { return a < b ? a : b; }
/* Format a line into why[ZR_WHY], with '?' for bytes that cannot be printed. Returns -1. */
int zr_why(char *why, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Read or write exactly n bytes at file offset `at`. Returns 0, or -1 and errno
 * (ENODATA: the file ends early). */
int zr_read_at(int fd, void *to, int64_t n, int64_t at);
int zr_write_at(int fd, const void *from, int64_t n, int64_t at);
/* Set the size of a file and allocate its space. If it cannot fit, nothing is tried, as that would
 * fill the disk for a moment. Some file systems cannot allocate in advance. */
int zr_reserve(int fd, int64_t size, const char *file, char *why);
/* FNV-1a, starting from ZR_HASH; used to compare things, not for weights. */
#define ZR_HASH 0xcbf29ce484222325
void zr_add_hash(uint64_t *hash, const void *from, size_t n);
/* Return what kind of file begins with these n bytes, if it is one often mistaken for another, such
 * as a Git LFS pointer or a pickle; NULL: unknown (zr_foreign.c). */
const char *zr_foreign(const char *text, int64_t n);
/* Read a regular file of at most `most` bytes. Returns its text followed by a 0, to be freed, or
 * NULL and why. what: phrase about a file that is longer. */
char *zr_read_whole(const char *file, int64_t most, const char *what, int64_t *n, char *why);
/* to[ZR_FILE] = the file `name` in the folder of `path` */
int zr_beside(char *to, const char *path, const char *name, char *why);
/* to[ZR_FILE] = dir/name */
int zr_path(char *to, const char *dir, const char *name, char *why);
int zr_make_dir(const char *dir, char *why); /* makes it and the folders above it */
/* Lock an open file. Fails if its name has meanwhile come to mean another file. */
int zr_lock(int fd, const char *file, char *why);
/* Remove a file that will be made under another name, and the files of its name with .1, .2 ...,
 * unless a running process holds its lock. */
int zr_save_clear(const char *file, char *why);

/* ---- tokens. Sample i (of `samples`, then from the start again) is tokens[i*T .. i*T+T]. */
typedef struct zr_data {
    const char *path;
    int fd, labels; /* labels: file with one label per token; -1: none */
    int width;      /* bytes of a token: 2 (uint16) or 4 (uint32) */
    int part;       /* the start checks 1/part of the bytes that it checks of a single file */
    int64_t at;     /* file offset of the first token */
    int64_t mask;   /* file offset of the mask, a bit per token, 0: not a target; 0: no mask */
    int64_t count, samples; /* number of tokens; of samples of T tokens and one more */
    int64_t T, vocab, ignore;
    char labels_path[ZR_FILE];
} zr_data;

/* Requirements of a program. ignore: token that is never a target (-1: none; in a file of uint32
 * the largest uint32 unless the spec names one). end: last token of each document, if documents are
 * masked from each other, else -1. width: bytes of a token if the file does not tell; 0: uint16.
 * part: see zr_data; 0: 1. */
typedef struct zr_form {
    int64_t T, vocab, ignore, end;
    int width, part;
} zr_form;

/* Open a token file. `path` must outlive d. */
int zr_data_open(zr_data *d, const char *path, const zr_form *f, char *why);
/* to[ZR_FILE] = the file beside a token file that may describe it. Returns 0, or -1: none. */
int zr_meta_path(char *to, const char *path);
int zr_index_path(char *to, const char *path); /* Megatron's index */
/* zr_foreign for a file of `size` bytes. */
const char *zr_foreign_file(int fd, int64_t size);
/* Refuse a file without a header that looks like something other than tokens of `width` bytes;
 * width 0 means uint16. Returns 0, or -1 and why. */
int zr_looks(const zr_data *d, int64_t size, int width, char *why);
/* Describe in `to`, and return, the size of the vocabulary and what to do about a token of so many
 * bytes that is beyond it. width 0: data.ignore cannot help. */
enum { ZR_BEYOND = 320 };
const char *zr_beyond(char to[ZR_BEYOND], int64_t id, int width, int64_t vocab);
/* Find tokens, labels and mask in an open file of `size` bytes (zr_tokens.c). */
int zr_find_tokens(zr_data *d, int64_t size, const zr_form *f, char *why);
/* Look for tokens beyond the vocabulary in samples first .. first+n-1: in their first 64 MiB and at
 * places of the rest, the share of `rank` of `ranks`. zr_data_read checks all that it reads. */
int zr_data_check(const zr_data *d, int64_t first, int64_t n, int rank, int ranks, char *why);
/* Read tokens, targets int32 [B,T] of samples first .. first+B-1. Ignored
 * tokens: input 0, target -1. */
int zr_data_read(const zr_data *d, int64_t first, int64_t B, int32_t *tokens, int32_t *targets,
                 char *why);
void zr_data_close(zr_data *d);

/* ---- samples of several token files, by their weights (zr_mix.c) */
/* Largest number of sources; the number that means a weight of 1. */
enum { ZR_SOURCES = 64, ZR_WEIGHT = 10000 };
typedef struct zr_given {
    const char *file; /* a file or a folder */
    int64_t weight;   /* from 1 to 1000 * ZR_WEIGHT */
    int length;       /* length of `file`, after which more text may follow */
} zr_given;

typedef struct zr_dataset {
    zr_data data;
    int64_t weight; /* ratio of all weights in smallest integers */
    char path[ZR_FILE];
} zr_dataset;

typedef struct zr_mix {
    int n;                  /* number of sources; 0: not given */
    uint64_t shuffle, seed; /* as in zr_program */
    zr_dataset *of;
    struct zr_fork *fork; /* zr_order.h */
} zr_mix;

/* Open the sources. name: name of the file in a folder. */
int zr_mix_open(zr_mix *s, const zr_given *given, int n, const char *name, const zr_form *f,
                char *why);
/* taken[n]: number of samples of each source among the first m */
void zr_mix_taken(const zr_mix *s, int64_t m, int64_t *taken);
/* As zr_data_check, for the first `used` samples; as zr_data_read. */
int zr_mix_check(const zr_mix *s, int64_t used, int rank, int ranks, char *why);
int zr_mix_read(const zr_mix *s, int64_t first, int64_t B, int32_t *tokens, int32_t *targets,
                char *why);
void zr_mix_close(zr_mix *s);

/* ---- multiple choice: a file like llm.c's of HellaSwag (zr_choices.c) */
typedef struct zr_choices {
    const char *path;
    int fd; /* -1: no file */
    int64_t T, vocab;
    int64_t n, longest; /* number of examples; largest bytes of one */
    int64_t *at;        /* [n + 1] offset of each example */
    uint16_t *count;    /* [n] number of completions of each */
    uint16_t *word;     /* words of the example read last */
    int64_t label;      /* number of its right completion */
    int64_t next;       /* word at which the next completion begins */
} zr_choices;

/* Open a file and check all of it. `path` must outlive c. */
int zr_choices_open(zr_choices *c, const char *path, int64_t T, int64_t vocab, char *why);
int zr_choices_read(zr_choices *c, int64_t i, char *why); /* reads example i < n */
/* Write the next of its count[i] completions, after the context, to tokens, targets int32[T]. Only
 * elements that are read, or are targets, are written. */
void zr_choices_next(zr_choices *c, int32_t *tokens, int32_t *targets);
void zr_choices_close(zr_choices *c);

/* ---- copies from and to a queue's arena at offset `at`. All queues must be empty. The target
 * provides these (zr_int.h). */
void zr_read(zr *z, int queue, void *to, int64_t at, int64_t bytes);
void zr_write(zr *z, int queue, int64_t at, const void *from, int64_t bytes);
char *zr_reach(const zr *z, int queue, int64_t at); /* address in the host's memory, or NULL */
void zr_progress_next(zr *z);  /* the next tensor or micro-batch begins: zr_progress.c */
void zr_progress_beside(void); /* this thread's work does not count as progress */
int zr_is_beside(void);        /* does this thread save beside a step? */
/* Return whether the time to save after a signal has passed (--grace). Ranks may differ. */
int zr_late(zr *z);
/* Count bytes written to a checkpoint's file. Returns 0, or -1 and errno if
 * there is no time for more. */
int zr_wrote(zr *z, int fd, int64_t bytes);
/* Return the bytes of an element of a state. */
static inline int64_t zr_width(const zr_state *s) { return (int[]){4, 2, 2, 8, 8}[s->type]; }

/* ---- a state of the model's tensors as safetensors files, under the tensors' own names */
typedef struct zr_merge zr_merge;
enum { ZR_ALL = 0, ZR_BASE = 1, ZR_ADAPTERS = 2 };
typedef struct zr_stored {
    const char *file;     /* name of the file: FILE.safetensors */
    const char *what;     /* zr_state.what */
    int32_t type;         /* type stored: ZR_F32, ZR_BF16, ZR_F16 */
    int32_t alone;        /* only tensors whose state is of this type */
    const uint8_t *types; /* type of each tensor, instead of `type`; or NULL */
    /* ZR_BASE or ZR_ADAPTERS: only these; adapters' names begin with zr_program.lead */
    int32_t part;
    zr_merge *merge; /* adapters added while writing, or NULL */
} zr_stored;
extern const zr_stored zr_masters, zr_adapters; /* of the base model, of adapters */

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

/* ---- LoRA adapters (zr_lora.c) */
int zr_is_adapter(const char *name);
/* Return the bytes of p->lead before a tensor's name; the head's name
 * lacks the model's own part. */
int zr_adapter_lead(const zr_program *p, const char *name);
/* to[256] = the base's tensor that PEFT keeps beside an adapter of the head.
 * Returns 0 if there is none. */
int zr_adapter_base(char *to, const char *name);
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

/* ---- weights: a folder as transformers writes it (zr_save.c), masters under Hugging Face's names.
 * Saving takes four steps, with a barrier of all ranks after each: every rank opens, rank 0 begins,
 * every rank writes its part into files whose names begin with zr_save_temp's, rank 0 ends. If any
 * rank failed (ok = 0) nothing is left behind; else the files get their names. A program with
 * adapters saves these, as PEFT does, unless they are merged: then every rank first writes its part
 * of the adapters into a file that is removed at the end, and adds them after a barrier. */
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
    zr_chunk *chunk; /* made at the start, so that saving needs no memory at the end */
} zr_saving;

/* Open a save. merge: merge the adapters. from: the folder that was loaded, or NULL. type: of all
 * tensors, ZR_F32 ...; -1: as in `types`, which must live as long, or f32 if that is NULL. most:
 * bytes of tensors in a file. note[ZR_WHY] of rank 0: what the folder lacks, or "". */
int zr_save_open(zr_saving *s, const zr_program *p, int rank, const char *dir, const char *from,
                 int merge, int type, const uint8_t *types, int64_t most, char *note, char *why);
void zr_save_close(zr_saving *s);
extern const char *const zr_copied[]; /* names of files copied; NULL at the end */
/* path[ZR_FILE] of the first temporary file. */
int zr_save_temp(char *path, const char *dir, char *why);
int zr_save_begin(const zr_saving *s, char *why);
int zr_save_adapters(const zr_saving *s, zr *z, int rank, char *why); /* for merging */
int zr_save_part(const zr_saving *s, zr *z, int rank, char *why);
/* End a save. ok: all ranks have written all parts; the files then stay even if this fails, and
 * `why` names them. */
int zr_save_end(const zr_saving *s, int ok, char *why);
/* Compare dir/config.json with the program's. Returns 1 with the differences in note[ZR_WHY]; 0:
 * none, or no such file; -1: not readable. */
int zr_config_differs(const zr_program *p, const char *dir, char *note, char *why);
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
