/* zr_grace.h -- the time for a checkpoint after a signal (--grace). */
#ifndef ZR_GRACE_H
#define ZR_GRACE_H
#include "zr.h"

/* Return whether the time to save after a signal has passed (--grace). Ranks may differ. */
int zr_late(zr *z);
/* Count bytes written to a checkpoint's file. Returns 0, or -1 and errno if
 * there is no time for more. */
int zr_wrote(zr *z, int fd, int64_t bytes);

#endif
