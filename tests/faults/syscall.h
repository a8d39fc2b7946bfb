/* syscall.h -- for preloaded libraries that replace syscall(): the operands of its calls, and the C
 * library's own function. */
#ifndef FAULTS_SYSCALL_H
#define FAULTS_SYSCALL_H
#include <dlfcn.h>
#include <stdarg.h>

enum { OPERANDS = 6 };

static inline void take_operands(va_list args, long a[OPERANDS])
{
    for (int i = 0; i < OPERANDS; i++) a[i] = va_arg(args, long);
}

static inline long real_syscall(long number, const long a[OPERANDS])
{
    static long (*real)(long, ...);
    if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

#endif
