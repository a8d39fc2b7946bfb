/* zr_handshake.c -- checks that all ranks agree before they work together.
 *
 * A fact is a property that all ranks must share, as a line of text. Rank 0 broadcasts its line; a
 * rank with another line prints both and ends the run. Ranks that a launcher started may have
 * different command lines and files, also on one host.
 *
 * Invariants
 *  1. All ranks check the facts in the same order. The digest of the sources comes first, because
 *     later messages may differ between programs of different sources.
 *  2. Paths, the number of threads and the log may differ between ranks, so they are no facts.
 */
#define _GNU_SOURCE
#include "zr_checkpoint.h"
#include "zr_choices.h"
#include "zr_data.h"
#include "zr_fail.h"
#include "zr_file.h"
#include "zr_handshake.h"
#include "zr_log.h"
#include "zr_memory.h"
#include "zr_mix.h"
#include "zr_net.h"
#include "zr_options.h"
#include "zr_queue.h"
#include "zr_rank.h"
#include "zr_safetensors.h"
#include "zr_seats.h"
#include "zr_shared.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- files: their size, and a hash of pieces spread evenly over each */

enum { PIECES = 16, PIECE = 65536 };

typedef struct seen {
    int64_t files, bytes;
    uint64_t hash;
} seen;

/* Add samples of a file. Parts that cannot be read are skipped, because reading all of the file
 * will report the error. */
static void add_samples(seen *s, int fd)
{
    char piece[PIECE];
    struct stat is;
    int64_t size = fstat(fd, &is) || !S_ISREG(is.st_mode) ? 0 : is.st_size;
    s->files++;
    s->bytes += size;
    zr_add_hash(&s->hash, &size, sizeof size);
    for (int64_t i = 0; i < PIECES; i++) {
        int64_t last = size > PIECE ? size - PIECE : 0, at = last * i / (PIECES - 1);
        int64_t n = size - at < PIECE ? size - at : PIECE;
        if (n > 0 && !zr_read_at(fd, piece, n, at)) zr_add_hash(&s->hash, piece, (size_t)n);
    }
}

static void tell_seen(const seen *s, char text[ZR_TOLD])
{
    snprintf(text, ZR_TOLD, "%" PRId64 " file%s, %" PRId64 " bytes, samples %016" PRIx64, s->files,
             s->files == 1 ? "" : "s", s->bytes, s->hash);
}

/* Describe the data: files of tokens and of labels, and their width unless it is uint16. */
void zr_data_text(const zr_mix *m, char text[ZR_TOLD])
{
    seen s = {0, 0, ZR_HASH};
    if (!m->n) return;
    for (int k = 0; k < m->n; k++) {
        const zr_data *d = &m->of[k].data;
        add_samples(&s, d->fd);
        if (d->labels >= 0) add_samples(&s, d->labels);
        if (d->width != 2) zr_add_hash(&s.hash, &d->width, sizeof d->width);
    }
    tell_seen(&s, text);
}

/* ---- facts */

static void write_sources(zr *z, char text[ZR_TOLD])
{
    (void)z;
    snprintf(text, ZR_TOLD, "%s", zr_digest);
}

static void write_text(zr *z, char text[ZR_TOLD])
{
    zr_text_hash(z->p->text, z->p->text_end, text);
}

static void write_plan(zr *z, char text[ZR_TOLD]) { snprintf(text, ZR_TOLD, "%s", z->p->plan); }

/* All kernel objects of a CPU give the same bits, so only the target must agree. */
static void write_object(zr *z, char text[ZR_TOLD])
{
    snprintf(text, ZR_TOLD, "%s", zr_is_gpu ? z->p->object() : z->p->target());
}

static void write_nccl(zr *z, char text[ZR_TOLD])
{
    if (z->nccl && z->ranks > 1) snprintf(text, ZR_TOLD, "%d", z->nccl);
}

static void write_options(zr *z, char text[ZR_TOLD]) { zr_options_text(z, text, ZR_TOLD); }

static void write_data(zr *z, char text[ZR_TOLD])
{
    uint64_t hash = ZR_HASH;
    zr_data_text(z->train, text);
    for (int k = 0; k < z->train->n; k++) zr_add_hash(&hash, &z->train->of[k].weight, 8);
    size_t n = strlen(text);
    if (z->train->n > 1) snprintf(text + n, ZR_TOLD - n, ", weights %016" PRIx64, hash);
}

static void write_val(zr *z, char text[ZR_TOLD]) { zr_data_text(z->val, text); }

static void write_eval(zr *z, char text[ZR_TOLD])
{
    seen s = {0, 0, ZR_HASH};
    if (z->choices->fd < 0) return;
    add_samples(&s, z->choices->fd);
    tell_seen(&s, text);
}

static void write_weights(zr *z, char text[ZR_TOLD])
{
    char why[ZR_WHY];
    zr_table t;
    seen s = {0, 0, ZR_HASH};
    if (!z->o->load) return;
    if (zr_table_open(&t, z->o->load, why)) zr_fail(z, ZR_USER, "--load %s", why);
    for (int64_t i = 0; i < t.nfiles; i++) {
        zr_add_hash(&s.hash, t.files[i].name, strlen(t.files[i].name));
        add_samples(&s, t.files[i].fd);
    }
    zr_table_close(&t);
    tell_seen(&s, text);
}

typedef struct fact {
    const char *has, *what;                   /* phrases of the message: "has", "kernels for" */
    void (*write)(zr *z, char text[ZR_TOLD]); /* leaves "" if there is nothing to compare */
    const char *remedy;
} fact;

static const fact programs[] = {
    {"is built from", "sources ", write_sources, "build all ranks from the same sources"},
    {"runs", "plan ", write_plan, "start the same binary on all ranks"},
    {"is built from", "train.c ", write_text,
     "one train.c was edited, or zgen was called otherwise: start the same binary on all ranks"},
};

static const fact runs[] = {
    {"has", "kernels for ", write_object, "all ranks need the same GPUs, libraries and --gemms"},
    {"has", "NCCL ", write_nccl, "all ranks need the same NCCL"},
    {"was started", "with", write_options, "start all ranks with the same options"},
    {"has", "--data of ", write_data, "give all ranks the same tokens"},
    {"has", "--val of ", write_val, "give all ranks the same tokens"},
    {"has", "--eval of ", write_eval, "give all ranks the same examples"},
    {"has", "--load of ", write_weights, "give all ranks the same weights"},
};

static void agree(zr *z, const fact *f)
{
    char mine[ZR_TOLD] = "", first[ZR_TOLD];
    f->write(z, mine);
    memcpy(first, mine, sizeof first);
    zr_tell(z, first, sizeof first);
    first[ZR_TOLD - 1] = 0; /* it may have come over a network */
    if (!memcmp(first, mine, sizeof first)) return;
    zr_fail(z, ZR_DISAGREE, "%s %s%s, rank 0 %s%s; %s", f->has, f->what, mine, f->what, first,
            f->remedy);
}

static void write_algorithms(zr *z, char text[ZR_TOLD])
{
    snprintf(text, ZR_TOLD, "%016" PRIx64, z->algorithms);
}

void zr_same_algorithms(zr *z)
{
    static const fact algorithms = {
        "runs", "products by algorithms ", write_algorithms,
        "give all ranks the same table of algorithms (--tune writes one, --gemms uses it) and the "
        "same driver"};
    uint64_t past = z->checkpoints->algorithms;
    z->algorithms = z->p->algorithms(z->queue[ZR_MAIN].k);
    if (!z->o->tune) agree(z, &algorithms); /* while each rank times its own products they differ */
    if (past && past != z->algorithms)
        zr_print(z, STDERR_FILENO,
                 "products run by algorithms %016" PRIx64 ", those of the checkpoint's run by "
                 "%016" PRIx64 ", which round differently, so bits change; a table of --gemms "
                 "would keep them\n",
                 z->algorithms, past);
}

void zr_same_program(zr *z)
{
    for (size_t i = 0; i < sizeof programs / sizeof *programs; i++) agree(z, programs + i);
    z->net->until = 0; /* all have met: allocating arenas and starting libraries may take longer */
}

void zr_handshake(zr *z)
{
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) agree(z, runs + i);
}
