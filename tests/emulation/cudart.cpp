/* cudart.cpp -- the CUDA runtime's calls on a CPU: one device, its memory, streams and events.
 *
 * Invariants
 *  1. Prototypes are the toolkit's own; a call that is not emulated does not link.
 *  2. A call that CUDA refuses is refused with CUDA's error, also during a capture.
 *  3. A copy from memory that is not pinned reads it at issue, and a copy to such memory is
 *     complete when the call returns, as with CUDA.
 */
#include "queue.h"
#include "tensor.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <unistd.h>

namespace {

enum { BLOCK = 1024, GRID_YZ = 65535, PLAIN = 48 << 10, DEVICES = 8 };

std::map<const void *, size_t> allowed; /* shared memory of kernels that have opted in to more */

int chosen;

/* The emulated device: ZR_EMULATE_CC names one by 10 times its compute capability. */
const struct model {
    int major, minor, processors, shared; /* shared: most bytes of a block */
} models[] = {{9, 0, 132, 227 << 10},
              {8, 0, 108, 163 << 10},
              {10, 0, 148, 227 << 10},
              {10, 3, 160, 227 << 10}};

const model &device(void)
{
    const char *word = getenv("ZR_EMULATE_CC");
    for (const model &m : models)
        if (word && atoi(word) == 10 * m.major + m.minor) return m;
    if (word) shim_fail("ZR_EMULATE_CC=%s: no such device", word);
    return models[0];
}

/* ZR_EMULATE_SMS: the number of processors of a slice of the device. */
int processors(void)
{
    const char *word = getenv("ZR_EMULATE_SMS");
    return word ? atoi(word) : device().processors;
}

/* cudaSuccess: no capture forbids such a call now */
cudaError_t forbidden(cudaStream_t s)
{
    if (s && s->in) return capture_refuse(s, cudaErrorStreamCaptureUnsupported);
    if (capture_any()) return capture_refuse(nullptr, cudaErrorStreamCaptureUnsupported);
    return cudaSuccess;
}

cudaError_t drain(cudaStream_t s)
{
    lane *l = queue_lane(s);
    cudaError_t e = queue_drive(l, [l] { return l->ops.empty(); });
    race_join(race_now[race_self], race_now[l->track]);
    return e;
}

cudaError_t drain_all(void)
{
    cudaError_t e = queue_drive(nullptr, queue_empty);
    for (const clocks &c : race_now) race_join(race_now[race_self], c);
    return e;
}

bool is_device(const void *p)
{
    cudaPointerAttributes a;
    return cudaPointerGetAttributes(&a, p) == cudaSuccess && a.type == cudaMemoryTypeDevice;
}

bool is_plain(const void *p)
{
    cudaPointerAttributes a;
    return cudaPointerGetAttributes(&a, p) == cudaSuccess && a.type == cudaMemoryTypeUnregistered;
}

void copy(void *to, const void *from, size_t n)
{
    race_check(from, n, false);
    race_check(to, n, true);
    memmove(to, from, n);
}

}

/* ---- launches */
void (*shim_told)(const void *kernel, unsigned block, size_t shared);

cudaError_t shim_enqueue(const char *name, const void *kernel, const shim_grid &g,
                         cudaStream_t stream, std::function<void()> thread)
{
    if (shim_told) {
        shim_told(kernel, g.block, g.shared);
        return cudaSuccess;
    }
    cudaError_t e = cudaSuccess;
    auto more = allowed.find(kernel);
    if (g.block < 1 || g.block > BLOCK || !g.grid.x || g.grid.x > 0x7fffffff || !g.grid.y ||
        g.grid.y > GRID_YZ || !g.grid.z || g.grid.z > GRID_YZ)
        e = cudaErrorInvalidConfiguration;
    else if (g.shared > (more == allowed.end() ? (size_t)PLAIN : more->second))
        e = cudaErrorInvalidValue;
    if (e == cudaSuccess)
        e = queue_issue(stream, name, [name, kernel, g, thread] {
            return work([name, kernel, g, thread] {
                tensor_choose(device().major);
                shim_run(name, kernel, g, thread);
                return DONE;
            });
        });
    return queue_error(e);
}

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute what, int value)
{
    if (what != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > device().shared)
        return queue_error(cudaErrorInvalidValue);
    allowed[kernel] = (size_t)value;
    return cudaSuccess;
}

/* ---- errors */
#define ERRORS(X)                                                                                  \
    X(cudaSuccess, "no error")                                                                     \
    X(cudaErrorInvalidValue, "invalid argument")                                                   \
    X(cudaErrorMemoryAllocation, "out of memory")                                                  \
    X(cudaErrorInvalidConfiguration, "invalid configuration argument")                             \
    X(cudaErrorInvalidDevice, "invalid device ordinal")                                            \
    X(cudaErrorNoDevice, "no CUDA-capable device is detected")                                     \
    X(cudaErrorNotReady, "device not ready")                                                       \
    X(cudaErrorNotSupported, "operation not supported")                                            \
    X(cudaErrorIllegalState, "the operation cannot be performed in the present state")             \
    X(cudaErrorLaunchFailure, "unspecified launch failure")                                        \
    X(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing")       \
    X(cudaErrorStreamCaptureInvalidated,                                                           \
      "operation failed due to a previous error during capture")                                   \
    X(cudaErrorStreamCaptureMerge, "operation would merge separate captures")                      \
    X(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began")     \
    X(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work")                        \
    X(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream")  \
    X(cudaErrorStreamCaptureImplicit, "the default stream cannot wait for a capture")              \
    X(cudaErrorCapturedEvent, "operation not permitted on an event recorded in a capture")

const char *cudaGetErrorString(cudaError_t e)
{
#define STRING(name, text)                                                                         \
    if (e == name) return text;
    ERRORS(STRING)
    return "unrecognized error code";
}

const char *cudaGetErrorName(cudaError_t e)
{
#define NAME(name, text)                                                                           \
    if (e == name) return #name;
    ERRORS(NAME)
    return "unrecognized error code";
}

/* ---- the device */
/* ZR_EMULATE_DEVICES: the number of visible devices. */
cudaError_t cudaGetDeviceCount(int *n)
{
    const char *word = getenv("ZR_EMULATE_DEVICES");
    *n = word ? atoi(word) : DEVICES;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = chosen;
    return cudaSuccess;
}

/* With ZR_EMULATE_TOLD it prints how ranks wait. */
cudaError_t cudaInitDevice(int, unsigned int how, unsigned int valid)
{
    if (getenv("ZR_EMULATE_TOLD") && valid == cudaInitDeviceFlagsAreValid)
        fprintf(stderr, "waits %u\n", how);
    return cudaSuccess;
}

/* An emulating process has one device, whatever number it selects. */
cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= DEVICES) return queue_error(cudaErrorInvalidDevice);
    chosen = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr what, int)
{
    *value = what == cudaDevAttrComputeCapabilityMajor         ? device().major
             : what == cudaDevAttrComputeCapabilityMinor       ? device().minor
             : what == cudaDevAttrMultiProcessorCount          ? processors()
             : what == cudaDevAttrMaxSharedMemoryPerBlockOptin ? device().shared
                                                               : -1;
    return *value < 0 ? queue_error(cudaErrorNotSupported) : cudaSuccess;
}

/* ZR_EMULATE_NO_P2P: no device can access another's memory. */
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    if (device < 0 || device >= DEVICES || peer < 0 || peer >= DEVICES)
        return queue_error(cudaErrorInvalidDevice);
    *can = device != peer && !getenv("ZR_EMULATE_NO_P2P");
    return cudaSuccess;
}

/* The UUID is the device's number, or that of ZR_EMULATE_UUID. */
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int number)
{
    const char *word = getenv("ZR_EMULATE_UUID");
    std::string uuid = word ? word : std::to_string(number);
    *p = {};
    uuid.copy(p->uuid.bytes, sizeof p->uuid.bytes);
    snprintf(p->name, sizeof p->name, "emulated sm_%d%d", device().major, device().minor);
    p->major = device().major;
    p->minor = device().minor;
    p->multiProcessorCount = processors();
    p->warpSize = SHIM_WARP;
    p->maxThreadsPerBlock = BLOCK;
    p->sharedMemPerBlock = PLAIN;
    p->sharedMemPerBlockOptin = device().shared;
    size_t free;
    race_free_bytes(&free, &p->totalGlobalMem);
    return cudaSuccess;
}

/* ZR_EMULATE_FREE: the most bytes that other processes leave free. */
cudaError_t cudaMemGetInfo(size_t *free, size_t *total)
{
    locked hold(queue_lock);
    const char *most = getenv("ZR_EMULATE_FREE");
    race_free_bytes(free, total);
    if (most) *free = std::min(*free, (size_t)strtoull(most, nullptr, 10));
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    locked hold(queue_lock);
    cudaError_t e = forbidden(nullptr);
    return e == cudaSuccess ? drain_all() : e;
}

/* ---- memory */
static cudaError_t take(room r, void **p, size_t n)
{
    locked hold(queue_lock);
    cudaError_t e = forbidden(nullptr);
    if (e != cudaSuccess) return e;
    const char *most = r == PINNED ? getenv("ZR_EMULATE_PINNED") : nullptr; /* bytes per call */
    *p = most && n > strtoull(most, nullptr, 10) ? nullptr : race_alloc(r, n);
    return *p || !n ? cudaSuccess : queue_error(cudaErrorMemoryAllocation);
}

static cudaError_t give(room r, void *p)
{
    locked hold(queue_lock);
    cudaError_t e = p ? forbidden(nullptr) : cudaSuccess;
    if (!p || e != cudaSuccess) return e;
    e = drain_all();
    return race_free(r, p) ? e : queue_error(cudaErrorInvalidValue);
}

cudaError_t cudaMalloc(void **p, size_t n) { return take(DEVICE, p, n); }
cudaError_t cudaFree(void *p) { return give(DEVICE, p); }
cudaError_t cudaMallocHost(void **p, size_t n) { return take(PINNED, p, n); }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned)
{
    const char *slow = getenv("ZR_EMULATE_PINNING_S"); /* pinning is as slow as for large memory */
    if (slow) sleep((unsigned)atoi(slow));
    return take(PINNED, p, n);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p)
{
    *a = {};
    a->type = race_is(DEVICE, p)   ? cudaMemoryTypeDevice
              : race_is(PINNED, p) ? cudaMemoryTypeHost
                                   : cudaMemoryTypeUnregistered;
    a->devicePointer = a->type == cudaMemoryTypeUnregistered ? nullptr : (void *)p;
    a->hostPointer = a->type == cudaMemoryTypeDevice ? nullptr : (void *)p;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, cudaMemcpyKind kind,
                            cudaStream_t s)
{
    locked hold(queue_lock);
    bool down = kind == cudaMemcpyDeviceToHost, up = kind == cudaMemcpyHostToDevice;
    if ((down && is_device(to)) || (up && is_device(from)))
        return queue_error(cudaErrorInvalidValue);
    if (s && s->in && ((up && is_plain(from)) || (down && is_plain(to))))
        return capture_refuse(s, cudaErrorStreamCaptureUnsupported);
    std::shared_ptr<std::string> staged;
    if (up && is_plain(from)) staged.reset(new std::string((const char *)from, n));
    cudaError_t e = queue_issue(s, "cudaMemcpyAsync", [=] {
        return work([=] {
            copy(to, staged ? staged->data() : from, n);
            return DONE;
        });
    });
    if (e == cudaSuccess && down && is_plain(to)) e = drain(s);
    return e;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t n, cudaMemcpyKind kind)
{
    locked hold(queue_lock);
    cudaError_t e = forbidden(nullptr);
    if (e == cudaSuccess) e = cudaMemcpyAsync(to, from, n, kind, nullptr);
    return e == cudaSuccess ? drain(nullptr) : e;
}

cudaError_t cudaMemsetAsync(void *p, int byte, size_t n, cudaStream_t s)
{
    return queue_issue(s, "cudaMemsetAsync", [=] {
        return work([=] {
            race_check(p, n, true);
            memset(p, byte, n);
            return DONE;
        });
    });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void *data)
{
    return queue_issue(s, "cudaLaunchHostFunc", [=] {
        return work([=] {
            queue_in_function = true;
            fn(data);
            queue_in_function = false;
            return DONE;
        });
    });
}

cudaError_t cudaMemset(void *p, int byte, size_t n)
{
    locked hold(queue_lock);
    cudaError_t e = forbidden(nullptr);
    return e == cudaSuccess ? cudaMemsetAsync(p, byte, n, nullptr) : e;
}

/* ---- streams */
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags)
{
    locked hold(queue_lock);
    *s = queue_open(flags != cudaStreamNonBlocking);
    return *s ? cudaSuccess : queue_error(cudaErrorMemoryAllocation);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority)
{
    cudaError_t e = cudaStreamCreateWithFlags(s, flags);
    if (e == cudaSuccess) (*s)->priority = priority;
    return e;
}

cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    locked hold(queue_lock);
    queue_close(s);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    locked hold(queue_lock);
    cudaError_t e = s && s->in ? forbidden(s) : cudaSuccess;
    return e == cudaSuccess ? drain(s) : e;
}

cudaError_t cudaStreamQuery(cudaStream_t s)
{
    locked hold(queue_lock);
    cudaError_t e = s && s->in ? forbidden(s) : cudaSuccess;
    if (e != cudaSuccess) return e;
    lane *l = queue_lane(s);
    queue_nudge(l);
    if (!l->ops.empty()) return cudaErrorNotReady;
    race_join(race_now[race_self], race_now[l->track]);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned)
{
    return queue_wait(s, e);
}

/* ---- events */
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    *e = new CUevent_st{nullptr, !(flags & cudaEventDisableTiming)};
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    locked hold(queue_lock);
    delete e;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return queue_record(s, e); }

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    locked hold(queue_lock);
    record_ref r = e->newest;
    if (r && r->in) return queue_error(cudaErrorCapturedEvent);
    cudaError_t error = forbidden(nullptr);
    if (error != cudaSuccess || !r) return error;
    error = queue_drive(r->where, [r] { return r->done; });
    if (error != cudaSuccess || !r->done) return error == cudaSuccess ? cudaErrorNotReady : error;
    race_join(race_now[race_self], r->after);
    return cudaSuccess;
}

/* ZR_EMULATE_SLOW=X: everything takes X times as long. */
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    locked hold(queue_lock);
    if (!from->timing || !to->timing || !from->newest || !to->newest)
        return queue_error(cudaErrorInvalidResourceHandle);
    if (!from->newest->done || !to->newest->done) return cudaErrorNotReady;
    const char *slow = getenv("ZR_EMULATE_SLOW");
    *ms = (float)((to->newest->at - from->newest->at) * (slow ? atof(slow) : 1) * 1000);
    return cudaSuccess;
}
