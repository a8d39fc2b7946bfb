"""config_keys.py -- describes each key of a spec in a sentence, for docs/config.md."""

from __future__ import annotations

from collections.abc import Mapping

_OP = "model.units[].ops[]"
_MODEL = {
    "name": "names the model: in reports, in `--version`, in the plan",
    "model.vocab": "is the number of tokens that there are",
    "model.width": "is the size of a token's vector between blocks",
    "model.names": "says whose names and layouts tensors have in a weights' file",
    "model.units[].embedding.tokens": "names the table of tokens",
    "model.units[].embedding.positions": "names the table of learned positions; null: none",
    "model.units[].embedding.context": "is the number of learned positions",
    "model.units[].blocks": "is how often these ops are repeated: the layers",
    "model.units[].name": "is the prefix of a layer's tensors; `{l}` is the layer's number",
    "model.units[].head": "is what follows the last block: a norm and the linear to logits",
    f"{_OP}.residual": "adds its input to what its ops make of it",
    f"{_OP}.layernorm.name": "names its weight and bias",
    f"{_OP}.layernorm.eps": "is added to the variance",
    f"{_OP}.layernorm.bias": "gives it a bias",
    f"{_OP}.rmsnorm.name": "names its weight",
    f"{_OP}.rmsnorm.eps": "is added to the mean square",
    f"{_OP}.attention.name": "names its four linears: query, key, value, output",
    f"{_OP}.attention.heads": "is the number of query heads",
    f"{_OP}.attention.kv_heads": "is the number of key and value heads (grouped queries)",
    f"{_OP}.attention.head_dim": "is the size of a head",
    f"{_OP}.attention.bias": "gives query, key and value a bias",
    f"{_OP}.attention.out_bias": "gives the output a bias",
    f"{_OP}.attention.rope.theta": "turns queries and keys by position, with this base",
    f"{_OP}.attention.rope.scaling.type": "is how frequencies change for a longer context",
    f"{_OP}.attention.rope.scaling.factor": "divides low frequencies, with linear all",
    f"{_OP}.attention.rope.scaling.low_freq_factor": "ends the low frequencies",
    f"{_OP}.attention.rope.scaling.high_freq_factor": "begins the high frequencies, which stay",
    f"{_OP}.attention.rope.scaling.original_context": "is the context before scaling",
    f"{_OP}.attention.rope.scaling.beta_fast": "begins the high frequencies, which stay: so often "
    "they turn in the original context",
    f"{_OP}.attention.rope.scaling.beta_slow": "ends the low frequencies, in the same way",
    f"{_OP}.attention.rope.scaling.attention_factor": "multiplies queries and keys",
    f"{_OP}.attention.rope.scaling.truncate": "widens what lies between low and high frequencies "
    "to whole pairs",
    f"{_OP}.attention.window": "is how many tokens a token sees, itself the last of them (sliding "
    "window); null: all before it; a list: in each layer",
    f"{_OP}.attention.qk_norm": "normalises each query and key head (RMS); whole: all query heads "
    "as one, and all key heads",
    f"{_OP}.attention.eps": "is that norm's eps",
    f"{_OP}.linear.name": "names it; several names: linears of one input, made as one product",
    f"{_OP}.linear.out": "is its output's width, one for each name",
    f"{_OP}.linear.bias": "gives it a bias",
    f"{_OP}.linear.tied": "takes the weight of this embedding, in the head",
    f"{_OP}.gelu": "applies GELU, by its tanh form or by erf",
    f"{_OP}.relu2": "squares what is above 0, the rest is 0 (squared ReLU)",
    f"{_OP}.swiglu": "multiplies SiLU of the first half of its input by the second half",
}
_ZERO = {
    "zero.stage": "is what ranks split: 1 optimizer states, 2 also gradients, 3 also parameters",
    "zero.reduce_bucket_size": "is the largest piece of gradients that is reduced at once, in "
    "elements",
    "zero.allgather_bucket_size": "is the largest piece of parameters that is gathered at once, in "
    "elements",
    "zero.overlap_comm": "runs collectives beside compute, on queues (streams) of their own",
    "zero.stage3_prefetch_bucket_size": "is how far ahead stage 3 gathers, rounded down to whole "
    "units, at least one; 0: not ahead; `auto` or null: one unit",
    "zero.stage3_param_persistence_threshold": "keeps tensors of at most so many elements whole on "
    "every rank",
    "zero.stage3_max_live_parameters": "bounds the elements that a rank has gathered at once; "
    "blocks that are larger are cut; 0: as little as whole units allow",
    "zero.stage3_max_reuse_distance": "keeps a unit gathered until its next use where no more "
    "elements are used in between; 0: never",
    "zero.replicate": "keeps the tensors of these names whole on every rank, at stage 3",
    "zero.shard_size": "is the number of ranks that share a unit's parameters at stage 3 "
    "(torchtitan's data_parallel_shard_degree), 0: all; a divisor or a multiple of "
    "`cluster.local`. At stages 1 and 2 these ranks share states, with `states: shard`",
    "zero.states": "are the ranks that share masters, moments and sums: all (Megatron's HFSDP), or "
    "those of a shard, each set of them with all states (PyTorch's HSDP)",
    "zero.mics_shard_size": "is `shard_size` with `states: shard`, by DeepSpeed's name for MiCS",
    "zero.hpz_partition_size": "is `shard_size` with `states: all`, by DeepSpeed's name for the "
    "secondary copy of ZeRO++: here the copy is the parameters, and masters are what it is made of",
    "zero.sub_group_size": "is the tile in which the host updates a shard, in elements; 0: the "
    "default",
    "zero.offload_optimizer.device": "puts optimizer states, and the update, on the host (cpu) or "
    "in a file (nvme)",
    "zero.offload_optimizer.buffer_count": "is how many tiles are on their way at once",
    "zero.offload_optimizer.ratio": "is the share of each shard that is offloaded; the device "
    "updates the rest",
    "zero.offload_optimizer.nvme_path": "is the directory of a rank's file; `--nvme` names another",
    "zero.offload_param.device": "puts the shards of parameters on the host or in a file, at "
    "stage 3",
    "zero.offload_param.nvme_path": "is the directory of a rank's file",
    "zero.offload_param.max_in_cpu": "keeps so many elements of a rank on the host, though the "
    "device is nvme",
    "zero.aio.block_size": "is the block in which the file is read and written, in bytes",
    "zero.aio.queue_depth": "is how many blocks are under way at once",
}
_OPTIMIZER = {
    "lr": "is the learning rate, before the schedule",
    "type": "is the optimizer",
    "betas": "are the decays of the moments",
    "eps": "is added to the divisor",
    "momentum": "is the decay of the momentum",
    "nesterov": "looks ahead by Nesterov's formula",
    "weight_decay": "pulls weights to zero: decoupled in AdamW and Lion, by the gradient in the "
    "others",
    "decay": "is what weight_decay applies to: tensors of two dimensions, or all",
    "clip": "is the largest norm of the whole gradient; 0: any",
    "moments": "is how moments are stored; bf16 takes stochastic rounding",
    "masters": "keeps f32 copies of parameters that are stored in halves",
    "groups[].match": "picks tensors by name; the first group that matches has them",
    "groups[].lr_factor": "multiplies their learning rate",
    "groups[].weight_decay": "is their weight decay; null: the optimizer's",
    "groups[].frozen": "trains none of them; they have no gradient and no state",
}
_SCHEDULE = {
    "type": "is the curve of the learning rate; steps that were applied count",
    "warmup": "is how many steps the rate rises from 0",
    "steps": "is the step at which a decay meets min_lr",
    "min_lr": "is the rate at the end",
    "decay": "is how many steps the decay of wsd takes",
    "warmup_min_lr": "is DeepSpeed's: the rate at which the warmup begins",
    "warmup_max_lr": "is DeepSpeed's: the rate at which it ends; null: `train.optimizer.lr`",
    "warmup_num_steps": "is DeepSpeed's: how many steps the warmup takes; 0 and 1 mean 2",
    "warmup_type": "is DeepSpeed's: the warmup's curve",
    "total_num_steps": "is DeepSpeed's: the step at which the decay ends",
    "warmup_min_ratio": "is DeepSpeed's: where the warmup begins, as a share of lr",
    "cos_min_ratio": "is DeepSpeed's: where the cosine ends, as a share of lr",
    "cycle_min_lr": "is DeepSpeed's: the rate at which a cycle begins and ends",
    "cycle_max_lr": "is DeepSpeed's: the rate at its top",
    "decay_lr_rate": "is DeepSpeed's: how fast the rate falls behind the cycle",
    "cycle_first_step_size": "is DeepSpeed's: how many steps the rate rises",
    "cycle_second_step_size": "is DeepSpeed's: how many steps it falls; null: as many",
    "cycle_first_stair_count": "is DeepSpeed's: the stairs of the rise; 0: none",
    "cycle_second_stair_count": "is DeepSpeed's: the stairs of the fall; null: as many",
    "decay_step_size": "is DeepSpeed's: how many steps a decay behind the cycle takes; 0: none",
    "cycle_momentum": "is DeepSpeed's: cycles the momentum against the rate",
    "cycle_min_mom": "is DeepSpeed's: the least momentum",
    "cycle_max_mom": "is DeepSpeed's: the greatest momentum",
    "decay_mom_rate": "is DeepSpeed's: how fast the momentum decays; here 0 alone",
}
_SCALE = {
    "scale": "is the factor of f16 gradients in every step; 0: it follows from overflows",
    "initial_scale_power": "is the power of 2 at which it begins",
    "window": "is after how many steps without overflow it doubles",
    "hysteresis": "is how many overflows it takes to halve it",
    "consecutive_hysteresis": "makes hysteresis whole again after each step without overflow",
    "min": "is the least scale; an overflow there ends the run",
}
_TRAIN = {
    "global_batch": "is the samples of a step, over all ranks",
    "micro_batch": "is the samples that go through a rank's model at once; accumulation is "
    "global_batch / (micro_batch x ranks)",
    "sequence": "is the tokens of a sample",
    **{f"optimizer.{key}": does for key, does in _OPTIMIZER.items()},
    "precision": "is the type of parameters, activations and gradients; sums are f32",
    **{f"loss_scale.{key}": does for key, does in _SCALE.items()},
    "max_skips": "is how many steps in a row may be skipped before the run ends",
    **{f"schedule.{key}": does for key, does in _SCHEDULE.items()},
    "seed": "begins all random numbers: first weights, stochastic rounding, dropout",
    "sum": "is the order in which gradients of micro-batches are added; a part of the recipe",
    "head_chunk": "is how many tokens' logits exist at once; null or `auto`: by the shape; "
    "a divisor of a micro-batch's tokens, in bf16 a multiple of 32 or all of them",
    "dropout": "is the share of an embedding's output, and of each residual branch's, that a step "
    "sets to 0, as GPT-2's embd_pdrop and resid_pdrop do; a part of the recipe",
    "recompute": "names ops of blocks whose values backward recomputes, to save memory "
    "(activation checkpointing)",
    "products": "is the order in which a CPU sums products in bf16: as AVX512_BF16 does (pairs), "
    "as AMX does (tiles), or as is fastest where a run begins; a part of the recipe",
    "reduction": "is who adds gradients over ranks: our exact sums, or NCCL's reduce-scatter "
    "(GPUs only)",
    "sm_margin": "is how many SMs of a GPU GEMMs leave to NCCL",
    "lora.rank": "is the rank of adapters beside linears, which alone train",
    "lora.alpha": "is their scale, times rank: alpha / rank x B A is added to a weight",
    "lora.match": "are the ends of the names of linears that have one; by default, as in PEFT, "
    "`q_proj` and `v_proj`, GPT-2's `c_attn`",
    "accumulate": "is the order of micro-batches: each through the whole model "
    "(micro_batches), or all through each layer, which is gathered once for them (layers)",
    "offload_activations": "keeps on the host what backward needs",
    "memory_budget": "bounds a rank's device memory; recompute and offloading are chosen for it",
}
DOES: Mapping[str, str] = {
    **_MODEL,
    **_ZERO,
    **{f"train.{key}": does for key, does in _TRAIN.items()},
    "cluster.ranks": "is the number of ranks: GPUs, or processes of a CPU",
    "cluster.local": "is the number of ranks of a host, each host's in a row (torchrun's "
    "LOCAL_WORLD_SIZE), 0: all; gradients are summed inside hosts first, and parameters are "
    "gathered between hosts first",
    "cluster.memory.device": "refuses a plan that takes more of a rank's device",
    "cluster.memory.host": "refuses a plan that takes more of the host for a rank",
    "cluster.memory.file": "refuses a plan that takes more of the disk for a rank",
    "targets": "names what `train.c` can be built for",
    "data.ignore": "is the token that is never a target; null: every token is one",
    "data.shuffle": "draws the order of each epoch's samples anew, from `train.seed`",
    "data.documents": "joins the documents of a sample, or masks them from each other: attention "
    "and positions begin anew with each (packing)",
    "data.end": "is the token that ends a document, for `mask`",
}
