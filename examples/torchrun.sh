#!/bin/bash
# torchrun.sh -- a rank for each GPU of this host, all started anew when one of them fails.
#
#     examples/torchrun.sh out/train-cuda --data tokens.bin --steps 100000 \
#         --checkpoints checkpoints --save-every 500
#
# On a signal torchrun gives its workers 30 s, then kills them.
exec torchrun --standalone --nproc-per-node=gpu --max-restarts=3 --no-python "$@" --grace 25s
