"""pairs.py -- products of bf16 one number after the other, as AVX512_BF16 has them, and the functions
that attention takes: tests/kernels/pairs.c."""

from __future__ import annotations

import ctypes
import dataclasses
import functools

import numpy as np
import zk
from trainer import alone, sh

Array = np.ndarray


@functools.cache
def model() -> ctypes.CDLL:
    """with the instruction where the processor has it"""
    has = zk.runs("avx512bf16")
    out = zk.ROOT / "out/test" / "pairs.so"
    with alone("pairs"):
        sh(
            *("gcc", "-O2", "-ffp-contract=off", "-shared", "-fPIC"),
            *("-mavx2", "-mfma", "-mf16c", "-Wno-psabi"),
            *(["-mavx512bw", "-mavx512vl", "-mavx512bf16"] if has else []),
            *("-o", out, "tests/kernels/pairs.c", "-lm"),
        )
    return ctypes.CDLL(str(out))


def product(
    a: Array, b: Array, odd_first: int = 1, onto: Array | None = None
) -> Array:
    """f32 [M,N]: onto (None: 0) + a [M,K] . b [K,N] of bf16"""
    (M, K), N = a.shape, b.shape[1]
    a, b = a.copy(), b.copy()
    y = np.zeros((M, N), np.float32) if onto is None else onto.copy()
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (y, a, b)]
    sizes = [ctypes.c_int64(n) for n in (M, N, K)]
    model().pairs(*pointers, *sizes, odd_first)
    return y


# ---- attention


BLOCK, REGION = (
    64,
    256,
)  # rows whose sums go together; keys that a gradient of queries takes at once


def _over(name: str, x: Array) -> Array:
    """exp or log of vec.h"""
    wide = np.resize(x, -(-x.size // 16) * 16).astype(np.float32)
    y = np.empty_like(wide)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (y, wide)]
    getattr(model(), "over_" + name)(*pointers, ctypes.c_int64(wide.size))
    return y[: x.size].reshape(x.shape)


def _fused(a: Array, b: Array, y: Array) -> Array:
    """a * b + y"""
    a, b, y = (np.array(x, np.float32) for x in (a, b, y))
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (y, a, b)]
    model().fused(*pointers, ctypes.c_int64(y.size))
    return y


def _rounded(x: Array) -> Array:
    """to bf16, denormals 0"""
    return zk.to_bf16(np.where(np.abs(x) < np.float32(2**-126), 0, x))


@dataclasses.dataclass(frozen=True)
class Head:
    """One head: q, k, v [T,D] of bf16, seen [T,T]; all sums by pairs, odd_first or not."""

    q: Array
    k: Array
    v: Array
    scale: float
    seen: Array
    odd_first: int = 1

    def blocks(self) -> list[slice]:
        T = len(self.q)
        return [slice(i, min(i + BLOCK, T)) for i in range(0, T, BLOCK)]

    def product(self, a: Array, b: Array, onto: Array | None = None) -> Array:
        return product(a, b, self.odd_first, onto)

    def scores(self, i: slice, j: slice) -> Array:
        x = self.product(self.q[i], self.k[j].T) * np.float32(self.scale)
        return np.where(self.seen[i, j], x, np.float32(-np.inf))

    def forward(self, y: Array, lse: Array) -> None:
        """y [T,D] and lse [T], filled"""
        for n, i in enumerate(self.blocks()):
            rows = len(self.q[i])
            top = np.full(rows, -np.finfo(np.float32).max, np.float32)
            total = np.zeros(rows, np.float32)
            total_v = np.zeros((rows, self.v.shape[1]), np.float32)
            for j in self.blocks()[: n + 1]:
                x = self.scores(i, j)
                old, top = top, np.maximum(top, x.max(1))
                p, shrink = (
                    _over("exp", e) for e in (x - top[:, None], old - top)
                )
                block = np.add.accumulate(p, axis=1)[:, -1]
                total = _fused(total, shrink, block)
                total_v = self.product(
                    _rounded(p), self.v[j], total_v * shrink[:, None]
                )
            y[i] = zk.to_bf16(total_v * (np.float32(1) / total)[:, None])
            lse[i] = top + _over("log", total)

    def weights(
        self, dy: Array, dot: Array, lse: Array, i: slice, j: slice
    ) -> tuple[Array, Array]:
        """p and ds of a block"""
        p = _over("exp", self.scores(i, j) - lse[i, None])
        dp = self.product(dy[i], self.v[j].T)
        ds = p * (dp - dot[i, None]) * np.float32(self.scale)
        return _rounded(p), _rounded(ds)

    def backward(
        self, dy: Array, y: Array, lse: Array, i: slice, dk: Array, dv: Array
    ) -> Array:
        """dq of block i; dk and dv [T,D] are added to"""
        dot = _dot(dy, y)
        dq = np.zeros(self.q[i].shape, np.float32)
        keys = [j for j in self.blocks() if j.start <= i.start]
        for j in sorted(keys, key=lambda j: (-(j.start // REGION), j.start)):
            p, ds = self.weights(dy, dot, lse, i, j)
            dq = self.product(ds, self.k[j], dq)
            dk[j] = self.product(ds.T, self.q[i], dk[j])
            dv[j] = self.product(p.T, dy[i], dv[j])
        return dq


def _dot(dy: Array, y: Array) -> Array:
    """[T]: dy . y by 16 sums"""
    T, D = y.shape
    a, b = (np.zeros((T, -(-D // 16) * 16), np.float32) for _ in "ab")
    a[:, :D], b[:, :D] = zk.from_bf16(dy), zk.from_bf16(y)
    lanes = np.zeros((T, 16), np.float32)
    for d in range(0, a.shape[1], 16):
        lanes = _fused(a[:, d : d + 16], b[:, d : d + 16], lanes)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def attention(
    qkv: Array,
    dy: Array,
    G: int,
    scale: float,
    seen: Array,
    odd_first: int = 1,
) -> tuple[Array, ...]:
    """y, lse, dqkv of qkv [B,T,H + 2 G,D]; seen [B,T,T]"""
    (B, T, _, D), H = qkv.shape, dy.shape[2]
    y, lse = np.zeros(dy.shape, np.uint16), np.zeros((B, H, T), np.float32)
    grad = np.zeros(qkv.shape, np.float32)
    for b, g in np.ndindex(B, G):
        k, v = qkv[b, :, H + g], qkv[b, :, H + G + g]
        mine = range(g * H // G, (g + 1) * H // G)
        heads = {
            h: Head(qkv[b, :, h], k, v, scale, seen[b], odd_first)
            for h in mine
        }
        dk, dv = (np.zeros((T, D), np.float32) for _ in "kv")
        for h, head in heads.items():
            head.forward(y[b, :, h], lse[b, h])
        for i in heads[mine[0]].blocks():
            for h, head in heads.items():
                grad[b, i, h] = head.backward(
                    dy[b, :, h], y[b, :, h], lse[b, h], i, dk, dv
                )
        grad[b, :, H + g], grad[b, :, H + G + g] = dk, dv
    return y, lse, zk.to_bf16(grad)
