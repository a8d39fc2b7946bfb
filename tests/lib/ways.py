"""ways.py -- ways to spread the work of a model with adapters, which all have one hash."""

WHOLE = "zero.stage3_param_persistence_threshold=0"
_PAIR = ("cluster.ranks=2", "zero.stage=3", WHOLE)
ADAPTED = {
    "one rank": ("cluster.ranks=1", "zero.stage=0"),
    "stage 1": ("cluster.ranks=2", "zero.stage=1", "train.recompute=[linear]"),
    "stage 2": ("cluster.ranks=4", "zero.stage=2", "zero.reduce_bucket_size=2000"),
    "recomputed": ("cluster.ranks=2", "zero.stage=3", "train.recompute=full"),
    "stage 3": ("cluster.ranks=4", "zero.stage=3", WHOLE),
    "one queue": (*_PAIR, "zero.overlap_comm=false"),
    "offloaded": (
        *_PAIR,
        "zero.offload_optimizer.device=cpu",
        "zero.offload_param.device=cpu",
    ),
    "layers": (*_PAIR, "train.accumulate=layers"),
    "two hosts": (
        "cluster.ranks=4",
        "cluster.local=2",
        "zero.stage=3",
        "zero.shard_size=2",
        "zero.states=shard",
        WHOLE,
    ),
    "in parts": (*_PAIR, "zero.stage3_max_live_parameters=30000"),
}
ONE = ADAPTED["one rank"]
