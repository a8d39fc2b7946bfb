"""oracle.py -- a float64 evaluator of a spec: loss, all gradients and an optimizer's steps, in
plain numpy.

The tests compare trained programs with it. It shares only the spec reader with the generator; every
backward is written by hand, and test_oracle.py checks it against PyTorch and finite differences.

Invariants
 1. Parameters and gradients are {name: array}, with the names and layouts of the weights' file.
 2. An op's forward returns (y, back); back(dy) returns dx and adds to the gradients it owns, so
    that a tensor used twice (a tied head) sums its uses.

Letters: B batch, T sequence, C width, V vocab, H query heads, G key and value heads, D head size.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from tests.lib import chance

Arrays = dict[str, np.ndarray]
Back = Callable[[np.ndarray], np.ndarray]


# ---- ops without parameters


def gelu(x: np.ndarray, kind: str) -> tuple[np.ndarray, Back]:
    if kind == "tanh":
        root = math.sqrt(2 / math.pi)
        t = np.tanh(root * (x + 0.044715 * x**3))
        share, slope = (
            (1 + t) / 2,
            (1 - t * t) / 2 * root * (1 + 3 * 0.044715 * x * x),
        )
    else:
        share = (1 + np.vectorize(math.erf, otypes=[x.dtype])(x / math.sqrt(2))) / 2
        slope = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return x * share, lambda dy: dy * (share + x * slope)


def relu2(x: np.ndarray) -> tuple[np.ndarray, Back]:
    above = np.maximum(x, 0)
    return above * above, lambda dy: dy * 2 * above


def geglu(x: np.ndarray) -> tuple[np.ndarray, Back]:
    """Return y [B,T,F] = gelu(gate) * up of x [B,T,2F], which is gate and up."""
    gate, up = np.split(x, 2, axis=-1)
    y, back_gate = gelu(gate, "tanh")

    def back(dy: np.ndarray) -> np.ndarray:
        return np.concatenate([back_gate(dy * up), dy * y], axis=-1)

    return y * up, back


def swiglu(x: np.ndarray) -> tuple[np.ndarray, Back]:
    """Return y [B,T,F] = silu(gate) * up of x [B,T,2F], which is gate and up."""
    gate, up = np.split(x, 2, axis=-1)
    s = 1 / (1 + np.exp(-gate))

    def back(dy: np.ndarray) -> np.ndarray:
        return np.concatenate(
            [dy * up * s * (1 + gate * (1 - s)), dy * gate * s], axis=-1
        )

    return gate * s * up, back


def rope_angles(rope: dict, T: int, D: int, length: int) -> np.ndarray:
    """Return angles [T, D/2]. llama3 and yarn slow waves that are long relative to the original
    context. length: tokens of a sample, by which longrope chooses its factors, and dynamic its
    theta."""
    theta, scaling = rope["theta"], rope.get("scaling")
    if scaling and scaling["type"] == "dynamic":
        factor, longer = scaling["factor"], length / scaling["original_context"]
        theta *= max(factor * longer - (factor - 1), 1.0) ** (D / (D - 2))
    freq = 1 / theta ** (np.arange(D // 2) * 2 / D)
    if scaling and scaling["type"] == "linear":
        freq /= scaling["factor"]
    if scaling and scaling["type"] == "longrope":
        long = length > scaling["original_context"]
        freq /= np.array(scaling["long_factor" if long else "short_factor"])
    if scaling and scaling["type"] == "yarn":
        # index of a pair, as a function of its turns in the original context
        turns = np.array([scaling["beta_fast"], scaling["beta_slow"]])
        period = scaling["original_context"] / (2 * math.pi * turns)
        low, high = D / 2 * np.log(period) / math.log(rope["theta"])
        if scaling["truncate"]:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, D - 1)
        high += 0.001 * (low == high)
        slowed = np.clip((np.arange(D // 2) - low) / (high - low), 0, 1)
        freq *= 1 - slowed + slowed / scaling["factor"]
    if scaling and scaling["type"] == "llama3":
        context = scaling["original_context"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        wave = 2 * math.pi / freq
        smooth = (context / wave - low) / (high - low)
        slow = freq / scaling["factor"]
        middle = (1 - smooth) * slow + smooth * freq
        freq = np.where(
            wave > context / low,
            slow,
            np.where(wave < context / high, freq, middle),
        )
    return np.arange(T)[:, None] * freq


def turn(
    x: np.ndarray, angle: np.ndarray, rope: dict, interleaved: bool = False
) -> np.ndarray:
    """Return x [B,N,T,D] with pairs of its first W elements rotated by angle [T, W/2]: (i, i + W/2),
    or neighbours; yarn and longrope scale them up."""
    W = 2 * angle.shape[-1]
    x, rest = x[..., :W], x[..., W:]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else np.split(x, 2, axis=-1)
    grown = (rope.get("scaling") or {}).get("attention_factor", 1.0)
    c = (grown * np.cos(angle)).astype(x.dtype)
    s = (grown * np.sin(angle)).astype(x.dtype)
    pair = [a * c - b * s, b * c + a * s]
    if interleaved:
        made = np.stack(pair, axis=-1).reshape(x.shape)
    else:
        made = np.concatenate(pair, axis=-1)
    return np.concatenate([made, rest], axis=-1)


def softcap(x: np.ndarray, cap: float | None) -> tuple[np.ndarray, Back]:
    """Return cap * tanh(x / cap), or x without a cap."""
    if not cap:
        return x, lambda dy: dy
    t = np.tanh(x / cap)
    return cap * t, lambda dy: dy * (1 - t * t)


def causal(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    factor: np.ndarray | None = None,
) -> tuple[np.ndarray, Callable]:
    """Return causal attention of q [B,H,T,D], k and v [B,G,T,D]. Head h reads k and v of head h /
    (H/G); a row sees the last `window` rows, including itself. scale: of scores, usually 1 /
    sqrt(D); cap: of scores; factor [B,H,T,T]: of probabilities, after the softmax."""
    (B, H, T, D), G = q.shape, k.shape[1]
    k, v = np.repeat(k, H // G, axis=1), np.repeat(v, H // G, axis=1)
    scale = scale or 1 / math.sqrt(D)
    score, bend = softcap(q @ k.swapaxes(2, 3) * scale, cap)
    seen = np.tri(T, dtype=bool)
    if window:
        seen &= ~np.tri(T, k=-window, dtype=bool)
    score = np.where(seen, score, -np.inf)
    p = np.exp(score - score.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    f = np.float64(1) if factor is None else factor

    def back(dy: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        dp = f * (dy @ v.swapaxes(2, 3))
        ds = bend(p * (dp - (dp * p).sum(-1, keepdims=True))) * scale
        dk, dv = (
            (m.swapaxes(2, 3) @ d).reshape(B, G, H // G, T, D).sum(2)
            for m, d in ((ds, q), (p * f, dy))
        )
        return ds @ k, dk, dv

    return (p * f) @ v, back


def cross_entropy(
    logits: np.ndarray,
    targets: np.ndarray,
    smoothing: float = 0.0,
    penalty: float = 0.0,
) -> tuple[float, int, np.ndarray]:
    """Return the mean loss over the targets >= 0, their number, and d(loss)/d(logits). logits
    [B,T,V]; smoothing: share of a target that is spread over all tokens; penalty: of the squared
    logsumexp."""
    valid = targets >= 0
    n = int(valid.sum())
    top = logits.max(-1, keepdims=True)
    lse = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    logp = logits - lse
    hot = np.where(valid, targets, 0)[..., None]
    wanted = np.full_like(logits, smoothing / logits.shape[-1])
    more = np.take_along_axis(wanted, hot, -1) + 1 - smoothing
    np.put_along_axis(wanted, hot, more, -1)
    each = -(wanted * logp).sum(-1) + penalty * lse[..., 0] ** 2
    d = np.exp(logp) * (1 + 2 * penalty * lse) - wanted
    return (
        float(each[valid].sum()) / max(n, 1),
        n,
        d * valid[..., None] / max(n, 1),
    )


# ---- the model


def head(spec) -> object:
    """Return the op that computes the logits."""
    return spec.model.units[-1].ops[-1]


def into(spec) -> tuple[str, ...]:
    """Return the linears of queries, keys and values."""
    one = {"gpt2": ("c_attn",), "phi3": ("qkv_proj",), "neox": ("query_key_value",)}
    return one.get(spec.model.names, ("q_proj", "k_proj", "v_proj"))


def behind(spec) -> str:
    """Return the linear behind the heads."""
    others = {"gpt2": "c_proj", "neox": "dense", "phi": "dense"}
    return others.get(spec.model.names, "o_proj")


def size_of(lora, name: str) -> tuple[int, float]:
    """Return rank and alpha of a linear's adapter, by the first group that matches it."""
    for group in lora.groups:
        if any(f".{name}".endswith(f".{word}") for word in group.match):
            return group.rank or lora.rank, group.alpha or lora.alpha
    return lora.rank, lora.alpha


def shapes(spec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the weights' file, in the order of use."""
    found, gpt2, C = {}, spec.model.names == "gpt2", spec.model.width

    def linear(name: str, K: int, N: int, bias: bool, flip: bool = not gpt2) -> None:
        found[name + ".weight"] = (N, K) if flip else (K, N)
        found.update({name + ".bias": (N,)} if bias else {})
        lora = spec.train.lora
        if lora and name.rpartition(".")[2] in lora.match:
            rank, _ = size_of(lora, name)
            found[name + ".lora_A.weight"] = (rank, K)
            found[name + ".lora_B.weight"] = (N, rank)

    def attention(name: str, a: dict, width: int) -> None:
        H, G, D = a["heads"], a["kv_heads"], a["head_dim"]
        names = into(spec)
        each = (H + 2 * G,) if len(names) == 1 else (H, G, G)
        parts = dict(zip(names, each, strict=True))
        for part, heads in parts.items():
            linear(f"{name}.{part}", width, heads * D, a["bias"])
        for part, heads in (("q", H), ("k", G)) if a["qk_norm"] else ():
            wide = heads * D if a["qk_norm"] == "whole" else D
            found[f"{name}.{part}_norm.weight"] = (wide,)
        linear(f"{name}.{behind(spec)}", H * D, C, a["out_bias"])

    def width_after(o, width: int, unit: str) -> int:
        a = o.args
        if o.kind == "embedding":
            found[a["tokens"] + ".weight"] = (spec.model.vocab, C)
            if a["positions"]:
                found[a["positions"] + ".weight"] = (a["context"], C)
            return C
        if o.kind == "residual":
            walk(o.ops, width, unit)
        elif o.kind == "parallel":
            return [walk(branch.ops, width, unit) for branch in o.ops][0]
        elif o.kind == "linear" and not a["tied"]:
            for name, out in zip(a["name"], a["out"], strict=True):
                linear(
                    unit + name,
                    width,
                    out,
                    a["bias"],
                    not gpt2 or o is head(spec),
                )
            return sum(a["out"])
        elif o.kind == "attention":
            attention(unit + a["name"], a, width)
            return C
        elif o.kind in ("layernorm", "rmsnorm"):
            if a.get("weight", True):
                found[unit + a["name"] + ".weight"] = (width,)
            found.update(
                {unit + a["name"] + ".bias": (width,)} if a.get("bias") else {}
            )
        return width // 2 if o.kind in ("swiglu", "geglu") else width

    def walk(ops: Sequence, width: int, unit: str) -> int:
        for o in ops:
            width = width_after(o, width, unit)
        return width

    width = C
    for unit in spec.model.units:
        for prefix in prefixes(unit):
            width = walk(unit.ops, width, prefix)
    return found


def prefixes(unit) -> list[str]:
    """Return the prefix of an op's name for each repeat of a unit."""
    name = unit.name + "." if unit.name else ""
    return [name.replace("{l}", str(l)) for l in range(unit.repeat)]


class Net:
    """One forward and backward of a spec's model at given parameters."""

    def __init__(
        self,
        spec,
        params: Arrays,
        real: type = np.float64,
        keys: Sequence[int] = (),
    ):
        """Prepare a pass. keys: of the samples' random numbers; without them there is no
        dropout."""
        self.spec, self.real, self.keys, self.places = spec, real, keys, 0
        self.layer = 0  # index in its entry of blocks
        self.p = {name: np.asarray(x, real) for name, x in params.items()}
        self.grads = {name: np.zeros_like(x) for name, x in self.p.items()}

    def add(self, name: str, g: np.ndarray) -> None:
        self.grads[name] += g

    # -- ops with parameters: x [B,T,C]

    def linear(
        self, x: np.ndarray, name: str, bias: bool, by_token: bool = False
    ) -> tuple[np.ndarray, Back]:
        """Return y = x . w + b. GPT-2's files have w as [in,out], the others as [out,in]; all have
        embeddings and heads as [tokens,width]."""
        weight = name + ".weight"
        flip = by_token or self.spec.model.names != "gpt2"
        w = self.p[weight].T if flip else self.p[weight]  # [in,out]
        y = x @ w
        if bias:
            y = y + self.p[name + ".bias"]
        adapter = self.adapter(x, name)
        if adapter:
            y = y + adapter[0]

        def back(dy: np.ndarray) -> np.ndarray:
            dw = x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])
            self.add(weight, dw.T if flip else dw)
            if bias:
                self.add(name + ".bias", dy.sum((0, 1)))
            dx = dy @ w.T
            return dx + adapter[1](dy) if adapter else dx

        return y, back

    def adapter(self, x: np.ndarray, name: str) -> tuple[np.ndarray, Back] | None:
        """Return y = scale * (dropout(x) A') B' if a linear has an adapter, else None; PEFT's A is
        [rank,in], B is [out,rank]."""
        names = [f"{name}.lora_{which}.weight" for which in "AB"]
        if names[0] not in self.p:
            return None
        A, B = (self.p[n] for n in names)
        lora = self.spec.train.lora
        rank, alpha = size_of(lora, name)
        scale = alpha / (rank**0.5 if lora.rslora else rank)
        x, undropped = self.dropped(x, lambda dx: dx, lora.dropout)
        low = x @ A.T

        def back(dy: np.ndarray) -> np.ndarray:
            d = scale * dy
            dlow = d @ B
            for n, left, right in zip(names, (dlow, d), (x, low), strict=True):
                self.add(
                    n,
                    left.reshape(-1, left.shape[-1]).T
                    @ right.reshape(-1, right.shape[-1]),
                )
            return undropped(dlow @ A)

        return scale * (low @ B.T), back

    def side_by_side(
        self, x: np.ndarray, names: Sequence[str], bias: bool
    ) -> tuple[np.ndarray, Back]:
        """Return linears of one input, with their outputs concatenated."""
        parts = [self.linear(x, name, bias) for name in names]
        cuts = np.cumsum([y.shape[-1] for y, _ in parts])[:-1]

        def back(dy: np.ndarray) -> np.ndarray:
            return sum(
                b(d)
                for (_, b), d in zip(parts, np.split(dy, cuts, axis=-1), strict=True)
            )

        return np.concatenate([y for y, _ in parts], axis=-1), back

    def layernorm(
        self, x: np.ndarray, name: str, eps: float, bias: bool
    ) -> tuple[np.ndarray, Back]:
        weight = name + ".weight"
        w = self.p.get(weight, 1)
        s = 1 / np.sqrt(x.var(-1, keepdims=True) + eps)
        n = (x - x.mean(-1, keepdims=True)) * s
        y = n * w
        if bias:
            y = y + self.p[name + ".bias"]

        def back(dy: np.ndarray) -> np.ndarray:
            if weight in self.p:
                self.add(weight, (dy * n).sum((0, 1)))
            if bias:
                self.add(name + ".bias", dy.sum((0, 1)))
            dn = dy * w
            return s * (
                dn - dn.mean(-1, keepdims=True) - n * (dn * n).mean(-1, keepdims=True)
            )

        return y, back

    def rmsnorm(
        self, x: np.ndarray, name: str, eps: float, one_plus: bool = False
    ) -> tuple[np.ndarray, Back]:
        """Normalize over the last axis of x [..., C]."""
        w = self.p[name + ".weight"] + one_plus
        s = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        n = x * s

        def back(dy: np.ndarray) -> np.ndarray:
            self.add(name + ".weight", (dy * n).sum(tuple(range(dy.ndim - 1))))
            dn = dy * w
            return s * (dn - n * (dn * n).mean(-1, keepdims=True))

        return n * w, back

    def attention(self, x: np.ndarray, name: str, a: dict) -> tuple[np.ndarray, Back]:
        B, T, _ = x.shape
        H, G, D = a["heads"], a["kv_heads"], a["head_dim"]
        by_head = self.spec.model.names == "neox"
        qkv, back_qkv = self.side_by_side(
            x, [f"{name}.{part}" for part in into(self.spec)], a["bias"]
        )
        if by_head:
            qkv = qkv.reshape(B, T, H, 3, D).swapaxes(2, 3).reshape(B, T, -1)
        q, k, v = np.split(qkv, [H * D, (H + G) * D], axis=-1)
        back_q = back_k = whole_q = whole_k = lambda dy: dy
        if a["qk_norm"] == "whole":
            q, whole_q = self.rmsnorm(q, name + ".q_norm", a["eps"])
            k, whole_k = self.rmsnorm(k, name + ".k_norm", a["eps"])
        q, k, v = (part.reshape(B, T, -1, D).swapaxes(1, 2) for part in (q, k, v))
        if a["qk_norm"] is True:
            plus = a["one_plus"]
            q, back_q = self.rmsnorm(q, name + ".q_norm", a["eps"], plus)
            k, back_k = self.rmsnorm(k, name + ".k_norm", a["eps"], plus)
        rope = self.rope(a)
        if rope:
            W, near = a["rope"]["width"] or D, a["rope"]["interleaved"]
            angle = rope_angles(rope, T, W, self.spec.train.sequence)
            q, k = (turn(x, angle, rope, near) for x in (q, k))
        said = self.window(a), a["scale"], a["softcap"]
        y, back_y = causal(q, k, v, *said, self.factors(B, H, T))
        joined = y.swapaxes(1, 2).reshape(B, T, H * D)
        last = f"{name}.{behind(self.spec)}"
        out, back_out = self.linear(joined, last, a["out_bias"])

        def back(dy: np.ndarray) -> np.ndarray:
            dq, dk, dv = back_y(back_out(dy).reshape(B, T, H, D).swapaxes(1, 2))
            if rope:
                dq, dk = (turn(d, -angle, rope, near) for d in (dq, dk))
            dq, dk, dv = (
                d.swapaxes(1, 2).reshape(B, T, -1) for d in (back_q(dq), back_k(dk), dv)
            )
            d = np.concatenate([whole_q(dq), whole_k(dk), dv], axis=-1)
            if by_head:
                d = d.reshape(B, T, 3, H, D).swapaxes(2, 3).reshape(B, T, -1)
            return back_qkv(d)

        return out, back

    def rope(self, a: dict) -> dict | None:
        """Return the rotary positions of the current layer."""
        if a["rope_layers"] and not a["rope_layers"][self.layer]:
            return None
        return a["local_rope"] if a["local_rope"] and self.window(a) else a["rope"]

    def window(self, a: dict) -> int | None:
        """Return the window of the current layer."""
        said = a["window"]
        return said[self.layer] if isinstance(said, tuple) else said

    def embedding(self, tokens: np.ndarray, a: dict) -> tuple[np.ndarray, Back]:
        """Embed tokens [B,T] -> [B,T,C]; the result of its back is not needed."""
        T = tokens.shape[1]
        x = self.p[a["tokens"] + ".weight"][tokens]
        if a["positions"]:
            x = x + self.p[a["positions"] + ".weight"][:T]

        def back(dy: np.ndarray) -> np.ndarray:
            np.add.at(self.grads[a["tokens"] + ".weight"], tokens, dy)
            if a["positions"]:
                self.grads[a["positions"] + ".weight"][:T] += dy.sum(0)
            return dy

        return x, back

    # -- composition

    def dropped(self, y: np.ndarray, back: Back, p: float) -> tuple[np.ndarray, Back]:
        """Return y [B,T,C] / (1 - p) or 0, with separate random numbers for each place of the
        model."""
        if not p or not self.keys:
            return y, back
        kept = chance.kept(self.keys, self.places, y.size // len(self.keys), p)
        self.places += 1
        factor = kept.reshape(y.shape) / (1 - float(np.float32(p)))
        return y * factor, lambda dy: back(dy * factor)

    def factors(self, B: int, heads: int, T: int) -> np.ndarray | None:
        """Return the factors [B,heads,T,T] of attention's probabilities, or None without dropout.
        A sample in blocks has the key of its first one."""
        p = self.spec.train.attention_dropout
        if not p or not self.keys:
            return None
        keys = self.keys[:: len(self.keys) // B]
        kept = chance.seen(keys, self.places, heads, T, p)
        self.places += 1
        return kept / (1 - float(np.float32(p)))

    def op(self, o, x: np.ndarray, unit: str) -> tuple[np.ndarray, Back]:
        a, p = o.args, self.spec.train.dropout
        if o.kind == "residual":
            y, back = self.dropped(*self.ops(o.ops, x, unit), p)
            return x + y, lambda dy: dy + back(dy)
        if o.kind == "embedding":
            y, back = self.embedding(x, a)
            factor = a["scale"] or 1
            return self.dropped(factor * y, lambda dy: back(factor * dy), p)
        if o.kind == "scale":
            return a["factor"] * x, lambda dy: a["factor"] * dy
        if o.kind == "gelu":
            return gelu(x, a["kind"])
        if o.kind == "relu2":
            return relu2(x)
        if o.kind == "swiglu":
            return swiglu(x)
        if o.kind == "geglu":
            return geglu(x)
        if o.kind == "parallel":
            ys, backs = zip(
                *(self.ops(branch.ops, x, unit) for branch in o.ops), strict=True
            )
            return sum(ys), lambda dy: sum(back(dy) for back in backs)
        if o is head(self.spec):
            y, back = self.linear(
                x, a["tied"] or a["name"][0], a["bias"], by_token=True
            )
            y, bend = softcap(y, a["softcap"])
            return y, lambda dy: back(bend(dy))
        if o.kind == "linear":
            return self.side_by_side(x, [unit + name for name in a["name"]], a["bias"])
        name = unit + a["name"]
        if o.kind == "layernorm":
            return self.layernorm(x, name, a["eps"], a["bias"])
        if o.kind == "rmsnorm":
            return self.rmsnorm(x, name, a["eps"], a["one_plus"])
        if o.kind == "attention":
            return self.attention(x, name, a)
        raise ValueError(f"no such op: {o.kind}")

    def ops(self, ops: Sequence, x: np.ndarray, unit: str) -> tuple[np.ndarray, Back]:
        backs = []
        for o in ops:
            x, back = self.op(o, x, unit)
            backs.append(back)

        def back_all(dy: np.ndarray) -> np.ndarray:
            for b in reversed(backs):
                dy = b(dy)
            return dy

        return x, back_all

    def logits(self, tokens: np.ndarray) -> tuple[np.ndarray, list[Back]]:
        """Return logits [B,T,V] of tokens [B,T], and the backward functions of the units."""
        x, backs = tokens, []
        for unit in self.spec.model.units:
            for self.layer, prefix in enumerate(prefixes(unit)):
                x, back = self.ops(unit.ops, x, prefix)
                backs.append(back)
        return x, backs

    def forward(
        self, tokens: np.ndarray, targets: np.ndarray
    ) -> tuple[float, int, np.ndarray, list[Back]]:
        """Return training's mean loss, the number of valid targets, d(mean loss)/d(logits) and the
        backward functions. tokens, targets [B,T]."""
        x, backs = self.logits(tokens)
        t = self.spec.train
        return *cross_entropy(x, targets, t.label_smoothing, t.z_loss), backs

    def run(self, tokens: np.ndarray, targets: np.ndarray) -> tuple[float, int]:
        """Return the mean loss and the number of valid targets; set self.grads = d(mean loss)."""
        loss, valid, d, backs = self.forward(tokens, targets)
        for back in reversed(backs):
            d = back(d)
        return loss, valid


def documents(spec, tokens: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (sample, begin, end) of each document. If documents are joined, return all samples
    together: (:, 0, T)."""
    T = tokens.shape[1]
    if spec.data.documents == "join":
        return [(slice(None), 0, T)]
    out = []
    for b, row in enumerate(tokens):
        ends = [t + 1 for t in range(T - 1) if row[t] == spec.data.end]
        cuts = itertools.pairwise([0, *ends, T])
        out += [(slice(b, b + 1), begin, end) for begin, end in cuts]
    return out


def gradients(
    spec,
    params: Arrays,
    tokens: np.ndarray,
    targets: np.ndarray,
    real: type = np.float64,
    keys: Sequence[int] = (),
) -> tuple[float, int, Arrays]:
    """Return the mean loss by train.loss_mean, the number of valid targets, and its gradients,
    document by document. With real = np.float32 all arithmetic is rounded to that type, which shows
    the effect of rounding on this model at these weights."""
    B = spec.train.micro_batch if spec.train.loss_mean == "micro_batch" else len(tokens)
    means = [slice(first, first + B) for first in range(0, len(tokens), B)]
    loss, grads = 0.0, {name: 0 for name in params}
    each = max(1, len(keys) // len(tokens))  # keys of a sample: of its blocks
    for rows in means:
        n = max(int((targets[rows] >= 0).sum()), 1) * len(means)
        for b, begin, end in documents(spec, tokens[rows]):
            net = Net(spec, params, real, keys[rows.start * each : rows.stop * each])
            part = b, slice(begin, end)
            mean, valid = net.run(tokens[rows][part], targets[rows][part])
            loss += mean * valid / n
            for name, g in net.grads.items():
                grads[name] = grads[name] + g * real(valid / n)
    return loss, int((targets >= 0).sum()), grads


# ---- training


def batch(
    stream: np.ndarray, T: int, first: int, count: int, ignore: int = -1
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and targets [count,T] of samples first .. first+count-1, modulo the number of
    samples. Sample i takes tokens[i*T .. i*T+T]. The token `ignore` is never a target and is read
    as 0."""
    samples = (len(stream) - 1) // T
    rows = [
        stream[i % samples * T : i % samples * T + T + 1]
        for i in range(first, first + count)
    ]
    tokens = np.stack(rows).astype(np.int64)
    gone = tokens == ignore
    return np.where(gone, 0, tokens)[:, :-1], np.where(gone, -1, tokens)[:, 1:]


def learning_rate(o, s, step: int) -> float:
    """Return the rate of step 1, 2, ...: linear warm-up, then constant, or down to min_lr at
    `steps`."""
    if step <= s.warmup:
        return o.lr * step / s.warmup
    if s.type == "constant":
        return o.lr
    done = min((step - s.warmup) / max(s.steps - s.warmup, 1), 1.0)
    share = 1 - done if s.type == "linear" else (1 + math.cos(math.pi * done)) / 2
    return s.min_lr + (o.lr - s.min_lr) * share


class Optimizer:
    """PyTorch's formulas (Lion: Chen and others, 2023), decay on matrices (or all), clipping by the
    norm of all gradients; with the state of one run."""

    def __init__(self, spec, params: Arrays):
        self.o, self.s = spec.train.optimizer, spec.train.schedule
        self.m = {name: np.zeros(x.shape) for name, x in params.items()}
        self.v = {name: np.zeros(x.shape) for name, x in params.items()}
        self.step = 0

    def decay(self, name: str) -> float:
        return self.o.weight_decay * (self.o.decay == "all" or self.m[name].ndim >= 2)

    def update(self, params: Arrays, grads: Arrays) -> float:
        """Change params in place. Return the norm of the gradients before clipping."""
        self.step += 1
        o, rate = self.o, learning_rate(self.o, self.s, self.step)
        norm = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
        clip = o.clip / (norm + 1e-6) if o.clip and norm > o.clip else 1.0
        for name, p in params.items():
            if name not in grads:  # frozen
                continue
            decay = self.decay(name)
            if o.type in ("AdamW", "Lion"):
                p *= 1 - rate * decay
                decay = 0.0
            g = grads[name] * clip + decay * p
            p -= rate * self.move(g, self.m[name], self.v[name])
        return norm

    def move(self, g: np.ndarray, m: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Return the step for a gradient, in units of the rate. Changes the moments m and v in
        place."""
        o = self.o
        if o.type == "SGD":
            m *= o.momentum
            m += g
            return g + o.momentum * m if o.nesterov else m
        if o.type == "Adagrad":
            v += g * g
            return g / (np.sqrt(v) + o.eps)
        beta1, beta2 = o.betas
        if o.type == "Lion":
            sign = np.sign(beta1 * m + (1 - beta1) * g)
            m += (1 - beta2) * (g - m)
            return sign
        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g * g - v)
        m_hat, v_hat = m / (1 - beta1**self.step), v / (1 - beta2**self.step)
        return m_hat / (np.sqrt(v_hat) + o.eps)


def train(
    spec,
    params: Arrays,
    stream: np.ndarray,
    steps: int,
    ignore: int = -1,
    gradients: Callable = gradients,
) -> tuple[Arrays, list[float], list[float]]:
    """Return the weights after `steps` steps over a stream of tokens, with the losses and gradient
    norms. Another `gradients` shows the effect of errors in them."""
    params = {name: np.array(x, np.float64) for name, x in params.items()}
    optimizer, G, losses, norms = (
        Optimizer(spec, params),
        spec.train.global_batch,
        [],
        [],
    )
    for step in range(steps):
        now = batch(stream, spec.train.sequence, step * G, G, ignore)
        keys = chance.keys(spec.train.seed, step * G, G) if spec.keyed else []
        loss, _, grads = gradients(spec, params, *now, keys=keys)
        if spec.train.lora:
            grads = {n: g for n, g in grads.items() if ".lora_" in n}
        losses.append(loss)
        norms.append(optimizer.update(params, grads))
    return params, losses, norms
