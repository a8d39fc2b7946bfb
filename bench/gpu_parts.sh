#!/usr/bin/env bash
# gpu_parts.sh -- the parts of bench/gpu.sh that call tools: sources, facts, kernels, attention,
# sanitize, counters; and toolkit, libraries and bare, which print folders.
#
# Called by gpu.sh in the root of the sources, with its variables: python, TORCH_PYTHON,
# ZR_BENCH_KIND, ZR_BENCH_LIMIT (seconds that the part has).
set -uo pipefail
: "${python:?}" "${TORCH_PYTHON:?}" "${ZR_BENCH_KIND:?}"

# Writes the programs' sources and what their losses must be: needs the generator's packages.
sources() { "$python" bench/gpu_cases.py all && "$python" bench/gpu_ready.py losses; }

# The folders of NVIDIA's wheels, which PyTorch came with.
wheels() { "$TORCH_PYTHON" -c 'import nvidia; print(*nvidia.__path__, sep="\n")' 2>/dev/null; }

# Where CUDA may be, or a part of it.
places() {
    local nvcc wheel
    nvcc=$(readlink -f "$(command -v nvcc)")
    printf '%s\n' ${CUDA_HOME:+"$CUDA_HOME"} "${nvcc%/bin/nvcc}" /usr/local/cuda | grep -vx /usr
    for wheel in $(wheels); do
        printf '%s\n' "$wheel"/cu13 "$wheel"/nccl "$wheel"/cublas "$wheel"/cuda_runtime
    done
}

# What is in a folder of headers or libraries, as links in another; what is there stays.
link_all() {
    local to=$1 file
    shift
    for file; do
        [ ! -e "$file" ] || [ -e "$to/${file##*/}" ] || ln -s "$file" "$to/"
    done
}

# Prints a CUDA_HOME with compiler, headers and libraries. Where they lie apart, in a toolkit and in
# wheels, it is a folder of links.
toolkit() {
    local farm=$PWD/out/bench/cuda from
    if runtime/cuda/toolkit >/dev/null 2>&1; then
        echo "${CUDA_HOME:-}"
        return 0
    fi
    rm -rf "$farm"
    mkdir -p "$farm/include" "$farm/lib"
    for from in $(places); do
        [ -e "$farm/bin" ] || [ ! -x "$from/bin/nvcc" ] || ln -s "$from/bin" "$from/nvvm" "$farm/"
        link_all "$farm/include" "$from"/include/*
        link_all "$farm/lib" "$from"/lib64/*.so* "$from"/lib/*.so* \
            "$from"/targets/x86_64-linux/lib/*.so*
    done
    CUDA_HOME=$farm runtime/cuda/toolkit >&2 && echo "$farm"
}

# Prints the folders of CUDA's libraries, for programs that were built elsewhere.
libraries() {
    local from folder found=()
    for from in $(places); do
        for folder in "$from/lib64" "$from/lib" "$from/targets/x86_64-linux/lib"; do
            ! compgen -G "$folder/lib*.so.*" >/dev/null || found+=("$folder")
        done
    done
    (IFS=:; echo "${found[*]}")
}

# The first lines of a command's output, or why there are none.
told() {
    local lines=$1
    shift
    "$@" 2>&1 | head -n "$lines"
}

# The machine, by nothing that needs to be built. Versions are those of packages: importing them
# would take longer.
facts() {
    local program fields
    date -u +%FT%TZ
    told 1 uname -srm
    echo "$(nproc) cores; AMX: $(grep -c -m 1 amx_tile /proc/cpuinfo)"
    told 1 grep -m 1 'model name' /proc/cpuinfo
    told 1 grep MemTotal /proc/meminfo
    told 4 df -h /tmp /dev/shm "$PWD"
    fields=name,driver_version,memory.total,power.limit,temperature.gpu,compute_mode
    told 4 nvidia-smi --format=csv --query-gpu=$fields,clocks.sm,clocks.max.sm,clocks.mem
    for program in gcc g++ clang ninja git nvcc ncu compute-sanitizer "$python" "$TORCH_PYTHON"; do
        echo "$program: $(command -v "$program" || echo none)"
    done
    told 1 gcc --version
    told 1 ldd --version
    told 1 ninja --version
    nvcc --version 2>&1 | tail -n 2
    echo "CUDA_HOME=${CUDA_HOME:-} LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}"
    told 12 wheels
    ldconfig -p 2>/dev/null | grep -E 'lib(cuda|cudart|cublasLt|nccl)\.so' | head -n 8
    "$TORCH_PYTHON" - <<'END'
import importlib.metadata as found, sys
wanted = """torch triton numpy pytest pytest-xdist hypothesis safetensors jinja2 pyyaml pydantic
nvidia-cublas nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-nccl-cu13""".split()
have = {package.metadata["Name"].lower(): package.version for package in found.distributions()}
print("Python", sys.version)
print(*(f"{name} {have.get(name, 'none')}" for name in wanted), sep=", ")
END
    return 0
}

# Only what runs on the device, or is compared with it: objects of a CPU have been tested elsewhere.
# CUDA does not survive a fork: `touched` forks.
kernels() {
    local files=(tests/kernels/test_{linear,norm,elementwise,attention,sum,optimizer}.py) workers=8
    if [ "$ZR_BENCH_KIND" != cuda ]; then       # all can be imported, and one runs
        "$python" -m pytest -c tests/pytest.ini --collect-only "${files[@]}" >/dev/null
        files=(tests/kernels/test_norm.py) workers=2
    fi
    "$python" -m pytest -c tests/pytest.ini --maxfail=40 -n $workers \
        -k "($ZR_BENCH_KIND or gpu or emulation or alignment or many_spans) and not touched" \
        "${files[@]}"
}

# A tool of CUDA: on PATH, else beside the compiler.
found() { command -v "$1" || echo "$(readlink -f out/cuda/root)/bin/$1"; }

# compute-sanitizer's memcheck, then racecheck, over every kernel, or those with a word in their
# name, each operand in an allocation of its own.
sanitize() {
    local program tool rc=0
    program=$(found compute-sanitizer)
    for tool in memcheck racecheck; do
        timeout -k 5 $((ZR_BENCH_LIMIT / 2 - 1)) "$program" --tool $tool --error-exitcode 9 \
            "$python" bench/gpu_kernels.py small ${1:+"$1"} || rc=$?
    done
    return $rc
}

# Nsight Compute's counters of attention and cross-entropy with a model's operands.
counters() {
    local program out=$PWD/out/bench/counters-$1.ncu-rep
    program=$(found ncu)
    rm -f "$out"
    "$program" --set full --clock-control none --launch-count 8 --export "$out" \
        --kernel-name 'regex:forward|keys_|queries_|query_lines|entropy' \
        "$python" bench/gpu_kernels.py once "$1" attention entropy &&
        "$program" --import "$out" --page details
}

# Prints a PATH for a rehearsal: only programs that a machine with a GPU has, without git and clang;
# a Python without the generator's packages; and stand-ins for CUDA's tools.
bare() {
    local folder=$PWD/out/bench/bare name tool real
    real=$(type -P "$python")
    [[ $real == /* ]] || real=$PWD/$real
    rm -rf "$folder"
    mkdir -p "$folder/without"
    for name in bash sh env awk basename cat chmod cmp cp cut date df dirname echo false find grep \
        gzip head kill ld ldconfig ldd ln ls mkdir mktemp mv nohup nproc printf ps pwd readlink \
        realpath rm rmdir sed seq sha256sum sleep sort stat tail tar tee test timeout touch tr \
        true uname uniq wc xargs gcc g++ as ar objcopy ninja; do
        ! tool=$(type -P "$name") || ln -s "$tool" "$folder/"
    done
    echo 'raise ImportError("a rehearsal has no pydantic")' >"$folder/without/pydantic.py"
    printf '#!/bin/sh\nPYTHONPATH=%s exec %s "$@"\n' "$folder/without" "$real" \
        >"$folder/python3"
    for name in compute-sanitizer ncu; do
        cat >"$folder/$name" <<'END'
#!/bin/sh
while [ $# -gt 0 ] && [ "$1" != python3 ]; do shift; done
[ $# -eq 0 ] || exec "$@"
END
    done
    chmod +x "$folder"/{python3,compute-sanitizer,ncu}
    echo "$folder"
}

case $1 in
sources | toolkit | libraries | bare | facts | kernels | sanitize) "$1" ;;
attention) sanitize attention ;;
counters) counters "$2" ;;
esac
