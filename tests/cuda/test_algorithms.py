"""test_algorithms.py -- tests the hash of cuBLASLt's choices (zk_algorithms), under emulation: ranks
with other choices do not train together, a resumed run reports other choices, and neither the
layout nor an evaluation changes the hash."""

from __future__ import annotations

import ctypes
import json
import pathlib
import re

import numpy as np
import pytest

from tests.cuda import test_cuda
from tests.cuda.test_emulation import other_process
from tests.lib import program, trainer, zk
from tests.runtime.test_handshake import together

ONE = ("train.micro_batch=1", "train.global_batch=2", "train.sequence=16")
TWO = (*ONE, "cluster.ranks=2", "zero.stage=3")
OFFLOAD = "zero.offload_optimizer.device=cpu"
OTHER = {"ZR_EMULATE_CHOICE": "2"}  # the library's third choice in place of its first
CHANGED = re.compile(
    r"^products run by algorithms (\w{16}), those of the checkpoint's run by (\w{16}), which round "
    r"differently, so bits change; a table of --gemms would keep them$",
    re.M,
)


def built(*keys: str) -> pathlib.Path:
    return trainer.build(trainer.generate(test_cuda.SPEC, *keys), trainer.EMULATED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("algorithms")
    trainer.write_tokens(made / "tokens", [i * i % 251 for i in range(3000)])
    return made


def train(
    binary: pathlib.Path, folder: pathlib.Path, *options: object, **settings: str
) -> program.Result:
    done = program.train(binary, folder / "tokens", *options, steps=1, **settings)
    assert done.code == 0, done.err
    return done


def hash_of(done: program.Result) -> str:
    return re.fullmatch(r"products: algorithms (\w{16})", done.line("products: "))[1]


@pytest.mark.slow
def test_a_hash_names_the_choices(folder: pathlib.Path) -> None:
    """Other choices have another hash, and other bits. Ranks, graphs and a validation, which has a
    product of its own, change neither."""
    one, two = built(*ONE, "cluster.ranks=1"), built(*TWO)
    first = train(one, folder)
    for done in (
        train(one, folder, "--no-graph"),
        train(one, folder, "--val", folder / "tokens", "--val-tokens", 40),
        train(two, folder),
    ):
        assert hash_of(done) == hash_of(first)
        assert done.line("weights ") == first.line("weights ")
    other = train(one, folder, **OTHER)
    assert hash_of(other) != hash_of(first)
    assert other.line("weights ") != first.line("weights ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys,options",
    [((), ""), ((), " --no-graph"), ((OFFLOAD,), "")],
    ids=["graphs", "no graphs", "offload"],
)
def test_ranks_of_other_choices_do_not_mix(
    folder: pathlib.Path, keys: tuple[str, ...], options: str
) -> None:
    binary, given = built(*TWO, *keys), f"--data tokens --steps 1{options}"
    first, other = together([binary] * 2, folder, given, given, more={1: OTHER})
    assert other[0] == 4 and re.search(
        r"rank 1 on host \S+: runs products by algorithms \w{16}, rank 0 products by algorithms "
        r"\w{16}; give all ranks the same table of algorithms \(--tune writes one, --gemms uses "
        r"it\) and the same driver\n",
        other[1],
    ), other
    assert first[0] == 5 and "rank 1 at 127.0.0.1 is lost" in first[1]


@pytest.mark.slow
def test_a_table_makes_them_equal(folder: pathlib.Path) -> None:
    """The remedy works. While a table is made, ranks may choose differently."""
    binary, more = built(*TWO), {1: {"ZR_EMULATE_CHOICE": "3"}}
    given = "--data tokens --gemms table --tune"
    ended = together([binary] * 2, folder, given, given, more=more)
    assert [code for code, _ in ended] == [0, 0], ended
    given = "--data tokens --steps 1 --gemms table"
    ended = together([binary] * 2, folder, given, given, more=more)
    assert [code for code, _ in ended] == [0, 0], ended


@pytest.mark.slow
def test_a_resumed_run_reports_other_choices(folder: pathlib.Path) -> None:
    """It is a note. Afterwards the checkpoint names the new ones."""
    binary = built(*ONE, "cluster.ranks=1")

    def to(steps: int, *options: object, **settings: str) -> tuple[str, str]:
        saved = ("--checkpoints", folder / "ck", *options)
        done = program.train(binary, folder / "tokens", *saved, steps=steps, **settings)
        assert done.code == 0, done.err
        record = folder / "ck" / f"step-{steps:08d}" / "run.json"
        assert json.loads(record.read_text())["algorithms"] == hash_of(done)
        return hash_of(done), done.err

    old, said = to(1)
    assert not CHANGED.search(said)
    same, said = to(2, "--val", folder / "tokens", "--val-tokens", 40)
    assert same == old and not CHANGED.search(said)
    new, said = to(3, **OTHER)
    assert CHANGED.search(said).groups() == (new, old)
    same, said = to(4, **OTHER)
    assert same == new and not CHANGED.search(said)


def test_a_hash_is_of_what_ran_since_the_last() -> None:
    """Hashes of products add up, so their order does not matter. A CPU has none."""
    k, x = zk.Kernels(zk.EMULATED), np.ones((24, 24), np.float32)
    found = []
    for sizes in ([16], [], [24, 16], [24], [16, 24, 16]):
        for n in sizes:
            k.zk_probe(np.empty_like(x), x, x, n)
        k.library.zk_algorithms.restype = ctypes.c_uint64
        found.append(k.library.zk_algorithms(k.context))
    first, none, both, second, again = found
    assert first != second and none == 0 not in (first, second)
    assert both == again == (first + second) % 2**64
    cpu = zk.Kernels()
    assert cpu.library.zk_algorithms(cpu.context) == 0


def test_more_products_than_there_is_room_for() -> None:
    done = other_process(
        "from tests.lib import zk\n"
        "k = zk.Kernels(zk.EMULATED)\n"
        "x = np.ones((257, 257), np.float32)\n"
        "for n in range(1, 257): k.zk_probe(np.empty_like(x), x, x, n)\n"
        "print('so far', flush=True)\n"
        "k.zk_probe(np.empty_like(x), x, x, 257)"
    )
    assert (done.returncode, done.stdout) == (3, "so far\n"), done.stderr
    assert done.stderr.startswith(
        "the model has more than 256 matrix products of different shapes; raise MOST_GEMMS in "
    )
