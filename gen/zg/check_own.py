"""check_own.py -- proves that the plan's own functions, which are no unit's, do what they must.

Sums, norms, updates work on the owner's part and nothing else.
"""
from __future__ import annotations

from . import ops
from .check_order import CheckError
from .plan import Flat, Plan

_UNITS = ("fwd", "bwd", "train", "eval")


def _device(p: Plan, f: Flat, near: str = "") -> dict[str, list[str]]:
    """What the device does to an owner's part of a flat, or to what of it stays there (near_)."""
    W, f32 = p.head.ranks, p.head.real == "f32"
    states = [s.removeprefix(near) for s in p.states(f, near)]
    whole, every = f.shard * W, f.state == "whole"
    own = f.near if near else f.shard
    n = whole if every else own
    span = f"spans.{f.name} l*{whole}" + (f" {whole}" if every else f"+r*{f.shard} {own}")

    def mine(formal: str, kept: str, width: int, all_of: bool = every) -> str:
        return f"{formal}+0" + (f"+r*{f.shard * width}" if kept == "whole" and not all_of else "")
    apart = "master" in states
    width, kept = (4, f.state) if apart else (ops.BYTES[p.head.real], f.real)
    full, master = int(width == 4), mine("p", kept, width)
    w = mine("w", f.real, ops.BYTES[p.head.real]) if apart and not f32 else "null"
    both = f"{w} {master}" if full else f"{master} null"
    part = f"spans.{f.name} l*{whole}+r*{f.shard} {own}"
    m, v = (f"{s}+0" if s in states else "null" for s in ("m", "v"))
    sinks = not f32 and p.cls(f"real.{f.name}").kind in ("hosted", "filed")
    both = f"null {master}" if sinks else both
    update = f"zk_update ctl+0 recipe {both} {m} {v} {mine('g', f.sum, 4)} {_moved(p, f, span)}"
    return {
        f"{near}update.{f.name}": [update, *[f"zk_round w+0 p+0 {n}"] * sinks],
        f"{near}init.{f.name}": [f"zk_init {master} {span} {p.head.seed} {full}"],
        f"{near}cast.{f.name}": [f"zk_round {w} p+0 {n}"],
        f"{near}hash.{f.name}": [f"zk_hash out {mine('p', kept, width, False)} {part} {full}"],
    }


def _moved(p: Plan, f: Flat, text: str) -> str:
    frozen = any(t.frozen for t in p.tensors if t.flat == f.name)
    return text.replace("spans.", "moved.") if frozen else text


def host_block(block: int, sources: int) -> int:
    """Of the host's counter, a leaf of which is all that a grain brings: how many are a block."""
    while sources % 2 == 0 and block > 1:
        block, sources = block // 2, sources // 2
    return block


def _own(p: Plan, f: Flat) -> dict[str, list[str]]:
    """The calls of a flat's functions: what an owner does to its part of each buffer."""
    W, A = p.head.ranks, p.head.grains
    S = W if p.head.reduction == "exact" else 1
    whole, block = f.shard * W, p.head.block
    moved = lambda text: _moved(p, f, text)
    mine = f"+0+r*{f.shard * 4}" if f.sum == "whole" else "+0"
    begin = f"spans.{f.name} l*{whole}+r*{f.shard}"
    part, far = f"{begin} {f.shard}", f"+{f.near}" if f.near else ""
    stride = whole if f.sum == "whole" else f.shard
    m, v = (f"{s}+0" if s in f.states else "null" for s in ("m", "v"))
    if p.offload:
        copy = "zk_host_round w+0 p+0 n"
        tile = f"{begin}+at n"
        some = tile if p.masters(f)[0].kind == "filed" else f"{begin}{far} {f.shard - f.near}"
        owner = {
            f"update.{f.name}": [f"zk_host_update hctl+0 recipe null p+0 {m} {v} g+0 "
                                f"{moved(tile)}", *[copy] * (p.head.real != "f32")],
            f"init.{f.name}": [f"zk_host_init p+0 {some} {p.head.seed} 1"],
            f"cast.{f.name}": [copy],
            f"hash.{f.name}": [f"zk_host_hash out p+0 {some} 1"],
            **(_device(p, f, "near_") if f.near else {}),
        }
    else:
        owner = _device(p, f)
    if not any(t.flat == f.name and not t.frozen for t in p.tensors):
        return {name: calls for name, calls in owner.items() if not name.startswith("update.")}
    if p.pushes:
        return {
            **owner,
            f"sum.{f.name}": [f"zk_push node+0 0 sources {S} 0 n null {S} 0 {block}"],
            f"push.{f.name}": [f"zk_host_push node+0 {f.shard} &leaf 1 {int(W > 1)} n hctl+0 {A} "
                               f"{f.mask} {host_block(block, S)}"],
            f"norm.{f.name}": [f"zk_host_square_sum hsums+0 g+0 {moved(part)}"],
        }
    norm = "zk_host_square_sum hsums+0" if p.below else "zk_square_sum sums+0"
    return {
        **owner,
        f"own.{f.name}": [f"zk_push node+0 {whole} &leaf 1 0 {whole} ctl+0 {A} {f.mask} {block}"],
        f"join.{f.name}": [f"zk_push node{mine} 0 sources {S} 1 n null {S} 0 {block // A}"],
        f"sum.{f.name}": [f"zk_push node{mine} {stride} sources {S} 0 n ctl+0 {S * A} {f.mask} "
                          f"{block}"],
        f"norm.{f.name}": [f"{norm} g{mine} {moved(part)}"],
    }


def functions(p: Plan) -> None:
    """The functions that are no unit's are these, call by call."""
    many = p.head.order == "ranks" and p.head.reduction == "exact"
    leaves = p.head.ranks if many else 1
    want = {"next": ["zk_begin ctl+0 sums+0 recipe"], "factor": ["zk_factor ctl+0 total+0 recipe"],
            "count": ["zk_host_count ctl+0 1" if p.pushes else f"zk_count ctl+0 {leaves}"]}
    if p.together > 1:
        want["recount"] = [f"zk_count ctl+0 {-leaves * p.together}"]
    for f in p.flats:
        want.update(_own(p, f))
    for n, t in enumerate(p.tables):
        want[f"turn.{n}"] = [f"zk_rope_table table+0 freq.{n} {p.head.sequence} {t.head}"]
    kernels = {l.name: l.kernel for l in p.launches}
    for fn in p.fns:
        if fn.name.partition(".")[0] in _UNITS:
            continue
        calls = [" ".join((c.kernel, *c.args)) for c in fn.calls]
        if calls != want.get(fn.name) or \
                any(c.rounds != 1 or kernels.get(c.launch) != c.kernel for c in fn.calls):
            raise CheckError(f"function {fn.name}: does {calls}, not {want.get(fn.name)}")
