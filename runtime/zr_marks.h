/* zr_marks.h -- marks of the tensors of a program. */
#ifndef ZR_MARKS_H
#define ZR_MARKS_H
#include "zr.h"

/* Return the marks of a tensor: ZR_WHOLE | ..., or 0. */
static inline int zr_marks_of(const zr_program *p, const zr_tensor *t)
{
    return p->marks ? p->marks[t - p->tensors] : 0;
}

#endif
