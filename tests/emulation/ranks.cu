/* ranks.cu -- tests collectives between processes: `emulated-ranks CASE RANKS`. The program starts
 * its ranks, and ends with SHIM_MISTAKE if one of them does, else with the largest status. */
#include <nccl.h>

#include "../../kernels/cuda/cuda.h"

#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

namespace {

enum { N = 100003, REMOTE = 5, MOST = 8 }; /* N: more than fits at once, and odd */

struct world {
    int rank, ranks;
    cudaStream_t a, b;
    cudaEvent_t e;
    ncclComm_t one, two;
    int64_t *from, *to, *big; /* device: N, ranks * N, ranks * N */
    int64_t *host;            /* pinned: ranks * N */
} w;

void fail(const char *what)
{
    fprintf(stderr, "rank %d: %s\n", w.rank, what);
    _exit(1);
}

void must(cudaError_t e)
{
    if (e != cudaSuccess) fail(cudaGetErrorString(e));
}

void nccl(ncclComm_t c, ncclResult_t r)
{
    while (r == ncclInProgress)
        if (ncclCommGetAsyncError(c, &r) != ncclSuccess) fail("asking");
    if (r != ncclSuccess) fail(ncclGetErrorString(r));
}

int64_t value(int from, int to, int i) { return (int64_t)from * 1000003 + to * 1009 + i; }

void set(int64_t *device, int pieces)
{
    for (int p = 0; p < pieces; p++)
        for (int i = 0; i < N; i++) w.host[p * N + i] = value(w.rank, p, i);
    must(cudaMemcpyAsync(device, w.host, (size_t)pieces * N * sizeof *device,
                         cudaMemcpyHostToDevice, w.a));
    must(cudaStreamSynchronize(w.a));
}

/* Ranks first, first + step and so on. */
struct some {
    int ranks, first, step;
};

/* Checks that to[m] came from the m-th of these, meant for `piece`. */
void check_of(const some &of, const int64_t *device, int piece)
{
    size_t bytes = (size_t)of.ranks * N * sizeof *device;
    must(cudaMemcpyAsync(w.host, device, bytes, cudaMemcpyDeviceToHost, w.a));
    must(cudaStreamSynchronize(w.a));
    for (int m = 0; m < of.ranks; m++)
        for (int i = 0; i < N; i++)
            if (w.host[m * N + i] != value(of.first + m * of.step, piece, i))
                fail("a wrong number");
}

/* Checks that to[r] came from every rank r, meant for `piece`. */
void check(const int64_t *device, int piece) { check_of({w.ranks, 0, 1}, device, piece); }

void gather(const int64_t *from, int64_t *to, cudaStream_t s, ncclComm_t c)
{
    nccl(c, ncclAllGather(from, to, N * sizeof *from, ncclUint8, c, s));
}

void all_to_all(const int64_t *from, int64_t *to, cudaStream_t s, ncclComm_t c)
{
    int ranks;
    nccl(c, ncclCommCount(c, &ranks));
    nccl(c, ncclGroupStart());
    for (int p = 0; p < ranks; p++) {
        nccl(c, ncclSend(from + (size_t)p * N, N, ncclInt64, p, c, s));
        nccl(c, ncclRecv(to + (size_t)p * N, N, ncclInt64, p, c, s));
    }
    nccl(c, ncclGroupEnd());
}

/* Rank 0's piece is in its place, the others' are in rank 0's. */
void not_in_place(void) { gather(w.big, w.big, w.a, w.one); }

void gathers(void)
{
    set(w.from, 1);
    gather(w.from, w.to, w.a, w.one);
    check(w.to, 0);
    must(cudaMemcpyAsync(w.big + (size_t)w.rank * N, w.from, N * sizeof *w.from,
                         cudaMemcpyDeviceToDevice, w.a));
    gather(w.big + (size_t)w.rank * N, w.big, w.a, w.one); /* in place */
    check(w.big, 0);
}

void exchanges(void)
{
    set(w.big, w.ranks);
    all_to_all(w.big, w.to, w.a, w.one);
    check(w.to, w.rank);
    must(cudaMemsetAsync(w.to, 0, (size_t)w.ranks * N * sizeof *w.to, w.a));
    nccl(w.one, ncclAlltoAll(w.big, w.to, N, ncclInt64, w.one, w.a));
    check(w.to, w.rank);
}

void sums(void)
{
    set(w.from, 1);
    nccl(w.one, ncclAllReduce(w.from, w.from, N, ncclInt64, ncclSum, w.one, w.a));
    must(cudaMemcpyAsync(w.host, w.from, N * sizeof *w.from, cudaMemcpyDeviceToHost, w.a));
    must(cudaStreamSynchronize(w.a));
    for (int i = 0; i < N; i++) {
        int64_t sum = 0;
        for (int r = 0; r < w.ranks; r++) sum += value(r, 0, i);
        if (w.host[i] != sum) fail("a wrong sum");
    }
}

/* Two communicators on two streams, each many times over, with nothing between them. */
void both(void)
{
    set(w.from, 1);
    set(w.big, w.ranks);
    int64_t *other;
    must(cudaMalloc((void **)&other, (size_t)w.ranks * N * sizeof *other));
    for (int i = 0; i < 20; i++) {
        gather(w.from, w.to, w.a, w.one);
        all_to_all(w.big, other, w.b, w.two);
    }
    must(cudaStreamSynchronize(w.b));
    check(w.to, 0);
    check(other, w.rank);
}

cudaGraphExec_t play_gathers(void)
{
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    set(w.from, 1);
    gather(w.from, w.to, w.a, w.one); /* connects */
    must(cudaStreamSynchronize(w.a));
    must(cudaStreamBeginCapture(w.a, cudaStreamCaptureModeRelaxed));
    must(cudaMemsetAsync(w.to, 0, (size_t)w.ranks * N * sizeof *w.to, w.a));
    gather(w.from, w.to, w.a, w.one);
    must(cudaStreamEndCapture(w.a, &graph));
    must(cudaGraphInstantiate(&ready, graph, 0));
    must(cudaGraphDestroy(graph));
    for (int i = 0; i < 5; i++) must(cudaGraphLaunch(ready, w.a));
    check(w.to, 0);
    return ready;
}

void graphs(void) { must(cudaGraphExecDestroy(play_gathers())); }

/* The communicator ends while the graph exists. */
void graph_left(void) { (void)play_gathers(); }

/* The result is read on another stream without a wait. */
void race(void)
{
    set(w.from, 1);
    gather(w.from, w.to, w.a, w.one);
    must(cudaMemcpyAsync(w.big, w.to, N * sizeof *w.to, cudaMemcpyDeviceToDevice, w.b));
    must(cudaDeviceSynchronize());
}

/* The buffer is changed before it was sent. */
void changed(void)
{
    set(w.from, 1);
    gather(w.from, w.to, w.a, w.one);
    must(cudaMemsetAsync(w.from, 0, 16, w.b));
    must(cudaDeviceSynchronize());
}

void different(void)
{
    set(w.big, w.ranks);
    if (w.rank == 0) gather(w.from, w.to, w.a, w.one);
    else all_to_all(w.big, w.to, w.a, w.one);
    must(cudaStreamSynchronize(w.a));
}

void other_size(void)
{
    nccl(w.one, ncclAllGather(w.from, w.to, w.rank ? 64 : 128, ncclUint8, w.one, w.a));
    must(cudaStreamSynchronize(w.a));
}

/* The last rank leaves. The others notice it and stop waiting for it. */
void gone(void)
{
    ncclResult_t state;
    if (w.rank == w.ranks - 1) _exit(0);
    (void)ncclAllGather(w.from, w.to, N, ncclInt64, w.one, w.a);
    do {
        if (cudaStreamQuery(w.a) != cudaErrorNotReady)
            fail("a collective ended without one of its ranks");
        if (ncclCommGetAsyncError(w.one, &state) != ncclSuccess) fail("asking");
    } while (state == ncclSuccess || state == ncclInProgress);
    if (state != ncclRemoteError) fail("the communicator saw something else");
    _exit(REMOTE);
}

/* Two communicators; the last rank uses another order. */
void unlike_orders(void)
{
    bool last = w.rank == w.ranks - 1;
    for (int i = 0; i < 2; i++) {
        ncclComm_t c = last == !i ? w.two : w.one;
        nccl(c, ncclAllGather(w.from, c == w.one ? w.to : w.big, N, ncclInt64, c,
                              c == w.one ? w.a : w.b));
    }
    must(cudaStreamSynchronize(w.a));
    must(cudaStreamSynchronize(w.b));
}

/* The ranks of a color, in order of their keys. */
ncclComm_t split(int color, int key)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t made;
    config.blocking = 0;
    nccl(w.one, ncclCommSplit(w.one, color, key, &made, &config));
    nccl(w.one, ncclInProgress);
    nccl(made, ncclInProgress);
    return made;
}

/* Half of the ranks, neighbours; then every second one, starting with the last. The halves exchange
 * and add while those gather. */
void groups(void)
{
    int half = (w.ranks + 1) / 2, place = w.rank % half, first = w.rank - place;
    some near = {w.ranks - first < half ? w.ranks - first : half, first, 1};
    int even = w.rank % 2, all = (w.ranks + 1 - even) / 2, last = even + 2 * (all - 1), number;
    some far = {all, last, -2};
    ncclComm_t here = split(first, place), there = split(even, (last - w.rank) / 2);
    int64_t *other, *sum;
    must(cudaMalloc((void **)&other, (size_t)w.ranks * N * sizeof *other));
    must(cudaMalloc((void **)&sum, N * sizeof *sum));
    nccl(there, ncclCommUserRank(there, &number));
    if (number != (last - w.rank) / 2) fail("a wrong place");
    set(w.from, 1);
    set(w.big, near.ranks);
    for (int i = 0; i < 3; i++) {
        all_to_all(w.big, other, w.b, here);
        gather(w.from, w.to, w.a, there);
        nccl(here, ncclAllReduce(w.from, sum, N, ncclInt64, ncclSum, here, w.b));
    }
    must(cudaStreamSynchronize(w.b));
    check_of(near, other, place);
    check_of(far, w.to, 0);
    must(cudaMemcpyAsync(w.host, sum, N * sizeof *sum, cudaMemcpyDeviceToHost, w.a));
    must(cudaStreamSynchronize(w.a));
    for (int i = 0; i < N; i++) {
        int64_t right = 0;
        for (int m = 0; m < near.ranks; m++) right += value(first + m, 0, i);
        if (w.host[i] != right) fail("a wrong sum");
    }
    nccl(there, ncclCommDestroy(there));
    nccl(here, ncclCommDestroy(here));
}

/* A rank's number among all, in place of its number in a pair. */
void wrong_key(void) { (void)split(w.rank / 2, w.rank); }

/* The last rank goes to the first pair. */
void wrong_color(void) { (void)split(w.rank == w.ranks - 1 ? 0 : w.rank / 2, w.rank % 2); }

/* Pairs of neighbours and pairs of others; the last pair of neighbours uses another order. */
void unlike_groups(void)
{
    ncclComm_t near = split(w.rank / 2, w.rank % 2), far = split(w.rank % 2, w.rank / 2);
    bool last = w.rank / 2 == 1;
    for (int i = 0; i < 2; i++) {
        ncclComm_t c = last == !i ? far : near;
        nccl(c, ncclAllGather(w.from, c == near ? w.to : w.big, N, ncclInt64, c,
                              c == near ? w.a : w.b));
    }
    must(cudaStreamSynchronize(w.a));
    must(cudaStreamSynchronize(w.b));
}

void *registered(const void *p, size_t n)
{
    void *handle = NULL;
    nccl(w.two, ncclCommRegister(w.two, (void *)p, n, &handle));
    return handle;
}

/* Memory of which a part is gathered. */
void registers(void)
{
    void *handle = registered(w.to, N * sizeof *w.to);
    gathers();
    nccl(w.two, ncclCommDeregister(w.two, handle));
}

void registered_host(void) { registered(w.host, 64); }

/* One byte more than the allocation has. */
void registered_more(void) { registered(w.from, N * sizeof *w.from + 1); }

void registered_twice(void)
{
    registered(w.from, 64);
    registered(w.to, 64);
}

/* The communicator ends while memory is registered with it. */
void registered_left(void) { registered(w.from, 64); }

void deregistered_other(void)
{
    registered(w.from, 64);
    (void)ncclCommDeregister(w.two, w.to);
}

// clang-format off
#define CASES(X)                                                                                   \
    X(gathers) X(exchanges) X(sums) X(both) X(graphs) X(graph_left) X(race) X(changed)             \
    X(different) X(other_size) X(gone) X(unlike_orders) X(groups) X(wrong_key) X(wrong_color)      \
    X(unlike_groups) X(registers) X(registered_host) X(registered_more) X(registered_twice)        \
    X(registered_left) X(deregistered_other) X(not_in_place)
// clang-format on

void open_world(ncclUniqueId id)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    size_t n = (size_t)w.ranks * N * sizeof(int64_t);
    config.blocking = 0;
    must(cudaStreamCreateWithFlags(&w.a, cudaStreamNonBlocking));
    must(cudaStreamCreateWithFlags(&w.b, cudaStreamNonBlocking));
    must(cudaMalloc((void **)&w.from, N * sizeof(int64_t)));
    must(cudaMalloc((void **)&w.to, n));
    must(cudaMalloc((void **)&w.big, n));
    must(cudaMallocHost((void **)&w.host, n));
    ncclResult_t r = ncclCommInitRankConfig(&w.one, w.ranks, id, w.rank, &config);
    nccl(w.one, r);
    w.two = split(0, w.rank);
}

int work(const char *wanted)
{
#define RUN(name)                                                                                  \
    if (!strcmp(wanted, #name)) {                                                                  \
        name();                                                                                    \
        nccl(w.two, ncclCommDestroy(w.two));                                                       \
        nccl(w.one, ncclCommDestroy(w.one));                                                       \
        return 0;                                                                                  \
    }
    CASES(RUN)
    return 2;
}

}

int main(int argc, char **argv)
{
    ncclUniqueId id;
    pid_t child[MOST];
    int worst = 0;
    if (argc != 3 || (w.ranks = atoi(argv[2])) < 1 || w.ranks > MOST ||
        ncclGetUniqueId(&id) != ncclSuccess)
        return 2;
    for (w.rank = 0; w.rank < w.ranks; w.rank++)
        if ((child[w.rank] = fork()) == 0) {
            open_world(id);
            exit(work(argv[1]));
        }
    for (int r = 0; r < w.ranks; r++) {
        int status;
        waitpid(child[r], &status, 0);
        status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        worst = status > worst ? status : worst;
    }
    return worst;
}
