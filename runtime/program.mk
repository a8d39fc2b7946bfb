# program.mk -- out/train and out/train-cuda where there is no ninja: program.ninja's commands. All
# objects are made anew when a header changes.
ifeq ($(origin CC),default)
CC = gcc
endif
include runtime/flags.ninja

o = out/o/cc
compile = $(CC) $(warn) $(code)
always := $(shell mkdir -p out/o/cc out/o/mpi out/o/cuda; \
    runtime/digest out/o/cpu.digest.c $(shared) $(for_cpu); \
    runtime/digest out/o/mpi.digest.c $(shared) $(for_mpi); \
    runtime/digest out/o/cuda.digest.c $(shared) $(for_cuda))
headers = $(wildcard runtime/*.h runtime/*/*.h kernels/*.h kernels/cpu/*.h kernels/cpu/*.def)
once = context host threads
each = $(filter-out $(once),$(notdir $(basename $(wildcard kernels/cpu/*.c))))
host = $(patsubst runtime/%.c,$o/%.o,$(wildcard runtime/*.c))
cpu = $(patsubst runtime/cpu/%.c,$o/cpu_%.o,$(wildcard runtime/cpu/*.c))
products = linear
tiled = linear attention
kernels = $(once:%=$o/%.o) $(each:%=$o/%_avx2.o) $(each:%=$o/%_avx512.o) \
    $(products:%=$o/%_avx512bf16.o) $(tiled:%=$o/%_amx.o)

out/train: $o/train.o $(host) $(cpu) $o/digest.o $(kernels)
	$(CC) -pthread $^ -o $@
$o/train.o: out/train.c $(headers)
	$(compile) -Iruntime -Ikernels -c $< -o $@
$(host): $o/%.o: runtime/%.c $(headers)
	$(compile) -Iruntime -c $< -o $@
$(cpu): $o/cpu_%.o: runtime/cpu/%.c $(headers)
	$(compile) -Iruntime -c $< -o $@
$o/digest.o: out/o/cpu.digest.c
	$(compile) -c $< -o $@
$(once:%=$o/%.o): $o/%.o: kernels/cpu/%.c $(headers)
	$(compile) -c $< -o $@
$o/%_avx2.o: kernels/cpu/%.c $(headers)
	$(compile) $(avx2) -c $< -o $@
$o/%_avx512.o: kernels/cpu/%.c $(headers)
	$(compile) $(avx512) -c $< -o $@
$o/%_avx512bf16.o: kernels/cpu/%.c $(headers)
	$(compile) $(avx512bf16) -c $< -o $@
$o/%_amx.o: kernels/cpu/%.c $(headers)
	$(compile) $(amx) -c $< -o $@

# out/train-mpi: of what is out/train's own it has another
m = out/o/mpi
wire = $(patsubst runtime/mpi/%.c,$m/%.o,$(wildcard runtime/mpi/*.c)) $m/digest.o
mpicc = OMPI_CC="$(CC)" MPICH_CC="$(CC)" mpicc

out/train-mpi: $o/train.o $(wire) $(host) $(filter-out $o/cpu_near.o,$(cpu)) $(kernels)
	$(mpicc) -pthread $^ -o $@
$m/digest.o: out/o/mpi.digest.c
	$(mpicc) $(warn) $(code) -c $< -o $@
$m/%.o: runtime/mpi/%.c $(headers)
	$(mpicc) $(warn) $(code) -Iruntime -c $< -o $@

# out/train-cuda
u = out/o/cuda
cuda_headers = $(headers) $(wildcard kernels/cuda/*.h) out/cuda.toolkit
device = $(patsubst kernels/cuda/%.cu,$u/%.o,$(wildcard kernels/cuda/*.cu))
streams = $(patsubst runtime/cuda/%.c,$u/%.o,$(wildcard runtime/cuda/*.c))
offloaded = $(foreach part,optimizer act sum,$o/$(part)_avx2.o $o/$(part)_avx512.o)

out/train-cuda: $o/train.o $(host) $u/digest.o $o/host.o $o/threads.o $(offloaded) $(streams) \
        $(device)
	r=$$(readlink -f out/cuda/lib) n=$$(readlink -f out/cuda/nccl/lib); \
	g++ -pthread $^ -L$$r -L$$n -l:libcudart.so.13 -l:libcublasLt.so.13 -l:libnccl.so.2 \
	    -Wl,-rpath,$$r -Wl,-rpath,$$n -Wl,-rpath-link,$$r -o $@
out/cuda.toolkit:
	runtime/cuda/toolkit >$@
$(device): $u/%.o: kernels/cuda/%.cu $(cuda_headers)
	$$(readlink -f out/cuda/root)/bin/nvcc $(nvcc) $(toolkit) $(generate) --threads 2 -c $< -o $@
$(streams): $u/%.o: runtime/cuda/%.c $(cuda_headers)
	gcc $(warn) $(code) -Iruntime $(toolkit) -c $< -o $@
$u/digest.o: out/o/cuda.digest.c
	gcc $(warn) $(code) -Iruntime $(toolkit) -c $< -o $@
