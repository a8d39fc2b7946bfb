/* zr_grace.c -- the time for a checkpoint after a signal (--grace). */
#define _GNU_SOURCE
#include "zr_checkpoint.h"
#include "zr_fail.h"
#include "zr_grace.h"
#include "zr_options.h"
#include "zr_rank.h"
#include "zr_shared.h"
#include "zr_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <unistd.h>

/* Bytes synced to the disk at once while a signal's sender or an update waits. */
enum { SYNCED = 1 << 26 };

int zr_late(zr *z)
{
    double asked = z->o->grace ? atomic_load(&z->shared->asked) : 0;
    return asked > 0 && zr_now() > asked + (double)z->o->grace;
}

int zr_wrote(zr *z, int fd, int64_t bytes)
{
    zr_checkpoints *c = z->checkpoints;
    c->unsynced += bytes;
    errno = ECANCELED;
    if (atomic_load(&z->writer->stop)) return -1;
    int hurried = z->o->grace && atomic_load(&z->shared->asked);
    if (!hurried && !c->beside) return 0;
    if (c->unsynced > SYNCED) {
        c->unsynced = 0;
        if (fdatasync(fd)) return -1;
    }
    errno = ECANCELED;
    return hurried && zr_late(z) ? -1 : 0;
}
