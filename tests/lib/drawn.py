"""drawn.py -- hypothesis strategies for small specs composed of every op kind; a spec is the
mapping that a YAML file holds. Shapes are small and seldom round."""

from hypothesis import strategies as st

Mapping = dict[str, object]
flag = st.booleans()
odd = st.integers(1, 24)


@st.composite
def ropes(draw) -> Mapping:
    rope: Mapping = {"theta": draw(st.sampled_from([10000, 500000]))}
    context = {"original_context": draw(st.integers(4, 64))}
    scalings: dict[str, Mapping] = {
        "linear": {},
        "llama3": {
            "low_freq_factor": 1,
            "high_freq_factor": draw(st.sampled_from([2, 4])),
            **context,
        },
        "yarn": {
            "beta_fast": draw(st.sampled_from([2, 32])),
            "truncate": draw(flag),
            **context,
        },
    }
    if draw(flag):
        kind = draw(st.sampled_from(sorted(scalings)))
        factor = draw(st.sampled_from([2, 8]))
        rope["scaling"] = {"type": kind, "factor": factor, **scalings[kind]}
    return rope


@st.composite
def attentions(draw, name: str, layers: int) -> Mapping:
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    turned = draw(flag)
    args: Mapping = {
        "name": name,
        "heads": groups * per_group,
        "kv_heads": groups,
        "head_dim": draw(st.integers(1, 10)) * (2 if turned else 1),
        "bias": draw(flag),
        "out_bias": draw(flag),
        "qk_norm": draw(st.sampled_from([False, True, "whole"])),
    }
    if turned:
        args["rope"] = draw(ropes())
    if draw(flag):
        some = st.integers(1, 24)
        args["window"] = draw(
            some | st.lists(st.none() | some, min_size=layers, max_size=layers)
        )
    return {"attention": args}


@st.composite
def norms(draw, name: str) -> Mapping:
    args: Mapping = {
        "name": name,
        "eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
    }
    if draw(flag):
        return {"rmsnorm": args}
    return {"layernorm": {**args, "bias": draw(flag)}}


@st.composite
def mlps(draw, name: str, width: int, family: str) -> list[Mapping]:
    """up, a nonlinearity, down. GPT-2's layout keeps one tensor per linear, so no gate beside up"""
    inner, bias = draw(odd), draw(flag)
    if family != "gpt2" and draw(flag):
        up: list[Mapping] = [
            {
                "linear": {
                    "name": [name + ".gate", name + ".up"],
                    "out": [inner, inner],
                    "bias": bias,
                }
            },
            {"swiglu": {}},
        ]
    else:
        up = [
            {"linear": {"name": name + ".up", "out": inner, "bias": bias}},
            draw(
                st.sampled_from(
                    [{"gelu": "tanh"}, {"gelu": "erf"}, {"relu2": {}}]
                )
            ),
        ]
    return [
        *up,
        {"linear": {"name": name + ".down", "out": width, "bias": draw(flag)}},
    ]


@st.composite
def branches(
    draw, name: str, width: int, family: str, layers: int
) -> list[Mapping]:
    ops = [draw(norms(name + ".norm"))] if draw(flag) else []
    if draw(flag):
        return [*ops, draw(attentions(name + ".attn", layers))]
    return [*ops, *draw(mlps(name + ".mlp", width, family))]


@st.composite
def blocks(draw, name: str, width: int, family: str) -> Mapping:
    ops: list[Mapping] = []
    layers = draw(st.integers(1, 3))
    for i in range(draw(st.integers(1, 3))):
        branch = draw(branches(f"part{i}", width, family, layers))
        ops += (
            branch if draw(st.integers(0, 4)) == 0 else [{"residual": branch}]
        )
    return {
        "blocks": layers,
        "name": name + ".{l}",
        "ops": ops,
    }


@st.composite
def models(draw) -> tuple[Mapping, int]:
    """a model and the length of its samples"""
    family, width = (
        draw(st.sampled_from(["gpt2", "llama"])),
        draw(st.integers(4, 40)),
    )
    vocab, T = draw(st.integers(2, 300)), draw(st.integers(1, 40))
    embedding: Mapping = {"tokens": "tokens"}
    if draw(flag):
        embedding |= {
            "positions": "positions",
            "context": T + draw(st.integers(0, 3)),
        }
    last = {"tied": "tokens"} if draw(flag) else {"name": "out", "out": vocab}
    head = [*([draw(norms("last"))] if draw(flag) else []), {"linear": last}]
    middle = [
        draw(blocks(name, width, family))
        for name in ("h", "g")[: draw(st.integers(1, 2))]
    ]
    return {
        "vocab": vocab,
        "width": width,
        "names": family,
        "units": [{"embedding": embedding}, *middle, {"head": head}],
    }, T


@st.composite
def specs(draw) -> Mapping:
    """a whole spec for one rank; Adam's eps is far above the rounding noise of float32 gradients,
    so that updates are smooth in them"""
    model, T = draw(models())
    optimizer = {
        "type": "AdamW",
        "lr": 0.01,
        "betas": [0.9, 0.95],
        "eps": 0.01,
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "clip": draw(st.sampled_from([0.0, 0.5])),
    }
    schedule = {
        "type": draw(st.sampled_from(["constant", "linear", "cosine"])),
        "warmup": draw(st.integers(0, 3)),
        "steps": draw(st.integers(4, 9)),
        "min_lr": 0.001,
    }
    packed = model["vocab"] > 16 and draw(flag)
    return {
        "name": "drawn",
        "data": {"documents": "mask", "end": 1} if packed else {},
        "model": model,
        "zero": {"stage": 0},
        "train": {
            "global_batch": 2 * draw(st.integers(1, 2)),
            "micro_batch": draw(st.integers(1, 2)),
            "sequence": T,
            "precision": "f32",
            "optimizer": optimizer,
            "schedule": schedule,
            "seed": 1,
            "dropout": 0.0 if packed else draw(st.sampled_from([0.0, 0.3])),
        },
        "cluster": {"ranks": 1},
        "targets": ["cpu"],
    }
