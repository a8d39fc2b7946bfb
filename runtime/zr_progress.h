/* zr_progress.h -- progress on stderr. */
#ifndef ZR_PROGRESS_H
#define ZR_PROGRESS_H
#include "zr.h"

void zr_show_start(zr *z);   /* describe the run before its first step */
void zr_show_stopped(zr *z); /* say that --patience has ended the training */
void zr_show_step(zr *z, const double report[ZR_REPORT]);
void zr_show_validated(zr *z, int64_t steps, double seconds); /* seconds: time of the validation */
/* Record that this rank begins task `what` of so many parts; NULL: no long task. */
void zr_progress(zr *z, const char *what, const char *unit, int64_t parts);
void zr_progress_look(zr *z); /* called often by the parent: shows the task */

void zr_progress_next(zr *z);  /* the next tensor or micro-batch begins: zr_progress.c */
void zr_progress_beside(void); /* this thread's work does not count as progress */
int zr_is_beside(void);        /* does this thread save beside a step? */

#endif
