#!/bin/bash
# torchrun-spare.sh -- a rank for each GPU of HOSTS hosts; a spare host takes the place of one that
# fails.
#
#     examples/torchrun-spare.sh first 2 out/train-cuda --data tokens.bin --steps 100000 \
#         --checkpoints checkpoints --save-every 500
#
# Start it on HOSTS + 1 hosts. `first` is the name of one of them, which keeps the list of all and
# must not fail itself. On a signal torchrun gives its workers 30 s, then kills them.
first=$1 hosts=$2
shift 2
exec torchrun --nnodes="$hosts" --nproc-per-node=gpu --rdzv-id=train --rdzv-backend=c10d \
    --rdzv-endpoint="$first:29400" --max-restarts=3 --no-python "$@" --grace 25s
