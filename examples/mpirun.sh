#!/bin/bash
# mpirun.sh -- ranks on the hosts of a file, started anew where a rank, a host or the network fails.
#
#     examples/mpirun.sh hosts out/train-mpi --data tokens.bin --steps 100000 \
#         --checkpoints checkpoints --save-every 500
#
# A line of hosts is NAME slots=RANKS; the program and its files have the same names on all. On a
# TERM the ranks save and leave: exit code 75.
hosts=$1
shift

# mpirun hands USR1 on to all ranks; a run that was told to leave is not started anew.
told=
trap 'told+=1; kill -USR1 "$run"' TERM

for _ in 1 2 3 4; do
    mpirun --hostfile "$hosts" "$@" &
    run=$!
    # a TERM ends the waiting, but not the run
    while before=$told; wait "$run"; code=$?; [ "$told" != "$before" ]; do :; done
    [ "$told" ] && break
    case $code in 0 | 2 | 4 | 6 | 8 | 75) break ;; esac
done
exit "$code"
