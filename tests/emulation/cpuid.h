/* cpuid.h -- a processor of the tests' choice for kernels/cpu/host.c: it has the features that the
 * environment variable ZR_TEST_CPU lists, or the real ones if that is not set.
 *
 * Features are named as __builtin_cpu_supports and __builtin_cpu_is name them; f16c is added.
 */
#ifndef EMULATED_CPUID_H
#define EMULATED_CPUID_H
#include <cpuid.h>
#include <stdlib.h>
#include <string.h>

static int cpuid_has(const char *feature, int real)
{
    const char *listed = getenv("ZR_TEST_CPU");
    size_t length = strlen(feature);
    if (!listed) return real;
    for (const char *at = listed; (at = strstr(at, feature)); at += length)
        if ((at == listed || at[-1] == ' ') && (at[length] == ' ' || !at[length])) return 1;
    return 0;
}

static int cpuid_leaf(unsigned leaf, unsigned *a, unsigned *b, unsigned *c, unsigned *d)
{
    int known = __get_cpuid(leaf, a, b, c, d);
    if (leaf == 1) *c = cpuid_has("f16c", known && *c & bit_F16C) ? *c | bit_F16C : *c & ~bit_F16C;
    return known;
}

#define __builtin_cpu_supports(feature) cpuid_has(feature, !!__builtin_cpu_supports(feature))
#define __builtin_cpu_is(model) cpuid_has(model, !!__builtin_cpu_is(model))
#define __get_cpuid cpuid_leaf

#endif
