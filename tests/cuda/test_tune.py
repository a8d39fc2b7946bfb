"""test_tune.py -- tests tables of algorithms for a GPU's products, under emulation: --tune writes
one of the fastest repeatable choices, --gemms uses it (zk_gemms), and tables for another GPU are
reported or refused."""

import os
import pathlib
import re
import subprocess

import pytest

from tests.cuda import test_cuda
from tests.lib import trainer
from tests.lib.patience import LIMIT

# A table that lists every product eight times and more
pytestmark = pytest.mark.slow

SPEC = trainer.ROOT / "model_specs" / "gpt-tiny.yaml"
SMALL = ("train.micro_batch=1", "train.global_batch=2", "train.sequence=16")
# cublasLtReductionScheme_t: parts of k added in f32, or in place
SPLIT, IN_PLACE = (
    2,
    1,
)


def program(*keys: str, kind: trainer.Kind = trainer.EMULATED) -> pathlib.Path:
    return trainer.build(trainer.generate(SPEC, *SMALL, *keys), kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("tune")
    trainer.write_tokens(made / "tokens", [i * i % 251 for i in range(2000)])
    return made


@pytest.fixture(scope="module")
def one(folder) -> pathlib.Path:
    return program("cluster.ranks=1")


def run(
    of: pathlib.Path,
    folder: pathlib.Path,
    *options: object,
    **settings: object,
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [of, "--data", folder / "tokens", *map(str, options)],
        text=True,
        env=os.environ | {k: str(v) for k, v in settings.items()},
        capture_output=True,
        timeout=LIMIT,
    )


def weights(of: pathlib.Path, folder: pathlib.Path, *options: object) -> str:
    done = run(of, folder, "--steps", 1, "--hash", *options)
    assert done.returncode == 0, done.stderr
    return re.search(r"^weights \w+$", done.stdout, re.M)[0]


@pytest.fixture(scope="module")
def table(one, folder) -> pathlib.Path:
    done = run(one, folder, "--gemms", folder / "table", "--tune")
    assert done.returncode == 0, done.stderr
    said = re.search(
        r"--gemms .*/table: (\d+) products take ([\d.]+) us, ([\d.]+) with the "
        r"library's first choices\n",
        done.stderr,
    )
    assert int(said[1]) >= 15 and float(said[2]) < float(said[3])
    return folder / "table"


def sealed(text: str) -> str:
    """Return a table with its checksum."""
    total = 0xCBF29CE484222325
    for byte in text.encode():
        total = (total ^ byte) * 0x100000001B3 % 2**64
    return f"{text}sum {total:016x}\n"


# ---- a table


def test_the_quickest_that_is_repeatable(table) -> None:
    """The fastest repeatable choice is taken. In the emulation two parts of k added in place are
    the fastest, which is not repeatable; two parts added in f32 come next."""
    first, *rows, last = table.read_text().splitlines()
    assert re.fullmatch(r"gemms of emulated sm_90, 132 SMs, cuBLASLt \d+", first)
    assert len({row.split(" : ")[0] for row in rows}) == len(rows)
    for row in rows:
        words = [int(word, 16) for word in row.split(" : ")[1].split()]
        assert len(words) == 8 and words[1:3] == [2, SPLIT] != [2, IN_PLACE], row
    assert sealed(
        "\n".join([first, *rows, ""])
    ) == table.read_text() and last.startswith("sum ")


def test_a_table_is_used(one, table, folder) -> None:
    """Other algorithms have other bits, the same in every run and however the work is spread."""
    tuned = weights(one, folder, "--gemms", table)
    assert tuned != weights(one, folder)
    spread = program("cluster.ranks=2", "zero.stage=3")
    assert weights(spread, folder, "--gemms", table, "--no-graph") == tuned


def test_a_table_of_some_products(one, table, folder, tmp_path) -> None:
    first, row, *_ = table.read_text().splitlines()
    (tmp_path / "some").write_text(sealed(f"{first}\n{row}\n"))
    done = run(one, folder, "--steps", 1, "--gemms", tmp_path / "some")
    n = len(table.read_text().splitlines()) - 2
    assert done.returncode == 0 and f"/some: has 1 of {n} products\n" in done.stderr


# ---- tables for another GPU, and broken ones


@pytest.mark.parametrize(
    "was,becomes",
    [
        ("emulated sm_90", "NVIDIA H200"),
        ("132 SMs", "114 SMs"),
        ("cuBLASLt 1", "cuBLASLt 2"),
    ],
)
def test_another_gpu_or_library(one, table, folder, tmp_path, was, becomes) -> None:
    lines = table.read_text().splitlines()
    (tmp_path / "other").write_text(
        sealed("\n".join([lines[0].replace(was, becomes), *lines[1:-1], ""]))
    )
    done = run(one, folder, "--steps", 1, "--hash", "--gemms", tmp_path / "other")
    assert done.returncode == 0
    assert re.search(
        rf"/other: has the gemms of .*{becomes}.*; this is emulated sm_90, 132 SMs, "
        r"cuBLASLt \d+, whose library makes its own choices\n",
        done.stderr,
    )
    assert weights(one, folder) in done.stdout


def broken() -> dict[str, object]:
    """Return ways to damage a table, each with its message."""
    damaged = "not a table of algorithms, or damaged; write it with --tune"
    return {
        "cut": (lambda text: text[:-30], damaged),
        "a line less": (
            lambda text: "".join(text.splitlines(True)[:-2]),
            damaged,
        ),
        "a digit": (
            lambda text: text.replace("656d756c", "656d756d", 1),
            damaged,
        ),
        "empty": (lambda text: "", damaged),
        "another file": (lambda text: "weights\n" * 100, damaged),
        "a zero byte": (lambda text: text.replace("f32", "f3\0", 1), damaged),
        "no words": (
            lambda text: sealed(text.splitlines()[0] + "\n60 x 60 : \n"),
            ":2: not a product and its algorithm",
        ),
        "too many": (
            lambda text: sealed(
                "".join(
                    [
                        text.splitlines(True)[0],
                        *text.splitlines(True)[1:2] * 257,
                    ]
                )
            ),
            ":258: not a product and its algorithm",
        ),
    }


@pytest.mark.parametrize("how", broken())
def test_damaged(one, table, folder, tmp_path, how) -> None:
    damage, said = broken()[how]
    (tmp_path / "bad").write_text(damage(table.read_text()))
    done = run(one, folder, "--steps", 1, "--gemms", tmp_path / "bad")
    assert (done.returncode, done.stdout) == (2, ""), done.stdout
    assert re.fullmatch(rf"rank 0: --gemms .*/bad(: )?{re.escape(said)}\n", done.stderr)


def test_an_algorithm_that_the_library_refuses(one, table, folder, tmp_path) -> None:
    """A table that is intact but has an algorithm that the library never made is refused."""
    text = "".join(table.read_text().splitlines(True)[:-1]).replace(
        "656d756c", "656d756d"
    )
    (tmp_path / "bad").write_text(sealed(text))
    done = run(one, folder, "--steps", 1, "--gemms", tmp_path / "bad")
    # Not a crash
    assert done.returncode == 3 and "an algorithm of the table (--gemms)" in done.stderr


def test_no_file(one, folder, tmp_path) -> None:
    done = run(one, folder, "--steps", 1, "--gemms", tmp_path / "none")
    assert (
        done.returncode == 2 and f"--gemms {tmp_path}/none: No such file" in done.stderr
    )
    done = run(one, folder, "--tune", "--gemms", tmp_path / "none" / "table")
    assert done.returncode == 3 and "/none/table: No such file" in done.stderr


# ---- options


@pytest.mark.parametrize(
    "options",
    [
        ["--tune"],
        ["--gemms", "x", "--tune", "--steps", "1"],
        ["--gemms", "x", "--tune", "--save", "y"],
    ],
)
def test_what_tune_goes_with(one, folder, options) -> None:
    done = run(one, folder, *options)
    assert done.returncode == 2 and "--tune trains nothing" in done.stderr


@pytest.mark.parametrize("option", ["--tune", "--gemms", "--no-graph"])
def test_the_cpus_program_has_none(folder, option) -> None:
    cpu = program("cluster.ranks=1", kind=trainer.GCC)
    done = run(cpu, folder, "--steps", 1, option)
    assert done.returncode == 2 and done.stderr.endswith(
        f"{option} is an option of the program for GPUs (ninja out/train-cuda)\n"
    )
    assert (
        option
        not in subprocess.run([cpu, "--help"], capture_output=True, text=True).stdout
    )


# ---- ranks


def test_ranks_with_other_tables_do_not_mix(table, folder) -> None:
    spread, port = (
        program("cluster.ranks=2", "zero.stage=3"),
        test_cuda.free_port(),
    )

    def start(rank, *options):
        return subprocess.Popen(
            [spread, "--data", folder / "tokens", "--steps", "1", *options],
            text=True,
            env=os.environ
            | {k: str(v) for k, v in test_cuda.torchrun(port, rank).items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    first, other = start(0, "--gemms", table), start(1)
    error = other.communicate(timeout=LIMIT)[1]
    first.communicate(timeout=LIMIT)
    assert other.returncode == 4
    assert re.search(
        r"rank 1 on host \S+: has kernels for sm_90, emulated sm_90, 132 SMs, cuBLASLt \d+, rank 0 "
        r"kernels for .*, gemms [0-9a-f]{16}; all ranks need the same GPUs, libraries and --gemms",
        error,
    )
