/* zr_disk.h -- the file arena. */
#ifndef ZR_DISK_H
#define ZR_DISK_H
#include "zr.h"

void zr_disk_open(zr *z); /* allocate it, all zero; fails if the disk has no room */
/* Move bytes between `at` in memory and offset `there` of the file, in the queue's direction. */
void zr_disk_move(zr *z, int queue, void *at, int64_t there, int64_t bytes);
int64_t zr_disk_moved(const zr *z, int queue); /* bytes so far */

#endif
