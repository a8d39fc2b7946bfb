/* device.c -- a rank's GPU: which one, its arenas in device and in pinned memory, copies.
 *
 * Invariants
 *  1. There is one allocation of device memory and one of pinned memory, both made at the start;
 *     the first, and the host arena in the second, are all zero.
 */
#define _GNU_SOURCE
#include "cuda.h"
#include "range.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const int zr_is_gpu = 1;

void zr_cuda(zr *z, cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    zr_fail(z, ZR_ENVIRONMENT, "step %" PRId64 ": %s: %s", z->step + 1, what,
            cudaGetErrorString(error));
}

/* ---- before the ranks start: nothing of CUDA, which does not survive a fork */

void zr_prepare(zr *z)
{
    z->t = calloc(1, sizeof *z->t);
    if (!z->t) zr_fail(z, ZR_ENVIRONMENT, "out of memory");
    zr_find_launcher(z);
    zr_choose_threads(z);
    z->t->watch.setting = zr_setting(z, "ZR_TIMEOUT_S", 1000000);
}

/* ---- which device */

static void set(const char *name, const char *value) { setenv(name, value, 0); }

/* What the libraries read when they start; what the user has set stays. */
static void set_up_libraries(zr *z, int shared)
{
    char host[16];
    set("CUDA_MODULE_LOADING", "EAGER");  /* else kernels are loaded in the first step */
    set("NCCL_LAUNCH_ORDER_IMPLICIT", "1");
    if (!z->o->no_graph) set("NCCL_GRAPH_MIXING_SUPPORT", "0");
    /* sums of floats have one order; nothing else of these two functions is used */
    set("NCCL_ALGO", "reducescatter:ring;reduce:ring");
    set("NCCL_PROTO", "reducescatter:simple;reduce:simple");
    if (!shared) return;
    /* Ranks of one device pass for ranks of as many hosts. */
    snprintf(host, sizeof host, "rank%d", z->rank);
    set("NCCL_HOSTID", host);
    set("NCCL_NET", "Socket");
    set("NCCL_SOCKET_IFNAME", "lo");
    set("NCCL_NVLS_ENABLE", "0");
    set("NCCL_P2P_DISABLE", "1");
}

/* Rank r takes device r; fails where there is none for it. A launcher may show each task one
 * device alone. */
static void choose(zr *z)
{
    int devices = 0, share = zr_setting(z, "ZR_SHARE_GPU", 1) != 0;
    set_up_libraries(z, share);
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0)
        zr_fail(z, ZR_ENVIRONMENT,
                "no CUDA device: %s; run this where NVIDIA's driver shows one (nvidia-smi), or "
                "build out/train, which needs none",
                error == cudaSuccess ? "none is visible" : cudaGetErrorString(error));
    if (devices < z->here && !share)
        zr_fail(z, ZR_ENVIRONMENT,
                "%d CUDA devices for %d ranks here; generate with fewer cluster.ranks, make more "
                "devices visible (CUDA_VISIBLE_DEVICES), or set ZR_SHARE_GPU=1 for a test", devices,
                z->here);
    z->t->device = (z->t->local + z->rank - z->lowest) % devices;
    zr_cuda(z, cudaSetDevice(z->t->device), "taking a device");
}

/* ---- arenas */

static int64_t free_bytes(zr *z, int64_t *all)
{
    size_t some = 0, total = 0;
    zr_cuda(z, cudaMemGetInfo(&some, &total), "asking for the device's free memory");
    if (all) *all = (int64_t)total;
    return (int64_t)some;
}

static double gib(int64_t bytes) { return (double)bytes / (1 << 30); }

/* Memory of NCCL's own allocator is registered where a graph's collectives use it: peers then read
 * and write it in place. Every rank has the same offsets in it. */
static int take(const zr *z, void **at, size_t bytes)
{
    return z->ranks > 1 ? ncclMemAlloc(at, bytes) == ncclSuccess
                        : cudaMalloc(at, bytes) == cudaSuccess;
}

static void take_arenas(zr *z)
{
    zr_target *t = z->t;
    int64_t all, need = z->p->columns[z->column].arena;
    void *at = NULL, *host = NULL;
    t->before = free_bytes(z, &all);
    if (need > t->before || !take(z, &at, (size_t)need))
        zr_fail(z, ZR_ENVIRONMENT,
                "needs %.3f GiB of device memory in one piece; device %d has %.3f of its %.3f GiB "
                "free; end other programs, or generate with more ranks, a smaller micro_batch or "
                "a smaller model",
                gib(need), t->device, gib(t->before), gib(all));
    cudaStream_t stream = t->stream[ZR_MAIN];
    zr_cuda(z, cudaMemsetAsync(at, 0, (size_t)need, stream), "clearing the arena");
    zr_cuda(z, cudaStreamSynchronize(stream), "clearing the arena");
    int64_t pinned = z->p->host + ZR_BOUNCE;
    cudaError_t error = cudaHostAlloc(&host, (size_t)pinned, cudaHostAllocDefault);
    if (error != cudaSuccess)
        zr_fail(z, ZR_ENVIRONMENT,
                "pinning %.3f GiB of the host's memory: %s; end other programs, or generate with "
                "more ranks, or with less on the host (zero.offload_optimizer, zero.offload_param, "
                "train.offload_activations)", gib(pinned), cudaGetErrorString(error));
    memset(host, 0, (size_t)z->p->hosted);
    t->arena = at;
    t->host = host;
    t->after = free_bytes(z, NULL);
}

/* Kernels are opened with streams and scratch: both are made before anything else of the rank. */
void zr_open(zr *z)
{
    zr_target *t = z->t;
    if (z->far) zr_plane_open(z);
    choose(z);
    zr_find_column(z);
    for (int queue = 0; queue < ZR_QUEUES; queue++) {
        int priority = queue == ZR_MAIN ? 0 : -1;     /* transfers go before work */
        zr_cuda(z, cudaStreamCreateWithPriority(&t->stream[queue], cudaStreamNonBlocking,
                                                priority), "making a stream");
        z->queue[queue].stream = t->stream[queue];
        zr_named(t->stream[queue], zr_queue_name(queue));
    }
    take_arenas(z);
    z->space = t->arena + z->p->space;
    z->desk = t->host + z->p->desk;
}

void zr_arena(zr *z) { (void)z; }

/* ---- copies: through pinned memory, on ZR_MAIN's stream */

static void copy(zr *z, void *to, const void *from, int64_t bytes, enum cudaMemcpyKind kind)
{
    cudaStream_t stream = zr_on(z, ZR_MAIN, "a copy");
    zr_cuda(z, cudaMemcpyAsync(to, from, (size_t)bytes, kind, stream), "copying");
    zr_cuda(z, cudaStreamSynchronize(stream), "copying");
}

void zr_read(zr *z, int queue, void *to, int64_t at, int64_t bytes)
{
    if (queue == ZR_HOST) memcpy(to, z->t->host + at, (size_t)bytes);
    if (queue == ZR_STORE) zr_disk_move(z, ZR_LOAD, to, at, bytes);
    if (queue != ZR_MAIN) return;
    char *bounce = z->t->host + z->p->host;
    for (int64_t i = 0; i < bytes; i += ZR_BOUNCE) {
        int64_t some = bytes - i < ZR_BOUNCE ? bytes - i : ZR_BOUNCE;
        copy(z, bounce, z->t->arena + at + i, some, cudaMemcpyDeviceToHost);
        memcpy((char *)to + i, bounce, (size_t)some);
    }
}

void zr_write(zr *z, int queue, int64_t at, const void *from, int64_t bytes)
{
    if (queue == ZR_HOST) memcpy(z->t->host + at, from, (size_t)bytes);
    if (queue == ZR_STORE) zr_disk_move(z, ZR_STORE, (void *)from, at, bytes);
    if (queue != ZR_MAIN) return;
    char *bounce = z->t->host + z->p->host;
    for (int64_t i = 0; i < bytes; i += ZR_BOUNCE) {
        int64_t some = bytes - i < ZR_BOUNCE ? bytes - i : ZR_BOUNCE;
        memcpy(bounce, (const char *)from + i, (size_t)some);
        copy(z, z->t->arena + at + i, bounce, some, cudaMemcpyHostToDevice);
    }
}

/* ---- tokens: a ring of places in pinned memory; each is free when its copy is done */

static int64_t rows(const zr *z) { return z->p->batch * z->p->sequence; }

void zr_inlet(zr *z, int64_t at, int32_t **tokens, int32_t **targets)
{
    (void)at;
    zr_target *t = z->t;
    t->inlet = (t->inlet + 1) % z->p->inlets;
    zr_cuda(z, cudaEventSynchronize(t->read[t->inlet]), "waiting for a batch to be copied");
    *tokens = (int32_t *)(t->host + z->p->inlet + t->inlet * z->p->inlet_step);
    *targets = *tokens + rows(z);
}

void zr_inlet_filled(zr *z, int64_t at)
{
    zr_target *t = z->t;
    const int32_t *from = (int32_t *)(t->host + z->p->inlet + t->inlet * z->p->inlet_step);
    size_t bytes = (size_t)rows(z) * sizeof *from;
    cudaStream_t stream = zr_on(z, ZR_MAIN, "the copy of a batch");
    zr_cuda(z, cudaMemcpyAsync(t->arena + z->p->tokens + at, from, bytes, cudaMemcpyHostToDevice,
                               stream), "copying tokens");
    zr_cuda(z, cudaMemcpyAsync(t->arena + z->p->targets + at, from + rows(z), bytes,
                               cudaMemcpyHostToDevice, stream), "copying targets");
    zr_cuda(z, cudaEventRecord(t->read[t->inlet], stream), "recording an event");
}

/* ---- what a run says of its device */

void zr_epilogue(zr *z)
{
    zr_target *t = z->t;
    int64_t now = free_bytes(z, NULL);
    if (t->launches)
        zr_print(z, STDOUT_FILENO, "graphs: %" PRId64 " launches, %.1f us of the host for each\n",
                 t->launches, 1e6 * t->launch_seconds / (double)t->launches);
    zr_print(z, STDOUT_FILENO, "device memory: arena %" PRId64 " bytes (%" PRId64 " taken), "
             "libraries %" PRId64 "\n", z->p->columns[z->column].arena, t->before - t->after,
             t->after - (t->first ? t->first : now));
    if (t->first && now != t->first)
        zr_print(z, STDOUT_FILENO, "device memory: %" PRId64 " bytes fewer are free than after the "
                 "first step\n", t->first - now);
}
