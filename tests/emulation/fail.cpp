/* fail.cpp -- how every mistake that the emulation finds ends the process. */
#include "shim.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <unistd.h>

void shim_fail(const char *format, ...)
{
    char line[1024] = "emulation: ";
    size_t n = strlen(line);
    va_list args;
    va_start(args, format);
    n += (size_t)vsnprintf(line + n, sizeof line - n - 1, format, args);
    n = std::min(n, sizeof line - 2);
    line[n++] = '\n';
    (void)!write(STDERR_FILENO, line, n);
    _exit(SHIM_MISTAKE);
}
