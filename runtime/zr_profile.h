/* zr_profile.h -- start and end of each command in some steps (--profile). */
#ifndef ZR_PROFILE_H
#define ZR_PROFILE_H
#include "zr_clock.h"

/* These do nothing without --profile. */
int64_t zr_profile_bytes(const zr *z); /* bytes of a rank's notes */
void zr_profile_open(zr *z);           /* fails if the file cannot be written */
void zr_profile_start(zr *z);
int zr_profile_apart(const zr *z);       /* is this step or the next one profiled? */
void zr_profile_step(zr *z, int begins); /* begins 1: the step begins; 0: it has ended */
void zr_profile_end(zr *z);              /* after the last profiled step: write table and file */
/* Return a new note for a command of a queue; NULL: the command is not noted. */
zr_note *zr_note_make(zr *z, int queue, const char *name, int kind);
void zr_note_done(zr *z, zr_note *note);
static inline zr_note *zr_note_begin(zr *z, int queue, const char *name, int kind)
{
    return z->profile->on ? zr_note_make(z, queue, name, kind) : NULL;
}
static inline void zr_note_end(zr *z, zr_note *note)
{
    if (note) zr_note_done(z, note);
}

#endif
