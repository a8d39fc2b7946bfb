/* mistakes.cu -- a program for every mistake with streams that the emulation must find, and beside
 * it the same thing done right: `emulated-mistakes CASE`.
 *
 * A right case ends with 0. A race ends with SHIM_MISTAKE, a call that CUDA refuses with REFUSED
 * and the error's name on stdout.
 */
#include "../../kernels/cuda/mma.h"

#include <stdlib.h>
#include <string.h>

namespace {

enum { N = 4096, REFUSED = 4 };

__global__ void fill(float *x, float with)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    x[i] = with;
}

__global__ void twice(float *y, const float *x)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = 2 * x[i];
}

__global__ void reach(float *x, int from) { x[from + (int)threadIdx.x] = 1; }

__global__ void vectors(float4 *x) { x[threadIdx.x] = make_float4(1, 2, 3, 4); }

__global__ void next_block(float *x)
{
    x[blockIdx.x * 32 + threadIdx.x] = x[(blockIdx.x + 1) % 2 * 32 + threadIdx.x];
}

__global__ void all_to_one(float *x) { x[0] = 1; }

__global__ void halves(bf16 *x) { put(&x[blockIdx.x * 3 + threadIdx.x % 3], 1.0f); }

__global__ void count(int *x) { atomicAdd(x, 1); }

__global__ void share(float *x, int from)
{
    ZK_SHARED(float, all);
    int i = from + (int)threadIdx.x;
    all[i] = 1;
    __syncthreads();
    x[threadIdx.x] = all[i ^ 1];
}

/* `off`: bytes by which each instruction's address is misaligned */
__global__ void instructions(float *x, int which, int off)
{
    ZK_SHARED(char, all);
    place mine = place_of(all) + 16 * (place)lane_of(), at = mine + (place)off;
    uint32_t m[4];
    if (which == 0) copy16(at, x, true);
    if (which == 1) copy16(mine, (char *)x + off, true);
    if (which == 2) copy4(at, x, true);
    wait_copies();
    if (which == 3) load_matrices(m, at);
    if (which == 4) load_turned(m, at);
    if (which == 5) load16(at);
    if (which == 6) load_pair(at);
    if (which == 7) store4(at, 1);
}

/* Thread 1 of two, after thread 0 has ended. */
__global__ void deep(float *x)
{
    volatile char all[(128 << 10) + 576];
    if (!threadIdx.x) return;
    for (size_t i = 0; i < sizeof all; i++) all[i] = 1;
    x[0] = all[5];
}

struct world {
    cudaStream_t a, b;
    cudaEvent_t e, f, g;
    float *x, *y, *pinned;
} w;

void must(cudaError_t e)
{
    if (e == cudaSuccess) return;
    printf("%s\n", cudaGetErrorName(e));
    fflush(stdout);
    _exit(REFUSED);
}

void launch_fill(cudaStream_t s, float *x, float with)
{
    const zk_grid grid = {N / 256, 1, 1, 256, 0}, *g = &grid;
    ZK_START(fill, g, s, x, with);
    must(cudaGetLastError());
}

void launch_twice(cudaStream_t s, float *y, const float *x)
{
    const zk_grid grid = {N / 256, 1, 1, 256, 0}, *g = &grid;
    ZK_START(twice, g, s, y, x);
    must(cudaGetLastError());
}

void launch_reach(int from)
{
    const zk_grid grid = {1, 1, 1, 32, 0}, *g = &grid;
    ZK_START(reach, g, w.a, w.x, from);
    must(cudaStreamSynchronize(w.a));
}

void begin(cudaStreamCaptureMode mode) { must(cudaStreamBeginCapture(w.a, mode)); }

cudaGraphExec_t end(void)
{
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    must(cudaStreamEndCapture(w.a, &graph));
    must(cudaGraphInstantiate(&ready, graph, 0));
    must(cudaGraphDestroy(graph));
    return ready;
}

void all_is(const float *x, float wanted)
{
    static float got[N];
    must(cudaMemcpy(got, x, sizeof got, cudaMemcpyDeviceToHost));
    for (int i = 0; i < N; i++)
        if (got[i] != wanted) {
            printf("element %d is %g, not %g\n", i, (double)got[i], (double)wanted);
            fflush(stdout);
            _exit(1);
        }
}

/* ---- streams and events */
void ordered(bool wait, cudaEvent_t waited)
{
    must(cudaEventRecord(w.f, w.a));
    launch_fill(w.a, w.x, 3);
    must(cudaEventRecord(w.e, w.a));
    if (wait) must(cudaStreamWaitEvent(w.b, waited, 0));
    launch_twice(w.b, w.y, w.x);
    must(cudaDeviceSynchronize());
    all_is(w.y, 6);
}

void right_wait(void) { ordered(true, w.e); }
void no_wait(void) { ordered(false, w.e); }
void wrong_event(void) { ordered(true, w.f); }
void never_recorded(void) { ordered(true, w.g); }

/* The wait is for the newest record before it, not for a later one. */
void record_too_late(void)
{
    must(cudaEventRecord(w.e, w.a));
    must(cudaStreamWaitEvent(w.b, w.e, 0));
    launch_fill(w.a, w.x, 3);
    must(cudaEventRecord(w.e, w.a));
    launch_twice(w.b, w.y, w.x);
    must(cudaDeviceSynchronize());
}

/* Read on one stream, then written on the other. */
void overwritten(bool wait)
{
    launch_fill(w.a, w.x, 3);
    must(cudaStreamSynchronize(w.a));
    launch_twice(w.b, w.y, w.x);
    must(cudaEventRecord(w.e, w.b));
    if (wait) must(cudaStreamWaitEvent(w.a, w.e, 0));
    launch_fill(w.a, w.x, 5);
    must(cudaDeviceSynchronize());
    all_is(w.y, 6);
}

void right_overwrite(void) { overwritten(true); }
void early_overwrite(void) { overwritten(false); }

/* Two streams read. The write comes after the last of them, and after both only if it waits. */
void read_twice(bool wait)
{
    launch_fill(w.a, w.x, 3);
    must(cudaEventRecord(w.e, w.a));
    must(cudaStreamWaitEvent(w.b, w.e, 0));
    launch_twice(w.b, w.pinned, w.x);
    must(cudaEventRecord(w.f, w.b));
    launch_twice(w.a, w.y, w.x);
    if (wait) must(cudaStreamWaitEvent(w.a, w.f, 0));
    launch_fill(w.a, w.x, 1);
    must(cudaDeviceSynchronize());
    all_is(w.y, 6);
}

void right_readers(void) { read_twice(true); }
void missed_reader(void) { read_twice(false); }

/* The host's wait orders the work that it issues later. */
void host_between(void)
{
    launch_fill(w.a, w.x, 3);
    must(cudaEventRecord(w.e, w.a));
    must(cudaEventSynchronize(w.e));
    launch_twice(w.b, w.y, w.x);
    must(cudaDeviceSynchronize());
    all_is(w.y, 6);
}

void host_asks(void)
{
    launch_fill(w.a, w.x, 3);
    while (cudaStreamQuery(w.a) == cudaErrorNotReady) {
    }
    launch_twice(w.b, w.y, w.x);
    must(cudaDeviceSynchronize());
    all_is(w.y, 6);
}

/* cudaMemset does not wait, and non-blocking streams do not wait for the default stream. */
void default_memset(bool wait)
{
    must(cudaMemset(w.x, 0, N * sizeof *w.x));
    if (wait) must(cudaStreamSynchronize(NULL));
    launch_twice(w.b, w.y, w.x);
    must(cudaDeviceSynchronize());
    all_is(w.y, 0);
}

void right_memset(void) { default_memset(true); }
void hasty_memset(void) { default_memset(false); }

/* ---- host and device */
void host_reads(void) { printf("%g\n", (double)*w.x); }
void host_writes(void) { w.x[5] = 1; }
void host_copies(void) { memcpy(w.pinned, w.x, 64); }

void staging(bool wait)
{
    for (int round = 0; round < 2; round++) {
        if (wait && round) must(cudaEventSynchronize(w.e));
        for (int i = 0; i < N; i++) w.pinned[i] = (float)round;
        must(cudaMemcpyAsync(w.x, w.pinned, N * sizeof *w.x, cudaMemcpyHostToDevice, w.a));
        must(cudaEventRecord(w.e, w.a));
    }
    must(cudaDeviceSynchronize());
    all_is(w.x, 1);
}

void right_staging(void) { staging(true); }
void early_staging(void) { staging(false); }

/* A kernel reads pinned memory itself. */
void pinned_read(bool wait)
{
    memset(w.pinned, 0, N * sizeof *w.pinned);
    launch_twice(w.a, w.y, w.pinned);
    if (wait) must(cudaStreamSynchronize(w.a));
    memset(w.pinned, 1, N * sizeof *w.pinned);
    must(cudaDeviceSynchronize());
    all_is(w.y, 0);
}

void right_pinned(void) { pinned_read(true); }
void early_pinned(void) { pinned_read(false); }

void result(bool wait)
{
    launch_fill(w.a, w.x, 7);
    must(cudaMemcpyAsync(w.pinned, w.x, N * sizeof *w.x, cudaMemcpyDeviceToHost, w.a));
    if (wait) must(cudaStreamSynchronize(w.a));
    float got = w.pinned[9];
    must(cudaDeviceSynchronize());
    if (got != 7) _exit(1);
}

void right_result(void) { result(true); }
void early_result(void) { result(false); }

/* Memory that is not pinned is read when the copy is issued. */
void plain_memory(void)
{
    static float from[N];
    from[1] = 1;
    must(cudaMemcpyAsync(w.x, from, sizeof from, cudaMemcpyHostToDevice, w.a));
    from[1] = 0;
    must(cudaStreamSynchronize(w.a));
    float got[2];
    must(cudaMemcpy(got, w.x, sizeof got, cudaMemcpyDeviceToHost));
    if (got[1] != 1) _exit(1);
}

void beyond(void) { launch_reach(N); }
void within(void) { launch_reach(N - 32); }

void freed(void)
{
    must(cudaFree(w.x));
    launch_reach(0);
}

void vectors_at(float *x)
{
    const zk_grid grid = {1, 1, 1, 32, 0}, *g = &grid;
    ZK_START(vectors, g, w.a, (float4 *)x);
    must(cudaDeviceSynchronize());
}

void launch_share(int from)
{
    const zk_grid grid = {1, 1, 1, 32, 128}, *g = &grid;
    ZK_START(share, g, w.a, w.x, from);
    must(cudaStreamSynchronize(w.a));
}

void launch_instruction(int which, int off)
{
    const zk_grid grid = {1, 1, 1, 32, 1024}, *g = &grid;
    ZK_START(instructions, g, w.a, w.x, which, off);
    must(cudaDeviceSynchronize());
}

void right_instructions(void)
{
    for (int which = 0; which < 8; which++) launch_instruction(which, 16);
}

void copy16_to(void) { launch_instruction(0, 8); }
void copy16_from(void) { launch_instruction(1, 8); }
void copy4_to(void) { launch_instruction(2, 2); }
void matrices_at(void) { launch_instruction(3, 8); }
void turned_at(void) { launch_instruction(4, 8); }
void load16_at(void) { launch_instruction(5, 8); }
void load_pair_at(void) { launch_instruction(6, 4); }
void store4_at(void) { launch_instruction(7, 2); }

void within_shared(void) { launch_share(0); }
void beyond_shared(void) { launch_share(8); }
void aligned(void) { vectors_at(w.x + 4); }
void misaligned(void) { vectors_at(w.x + 2); }

/* Memory that was never written is NaN. */
void fresh(void)
{
    static float got[N];
    launch_twice(w.a, w.y, w.x);
    must(cudaStreamSynchronize(w.a));
    must(cudaMemcpy(got, w.y, sizeof got, cudaMemcpyDeviceToHost));
    for (int i = 0; i < N; i++)
        if (got[i] == got[i]) exit(1);
}

void deep_stack(void)
{
    const zk_grid grid = {1, 1, 1, 2, 0}, *g = &grid;
    ZK_START(deep, g, w.a, w.x);
    must(cudaStreamSynchronize(w.a));
}

/* ---- blocks of one launch */
template <class T> void launch_two(void (*kernel)(T *))
{
    const zk_grid grid = {2, 1, 1, 32, 0}, *g = &grid;
    ZK_START(kernel, g, w.a, (T *)w.x);
    must(cudaDeviceSynchronize());
}

void blocks_read_others(void) { launch_two(next_block); }
void threads_write_one(void) { launch_two(all_to_one); }
void threads_write_twice(void) { launch_two(halves); }
void threads_count(void) { launch_two(count); }

/* ---- graphs */
void branches(bool wait)
{
    begin(cudaStreamCaptureModeGlobal);
    must(cudaEventRecord(w.f, w.a));
    must(cudaStreamWaitEvent(w.b, w.f, 0));
    launch_fill(w.a, w.x, 3);
    must(cudaEventRecord(w.e, w.a));
    if (wait) must(cudaStreamWaitEvent(w.b, w.e, 0));
    launch_twice(w.b, w.y, w.x);
    must(cudaEventRecord(w.g, w.b));
    must(cudaStreamWaitEvent(w.a, w.g, 0));
    cudaGraphExec_t graph = end();
    for (int i = 0; i < 3; i++) {
        must(cudaMemsetAsync(w.y, 0, N * sizeof *w.y, w.a));
        must(cudaGraphLaunch(graph, w.a));
    }
    must(cudaStreamSynchronize(w.a));
    all_is(w.y, 6);
}

void right_branches(void) { branches(true); }
void loose_branches(void) { branches(false); }

/* Nothing runs during the capture, and arguments keep their values of then. */
void captured(void)
{
    float with = 3;
    launch_fill(w.a, w.x, 1);
    must(cudaStreamSynchronize(w.a));
    begin(cudaStreamCaptureModeGlobal);
    launch_fill(w.a, w.x, with);
    with = 5;
    cudaGraphExec_t graph = end();
    all_is(w.x, 1);
    must(cudaGraphLaunch(graph, w.a));
    must(cudaStreamSynchronize(w.a));
    all_is(w.x, 3);
}

/* Work of the other stream, issued outside of the graph, is not ordered with it. */
void beside(bool wait)
{
    begin(cudaStreamCaptureModeGlobal);
    launch_fill(w.a, w.x, 3);
    cudaGraphExec_t graph = end();
    must(cudaGraphLaunch(graph, w.a));
    must(cudaEventRecord(w.e, w.a));
    if (wait) must(cudaStreamWaitEvent(w.b, w.e, 0));
    launch_twice(w.b, w.y, w.x);
    must(cudaDeviceSynchronize());
    all_is(w.y, 6);
}

void after_graph(void) { beside(true); }
void beside_graph(void) { beside(false); }

void wait_from_outside(void)
{
    must(cudaEventRecord(w.e, w.b));
    begin(cudaStreamCaptureModeRelaxed);
    must(cudaStreamWaitEvent(w.a, w.e, 0));
}

void unjoined(void)
{
    begin(cudaStreamCaptureModeRelaxed);
    must(cudaEventRecord(w.f, w.a));
    must(cudaStreamWaitEvent(w.b, w.f, 0));
    launch_fill(w.b, w.x, 3);
    end();
}

void joined_too_early(void)
{
    begin(cudaStreamCaptureModeRelaxed);
    must(cudaEventRecord(w.f, w.a));
    must(cudaStreamWaitEvent(w.b, w.f, 0));
    must(cudaEventRecord(w.e, w.b));
    launch_fill(w.b, w.x, 3);
    must(cudaStreamWaitEvent(w.a, w.e, 0));
    end();
}

void sync_in_capture(void)
{
    begin(cudaStreamCaptureModeRelaxed);
    must(cudaStreamSynchronize(w.a));
}

void spoiled(void)
{
    begin(cudaStreamCaptureModeRelaxed);
    (void)cudaStreamSynchronize(w.a);
    end();
}

void CUDART_CB calls_cuda(void *) { launch_fill(w.b, w.x, 1); }
void CUDART_CB waits_for_cuda(void *) { (void)cudaStreamSynchronize(w.b); }
void CUDART_CB counts(void *at) { ++*(int *)at; }

void call(cudaHostFn_t fn)
{
    static int counted;
    must(cudaLaunchHostFunc(w.a, counts, &counted));
    must(cudaLaunchHostFunc(w.a, fn, &counted));
    must(cudaStreamSynchronize(w.a));
    if (counted != 2) _exit(1);
}

void function_counts(void) { call(counts); }
void function_launches(void) { call(calls_cuda); }
void function_waits(void) { call(waits_for_cuda); }

void malloc_in_capture(void)
{
    void *p;
    begin(cudaStreamCaptureModeGlobal);
    must(cudaMalloc(&p, 4096));
}

void captured_event_outside(void)
{
    begin(cudaStreamCaptureModeRelaxed);
    must(cudaEventRecord(w.e, w.a));
    end();
    must(cudaEventSynchronize(w.e));
}

// clang-format off
#define CASES(X)                                                                                   \
    X(right_wait) X(no_wait) X(wrong_event) X(never_recorded) X(record_too_late)                   \
    X(right_overwrite) X(early_overwrite) X(right_readers) X(missed_reader) X(host_between)        \
    X(host_asks) X(right_memset)                                                                   \
    X(hasty_memset) X(host_reads) X(host_writes) X(host_copies) X(right_staging) X(early_staging)  \
    X(right_pinned) X(early_pinned) X(right_result) X(early_result) X(plain_memory) X(beyond)      \
    X(within) X(within_shared) X(beyond_shared) X(freed) X(aligned) X(misaligned) X(fresh)         \
    X(deep_stack)                                                                                  \
    X(right_instructions) X(copy16_to) X(copy16_from) X(copy4_to) X(matrices_at) X(turned_at)      \
    X(load16_at) X(load_pair_at) X(store4_at)                                                      \
    X(right_branches) X(loose_branches) X(captured) X(after_graph) X(beside_graph)                 \
    X(wait_from_outside) X(unjoined) X(joined_too_early) X(blocks_read_others)                     \
    X(threads_write_one) X(threads_write_twice) X(threads_count) X(sync_in_capture) X(spoiled)     \
    X(malloc_in_capture) X(captured_event_outside) X(function_counts) X(function_launches)         \
    X(function_waits)
// clang-format on

void open_world(void)
{
    must(cudaStreamCreateWithFlags(&w.a, cudaStreamNonBlocking));
    must(cudaStreamCreateWithFlags(&w.b, cudaStreamNonBlocking));
    must(cudaEventCreateWithFlags(&w.e, cudaEventDisableTiming));
    must(cudaEventCreateWithFlags(&w.f, cudaEventDisableTiming));
    must(cudaEventCreateWithFlags(&w.g, cudaEventDisableTiming));
    must(cudaMalloc((void **)&w.x, N * sizeof *w.x));
    must(cudaMalloc((void **)&w.y, N * sizeof *w.y));
    must(cudaHostAlloc((void **)&w.pinned, N * sizeof *w.pinned, cudaHostAllocDefault));
}

}

int main(int argc, char **argv)
{
    const char *wanted = argc == 2 ? argv[1] : "";
    open_world();
#define RUN(name)                                                                                  \
    if (!strcmp(wanted, #name)) {                                                                  \
        name();                                                                                    \
        return 0;                                                                                  \
    }
    CASES(RUN)
    return 2;
}
