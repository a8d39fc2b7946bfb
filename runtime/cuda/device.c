/* device.c -- a rank's GPU: which one, its arenas in device and in pinned memory, copies.
 *
 * Invariants
 *  1. There is one allocation of device memory and one of pinned memory, both made at the start.
 *     The device arena, and the host arena in pinned memory, are all zero.
 */
#define _GNU_SOURCE
#include "cuda.h"
#include "nvtx.h"
#include "../zr_disk.h"
#include "../zr_fail.h"
#include "../zr_log.h"
#include "../zr_memory.h"
#include "../zr_net.h"
#include "../zr_options.h"
#include "../zr_progress.h"
#include "../zr_queue.h"
#include "../zr_range.h"
#include "../zr_rank.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* ---- before the ranks start: no CUDA, which does not survive a fork */

void zr_prepare(zr *z)
{
    z->t = zr_get(z, 1, sizeof *z->t);
    zr_find_launcher(z);
}

/* ---- choice of the device */

static void set(const char *name, const char *value) { setenv(name, value, 0); }

/* Before NCCL 2.32, registered buffers may hang NCCL on InfiniBand without an error (nccl#2389).
 * Between hosts they are registered with later versions only. */
enum { NCCL_SOUND = NCCL_VERSION(2, 32, 0) };

static void set_up_hosts(zr *z)
{
    ncclGetVersion(&z->nccl);
    if (!z->far || z->net->neighbours == z->ranks || z->nccl >= NCCL_SOUND) return;
    set("NCCL_GRAPH_REGISTER", "0");
    set("NCCL_LOCAL_REGISTER", "0");
    zr_print(z, STDERR_FILENO,
             "several hosts with NCCL %d: buffers are not registered, as NCCL may hang "
             "(NCCL_GRAPH_REGISTER=1 registers those of CUDA graphs, NCCL_LOCAL_REGISTER=1 those "
             "of steps without graphs)\n",
             z->nccl);
}

/* Sums of floats must have one order: fix NCCL's algorithm and protocol for the two functions that
 * add floats, which are used for nothing else. With train.reduction: fast, fail if the user's
 * variables choose others. */
static void set_up_sums(zr *z)
{
    static const char *const ways[][3] = {
        {"NCCL_ALGO", "reducescatter:ring;reduce:ring", "ring"},
        {"NCCL_PROTO", "reducescatter:simple;reduce:simple", "simple"},
    };
    int fast = 0;
    for (int i = 0; i < z->p->nrecipe; i++)
        fast |= z->ranks > 1 && !strcmp(z->p->recipe[i], "train.reduction: \"fast\"");
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        const char *name = ways[i][0], *wanted = ways[i][1], *in_short = ways[i][2];
        set(name, wanted);
        if (fast && strcasecmp(getenv(name), wanted) && strcasecmp(getenv(name), in_short))
            zr_fail(z, ZR_USER,
                    "%s=%s is set, but train.reduction: fast repeats only with NCCL's ring "
                    "algorithm and simple protocol; unset it, or set it to %s or \"%s\"",
                    name, getenv(name), in_short, wanted);
    }
}

/* Return whether steps are launched anew, with collectives between their kernels. */
static int unrecorded(const zr *z)
{
    return z->ranks > 1 && (z->o->no_graph || z->o->profile || zr_uses(z, ZR_HOST));
}

/* Report NCCL variables that change NCCL's memory from the amount that the plan counts. */
static void tell_taken(zr *z)
{
    static const char *const names[] = {
        "NCCL_BUFFSIZE",          "NCCL_LL_BUFFSIZE",       "NCCL_LL128_BUFFSIZE",
        "NCCL_MAX_P2P_NCHANNELS", "NCCL_MIN_P2P_NCHANNELS", "NCCL_MIN_NCHANNELS",
        "NCCL_MIN_CTAS",          "NCCL_MAX_CTAS",          "NCCL_NVLS_NCHANNELS",
    };
    for (size_t i = 0; z->rank == 0 && z->ranks > 1 && i < sizeof names / sizeof *names; i++)
        if (getenv(names[i]))
            zr_print(z, STDERR_FILENO,
                     "%s=%s is set: NCCL may use a different amount of memory than planned\n",
                     names[i], getenv(names[i]));
}

/* Fail if variables give products of f32 other bits than cuBLASLt's f32. */
static void check_products(zr *z)
{
    static const char *const names[] = {
        "NVIDIA_TF32_OVERRIDE",
        "CUBLAS_EMULATE_SINGLE_PRECISION",
        "CUBLAS_EMULATION_STRATEGY",
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (value && *value && strcmp(value, "0"))
            zr_fail(z, ZR_USER, "%s=%s is set, which changes the bits of products; unset it",
                    names[i], value);
    }
}

/* Set the variables that libraries read when they start. Variables that the user has set stay. */
static void set_up_libraries(zr *z, int shared)
{
    char host[16], channels[16];
    check_products(z);
    tell_taken(z);
    /* A kernel that is loaded at its first launch waits for the device, where a collective may be
     * waiting for a peer that waits likewise. Graphs are captured before anything waits. */
    set("CUDA_MODULE_LOADING", unrecorded(z) ? "EAGER" : "LAZY");
    set("NCCL_LAUNCH_ORDER_IMPLICIT", "1");
    if (!z->o->no_graph) set("NCCL_GRAPH_MIXING_SUPPORT", "0");
    /* An all-to-all takes 12 MiB per channel and peer, with up to 32 channels if not limited. 8 are
     * hidden behind backward (gen/zg/facts/reserve.py counts them); a margin allows fewer. */
    snprintf(channels, sizeof channels, "%d", z->p->margin ? z->p->channels : 8);
    set("NCCL_MAX_P2P_NCHANNELS", channels);
    set_up_hosts(z);
    set_up_sums(z);
    z->t->registers = unrecorded(z);
    if (!shared) return;
    /* ranks on one device pretend to be on as many hosts */
    snprintf(host, sizeof host, "rank%d", z->rank);
    set("NCCL_HOSTID", host);
    set("NCCL_NET", "Socket");
    set("NCCL_SOCKET_IFNAME", "lo");
    set("NCCL_NVLS_ENABLE", "0");
    set("NCCL_P2P_DISABLE", "1");
}

/* Fail if two ranks have the same device. Two tasks that each see one device may see the same;
 * only its UUID tells. For an instance of a GPU (MIG) the driver's cuDeviceGetUuid returns its
 * own UUID, which the runtime's documentation does not promise. If it returned the GPU's, ranks
 * on two instances of one GPU would be refused here, as NCCL 2.28 refuses them itself (it
 * compares PCI addresses). */
static void claim_device(zr *z, int share)
{
    char text[48] = "";
    struct cudaDeviceProp p;
    zr_cuda(z, cudaGetDeviceProperties(&p, z->t->device), "querying the device");
    int n = snprintf(text, sizeof text, "GPU"); /* as nvidia-smi -L writes it */
    for (int i = 0; i < 16; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, "%s%02x",
                      i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                      (unsigned char)p.uuid.bytes[i]);
    zr_plane_alone(z, share ? "" : text,
                   "let every rank see one device of its own, or all devices "
                   "(CUDA_VISIBLE_DEVICES; Slurm: --gpus-per-node, --gpu-bind=none), generate with "
                   "fewer cluster.ranks, or set ZR_SHARE_GPU=1 for a test");
}

/* Return whether each of the first n devices can access the others' memory. */
static int direct(zr *z, int n)
{
    int can = 1;
    for (int i = 0; can && i < n * n; i++)
        if (i / n != i % n)
            zr_cuda(z, cudaDeviceCanAccessPeer(&can, i / n, i % n), "querying P2P access");
    return can;
}

/* Warn if GPUs cannot access each other's memory. NCCL then moves pieces through files in /dev/shm,
 * which has 64 MiB in containers, and NCCL's error does not say when it is full. */
static void tell_indirect(zr *z, int alone, int ranks)
{
    struct statvfs shm;
    double bytes = statvfs("/dev/shm", &shm) ? 0 : (double)shm.f_blocks * (double)shm.f_frsize;
    if (z->rank != 0 || ranks < 2 || (!alone && direct(z, ranks))) return;
    if (alone)
        zr_print(z, STDERR_FILENO,
                 "each of the %d ranks on this host sees only one device: NCCL cannot "
                 "use P2P between them; let every task see all devices (Slurm: --gpus-per-node=%d "
                 "--gpu-bind=none)\n",
                 ranks, ranks);
    zr_print(
        z, STDERR_FILENO,
        "the GPUs of this host cannot access each other's memory (no P2P): NCCL needs /dev/shm, "
        "which has %.3f GiB (for a container: --shm-size=1g)\n",
        zr_gib((int64_t)bytes));
}

/* Choose a device: rank r takes device r. Fails if there is none. A launcher may show
 * each task one device only. */
static void choose(zr *z)
{
    int devices = 0, share = zr_setting(z, "ZR_SHARE_GPU", 1) != 0;
    set_up_libraries(z, share);
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0)
        zr_fail(z, ZR_ENVIRONMENT,
                "no CUDA device: %s; run this where the NVIDIA driver, 580 or newer (or an older "
                "one with cuda-compat), shows one (nvidia-smi), or build out/train, which needs "
                "none",
                error == cudaSuccess ? "none is visible" : cudaGetErrorString(error));
    int alone = z->far && devices == 1; /* the visible device is this task's own */
    int ranks = z->far ? z->net->neighbours : z->here;
    if (devices < ranks && !share && !alone)
        zr_fail(z, ZR_ENVIRONMENT,
                "%d CUDA devices for %d ranks here; generate with fewer cluster.ranks, make more "
                "devices visible (CUDA_VISIBLE_DEVICES), or set ZR_SHARE_GPU=1 for a test",
                devices, ranks);
    z->t->device = (z->net->local + z->rank - z->lowest) % devices;
    if (zr_setting(z, "ZR_BLOCKING_SYNC", 1) != 0) /* before any call makes the context */
        zr_cuda(z,
                cudaInitDevice(z->t->device, cudaDeviceScheduleBlockingSync,
                               cudaInitDeviceFlagsAreValid),
                "setting up a device");
    zr_cuda(z, cudaSetDevice(z->t->device), "selecting a device");
    if (z->far) claim_device(z, share);
    if (!share) tell_indirect(z, alone, ranks);
}

/* Fail unless the margin leaves SMs to products. */
static void check_margin(zr *z)
{
    int all = 0;
    zr_cuda(z, cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, z->t->device),
            "querying the device's SMs");
    if (z->p->margin >= all)
        zr_fail(z, ZR_ENVIRONMENT,
                "train.sm_margin is %d, but device %d has %d SMs; generate it "
                "again with a smaller one, or 0",
                z->p->margin, z->t->device, all);
}

/* ---- arenas */

static int64_t free_bytes(zr *z, int64_t *all)
{
    size_t some = 0, total = 0;
    zr_cuda(z, cudaMemGetInfo(&some, &total), "querying the device's free memory");
    if (all) *all = (int64_t)total;
    return (int64_t)some;
}

/* Allocate device memory. NCCL's allocator registers it if a graph's collectives use it, so that
 * peers read and write it in place. Every rank has the same offsets in it. */
static int take(const zr *z, void **at, size_t bytes)
{
    return z->ranks > 1 ? ncclMemAlloc(at, bytes) == ncclSuccess
                        : cudaMalloc(at, bytes) == cudaSuccess;
}

static void take_arenas(zr *z)
{
    zr_target *t = z->t;
    int64_t all, need = z->p->columns[z->column].arena, nccl = z->p->columns[z->column].nccl;
    void *at = NULL, *host = NULL;
    t->before = free_bytes(z, &all);
    t->found = all - t->before;
    if (need + nccl > t->before || !take(z, &at, (size_t)need))
        zr_fail(z, ZR_ENVIRONMENT,
                "needs %.3f GiB of contiguous device memory, and NCCL up to %.3f GiB more; "
                "device %d has %.3f of its %.3f GiB free; end other programs, or generate with "
                "more ranks, a smaller train.micro_batch or a smaller model",
                zr_gib(need), zr_gib(nccl), t->device, zr_gib(t->before), zr_gib(all));
    cudaStream_t stream = t->stream[ZR_MAIN];
    zr_cuda(z, cudaMemsetAsync(at, 0, (size_t)need, stream), "clearing the arena");
    zr_cuda(z, cudaStreamSynchronize(stream), "clearing the arena");
    int64_t pinned = z->p->host + ZR_BOUNCE;
    cudaError_t error = cudaHostAlloc(&host, (size_t)pinned, cudaHostAllocDefault);
    if (error != cudaSuccess)
        zr_fail(z, ZR_ENVIRONMENT,
                "pinning %.3f GiB of the host's memory: %s; end other programs, or generate with "
                "more ranks, or with less on the host (zero.offload_optimizer, zero.offload_param, "
                "train.offload_activations)",
                zr_gib(pinned), cudaGetErrorString(error));
    memset(host, 0, (size_t)z->p->hosted);
    t->arena = at;
    t->host = host;
    t->after = free_bytes(z, NULL);
}

/* Open the device. Kernels are opened with streams and scratch, so both are made first. */
void zr_open(zr *z)
{
    zr_target *t = z->t;
    zr_choose_threads(z);
    choose(z);
    zr_find_column(z);
    check_margin(z);
    for (int queue = 0; queue < ZR_QUEUES; queue++) {
        int priority = queue == ZR_MAIN ? 0 : -1; /* other queues wait for these */
        zr_cuda(z, cudaStreamCreateWithPriority(&t->stream[queue], cudaStreamNonBlocking, priority),
                "creating a stream");
        z->queue[queue].stream = t->stream[queue];
        zr_named(t->stream[queue], zr_queue_name(queue));
    }
    if (z->o->save_every) {
        zr_cuda(z, cudaStreamCreateWithFlags(&t->beside, cudaStreamNonBlocking),
                "creating a stream");
        zr_named(t->beside, "checkpoint");
    }
    take_arenas(z);
    z->workspace = t->arena + z->p->workspace;
    z->pinned_scratch = t->host + z->p->pinned_scratch;
}

void zr_arena(zr *z) { (void)z; }

/* ---- copies through pinned memory, on ZR_MAIN's stream or that of the thread
 * that saves beside a step */

static cudaStream_t stream_beside(zr *z)
{
    /* each thread sets its own device */
    zr_cuda(z, cudaSetDevice(z->t->device), "selecting a device");
    return z->t->beside;
}

static void copy(zr *z, void *to, const void *from, int64_t bytes, enum cudaMemcpyKind kind)
{
    cudaStream_t stream = zr_is_beside() ? stream_beside(z) : zr_on(z, ZR_MAIN, "a copy");
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

char *zr_reach(const zr *z, int queue, int64_t at)
{
    return queue == ZR_HOST ? z->t->host + at : NULL;
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

/* ---- tokens: a ring of slots in pinned memory; a slot is free once its copy is complete */

void zr_batches(zr *z, int64_t n)
{
    zr_target *t = z->t;
    for (; t->copied < n; t->copied++) {
        zr_cuda(z, cudaEventSynchronize(t->read[t->copied % z->p->pinned_batches]),
                "waiting for a batch to be copied");
        zr_progress_next(z);
    }
}

/* Return the bytes of a micro-batch's keys: its own, and those of whole samples. */
static int64_t key_bytes(const zr *z)
{
    int64_t each = z->p->batch * (int64_t)sizeof(int64_t);
    return (z->p->keys ? each : 0) + (z->p->sample_keys ? each : 0);
}

/* Return the next slot's tokens. Targets and positions follow them; keys, int64 [B], and keys of
 * whole samples, precede them. */
static int32_t *next_place(const zr *z)
{
    char *at = z->t->host + z->p->pinned_batch +
               z->t->filled % z->p->pinned_batches * z->p->pinned_batch_step;
    return (int32_t *)(at + key_bytes(z));
}

static void bring(zr *z, int64_t to, const void *from, int64_t bytes)
{
    cudaStream_t stream = zr_on(z, ZR_MAIN, "the copy of a batch");
    zr_cuda(z,
            cudaMemcpyAsync(z->t->arena + to, from, (size_t)bytes, cudaMemcpyHostToDevice, stream),
            "copying a batch");
}

static zr_arrays next_rows(const zr *z)
{
    int32_t *tokens = next_place(z);
    int64_t n = zr_batch_tokens(z->p), all = z->p->documents ? z->p->batch * z->p->sequence : 0;
    return (zr_arrays){.tokens = tokens,
                       .targets = tokens + n,
                       .positions = tokens + 2 * n,
                       .documents = tokens + 3 * n,
                       .sample_targets = tokens + 3 * n + all};
}

zr_arrays zr_batch_place(zr *z, int64_t at)
{
    (void)at;
    zr_target *t = z->t;
    zr_batches(z, t->filled - z->p->pinned_batches + 1);
    return next_rows(z);
}

void zr_batch_filled(zr *z, int64_t at, int64_t first)
{
    zr_target *t = z->t;
    zr_arrays from = next_rows(z);
    int64_t n = zr_batch_tokens(z->p), B = z->p->batch, each = B * (int64_t)sizeof(int64_t);
    int64_t all = B * z->p->sequence * (int64_t)sizeof(int32_t);
    int64_t *keys = (int64_t *)((char *)from.tokens - key_bytes(z));
    const int64_t to[] = {z->p->tokens, z->p->targets, z->p->positions};
    int arrays = z->p->positions ? 3 : 2;
    if (z->p->positions && zr_blocks(z->p) == 1) zr_positions(z->p, z->p->batch, &from);
    if (z->p->keys) zr_keys(z->p, first, keys);
    if (z->p->sample_keys) zr_keys(z->p, zr_sample_of(z->p, first), keys + B);
    for (int i = 0; i < arrays; i++)
        bring(z, to[i] + at, from.tokens + i * n, n * (int64_t)sizeof *from.tokens);
    if (z->p->documents) bring(z, z->p->documents + at, from.documents, all);
    if (z->p->sample_targets) bring(z, z->p->sample_targets + at, from.sample_targets, all);
    if (z->p->keys) bring(z, z->p->keys + at, keys, each);
    if (z->p->sample_keys) bring(z, z->p->sample_keys + at, keys + B, each);
    zr_cuda(z,
            cudaEventRecord(t->read[t->filled % z->p->pinned_batches],
                            zr_on(z, ZR_MAIN, "the copy of a batch")),
            "recording an event");
    t->filled++;
}

/* ---- the report on the device */

void zr_epilogue(zr *z)
{
    zr_target *t = z->t;
    int64_t now = free_bytes(z, NULL);
    if (t->launches)
        zr_print(z, STDOUT_FILENO, "graphs: %" PRId64 " launches, %.1f us of host time each\n",
                 t->launches, 1e6 * t->launch_seconds / (double)t->launches);
    if (z->algorithms)
        zr_print(z, STDOUT_FILENO, "products: algorithms %016" PRIx64 "\n", z->algorithms);
    zr_print(z, STDOUT_FILENO,
             "device memory: arena %" PRId64 " bytes (%" PRId64 " taken), libraries %" PRId64 "\n",
             z->p->columns[z->column].arena, t->before - t->after,
             t->after - (t->first ? t->first : now));
    zr_print(z, STDOUT_FILENO,
             "device memory: %" PRId64 " bytes before the arena (the context; other programs)\n",
             t->found);
    if (z->ranks > 1)
        zr_print(z, STDOUT_FILENO,
                 "NCCL %d\ndevice memory: NCCL's communicators %" PRId64
                 " bytes when they were made\n",
                 z->nccl, t->nccl_took);
    if (t->first && now != t->first)
        zr_print(z, STDOUT_FILENO,
                 "device memory: %" PRId64 " bytes less are free than after the first step\n",
                 t->first - now);
}
