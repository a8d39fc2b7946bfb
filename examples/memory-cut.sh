#!/bin/bash
# memory-cut.sh -- a run of stage 1 whose memory is cut goes on at stage 3 with offloading.
#
#     examples/memory-cut.sh
#
# Two ranks on a CPU train model_specs/demo.yaml for 10 steps at stage 1. Then a rank has 64 MB: zgen
# refuses the plan and names ways that fit. A program of stage 3 resumes from the checkpoint. The
# weights must be those of a run that stays at stage 1. All files are in build/memory-cut*.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."
files=build/memory-cut
cut=(--set cluster.memory.device=64MB)
offload=(--set zero.offload_optimizer.device=cpu --set zero.offload_param.device=cpu)

say() { printf '== %s\n' "$*"; }
die() { printf 'memory-cut: %s\n' "$*" >&2; exit 1; }

# generate STAGE OPTIONS: the program's source, build/memory-cut-STAGE/train.c
generate() {
    gen/zgen model_specs/demo.yaml --set 'targets=[cpu]' --set zero.stage="$1" "${@:2}" \
        -o "$files-$1/train.c"
}
build() { ninja --quiet "$files-$1/train"; }

# train STAGE STEPS OPTIONS: prints the run's output and keeps it in build/memory-cut/said
train() {
    "$files-$1/train" --data "$files/tokens" --steps "$2" --hash "${@:3}" | tee "$files/said"
}
weights() { sed -n 's/^weights //p' "$files/said"; }

# Seconds between two values of EPOCHREALTIME.
between() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.3f", b - a }'; }

rm -rf "$files" "$files"-[13]
./run data text tests/data/kjv.txt -o "$files/tokens"

say "10 steps at stage 1"
generate 1
build 1
train 1 10 --checkpoints "$files/checkpoints"
stopped=$EPOCHREALTIME

say "the memory is cut: stage 1 is refused"
code=0
generate 1 "${cut[@]}" || code=$?
[ "$code" -eq 2 ] || die "zgen ended with $code, not with 2"
refused=$EPOCHREALTIME

say "steps 11 to 20 at stage 3, parameters and optimizer on the host"
generate 3 "${cut[@]}" "${offload[@]}"
generated=$EPOCHREALTIME
build 3
built=$EPOCHREALTIME
train 3 20 --checkpoints "$files/checkpoints"
resumed=$(weights)
load=$(sed -n 's/^start .* \([0-9.]*\) s to the first step$/\1/p' "$files/said")

say "20 steps at stage 1"
train 1 20
[ "${resumed:?}" = "$(weights)" ] ||
    die "the resumed run has the weights $resumed, the other one $(weights)"
say "the weights are the same: $resumed"

awk -v refuse="$(between "$stopped" "$refused")" -v generate="$(between "$refused" "$generated")" \
    -v build="$(between "$generated" "$built")" -v load="$load" 'BEGIN {
    printf "from the end of the first program to the first step of the second: %.1f s\n",
        refuse + generate + build + load
    printf "refused plan %.1f s, generate %.1f s, build %.1f s, start and load %.1f s\n",
        refuse, generate, build, load }'
