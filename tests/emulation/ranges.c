/* ranges.c -- a profiler for NVTX's ranges: it writes their names to the file RANGES.PID, a line
 * each, two blanks deeper inside another; `main: ...` names a stream. */
#include <nvtx3/nvToolsExtCudaRt.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int depth;

static FILE *file(void)
{
    static FILE *f;
    static pid_t owner; /* of each process */
    char path[4096];
    if (f && owner == getpid()) return f;
    snprintf(path, sizeof path, "%s.%d", getenv("RANGES"), (int)(owner = getpid()));
    return f = fopen(path, "w");
}

static int push(const char *name)
{
    fprintf(file(), "%*s%s\n", 2 * depth, "", name);
    fflush(file());
    return depth++;
}

static int pop(void) { return --depth; }

static void stream(cudaStream_t s, const char *name)
{
    (void)s;
    fprintf(file(), "stream %s\n", name);
}

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t table)
{
    const NvtxExportTableCallbacks *callbacks = table(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable core, cudart;
    unsigned n;
    callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &core, &n);
    *core[NVTX_CBID_CORE_RangePushA] = (NvtxFunctionPointer)push;
    *core[NVTX_CBID_CORE_RangePop] = (NvtxFunctionPointer)pop;
    callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CUDART, &cudart, &n);
    *cudart[NVTX_CBID_CUDART_NameCudaStreamA] = (NvtxFunctionPointer)stream;
    return 1;
}
