"""dskeys.py -- every key of a DeepSpeed ds_config.json: its possible values and its effect here.

Each key has one row. A new feature changes its row and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

from .dsrows import (
    ANY,
    COUNT,
    DTYPE,
    EVEN,
    FLAG,
    INTEGER,
    LR,
    OBJECT,
    POSITIVE,
    SHARE,
    SIZE,
    TEXT,
    TEXTS,
    Key,
    Moved,
    Qualifier,
    Same,
    by_width,
    either,
    idle,
    integer,
    legacy,
    listed,
    no,
    parts,
    real,
    to,
    under,
    watch,
    word,
)

_FLOAT = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
_OWNER = "gradients are always reduced to the rank that owns them"
_SCALED = "gradients are summed in f32 and scaled once, in the optimizer"
_LATER = "is not supported yet"
_LOG = "`out/train --log FILE` writes the loss, gradient norm, learning rate and time of every step"
_PROFILE = "`out/train --profile FILE` times "
_QUANTIZED = f"{_LATER}: weights and gradients are communicated in train.precision"
_ONE = "there is only one implementation here"
_AGAIN = "`--set train.recompute=full` recomputes a layer's activations in backward"
_RANK = (
    "is not supported: every rank computes all heads, layers and tokens of its samples"
)

_OPTIMIZERS = {
    "Adam": "AdamW",
    "AdamW": "AdamW",
    "Lion": "Lion",
    "Adagrad": "Adagrad",
    "SGD": "SGD",
}
SCHEDULER_TYPES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle")

# fmt: off
_TOP = {
    "train_batch_size": to("train.global_batch", COUNT),
    "train_micro_batch_size_per_gpu": to("train.micro_batch", COUNT),
    "gradient_accumulation_steps": to("", COUNT),  # follows from the others: batches()
    "managed_gradient_accumulation": no("a step is always train_batch_size samples", FLAG, (True,)),
    "dataloader_drop_last": idle("every batch is full"),
    "gradient_clipping": to("train.optimizer.clip", POSITIVE),

    "communication_data_type": Same(DTYPE, key="train.precision", words=_FLOAT, summed=True),
    "seq_parallel_communication_data_type": idle("rows and heads are exchanged as they "
                                                 "are stored", DTYPE),
    "prescale_gradients": idle(_SCALED, quiet=(False,)),
    "gradient_predivide_factor": idle(_SCALED, real(1e-30), quiet=(1,)),
    "gradient_allreduce_op": no("the loss of a step is a mean",
                                word("mean", "sum"), ("mean",)),
    "sparse_gradients": no("gradients are dense"),
    "disable_allgather": idle("DeepSpeed does not use it", quiet=(False,)),

    "zero_allow_untested_optimizer": idle("every optimizer here works at every stage"),
    "zero_force_ds_cpu_optimizer": idle("every optimizer here also runs on the host"),
    "steps_per_print": idle("every step is printed and logged", POSITIVE),
    "wall_clock_breakdown": watch(f"{_PROFILE}forward, backward, waiting for gathers and "
                                  "reductions, and the optimizer's step"),
    "memory_breakdown": watch("`zgen --emit memory` prints it"),
    "dump_state": watch("`zgen --emit config` and `--emit plan` print the configuration"),
    "log_level": idle(_ONE, TEXT),
    "graph_harvesting": watch("a step runs as CUDA graphs unless the "
                              "optimizer is offloaded"),
    "vocabulary_size": idle("it is model.vocab in the spec", COUNT),
    "use_data_before_expert_parallelism": no(_RANK),
    "sequence_parallel_size": to("cluster.context_parallel", COUNT),
    "allgather_size": Moved(EVEN, to="zero_optimization.allgather_bucket_size"),
    **{name: idle("is a comment", ANY, quiet=()) for name in ("_*", "comment", "//")},

    # no keys of DeepSpeed, but people try them
    "disable_fused_adam": idle("is not a DeepSpeed key; DeepSpeed ignores it, too", ANY),
    "seed": no("is not a DeepSpeed key: use train.seed in the spec", ANY, ()),
    "sm_margin": no("is not a DeepSpeed key: use train.sm_margin in the spec", ANY, ()),
    "deterministic": no("is not a DeepSpeed key: training is always deterministic", ANY, (True,)),
    "learning_rate": no("is not a DeepSpeed key: use optimizer.params.lr", ANY, ()),
    "max_grad_norm": no("is not a DeepSpeed key: use gradient_clipping", ANY, ()),
    "per_device_train_batch_size": no("is not a DeepSpeed key: use train_micro_batch_size_per_gpu",
                                      ANY, ()),
}

_OPTIMIZER = {
    "type": to("train.optimizer.type", TEXT, words=_OPTIMIZERS, weak=("Adam",)),
    "legacy_fusion": idle(_ONE),
    **under("params", {
        "lr": to("train.optimizer.lr", LR),
        "betas": to("train.optimizer.betas", listed(SHARE, 2)),
        "eps": to("train.optimizer.eps", SHARE),
        "weight_decay": to("train.optimizer.weight_decay", POSITIVE),
        "momentum": to("train.optimizer.momentum", SHARE),
        "adam_w_mode": to("train.optimizer.type", FLAG, words={False: "Adam"}),
        "bias_correction": no("bias correction is always on", FLAG, (True,)),
        "amsgrad": no(_LATER),
        "nesterov": to("train.optimizer.nesterov", FLAG),
        "dampening": no(_LATER, SHARE, (0,)),
        "lr_decay": no("use train.schedule in the spec", POSITIVE, (0,)),
        "initial_accumulator_value": no(_LATER, POSITIVE, (0,)),
        "maximize": no("the loss is minimized"),
        "max_grad_norm": no("DeepSpeed refuses it here: use gradient_clipping", POSITIVE, (0,)),
        "torch_adam": idle(_ONE), "set_grad_none": idle("gradient memory is fixed by the plan"),
        "fused": idle(_ONE), "foreach": idle(_ONE), "capturable": idle(_ONE),
        "fp32_optimizer_states": no("use bf16.bf16_optimizer_states", FLAG, (True,)),
        **{name: idle("belongs to an optimizer that is not supported", kind) for name, kind in {
            "max_coeff": POSITIVE, "min_coeff": POSITIVE, "eps_inside_sqrt": FLAG,
            "freeze_step": SIZE, "cuda_aware": FLAG, "comm_backend_name": TEXT,
            "var_freeze_step": SIZE, "var_update_scaler": SIZE, "local_step_scaler": SIZE,
            "local_step_clipper": SIZE, "coeff_beta": SHARE, "factor_max": POSITIVE,
            "factor_min": POSITIVE, "factor_threshold": POSITIVE, "muon_lr": LR, "adam_lr": LR,
            "ns_method": TEXT}.items()},
    }),
}

_SCHEDULER = {
    "type": to("train.schedule.type", TEXT, words={w: w for w in SCHEDULER_TYPES}),
    **under("params", {
        **{name: to(f"train.schedule.{name}", kind) for name, kind in {
            "warmup_type": word("log", "linear"), "warmup_min_ratio": SHARE, "cos_min_ratio": SHARE,
            "cycle_min_lr": LR, "cycle_max_lr": LR, "decay_lr_rate": POSITIVE,
            "cycle_first_step_size": COUNT, "cycle_second_step_size": COUNT,
            "cycle_first_stair_count": SIZE, "cycle_second_stair_count": SIZE,
            "decay_step_size": SIZE, "cycle_momentum": FLAG, "cycle_min_mom": SHARE,
            "cycle_max_mom": SHARE, "decay_mom_rate": POSITIVE}.items()},
        "warmup_min_lr": to("train.schedule.warmup_min_lr", LR, auto=lambda spec: 0, rule="0"),
        "warmup_max_lr": to("train.schedule.warmup_max_lr", LR, rule="train.optimizer.lr",
                            auto=lambda spec: spec("train.optimizer.lr")),
        "warmup_num_steps": to("train.schedule.warmup_num_steps", SIZE,
                               auto=lambda spec: spec("train.schedule.warmup") or 0,
                               rule="train.schedule.warmup"),
        "total_num_steps": to("train.schedule.total_num_steps", COUNT, rule="train.schedule.steps",
                              required=False,
                              auto=lambda spec: spec("train.schedule.steps")),
        "last_batch_iteration": no("a schedule always starts at the first step", INTEGER, (-1,)),
        **{f"lr_range_test_{name}": idle("belongs to a schedule that is not supported", kind)
           for name, kind in {"min_lr": LR, "step_size": COUNT, "step_rate": POSITIVE,
                              "staircase": FLAG}.items()},
    }),
}

_PRECISION = {
    "fp16.enabled": to("train.precision", FLAG, words={True: "f16", False: "f32"}, weak=(False,)),
    **{f"fp16.{name}": to(f"train.loss_scale.{ours}", kind) for name, ours, kind in (
        ("loss_scale", "scale", POSITIVE),
        ("initial_scale_power", "initial_scale_power", integer(0, 127)),
        ("loss_scale_window", "window", COUNT), ("hysteresis", "hysteresis", COUNT),
        ("consecutive_hysteresis", "consecutive_hysteresis", FLAG),
        ("min_loss_scale", "min", POSITIVE))},
    "fp16.auto_cast": idle("the input is tokens, not floating-point numbers", quiet=(False,)),
    "fp16.fp16_master_weights_and_grads": no("masters and gradient sums are f32, as in DeepSpeed "
                                             "without "
                                             "it"),
    "bf16.enabled": to("train.precision", FLAG, words={True: "bf16", False: "f32"}, weak=(False,)),
    "bf16.check_grad_overflow": no("non-finite gradients always skip the step", FLAG, (True,)),
    "bf16.check_overflow": no("is not a DeepSpeed key: use check_grad_overflow", ANY, ()),
    "bf16.immediate_grad_update": idle("gradients are summed in f32 as they are computed"),
    "bf16.bf16_master_weights_and_grads": to("train.optimizer.masters", FLAG,
                                             words={True: False, False: True}),
    "bf16.bf16_optimizer_states": to("train.optimizer.moments", FLAG,
                                     words={True: "bf16", False: "f32"}),
    "data_types.grad_accum_dtype": no("gradients are always summed in f32", DTYPE, ("fp32",)),
    "data_types.param_dtype": Same(DTYPE, key="train.precision", words=_FLOAT),
    "data_types.buffer_dtype": idle("models have no buffers", DTYPE),
    "torch_autocast.enabled": no("belongs to PyTorch: use bf16"),
    **under("torch_autocast", parts(dtype=TEXT, lower_precision_safe_modules=TEXTS)),
    "amp.enabled": legacy("Apex: use bf16", FLAG, (False,)),
    "amp.*": Qualifier(ANY),
}

_STAGE3 = {  # after stage3_, or without it
    "prefetch_bucket_size": to("zero.stage3_prefetch_bucket_size", SIZE, stages="3",
                               auto=by_width(lambda w: int(0.9 * w ** 2)),
                               rule="0.9 x width x width"),
    "param_persistence_threshold": to("zero.stage3_param_persistence_threshold", SIZE, stages="3",
                                      auto=by_width(lambda w: 10 * w),
                                      rule="10 x width"),
    "max_live_parameters": to("zero.stage3_max_live_parameters", SIZE, stages="3"),
    "max_reuse_distance": to("zero.stage3_max_reuse_distance", SIZE, stages="3"),
    "model_persistence_threshold": no(f"{_LATER}: zero.replicate in the spec names tensors to "
                                      "keep whole",
                                      SIZE, (2 ** 63 - 1,), stages="3"),
    "gather_16bit_weights_on_model_save": idle("weights are always saved unsharded", stages="3"),
    "module_granularity_threshold": idle("a unit is gathered whole", INTEGER, stages="3"),
    "use_all_reduce_for_fetch_params": idle("units are gathered by all-gather", stages="3"),
    "allgather_sequential": idle("units are gathered in place, without copies", stages="3"),
}

_ZERO = {
    "stage": to("zero.stage", integer(0, 3)),
    "reduce_bucket_size": to("zero.reduce_bucket_size", COUNT, rule="width x width",
                             auto=by_width(lambda w: w ** 2)),
    "allgather_bucket_size": to("zero.allgather_bucket_size", EVEN),
    "overlap_comm": to("zero.overlap_comm", FLAG),
    **{f"stage3_{name}": row for name, row in _STAGE3.items()},
    **{name: Moved(row.kind, row.stages, to=f"zero_optimization.stage3_{name}", old=False)
       for name, row in _STAGE3.items()},
    "contiguous_gradients": idle("gradients are always contiguous"),
    "reduce_scatter": idle(_OWNER),
    "use_multi_rank_bucket_allreduce": idle(_OWNER),
    "allgather_partitions": idle("partitions are always gathered by all-gather"),
    "round_robin_gradients": idle("every rank owns an equal share of every unit"),
    "load_from_fp32_weights": idle("masters are always f32"),
    "elastic_checkpoint": idle("saved weights are unsharded and load on any number of ranks"),
    "sub_group_size": to("zero.sub_group_size", SIZE, stages="123"),
    "ignore_unused_parameters": idle("every parameter is used"),
    "memory_efficient_linear": idle("no module is patched", stages="3"),
    "override_module_apply": idle("no module is patched", stages="3"),
    "pipeline_loading_checkpoint": idle("every rank reads only its own shard", stages="3"),
    "log_trace_cache_warnings": idle("there is no tracing", stages="3"),
    "enable_sanity_checks": idle("every plan is checked when it is generated"),
    "save_muon_momentum_buffer_in_memory": idle("belongs to an optimizer that is not supported"),
    "legacy_stage1": no("DeepSpeed refuses it"),
    "grad_hooks": no("appears only in DeepSpeed's documentation; DeepSpeed refuses it", ANY, ()),
    "zero_hpz_partition_size": to("zero.hpz_partition_size", SIZE, stages="3", quiet=(0, 1)),
    "zero_quantized_weights": no(_QUANTIZED, stages="3"),
    "zero_quantized_nontrainable_weights": no(_QUANTIZED, stages="3"),
    "zero_quantized_gradients": no(_QUANTIZED, stages="3"),
    "zeropp_loco_param": no(_QUANTIZED, OBJECT, ({},), stages="3"),
    **under("zeropp_loco_param", parts(err_beta=SHARE, reset_T=COUNT)),
    "mics_shard_size": to("zero.mics_shard_size", integer(-1), stages="3",
                          quiet=(-1, 0)),
    "mics_hierarchical_params_gather": idle("parameters are gathered between hosts first if "
                                            "cluster.local gives the ranks per host"),
    **{f"leaf_module.{name}": idle("a unit is gathered whole", either(TEXT, TEXTS), stages="3")
       for name in ("classes", "names", "name_suffixes")},
    "offload_optimizer.device": to("zero.offload_optimizer.device", word("none", "cpu", "nvme"),
                                   stages="123"),
    "offload_optimizer.buffer_count": to("zero.offload_optimizer.buffer_count", COUNT),
    "offload_optimizer.ratio": to("zero.offload_optimizer.ratio", SHARE),
    "offload_optimizer.super_offload": no(_LATER),
    "offload_optimizer.pin_memory": idle("a GPU's host arena is always pinned", quiet=(True,)),
    "offload_optimizer.nvme_path": to("zero.offload_optimizer.nvme_path", TEXT),
    "offload_optimizer.cpuadam_cores_perc": idle("out/train --threads sets them", SHARE),
    **{f"offload_optimizer.{name}": idle("tiles are always pipelined", quiet=(False,))
       for name in ("pipeline_read", "pipeline_write", "fast_init")},
    "offload_param.device": to("zero.offload_param.device", word("none", "cpu", "nvme"),
                               stages="3"),
    "offload_param.pin_memory": idle("a GPU's host arena is always pinned", quiet=(True,)),
    "offload_param.nvme_path": to("zero.offload_param.nvme_path", TEXT),
    **{f"offload_param.{name}": idle("the plan reserves memory for every prefetched unit", SIZE)
       for name in ("buffer_count", "buffer_size")},
    "offload_param.max_in_cpu": to("zero.offload_param.max_in_cpu", SIZE),
    "zenflow": no(f"{_LATER}: offload_optimizer runs the whole update on the host", OBJECT, ({},)),
    **under("zenflow", parts(
        topk_ratio=SHARE, select_strategy=word("auto", "step", "epoch"), select_interval=COUNT,
        update_interval=COUNT, overlap_step=FLAG, offload=FLAG, auto_ratio=SHARE,
        full_warm_up_rounds=SIZE, pt_reserved_cores_perc=SHARE, steps_per_epoch=COUNT)),
    "cpu_offload": Moved(FLAG, to="zero_optimization.offload_optimizer.device",
                         words={True: "cpu", False: "none"}),
    "cpu_offload_param": Moved(FLAG, to="zero_optimization.offload_param.device",
                               words={True: "cpu", False: "none"}),
    "cpu_offload_params": Moved(FLAG, to="zero_optimization.offload_param.device",
                                words={True: "cpu", False: "none"}),
    "cpu_offload_use_pin_memory": Moved(FLAG, to="zero_optimization.offload_optimizer.pin_memory"),
    "stage3_gather_fp16_weights_on_model_save": Moved(
        FLAG, "3", to="zero_optimization.stage3_gather_16bit_weights_on_model_save"),
}

_REST = {
    "elasticity.enabled": no("results are bit-identical on any number of ranks that divides "
                             "train_batch_size: set it with --set cluster.ranks"),
    **under("elasticity", parts(
        max_train_batch_size=COUNT, micro_batch_sizes=listed(COUNT), min_gpus=COUNT, max_gpus=COUNT,
        min_time=POSITIVE, prefer_larger_batch=FLAG, version=POSITIVE,
        ignore_non_elastic_batch_info=FLAG, num_gpus_per_node=COUNT, model_parallel_size=COUNT)),
    "elasticity.prefer_large_batch": idle("DeepSpeed ignores it: it reads prefer_larger_batch",
                                          ANY),

    "aio.thread_count": idle("DeepSpeed ignores it: it reads intra_op_parallelism", ANY),
    "aio.block_size": to("zero.aio.block_size", COUNT),
    "aio.queue_depth": to("zero.aio.queue_depth", COUNT),
    **{f"aio.{name}": idle("tile reads, shard reads and writes each have a queue, queue_depth "
                           "blocks deep", kind)
       for name, kind in {"intra_op_parallelism": COUNT, "single_submit": FLAG,
                          "overlap_events": FLAG}.items()},
    "aio.use_gds": no(f"{_LATER}: file reads go through host memory"),

    "activation_checkpointing.cpu_checkpointing": to("train.offload_activations", FLAG),
    "activation_checkpointing.partitioned_activations": idle(
        "DeepSpeed ignores it: it reads partition_activations", ANY),
    "activation_checkpointing.profile": watch(f"{_PROFILE}every function of a step"),
    "activation_checkpointing.partition_activations": idle(
        f"a rank has only the activations of its own samples; {_AGAIN}", quiet=(False,)),
    **{f"activation_checkpointing.{name}": idle(_AGAIN, kind, quiet=(False,))
       for name, kind in {"contiguous_memory_optimization": FLAG, "number_checkpoints": SIZE,
                          "synchronize_checkpoint_boundary": FLAG, "checkpoint_in_cpu": FLAG}
       .items()},

    "checkpoint.load_universal": no("`out/train --load` reads safetensors"),
    **{f"checkpoint.{name}": idle("`out/train --save` writes safetensors", kind)
       for name, kind in {
           "tag_validation": word("Ignore", "Warn", "Fail"), "use_node_local_storage": FLAG,
           "parallel_write.pipeline_stage": FLAG, "checkpoint_serialization": FLAG,
           "writer.type": word("FAST", "PYTHON", "MOCK"), "writer.decoupled": FLAG,
           "writer.io_buffer_size": SIZE, "writer.io_buffer_double": FLAG,
           "writer.show_statistics": FLAG,
           "writer.data_parallel": word("REPLICA", "SOCKET", "MACHINE"),
           "writer.io_multiplier": COUNT}.items()},
    "nebula.enabled": no("`out/train --save` writes safetensors"),
    **under("nebula", parts(nebula_load_path=TEXT, persistent_storage_path=TEXT, load_path=TEXT,
                            persistent_time_interval=SIZE, num_of_version_in_retention=SIZE,
                            enable_nebula_load=FLAG)),
    "datastates_ckpt": no("`out/train --save` writes safetensors", ANY, (False, {})),

    **{f"compile.{name}": idle("everything is compiled ahead of time", kind, quiet=(False,))
       for name, kind in {
           "deepcompile": FLAG, "passes": TEXTS, "offload_parameters": FLAG,
           "offload_opt_states": FLAG, "offload_activation": FLAG,
           "offload_activation_pin_memory": FLAG, "free_activation": FLAG,
           "free_activation_threshold": SIZE, "double_buffer": FLAG, "symmetric_memory": FLAG,
           "sync_before_reduce": FLAG, "sync_after_reduce": FLAG, "sync_before_allgather": FLAG,
           "sync_after_allgather": FLAG, "keep_int_input_tensors": FLAG,
           "keep_all_input_tensors": FLAG, "debug_log": FLAG, "enabled": FLAG, "disable": FLAG,
           "backend": TEXT, "kwargs": OBJECT}.items()},

    "timers.throughput.enabled": idle("every step is timed without synchronizing"),
    "timers.throughput.synchronized": idle("every step is timed without synchronizing"),
    "flops_profiler.enabled": watch(f"{_PROFILE}every function of the --profile-steps, with its "
                                    "GFLOP/s; `zgen --emit explain` prints the FLOPs of a step"),
    **under("flops_profiler", parts(
        profile_step=COUNT, module_depth=INTEGER, top_modules=COUNT, detailed=FLAG,
        output_file=TEXT, recompute_fwd_factor=POSITIVE)),
    "comms_logger.enabled": watch(f"{_PROFILE}every collective, with its bytes; `zgen --emit "
                                  "explain` prints the bytes and collectives of a step"),
    **under("comms_logger", parts(verbose=FLAG, prof_all=FLAG, debug=FLAG, prof_ops=TEXTS)),
    **{f"{name}.enabled": watch(_LOG) for name in ("tensorboard", "wandb", "csv_monitor", "comet")},
    **{f"{name}.{key}": Qualifier(TEXT) for name in ("tensorboard", "csv_monitor")
       for key in ("output_path", "job_name")},
    **under("wandb", parts(group=TEXT, team=TEXT, project=TEXT)),
    **under("comet", parts(
        samples_log_interval=COUNT, project=TEXT, workspace=TEXT, api_key=TEXT,
        experiment_name=TEXT, experiment_key=TEXT, online=FLAG,
        mode=word("get", "create", "get_or_create"))),

    "autotuning.enabled": watch("no trials are run: `zgen --emit memory` and `--emit explain` "
                                "print what a configuration costs"),
    "autotuning.*": Qualifier(ANY),
    "tensor_parallel.autotp_size": no(_RANK, SIZE, (0, 1)),
    "tensor_parallel.*": Qualifier(ANY),
    "expert_parallel.enabled": no(_RANK),
    "expert_parallel.*": Qualifier(ANY),
    "hybrid_engine.enabled": no("is for inference during training"),
    "hybrid_engine.*": Qualifier(ANY),
    "pipeline.*": idle("there is no pipeline parallelism", ANY),
    "data_efficiency.enabled": no("whole samples are taken in the order of the token file"),
    "data_efficiency.*": Qualifier(ANY),
    "compression_training": no("is not supported", OBJECT, ({},)),
    "weight_quantization": no("is for inference", OBJECT, ({},)),

    "sparse_attention": legacy("block-sparse attention", unless=({},)),
    "quantize_training": legacy("quantized training (MoQ)", unless=({}, {"enabled": False})),
    "eigenvalue": legacy("quantized training (MoQ)", unless=({}, {"enabled": False})),
    "curriculum_learning.enabled": legacy("curriculum learning", FLAG, (False,)),
    "curriculum_learning.*": Qualifier(ANY),
    "progressive_layer_drop.enabled": legacy("progressive layer dropping", FLAG, (False,)),
    "progressive_layer_drop.*": Qualifier(ANY),
}

# fmt: on
TABLE: Mapping[str, Key] = {
    **_TOP,
    **under("optimizer", _OPTIMIZER),
    **under("scheduler", _SCHEDULER),
    **_PRECISION,
    **{
        f"bfloat16.{name.partition('.')[2]}": Moved(row.kind, to=name, old=False)
        for name, row in _PRECISION.items()
        if name.startswith("bf16.")
    },
    **under("zero_optimization", _ZERO),
    **_REST,
}

# Switch of a section: while it is off, the section's other keys have no effect.
SWITCHES: Mapping[str, str] = {
    name.rpartition(".")[0]: name
    for name in TABLE
    if name.endswith((".enabled", ".device", ".autotp_size"))
    and not name.startswith(("bf16.", "bfloat16.", "timers.", "compile."))
}
