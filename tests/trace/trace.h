/* trace.h -- included before a train.c: every call of the runtime prints itself by name. */
#ifndef TRACE_H
#define TRACE_H
#include "zr.h"

void trace_call(int queue, const char *fn, int n, const int64_t *i);

#undef zr_call
#define zr_call(z, queue, fn, ...)                                                                 \
    ((void)(z),                                                                                    \
     trace_call(queue, #fn, (int)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)),       \
                (const int64_t[]){__VA_ARGS__}))

#endif
