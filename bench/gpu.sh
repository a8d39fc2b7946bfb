#!/usr/bin/env bash
# gpu.sh -- one run on a machine with an NVIDIA GPU: builds, checks and measures; writes one JSON.
#
# Every part has a time limit and a process group of its own: one that fails or hangs costs itself.
# The JSON is whole after each of them. See bench/gpu.md.
#
# Exit codes: 0 all parts went well; 1 not all did, the JSON says which; 2 usage; 3 no GPU here;
# 130, 143 stopped by a signal, which ends the part that runs, too.
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/.." || exit 2
export LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1

usage() {
    cat <<'END'
bench/gpu.sh [OPTIONS] [JSON]     everything, into JSON (default $OUT/gpu.json, else out/gpu.json)
  --parts A,B...    only these: env build bits losses kernels attention law tune ceilings speed
                    profile ranks memory offload table sanitize; build brings what the others need
                    up to date
  --cases A,B...    only these models of the part speed
  --limit SECONDS   for all parts together (default 570, of a rehearsal 7200); what does not fit
                    any more is left out
  --from DIR        takes train.c and plans from DIR
  --prepare DIR     writes them there, and ends: for a machine that lacks the generator's packages
  --rehearse        tries this script without a GPU: emulated programs, tiny models
END
}

say() { printf '%s\n' "$*" >&2; }
die() { say "gpu.sh: $2"; exit "$1"; }

json='' parts=env,build,bits,losses,kernels,attention,law,tune,ceilings,speed,profile,ranks
parts+=,memory,offload,table,sanitize
limit='' cases='' prepare='' kind=cuda patience=1
while [ $# -gt 0 ]; do
    case $1,$# in
    --help,* | -h,*) usage; exit 0 ;;
    --rehearse,*) kind=emulated patience=12 ;;
    --parts,1 | --cases,1 | --limit,1 | --from,1 | --prepare,1) die 2 "$1 needs a word behind it" ;;
    --parts,*) parts=$2; shift ;;
    --cases,*) cases=$2; shift ;;
    --limit,*) limit=$2; shift ;;
    --from,*) ZR_BENCH_FROM=$(realpath -m "$2"); shift ;;
    --prepare,*) prepare=$(realpath -m "$2"); shift ;;
    -*) usage >&2; exit 2 ;;
    *) [ -z "$json" ] || { usage >&2; exit 2; }
       json=$1 ;;
    esac
    shift
done
[ -n "$limit" ] || limit=$((patience == 1 ? 570 : 7200))
[[ $limit =~ ^[1-9][0-9]{0,5}$ ]] || die 2 "--limit $limit: a whole number of seconds is needed"
json=$(realpath -m "${json:-${OUT:-out}/gpu.json}")

# ---- Python: the project's own where it is, else the machine's. PyTorch's may be another one.
python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
export TORCH_PYTHON=${TORCH_PYTHON:-python3}
export ZR_BENCH_KIND=$kind

if [ -n "$prepare" ]; then
    ZR_BENCH_FROM=$prepare exec "$python" bench/gpu_cases.py all
fi
if [ -n "${ZR_BENCH_FROM:-}" ]; then
    export ZR_BENCH_FROM
    "$python" bench/gpu_cases.py fresh ||
        die 2 "--from $ZR_BENCH_FROM: not made by this generator; make it anew with --prepare"
fi
export ZR_BENCH_FROM=${ZR_BENCH_FROM:-$PWD/out/bench/sources}

mkdir -p out/bench "$(dirname "$json")" || die 2 "cannot write $json"
work=$(mktemp -d "$PWD/out/bench/parts.XXXXXX")
begun=$SECONDS

report() { "$python" bench/gpu_report.py "$work" "$json" "$@"; }

# ---- is there a GPU?
device() {
    "$python" - <<'END'
import ctypes, sys
for name in ('libcuda.so.1', '/usr/local/nvidia/lib64/libcuda.so.1'):
    try:
        cuda, n, major, minor = ctypes.CDLL(name), *(ctypes.c_int() for _ in range(3))
    except OSError:
        continue
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(n)) == 0 and n.value > 0:
        for attribute, to in ((75, major), (76, minor)):
            cuda.cuDeviceGetAttribute(ctypes.byref(to), attribute, 0)
        print(f'sm_{major.value}{minor.value}')
        sys.exit(0)
sys.exit(1)
END
}

if [ $kind = cuda ]; then
    if ! target=$(device); then
        report 'no GPU' "no NVIDIA GPU that CUDA's driver shows; --rehearse needs none" || exit 1
        rmdir "$work"
        die 3 "no NVIDIA GPU is here; $json says so. --rehearse tries the script without one"
    fi
    export ZR_TEST_DEVICE=$target
    code=${target#sm_}
    [ "$code" != 90 ] || code=90a
    export ZR_GENCODE="-gencode arch=compute_$code,code=sm_$code"
fi

# ---- a part: its name, its limit in seconds, its command. Results go to $work/NAME.json.
# status: 0 went well, 124 took too long, "left out" when no time is left, else what it ended with
failed=0 running=
part() {
    local name=$1 most=$((patience * $2)) left t=$SECONDS rc=0
    shift 2
    left=$((limit - (SECONDS - begun)))
    if [ "$left" -lt 5 ]; then
        printf 'left out\n0\n' >"$work/$name.status"
        say "== $name: no time is left"
        failed=1
        return
    fi
    [ "$most" -le "$left" ] || most=$left
    say "== $name (at most $most s)"
    ZR_BENCH_LIMIT=$most timeout -k 5 "$most" "$@" >"$work/$name.log" 2>&1 &
    running=$!
    wait "$running" || rc=$?
    running=
    printf '%s\n%s\n' "$rc" $((SECONDS - t)) >"$work/$name.status"
    tail -n 12 "$work/$name.log" | cut -c 1-160 >&2
    say "   $name: status $rc, $((SECONDS - t)) s"
    [ "$rc" -eq 0 ] || failed=1
    report running || failed=1
}

# A terminal's signal reaches this script alone, as parts have process groups of their own.
stop() {
    trap - INT TERM
    [ -z "$running" ] || kill "$running" 2>/dev/null
    wait "$running" 2>/dev/null
    die "$1" "stopped; $json has the parts before"
}
trap 'stop 130' INT
trap 'stop 143' TERM

wanted() { [[ ,$parts, == *,$1,* ]]; }

# ---- the parts

export python
if home=$(bench/gpu_parts.sh toolkit 2>"$work/toolkit.log") && [ -n "$home" ]; then
    export CUDA_HOME=$home
fi
names=$("$python" bench/gpu_cases.py names) || die 1 'bench/gpu_cases.py fails'
"$python" bench/gpu_cases.py fresh || part prepare 200 "$python" bench/gpu_cases.py all

# Correctness comes first, and what is known least about first of all: whether it builds at all. The
# sanitizer is last: it says where a fault is that others have shown.
! wanted build || part build 240 "$python" bench/gpu_check.py build "$work/build.json"
! wanted env || part env 40 bench/gpu_parts.sh env
if [ $kind = cuda ]; then
    nvidia-smi --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu \
        --format=csv,noheader -lms 1000 >"$work/clocks.csv" 2>/dev/null &
    watching=$!
    trap 'kill "$watching" 2>/dev/null' EXIT
fi
! wanted bits || part bits 60 "$python" tests/kernel_bits.py "$work/bits.json"
! wanted losses || part losses 90 "$python" bench/gpu_check.py losses "$work/losses.json"
[ $kind != cuda ] || ! wanted kernels || part kernels 90 bench/gpu_parts.sh kernels
[ $kind != cuda ] || ! wanted attention || part attention 90 bench/gpu_parts.sh attention
! wanted law || part law 110 "$python" bench/gpu_check.py law "$work/law.json"
! wanted tune || part tune 120 "$python" bench/gpu_check.py tune "$work/tune.json"
! wanted ceilings || part ceilings 40 "$python" bench/gpu_kernels.py ceilings "$work/ceilings.json"
if wanted speed; then
    for name in $names; do
        [[ -n $cases && ,$cases, != *,$name,* ]] ||
            part "speed-$name" 110 "$python" bench/gpu_speed.py "$name" "$work/speed-$name.json"
    done
fi
! wanted profile || part profile 40 "$python" bench/gpu_check.py profile "$work/profile.json"
! wanted ranks || part ranks 90 "$python" bench/gpu_check.py ranks "$work/ranks.json"
! wanted memory || part memory 30 "$python" bench/gpu_check.py memory "$work/memory.json"
! wanted offload || part offload 110 "$python" bench/gpu_check.py offload "$work/offload.json"
! wanted table || part table 90 "$python" bench/gpu_kernels.py table "$work/table.json"
[ $kind != cuda ] || ! wanted sanitize || part sanitize 100 bench/gpu_parts.sh sanitize
report 'done' || failed=1
say "$json"
exit $failed
