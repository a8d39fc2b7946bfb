#!/usr/bin/env bash
# gpu.sh -- one call on a machine with an NVIDIA GPU: builds, checks and measures; writes one JSON.
#
# Every part has a time limit and a process group of its own: one that fails or hangs costs itself.
# The JSON is whole at any time. See bench/gpu.md.
#
# Exit codes: 0 all parts went well; 1 not all did, the JSON says which; 2 usage; 3 no GPU here;
# 130, 143 stopped by a signal, which ends the part that runs, too.
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/.." || exit 2
export LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export ZR_WERROR=                       # warnings of other compilers are told and end nothing

usage() {
    cat <<'END'
bench/gpu.sh meet [OPTIONS] [JSON]    does it build, train and keep the law of bits?
bench/gpu.sh speed [OPTIONS] [JSON]   GPT-2's speed beside PyTorch's, kernel by kernel
bench/gpu.sh odd [OPTIONS] [JSON]     memory, ranks, other models, offloading, counters, sanitizers
    JSON is $OUT/CALL.json or out/CALL.json by default; whole logs go beside it as CALL.tar.gz
  --from DIR        takes programs from DIR
  --limit SECONDS   for the whole call (default 570, of a rehearsal 7200); parts that do not fit any
                    more are left out
  --rehearse        without a GPU: emulated programs, tiny models, a PATH of few programs
bench/gpu.sh --parts A,B... [...]     these parts (default JSON gpu.json)
bench/gpu.sh --rehearse [OPTIONS]     rehearses all three calls
bench/gpu.sh --prepare DIR            writes all programs to DIR, and ends
END
}

say() { printf '%s\n' "$*" >&2; }
die() { say "gpu.sh: $2"; exit "$1"; }

# Prints the parts of a call, in an order that loses least when it is cut. A part of a model names
# the beginning of the model's name, whose end may tell of the card.
parts_of() {
    case $1 in
    meet) echo build,losses,bits,law,kernels,attention ;;
    speed) echo build,tune-gpt2-124m,speed-gpt2-124m,ceilings,profile,tune-gpt2-1558m,\
speed-gpt2-1558m,table-gpt2-124m,table-gpt2-1558m,table-qwen3,table-llama3 ;;
    odd) echo build,memory,ranks,tune-llama3,speed-llama3,tune-qwen3,speed-qwen3,offload,\
counters-qwen3,counters-gpt2-124m,sanitize ;;
    esac
}

call='' json='' parts='' limit='' prepare='' kind=cuda patience=1 again=()
while [ $# -gt 0 ]; do
    case $1,$# in
    --help,* | -h,*) usage; exit 0 ;;
    --rehearse,*) kind=emulated patience=12 ;;
    --parts,1 | --limit,1 | --from,1 | --prepare,1) die 2 "$1 needs a word behind it" ;;
    --parts,*) parts=$2; shift ;;
    --limit,*) limit=$2 again+=(--limit "$2"); shift ;;
    --from,*) ZR_BENCH_FROM=$(realpath -m "$2"); shift ;;
    --prepare,*) prepare=$(realpath -m "$2"); shift ;;
    -*) usage >&2; exit 2 ;;
    meet,* | speed,* | odd,*) [ -z "$call" ] || { usage >&2; exit 2; }
       call=$1 ;;
    *) [ -z "$json" ] || { usage >&2; exit 2; }
       json=$1 ;;
    esac
    shift
done
[ -n "$limit" ] || limit=$((patience == 1 ? 570 : 7200))
[[ $limit =~ ^[1-9][0-9]{0,5}$ ]] || die 2 "--limit $limit: a whole number of seconds is needed"
parts=${parts:-$(parts_of "$call")}
[ -n "$prepare$parts" ] || [ "$kind$json" = emulated ] || { usage >&2; exit 2; }
IFS=, read -ra list <<<"$parts"
for name in "${list[@]}"; do
    [[ $name =~ ^(build|losses|bits|law|kernels|attention|ceilings|profile|memory|ranks|offload)$ ||
        $name =~ ^(sanitize|(tune|speed|table|counters)(-.*)?)$ ]] ||
        die 2 "--parts $name: there is no such part"
done

# ---- Python: the project's own where it is, else the machine's. PyTorch's may be another one.
python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
export python TORCH_PYTHON=${TORCH_PYTHON:-python3} ZR_BENCH_KIND=$kind

mkdir -p out/bench && : >>out/programs.ninja || die 2 "cannot write $PWD/out"

if [ -n "$prepare" ]; then
    export ZR_BENCH_FROM=$prepare
    bench/gpu_parts.sh sources && "$python" bench/gpu_ready.py programs
    exit
fi
if [ -n "${ZR_BENCH_FROM:-}" ]; then
    export ZR_BENCH_FROM
    "$python" bench/gpu_cases.py fresh ||
        die 2 "--from $ZR_BENCH_FROM: not made by this generator; make it anew with --prepare"
fi
export ZR_BENCH_FROM=${ZR_BENCH_FROM:-$PWD/out/bench/sources}
if [ $kind = emulated ]; then
    "$python" bench/gpu_cases.py fresh || bench/gpu_parts.sh sources || die 1 'no programs to run'
    if [ -z "$parts" ]; then
        failed=0
        for call in meet speed odd; do
            bench/gpu.sh "$call" --rehearse --from "$ZR_BENCH_FROM" "${again[@]}" || failed=$?
        done
        exit $failed
    fi
    PATH=$(bench/gpu_parts.sh bare) python=python3 TORCH_PYTHON=python3
fi

json=$(realpath -m "${json:-${OUT:-out}/${call:-gpu}.json}")
mkdir -p "$(dirname "$json")" || die 2 "cannot write $json"
work=$(mktemp -d "$PWD/out/bench/parts.XXXXXX")

# The report is written before every part, and while they run.
report() { "$python" bench/gpu_report.py "$work" "$json" "$@"; }
others=()                               # processes beside the parts
quiet() {
    [ ${#others[@]} -eq 0 ] || { kill "${others[@]}"; wait "${others[@]}"; } 2>/dev/null
    others=()
}
trap quiet EXIT

# ---- a part: its name, its limit in seconds, its command. Results go to $work/NAME.json.
# status: 0 went well, 124 took too long, "left out" when no time is left, else what it ended with
failed=0 running='' ended=0
state() { printf '%s\n%s\n' "$2" "$3" >"$work/.state" && mv "$work/.state" "$work/$1.status"; }
part() {
    local name=$1 most=$((patience * $2)) left=$((limit - 8 - SECONDS)) t=$SECONDS
    shift 2
    ended=1
    if [ "$left" -lt 5 ]; then
        state "$name" 'left out' 0
        say "== $name: no time is left"
        failed=1
        return
    fi
    [ "$most" -le "$left" ] || most=$left
    say "== $name (at most $most s)"
    state "$name" running 0
    report running || failed=1
    ZR_BENCH_LIMIT=$most timeout -k 5 "$most" "$@" >"$work/$name.log" 2>&1 &
    running=$!
    wait "$running"
    ended=$?
    running=
    state "$name" "$ended" $((SECONDS - t))
    tail -n 12 "$work/$name.log" | cut -c 1-160 >&2
    say "   $name: status $ended, $((SECONDS - t)) s"
    [ "$ended" -eq 0 ] || failed=1
}

# A terminal's signal reaches this script alone, as parts have process groups of their own.
stop() {
    trap - INT TERM
    [ -z "$running" ] || kill "$running" 2>/dev/null
    wait "$running" 2>/dev/null
    quiet
    report stopped >&2
    die "$1" "stopped; $json has the parts before"
}
trap 'stop 130' INT
trap 'stop 143' TERM

tool() { part "$1" "$2" bench/gpu_parts.sh "${@:3}"; }
check() { part "$1" "$2" "$python" bench/gpu_check.py "$1" "$work/$1.json"; }

# Where nothing can be built, objects and programs that were built before are taken.
build() {
    local ready=$ZR_BENCH_FROM/ready folders
    check build 200
    [ $ended -ne 0 ] && [ -d "$ready" ] || return 0
    chmod +x "$ready"/*
    folders=$(bench/gpu_parts.sh libraries)
    export ZR_TEST_READY=$ready LIBRARY_PATH=$folders
    export LD_LIBRARY_PATH=$folders${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    check ready 90
}

# A part of each model whose name begins with a word: WHAT-WORD.
models() {
    local what=${1%%-*} word=${1#"${1%%-*}"} name out
    for name in $names; do
        [[ -$name == "$word"* ]] || continue
        out=$work/$what-$name.json
        case $what in
        tune) check "tune-$name" 60 ;;
        speed) part "speed-$name" 120 "$python" bench/gpu_speed.py "$name" "$out" ;;
        table) part "table-$name" 60 "$python" bench/gpu_kernels.py table "$name" "$out" ;;
        counters) tool "counters-$name" 60 counters "$name" ;;
        esac
    done
}

one() {
    case $1 in
    build) build ;;
    bits) part bits 60 "$python" tests/kernel_bits.py "$work/bits.json" ;;
    ceilings) part ceilings 40 "$python" bench/gpu_kernels.py ceilings "$work/ceilings.json" ;;
    losses | ranks) check "$1" 90 ;;
    law) check law 110 ;;
    profile) check profile 40 ;;
    memory) check memory 30 ;;
    offload) check offload 120 ;;
    kernels | attention) tool "$1" 90 "$1" ;;
    sanitize) tool sanitize 120 sanitize ;;
    *) models "$1" ;;
    esac
}

# ---- the machine
driver=/usr/local/nvidia/lib64          # where containers may have the driver's libraries
[ ! -d $driver ] || export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$driver
tool facts 20 facts
if [ $kind = cuda ]; then
    if ! read -r code column bytes _ < <("$python" bench/gpu_found.py); then
        quiet
        report 'no GPU' "CUDA's driver shows no NVIDIA GPU; --rehearse needs none" >&2 || exit 1
        rm -r "$work"
        die 3 "no NVIDIA GPU is here; $json says so. --rehearse tries the script without one"
    fi
    ZR_BENCH_CARD=$((bytes >> 30 < 90 ? 80 : 140))
    export ZR_BENCH_CARD ZR_TEST_DEVICE=$column
    [ "$code" != 90 ] || code=90a
    export ZR_GENCODE="-gencode arch=compute_$code,code=sm_$code"
    mode=$(nvidia-smi --query-gpu=compute_mode --format=csv,noheader 2>/dev/null | head -n 1) || true
    case ${mode:-Default} in
    Default | *N/A*) ;;
    *) say "compute mode $mode: losses, law, kernels and ranks need several processes on the GPU" \
        "(nvidia-smi -c DEFAULT)" ;;
    esac
    nvidia-smi --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu \
        --format=csv,noheader -lms 1000 >"$work/clocks.csv" 2>/dev/null &
    others+=($!)
fi
"$python" bench/gpu_report.py "$work" "$json" every 15 >/dev/null 2>&1 & # ends with its parent
others+=($!)
if home=$(bench/gpu_parts.sh toolkit 2>"$work/toolkit.log") && [ -n "$home" ]; then
    export CUDA_HOME=$home
fi
names=$("$python" bench/gpu_cases.py names) || die 1 'bench/gpu_cases.py fails'
"$python" bench/gpu_cases.py fresh || tool sources 200 sources
for name in "${list[@]}"; do one "$name"; done
quiet
report 'done' && rm -r "$work" || failed=1
say "$json"
exit $failed
