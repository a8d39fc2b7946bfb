/* zr_file.h -- files of tokens and of weights, as one rank sees them.
 *
 * Invariants
 *  1. A function that can fail returns 0, or -1 and one line of text in `why`: what is wrong with
 *     which file. It never ends the process and never waits for another rank.
 *  2. Nothing that a file holds can make these functions read or write out of bounds.
 *  3. No file of weights that bears its final name is ever half-written.
 */
#ifndef ZR_FILE_H
#define ZR_FILE_H
#include "zr.h"

enum { ZR_WHY = 1000, ZR_FILE = 4096 }; /* bytes of `why` and `note`; of a path */

static inline int64_t zr_least(int64_t a, int64_t b) { return a < b ? a : b; }
/* Puts a line together in why[ZR_WHY], bytes that cannot be printed as '?'. Returns -1. */
int zr_why(char *why, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Exactly n bytes at file offset `at`; 0, or -1 and errno (ENODATA: the file ends before). */
int zr_read_at(int fd, void *to, int64_t n, int64_t at);
int zr_write_at(int fd, const void *from, int64_t n, int64_t at);
/* The file has `size` bytes, and room for them, now. What cannot fit is not tried: that would fill
 * the disk for a moment. Some file systems cannot reserve. */
int zr_reserve(int fd, int64_t size, const char *file, char *why);
/* FNV-1a, from ZR_HASH on: to tell whether things are alike, not for weights */
#define ZR_HASH 0xcbf29ce484222325
void zr_add_hash(uint64_t *hash, const void *from, size_t n);
/* What a file is that begins with these n bytes and is not what its name says, such as a pointer of
 * Git LFS or a pickle; NULL: nothing that is known (zr_foreign.c). */
const char *zr_foreign(const char *text, int64_t n);
/* All of a regular file of at most so many bytes, a 0 behind it, for free(); NULL and why. what:
 * the predicate of a longer one. */
char *zr_read_whole(const char *file, int64_t most, const char *what, int64_t *n, char *why);
/* to[ZR_FILE] = the file `name` in the folder that `path` lies in */
int zr_beside(char *to, const char *path, const char *name, char *why);
/* to[ZR_FILE] = dir/name */
int zr_path(char *to, const char *dir, const char *name, char *why);
int zr_make_dir(const char *dir, char *why); /* it and those above it */
/* Locks what was opened. The name may have come to mean another file before the lock was had. */
int zr_lock(int fd, const char *file, char *why);
/* Removes a file that is to get another name, and those of its name and .1, .2 ..., unless a run
 * that lives holds its lock. */
int zr_save_clear(const char *file, char *why);

/* ---- tokens. Sample i (of `samples`, then from the start again) takes tokens[i*T .. i*T+T]. */
typedef struct zr_data {
    const char *path;
    int fd, labels;         /* labels: as long as the tokens, a file; -1: none */
    int width;              /* bytes of a token: 2, uint16, or 4, uint32 */
    int part;               /* a start looks at 1/part of what it looks at in a file alone */
    int64_t at;             /* file offset of the first token */
    int64_t mask;           /* and of a bit for each, 0 where it is no target; 0: none */
    int64_t count, samples; /* tokens; samples of T and one more */
    int64_t T, vocab, ignore;
    char labels_path[ZR_FILE];
} zr_data;

/* What a program asks of a file. ignore: the id that is never a target (-1: none; in a file of
 * uint32 the greatest uint32, where the spec does not say). end: the last token of documents that
 * are masked from each other (-1: they are not). width: bytes of a token where the file does not
 * tell; 0: uint16. part: of what a start looks at; 0: all. */
typedef struct zr_form {
    int64_t T, vocab, ignore, end;
    int width, part;
} zr_form;

/* `path` must outlive d. */
int zr_data_open(zr_data *d, const char *path, const zr_form *f, char *why);
/* to[ZR_FILE] = what may lie beside a token file and tell what it holds; 0, or -1: none. */
int zr_meta_path(char *to, const char *path);
int zr_index_path(char *to, const char *path); /* Megatron's */
/* As zr_foreign, of a file of `size` bytes */
const char *zr_foreign_file(int fd, int64_t size);
/* Refuses a file without a header that looks like something else than tokens of `width` bytes; a
 * width of 0 stands for uint16. Returns 0, or -1 and why. */
int zr_looks(const zr_data *d, int64_t size, int width, char *why);
/* Returns `to`: how many tokens there are, and what to do where an id of so many bytes is beyond
 * them; width 0: data.ignore has no effect on it. */
enum { ZR_BEYOND = 320 };
const char *zr_beyond(char to[ZR_BEYOND], int64_t id, int width, int64_t vocab);
/* Where tokens, labels and mask lie in an open file of `size` bytes (zr_tokens.c). */
int zr_find_tokens(zr_data *d, int64_t size, const zr_form *f, char *why);
/* Looks for ids beyond the vocabulary in samples first .. first+n-1, in their first 64 MiB and at
 * places of the rest: the part of rank of ranks. zr_data_read looks at all that it reads. */
int zr_data_check(const zr_data *d, int64_t first, int64_t n, int rank, int ranks, char *why);
/* tokens, targets int32 [B, T] of samples first .. first+B-1; ignored: input 0, target -1 */
int zr_data_read(const zr_data *d, int64_t first, int64_t B, int32_t *tokens, int32_t *targets,
                 char *why);
void zr_data_close(zr_data *d);

/* ---- samples of several token files, by their weights (zr_mix.c) */
enum { ZR_SOURCES = 64, ZR_WEIGHT = 10000 }; /* at most so many; a weight of 1 */
typedef struct zr_given {
    const char *file; /* or a folder */
    int64_t weight;   /* from 1 to 1000 * ZR_WEIGHT */
    int length;       /* of `file`, behind which more may follow */
} zr_given;

typedef struct zr_dataset {
    zr_data data;
    int64_t weight; /* the ratio of all in the least whole numbers */
    char path[ZR_FILE];
} zr_dataset;

typedef struct zr_mix {
    int n;                  /* 0: not given */
    uint64_t shuffle, seed; /* as zr_program's */
    zr_dataset *of;
    struct zr_fork *fork; /* zr_order.h */
} zr_mix;

/* name: of the file in a folder. */
int zr_mix_open(zr_mix *s, const zr_given *given, int n, const char *name, const zr_form *f,
                char *why);
/* taken[n]: how many each has of the first m samples */
void zr_mix_taken(const zr_mix *s, int64_t m, int64_t *taken);
/* As zr_data_check, of the first `used` samples; as zr_data_read. */
int zr_mix_check(const zr_mix *s, int64_t used, int rank, int ranks, char *why);
int zr_mix_read(const zr_mix *s, int64_t first, int64_t B, int32_t *tokens, int32_t *targets,
                char *why);
void zr_mix_close(zr_mix *s);

/* ---- multiple choice, a file as llm.c's of HellaSwag (zr_choices.c) */
typedef struct zr_choices {
    const char *path;
    int fd; /* -1: there is no file */
    int64_t T, vocab;
    int64_t n, longest; /* examples; bytes of one at most */
    int64_t *at;        /* [n + 1] where they begin */
    uint16_t *count;    /* [n] how many completions each has */
    uint16_t *word;     /* of the example that was read last */
    int64_t label;      /* its right completion */
    int64_t next;       /* word where the completion begins that zr_choices_next takes */
} zr_choices;

/* `path` must outlive c. Looks at all of the file. */
int zr_choices_open(zr_choices *c, const char *path, int64_t T, int64_t vocab, char *why);
int zr_choices_read(zr_choices *c, int64_t i, char *why); /* example i < n */
/* The next of its count[i] completions, behind the context: tokens, targets int32[T], of which it
 * writes those that are read, and those that are targets. */
void zr_choices_next(zr_choices *c, int32_t *tokens, int32_t *targets);
void zr_choices_close(zr_choices *c);

/* ---- a queue's arena, wherever it lies: bytes out of it and into it, at offset `at`. All queues
 * are empty. The target has these (zr_int.h). */
void zr_read(zr *z, int queue, void *to, int64_t at, int64_t bytes);
void zr_write(zr *z, int queue, int64_t at, const void *from, int64_t bytes);
char *zr_reach(const zr *z, int queue, int64_t at); /* where the host has them itself, or NULL */
void zr_progress_next(zr *z);  /* another tensor or micro-batch begins: zr_progress.c */
void zr_progress_beside(void); /* what this thread does is none of it */
int zr_is_beside(void);        /* is this such a thread? */
/* Has a signal's time to save in passed (--grace)? Each rank's own answer. */
int zr_late(zr *z);
/* So many bytes more are in a checkpoint's file. 0; -1 and errno: there is no time for more. */
int zr_wrote(zr *z, int fd, int64_t bytes);
/* Bytes of an element of a state. */
static inline int64_t zr_width(const zr_state *s) { return (int[]){4, 2, 2, 8, 8}[s->type]; }

/* ---- a state of the model's tensors as a file of safetensors, under their own names */
typedef struct zr_merge zr_merge;
enum { ZR_ALL = 0, ZR_BASE = 1, ZR_ADAPTERS = 2 };
typedef struct zr_stored {
    const char *file;     /* FILE.safetensors */
    const char *what;     /* zr_state.what */
    int32_t type;         /* that it is stored in: ZR_F32, ZR_BF16, ZR_F16 */
    int32_t alone;        /* only of tensors whose state is of this type */
    const uint8_t *types; /* of each tensor, instead of `type`; or NULL */
    int32_t part;         /* ZR_BASE or ZR_ADAPTERS: only these; theirs have zr_program's lead */
    zr_merge *merge;      /* what is added where it is written, or NULL */
} zr_stored;
extern const zr_stored zr_masters, zr_adapters; /* of the base */

typedef struct zr_header {
    char *text;             /* [n], what the file begins with */
    int64_t n, data;        /* bytes of it, of all tensors */
    int64_t first, tensors; /* the first, of all those that are stored; how many */
} zr_header;
typedef struct zr_chunk zr_chunk; /* elements on their way */
zr_chunk *zr_chunk_new(void);     /* for free(); NULL: no memory */

/* Tensors from `first` on, one and what more fits into `most` bytes. -1: no memory */
int zr_stored_open(zr_header *h, const zr_program *p, const zr_stored *f, int64_t first,
                   int64_t most);
/* A file, new or as it is there, with the header and all its room; its descriptor, which holds a
 * lock, or -1. */
int zr_stored_begin(const zr_header *h, const char *file, char *why);
/* This rank's part of it, safe on the disk. sums[tensors], or NULL: what this rank's elements add
 * to the tensors' checksums. */
int zr_stored_write(zr *z, const zr_program *p, const zr_stored *f, const zr_header *h, int rank,
                    const char *file, zr_chunk *c, uint64_t *sums, char *why);
/* From dir/FILE.safetensors, all that this rank has of it; sums as above. */
int zr_stored_read(zr *z, const zr_program *p, const zr_stored *f, int rank, const char *dir,
                   uint64_t *sums, char *why);
/* The name of its n-th tensor into to[size] */
void zr_stored_name(const zr_program *p, const zr_stored *f, int64_t n, char *to, size_t size);
/* take(to, name), unless NULL, for each tensor in the order of sums; returns how many */
int zr_stored_names(const zr_program *p, const zr_stored *f,
                    void (*take)(void *to, const char *name), void *to);
/* types[zr_stored_names] = those that dir's files have them in */
int zr_stored_types(const zr_program *p, const zr_stored *f, const char *dir, uint8_t *types,
                    char *why);

/* ---- adapters of low rank (zr_lora.c) */
int zr_is_adapter(const char *name);
/* Bytes of p->lead before a tensor's name: the model's own part is not before its head. */
int zr_adapter_lead(const zr_program *p, const char *name);
/* to[256]: the base's tensor that PEFT keeps beside an adapter of the head; 0: it is none. */
int zr_adapter_base(char *to, const char *name);
/* dir/adapter_config.json is of adapters as the program has them. base: what --load names, or NULL;
 * note[ZR_WHY]: what differs and changes nothing, untouched if nothing does */
int zr_adapter_fits(const zr_program *p, const char *dir, const char *base, char *note, char *why);
zr_merge *zr_merge_new(const zr_program *p);
int zr_merge_open(zr_merge *m, const char *path, char *why);
void zr_merge_close(zr_merge *m);
/* The adapters of this tensor come next; 0: it has none; -1: errno. */
int zr_merge_take(zr_merge *m, const char *name);
/* w[n], from its element `first` on, += scale * B A */
void zr_merge_add(const zr_merge *m, float *w, int64_t first, int64_t n);

/* ---- weights: a folder as transformers has it (zr_save.c), masters under Hugging Face's names.
 * Saving takes four steps with a barrier of all ranks after each: every rank opens, rank 0 begins,
 * every rank writes its part into files that begin with zr_save_temp's name, rank 0 ends (ok = 0
 * when any rank failed: nothing is left behind; else the files get their names). Of a program with
 * adapters these are what is saved, as PEFT has them, unless they are merged: then every rank first
 * writes its part of them, too, into a file that goes at the end, and after a barrier adds them. */
typedef struct zr_saving {
    const zr_program *p;
    const char *dir;
    zr_stored stored;
    struct zr_saved {
        char name[48];
        zr_header h; /* tensors 0: all of the file */
    } *file;         /* [n]; the first is renamed last: model.safetensors, or the index of all */
    int n, shards;   /* files; those of tensors */
    int added;       /* of the files, adapters that are merged; 0: none */
    zr_chunk *chunk; /* made at the start: a save needs no memory at its end */
} zr_saving;

/* merge: adapters. from: the folder that was loaded, or NULL. type: of all tensors, ZR_F32 ...;
 * -1: as `types` has it, or f32 where that is NULL; it must live as long. most: bytes of a file's
 * tensors. note[ZR_WHY]: what the folder lacks, "" if nothing; of rank 0. */
int zr_save_open(zr_saving *s, const zr_program *p, int rank, const char *dir, const char *from,
                 int merge, int type, const uint8_t *types, int64_t most, char *note, char *why);
void zr_save_close(zr_saving *s);
extern const char *const zr_copied[];                     /* names; behind the last NULL */
int zr_save_temp(char *path, const char *dir, char *why); /* path[ZR_FILE]: of the first */
int zr_save_begin(const zr_saving *s, char *why);
int zr_save_adapters(const zr_saving *s, zr *z, int rank, char *why); /* that are merged */
int zr_save_part(const zr_saving *s, zr *z, int rank, char *why);
/* ok: all ranks have written all parts; then, whatever fails, they stay, and `why` names them. */
int zr_save_end(const zr_saving *s, int ok, char *why);
/* 1, and in note[ZR_WHY] how numbers of dir/config.json differ from those that the program has; 0:
 * they do not, or there is no such file; -1: it cannot be read. */
int zr_config_differs(const zr_program *p, const char *dir, char *note, char *why);
/* Reads this rank's masters from dir/model.safetensors or from the files that
 * dir/model.safetensors.index.json names: F32, BF16 or F16. Tensors that the model has no place for
 * are an error unless `drop`, but for buffers and a head that repeats the embedding. note[ZR_WHY]:
 * what of the files is left out, "" if nothing; only rank 0 looks for that. After -1 no master has
 * changed, unless the reading itself failed. */
int zr_load(const zr_program *p, zr *z, int rank, const char *dir, int drop, char *note, char *why);
/* The same of adapters, from dir/adapter_model.safetensors; note: see zr_adapter_fits. Weights of
 * the base may lie beside them that are those in the folder `base` to the bit. */
int zr_load_adapters(const zr_program *p, zr *z, int rank, const char *dir, const char *base,
                     char *note, char *why);

#endif
