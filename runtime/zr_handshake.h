/* zr_handshake.h -- checks that all ranks agree before they work together. */
#ifndef ZR_HANDSHAKE_H
#define ZR_HANDSHAKE_H
#include "zr_mix.h"
#include "zr_shared.h"

/* Fail where a rank's program differs from rank 0's, and, once kernels are open, where kernels,
 * options or data differ. */
void zr_same_program(zr *z);
void zr_handshake(zr *z);
/* Once a GPU's products have their algorithms: set z->algorithms, fail where it differs from rank
 * 0's, and report on stderr where it differs from that of the run which is resumed. */
void zr_same_algorithms(zr *z);
/* Describe the data: files, their sizes, a hash of samples; "" without data. */
void zr_data_text(const zr_mix *m, char text[ZR_TOLD]);
extern const char zr_digest[];  /* digest of the sources, 64 hex digits, from runtime/digest */
extern const char zr_release[]; /* contents of VERSION */

#endif
