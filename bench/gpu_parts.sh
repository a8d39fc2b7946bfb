#!/usr/bin/env bash
# gpu_parts.sh -- the parts of bench/gpu.sh that call tools: toolkit, env, kernels, attention, sanitize.
#
# Called by gpu.sh in the root of the sources, with its variables: python, TORCH_PYTHON,
# ZR_BENCH_LIMIT (seconds that the part has).
set -uo pipefail
: "${python:?}" "${TORCH_PYTHON:?}"

# What is in a folder of headers or libraries, as links in another; what is there stays.
link_all() {
    local to=$1 file
    shift
    for file; do
        [ ! -e "$file" ] || [ -e "$to/${file##*/}" ] || ln -s "$file" "$to/"
    done
}

# Prints a CUDA_HOME with compiler, headers and libraries. Where they lie apart, in a toolkit and in
# the wheels that PyTorch came with, it is a folder of links.
toolkit() {
    local farm=$PWD/out/bench/cuda from wheels
    if runtime/cuda/toolkit >/dev/null 2>&1; then
        echo "${CUDA_HOME:-}"
        return 0
    fi
    wheels=$("$TORCH_PYTHON" -c 'import nvidia; print(list(nvidia.__path__)[0])')
    rm -rf "$farm"
    mkdir -p "$farm/include" "$farm/lib"
    for from in "${CUDA_HOME:-/usr/local/cuda}" "$wheels"/cu13 "$wheels"/nccl "$wheels"/cublas; do
        [ -e "$farm/bin" ] || [ ! -x "$from/bin/nvcc" ] || ln -s "$from/bin" "$from/nvvm" "$farm/"
        link_all "$farm/include" "$from"/include/*
        link_all "$farm/lib" "$from"/lib64/*.so* "$from"/lib/*.so* \
            "$from"/targets/x86_64-linux/lib/*.so*
    done
    CUDA_HOME=$farm runtime/cuda/toolkit >&2 && echo "$farm"
}

env_() {
    date -u +%FT%TZ
    echo "commit $(git rev-parse HEAD 2>/dev/null || echo unknown)," \
        "$(git status --porcelain 2>/dev/null | wc -l) files changed"
    uname -a
    nproc
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem \
        --format=csv
    nvidia-smi --query-gpu=power.limit,temperature.gpu,compute_mode --format=csv
    "$(readlink -f out/cuda/root)/bin/nvcc" --version
    grep -E 'define NCCL_(MAJOR|MINOR|PATCH) ' out/cuda/nccl/include/nccl.h
    grep -E 'define CUBLAS_VER_(MAJOR|MINOR|PATCH|BUILD) ' out/cuda/root/include/cublas_api.h
    readlink -f out/cuda/lib/lib{cublasLt,cudart}.so.13 out/cuda/nccl/lib/libnccl.so.2
    "$TORCH_PYTHON" -c 'import torch
print("torch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN",
      torch.backends.cudnn.version(), "NCCL", torch.cuda.nccl.version())'
    "$python" -c 'import numpy, sys; print("python", sys.version, "numpy", numpy.__version__)'
    "$python" -c 'import pydantic; print("pydantic", pydantic.VERSION)' 2>&1 | tail -n 1
}

# Only what runs on the device, or is compared with it: objects of a CPU have been tested elsewhere.
# CUDA does not survive a fork: `touched` forks.
kernels() {
    "$python" -m pytest -c tests/pytest.ini --maxfail=40 -n 8 -k \
        'not avx and not None and not touched and not compilers and not change_no_bit' \
        tests/kernels/test_linear.py tests/kernels/test_norm.py tests/kernels/test_elementwise.py tests/kernels/test_attention.py \
        tests/kernels/test_sum.py tests/kernels/test_optimizer.py
}

# One tool over every kernel, or those with a word in their name, each operand in an allocation of
# its own.
sanitizer() {
    local program
    program=$(command -v compute-sanitizer) || program=$(readlink -f out/cuda/root)/bin/compute-sanitizer
    timeout -k 5 $((ZR_BENCH_LIMIT / 2 - 1)) "$program" --tool "$1" --error-exitcode 9 \
        "$python" bench/gpu_kernels.py small ${2:+"$2"}
}

sanitize() {
    local rc=0
    sanitizer memcheck "${1:-}" || rc=$?
    sanitizer racecheck "${1:-}" || rc=$?
    return "$rc"
}

case $1 in
toolkit) toolkit ;;
env) env_ ;;
kernels) kernels ;;
sanitize) sanitize ;;
attention) sanitize attention ;;
esac
