"""config_keys.py -- describes each key of a spec, for docs/config.md."""

from __future__ import annotations

from collections.abc import Mapping

_OP = "model.units[].ops[]"
_MODEL = {
    "name": "model name: shown in reports, `--version` and the plan",
    "model.vocab": "vocabulary size",
    "model.vocab_from": "rows by token of a folder that `--load` grows to `model.vocab`; null: the "
    "folder has `model.vocab` rows",
    "model.vocab_rows": "first values of the new rows of `model.vocab_from`: the mean of the "
    "folder's rows, or the initial values of a new model; part of the recipe",
    "model.width": "hidden size: the length of a token's vector between blocks",
    "model.names": "model family whose tensor names and layouts the weights' files use",
    "model.units[].embedding.tokens": "name of the token embedding",
    "model.units[].embedding.positions": "name of the learned position embedding; null: none",
    "model.units[].embedding.context": "number of learned positions",
    "model.units[].embedding.scale": "factor of its output",
    "model.units[].blocks": "number of layers with these ops",
    "model.units[].name": "prefix of a layer's tensor names; `{l}` is the layer's number",
    "model.units[].head": "ops after the last block: a norm and the linear to logits",
    f"{_OP}.residual": "ops of a residual branch; their output is added to the branch's input",
    f"{_OP}.parallel": "branches with one input, each a list of ops; their outputs are added",
    f"{_OP}.layernorm.name": "name of its weight and bias",
    f"{_OP}.layernorm.eps": "added to the variance",
    f"{_OP}.layernorm.weight": "whether it has a weight",
    f"{_OP}.layernorm.bias": "whether it has a bias",
    f"{_OP}.rmsnorm.name": "name of its weight",
    f"{_OP}.rmsnorm.eps": "added to the mean square",
    f"{_OP}.rmsnorm.one_plus": "multiplies by 1 + weight instead of the weight",
    f"{_OP}.attention.name": "prefix of its four linears: query, key, value, output",
    f"{_OP}.attention.heads": "number of query heads",
    f"{_OP}.attention.kv_heads": "number of key and value heads (grouped-query attention)",
    f"{_OP}.attention.head_dim": "size of a head",
    f"{_OP}.attention.bias": "whether query, key and value have a bias",
    f"{_OP}.attention.out_bias": "whether the output linear has a bias",
    f"{_OP}.attention.rope.theta": "base of the rotary position embedding (RoPE)",
    f"{_OP}.attention.rope.width": "number of a head's first elements that it rotates",
    f"{_OP}.attention.rope.interleaved": "whether neighbours are a pair, instead of elements half "
    "the width apart",
    f"{_OP}.attention.local_rope": "RoPE of layers with a window: theta and scaling",
    f"{_OP}.attention.rope_layers": "whether each layer has rotary positions",
    f"{_OP}.attention.rope.scaling.type": "method of scaling RoPE to a longer context",
    f"{_OP}.attention.rope.scaling.factor": "divides the low frequencies; with linear, all of "
    "them; with dynamic, grows theta with samples beyond the original context",
    f"{_OP}.attention.rope.scaling.low_freq_factor": "upper end of the low frequencies",
    f"{_OP}.attention.rope.scaling.high_freq_factor": "lower end of the high frequencies, which "
    "are not scaled",
    f"{_OP}.attention.rope.scaling.original_context": "context length before scaling",
    f"{_OP}.attention.rope.scaling.beta_fast": "lower end of the high frequencies, which are not "
    "scaled, in turns per original context",
    f"{_OP}.attention.rope.scaling.beta_slow": "upper end of the low frequencies, in turns per "
    "original context",
    f"{_OP}.attention.rope.scaling.attention_factor": "multiplies queries and keys",
    f"{_OP}.attention.rope.scaling.short_factor": "divisor of the frequency of each pair, if "
    "`train.sequence` is at most the original context",
    f"{_OP}.attention.rope.scaling.long_factor": "divisor of the frequency of each pair in longer "
    "samples",
    f"{_OP}.attention.rope.scaling.truncate": "rounds the range between low and high frequencies "
    "outwards to whole pairs",
    f"{_OP}.attention.window": "sliding window: number of tokens that a token attends to, "
    "including itself; null: all before it; a list: one per layer",
    f"{_OP}.attention.qk_norm": "normalizes each query and key head (RMS norm); whole: all query "
    "heads together, and all key heads together",
    f"{_OP}.attention.eps": "eps of qk_norm",
    f"{_OP}.attention.one_plus": "qk_norm multiplies by 1 + weight",
    f"{_OP}.attention.scale": "factor of the products of queries and keys",
    f"{_OP}.attention.softcap": "cap of scores: score = cap * tanh(score / cap)",
    f"{_OP}.linear.name": "name of the linear; a list: linears with the same input, computed as "
    "one matrix product",
    f"{_OP}.linear.out": "output width, one for each name",
    f"{_OP}.linear.bias": "whether it has a bias",
    f"{_OP}.linear.tied": "in the head: name of the embedding whose weight it uses",
    f"{_OP}.linear.softcap": "of the logits' linear: cap of logits, as of scores",
    f"{_OP}.gelu": "GELU: tanh approximation, or erf",
    f"{_OP}.relu2": "squared ReLU",
    f"{_OP}.scale": "multiplies by a number",
    f"{_OP}.swiglu": "multiplies SiLU of the first half of its input by the second half",
    f"{_OP}.geglu": "multiplies GELU (tanh) of the first half of its input by the second half",
}
_ZERO = {
    "zero.stage": "ZeRO stage: ranks shard 1 the optimizer states, 2 also the gradients, 3 also "
    "the parameters",
    "zero.reduce_bucket_size": "most elements of gradients that one collective reduces",
    "zero.allgather_bucket_size": "most elements of parameters that one collective gathers",
    "zero.overlap_comm": "overlaps collectives with compute, on queues (streams) of their own",
    "zero.stage3_prefetch_bucket_size": "elements that stage 3 prefetches, rounded down to whole "
    "units, at least one; 0: no prefetch; `auto` or null: one unit",
    "zero.stage3_param_persistence_threshold": "at stage 3, tensors with at most this many "
    "elements are kept whole on every rank",
    "zero.stage3_max_live_parameters": "most elements of parameters that a rank has gathered at "
    "once; larger blocks are split; 0: as few as whole units allow",
    "zero.stage3_max_reuse_distance": "a unit stays gathered until its next use if at most this "
    "many elements are used in between; 0: never",
    "zero.replicate": "name patterns of tensors that stage 3 keeps whole on every rank",
    "zero.shard_size": "number of ranks that shard a unit's parameters at stage 3 "
    "(torchtitan's data_parallel_shard_degree), 0: all; a divisor or a multiple of "
    "`cluster.local`. At stages 1 and 2, with `states: shard`: number of ranks that shard the "
    "states",
    "zero.states": "ranks that shard masters, moments and gradient sums: all (Megatron's HFSDP), "
    "or those of a shard, so that each set of `shard_size` ranks has all states (PyTorch's HSDP)",
    "zero.mics_shard_size": "DeepSpeed's name (MiCS) for `shard_size` with `states: shard`",
    "zero.hpz_partition_size": "DeepSpeed's name (ZeRO++ hpZ) for `shard_size` with `states: all`: "
    "the secondary partition is the parameters themselves, which are made from the masters",
    "zero.sub_group_size": "elements in a tile, the part of a shard that the host updates at "
    "once; 0: the default",
    "zero.offload_optimizer.device": "offloads optimizer states, and the update, to the host "
    "(cpu) or to a file (nvme)",
    "zero.offload_optimizer.buffer_count": "number of tiles in flight",
    "zero.offload_optimizer.ratio": "share of each shard that is offloaded; the device updates "
    "the rest",
    "zero.offload_optimizer.nvme_path": "folder of a rank's file; `--nvme` overrides it",
    "zero.offload_param.device": "at stage 3, offloads the parameters' shards to the host (cpu) "
    "or to a file (nvme)",
    "zero.offload_param.nvme_path": "folder of a rank's file; `--nvme` overrides it",
    "zero.offload_param.max_in_cpu": "with device nvme, elements of a rank that stay on the host",
    "zero.aio.block_size": "block size of file reads and writes, in bytes",
    "zero.aio.queue_depth": "number of blocks in flight",
}
_OPTIMIZER = {
    "lr": "learning rate, before the schedule",
    "type": "optimizer",
    "betas": "decay rates of the moments",
    "eps": "added to the denominator",
    "momentum": "decay rate of the momentum",
    "nesterov": "Nesterov momentum",
    "weight_decay": "weight decay: decoupled for AdamW and Lion, added to the gradient for the "
    "others",
    "decay": "tensors that weight_decay applies to: those of two dimensions, or all",
    "clip": "gradients are clipped to this norm over all parameters; 0: no clipping",
    "moments": "type in which moments are stored; bf16 uses stochastic rounding",
    "masters": "keeps f32 master copies of 16-bit parameters",
    "groups[].match": "name patterns of the group's tensors; the first group that matches a "
    "tensor gets it",
    "groups[].lr_factor": "factor of the group's learning rate",
    "groups[].weight_decay": "weight decay of the group; null: the optimizer's",
    "groups[].frozen": "freezes the group's tensors: no gradients, no optimizer states",
}
_SCHEDULE = {
    "type": "learning rate schedule; skipped steps do not count",
    "warmup": "steps in which the learning rate rises from 0",
    "steps": "step at which the decay reaches min_lr",
    "min_lr": "learning rate at the end",
    "decay": "steps of the decay of wsd",
    "cycles": "cosines of cosine_with_restarts until `steps`, as transformers' num_cycles",
    "warmup_min_lr": "DeepSpeed's: learning rate at the start of the warmup",
    "warmup_max_lr": "DeepSpeed's: learning rate at its end; null: `train.optimizer.lr`",
    "warmup_num_steps": "DeepSpeed's: steps of the warmup; 0 and 1 mean 2",
    "warmup_type": "DeepSpeed's: curve of the warmup",
    "total_num_steps": "DeepSpeed's: step at which the decay ends",
    "warmup_min_ratio": "DeepSpeed's: learning rate at the start of the warmup, relative to lr",
    "cos_min_ratio": "DeepSpeed's: learning rate at the end of the cosine, relative to lr",
    "cycle_min_lr": "DeepSpeed's: learning rate at the start and the end of a cycle",
    "cycle_max_lr": "DeepSpeed's: peak learning rate of the cycle",
    "decay_lr_rate": "DeepSpeed's: decay rate of the learning rate after the cycle",
    "cycle_first_step_size": "DeepSpeed's: steps in which the learning rate rises",
    "cycle_second_step_size": "DeepSpeed's: steps in which it falls; null: as many",
    "cycle_first_stair_count": "DeepSpeed's: stairs while it rises; 0: none",
    "cycle_second_stair_count": "DeepSpeed's: stairs while it falls; null: as many",
    "decay_step_size": "DeepSpeed's: steps of one decay after the cycle; 0: no decay",
    "cycle_momentum": "DeepSpeed's: cycles the momentum inversely to the learning rate",
    "cycle_min_mom": "DeepSpeed's: minimum momentum",
    "cycle_max_mom": "DeepSpeed's: maximum momentum",
    "decay_mom_rate": "DeepSpeed's: decay rate of the momentum; only 0 is supported",
}
_SCALE = {
    "scale": "static loss scale of f16; 0: dynamic",
    "initial_scale_power": "the first dynamic scale is 2 to this power",
    "window": "steps without an overflow after which the scale doubles",
    "hysteresis": "overflows after which the scale is halved",
    "consecutive_hysteresis": "restores the hysteresis after every step without an overflow",
    "min": "minimum scale; an overflow there ends the run",
}
_TRAIN = {
    "global_batch": "samples in a step, over all ranks",
    "micro_batch": "samples in a rank's micro-batch; gradient accumulation steps are "
    "global_batch / (micro_batch x ranks)",
    "sequence": "tokens in a sample",
    **{f"optimizer.{key}": does for key, does in _OPTIMIZER.items()},
    "precision": "type of parameters, activations and gradients; sums are f32, but a "
    "step's only gradient keeps its type",
    **{f"loss_scale.{key}": does for key, does in _SCALE.items()},
    "max_skips": "the run ends after this many skipped steps in a row; steps that lower the loss "
    "scale do not count",
    **{f"schedule.{key}": does for key, does in _SCHEDULE.items()},
    "seed": "seed of all random numbers: initial weights, stochastic rounding, dropout",
    "sum": "order in which the gradients of micro-batches are added; part of the recipe",
    "head_chunk": "tokens whose logits are in memory at once; null or `auto`: derived from the "
    "shape; must divide a micro-batch's tokens, and in bf16 be a multiple of 32 or all of them",
    "mlp_chunk": "tokens that go through a block's MLP at once; null or `auto`: all; other chunks "
    "need less memory, and backward computes the MLP again; part of the recipe, though on a CPU it "
    "changes no bit; must divide as head_chunk does",
    "dropout": "dropout probability of the embedding's output and of each residual branch, like "
    "GPT-2's embd_pdrop and resid_pdrop; part of the recipe",
    "attention_dropout": "dropout probability of attention's probabilities, like GPT-2's "
    "attn_pdrop; part of the recipe",
    "label_smoothing": "share of a target that is spread over all tokens of the vocabulary, in "
    "training; validation reports the plain loss; part of the recipe",
    "z_loss": "factor of the squared logsumexp of the logits, which is added to the loss in "
    "training; part of the recipe",
    "loss_mean": "mean of a step's loss: over all tokens of the global batch that are not ignored "
    "(tokens), or over those of each micro-batch and then over micro-batches (micro_batch); "
    "validation reports the mean over tokens; part of the recipe",
    "recompute": "ops of a block whose activations backward recomputes, to save memory "
    "(activation checkpointing)",
    "products": "order in which a CPU sums bf16 products: as AVX512_BF16 does (pairs), as AMX "
    "does (tiles), or the faster of them when a run starts (auto); part of the recipe",
    "reduction": "how gradients are summed over ranks: by zgen's exact sums, or by NCCL's "
    "reduce-scatter (fast; GPUs only)",
    "sm_margin": "SMs of a GPU that GEMMs leave to NCCL",
    "lora.rank": "rank of the LoRA adapters; only the adapters are trained",
    "lora.alpha": "alpha / rank x B A is added to a weight; `rslora` changes the divisor",
    "lora.rslora": "alpha is divided by the square root of the rank, as with PEFT's `use_rslora`",
    "lora.match": "suffixes of the names of linears that get an adapter, or all-linear: all "
    "but that of the logits; default, as in PEFT: `q_proj` and `v_proj` (for Phi also `fc1` and "
    "`fc2`), or the one linear of q, k and v",
    "lora.base": "format in which the weights of blocks' linears are stored and gathered, as in "
    "QLoRA; default: `train.precision`; part of the recipe",
    "lora.dropout": "dropout probability of the input of each adapter's A, as PEFT's "
    "`lora_dropout`; part of the recipe",
    "lora.whole": "suffixes of the names of embeddings, norms and the head that are trained whole "
    "beside the adapters, as PEFT's `modules_to_save`",
    "lora.groups[].match": "suffixes of the names of linears with other adapters; the first group "
    "that matches a linear applies",
    "lora.groups[].rank": "rank of their adapters; null: `train.lora.rank`",
    "lora.groups[].alpha": "alpha of their adapters; null: `train.lora.alpha`",
    "sequence_blocks": "blocks of equally many tokens into which a sample is cut; each has a "
    "gradient of its own; a multiple of `cluster.context_parallel`; part of the recipe",
    "accumulate": "order of micro-batches: one after the other through the whole model "
    "(micro_batches), or all through a layer before the next one, so that it is gathered once "
    "(layers)",
    "offload_activations": "offloads the activations saved for backward to the host",
    "memory_budget": "limit of a rank's device memory; zgen chooses recompute and offloading to "
    "fit it",
}
DOES: Mapping[str, str] = {
    **_MODEL,
    **_ZERO,
    **{f"train.{key}": does for key, does in _TRAIN.items()},
    "cluster.ranks": "number of ranks: GPUs, or CPU processes",
    "cluster.local": "ranks per host, in rank order (torchrun's LOCAL_WORLD_SIZE), 0: all; "
    "gradients are summed inside hosts first, and parameters are gathered between hosts first",
    "cluster.context_parallel": "neighbouring ranks that share the tokens of a sample, as "
    "torchtitan's context_parallel_degree: each has some blocks of `train.sequence_blocks`, and "
    "around attention they exchange rows for heads (Ulysses)",
    "cluster.device": "device for predicted times: a name (a100-40gb, a100-80gb, b200, cpu, h100, "
    "h200) or the file of `./run calibrate`; null: a usual one of the first target",
    "cluster.links.peers.bandwidth": "bytes per second between ranks of a host, into each, in place"
    " of the device's",
    "cluster.links.peers.latency": "seconds of a collective between them, besides hops and bytes",
    "cluster.links.peers.hop": "seconds more for each further rank of an all-gather or"
    " reduce-scatter, and for each level of an all-reduce's tree",
    "cluster.links.network.bandwidth": "bytes per second between hosts, into each host",
    "cluster.links.network.latency": "seconds of a collective between hosts, besides hops and"
    " bytes",
    "cluster.links.network.hop": "as `cluster.links.peers.hop`, if ranks are on several hosts",
    "cluster.memory.device": "device memory of a rank; a plan that needs more is refused",
    "cluster.memory.host": "host memory of a rank; a plan that needs more is refused",
    "cluster.memory.file": "disk space of a rank; a plan that needs more is refused",
    "targets": "targets that `train.c` can be built for",
    "data.ignore": "token that is never a target; null: none",
    "data.shuffle": "shuffles the samples anew in each epoch, seeded by `train.seed`",
    "data.documents": "joins the documents of a sample, or masks them from each other: attention "
    "and positions restart with each document (packing)",
    "data.end": "token that ends a document, for `mask`",
}
