"""test_libraries.py -- tests the settings that the runtime makes in the environment of CUDA and
NCCL, and the NCCL functions that it calls, under emulation."""

import os
import pathlib
import re
import socket
import subprocess
from collections import Counter

import pytest
from zg.facts import reserve
from zg.facts.commands import COLLECTIVES
from zg.plan.plan import Step

from tests.lib import plans, trainer
from tests.lib.patience import LIMIT

SPEC = trainer.ROOT / "model_specs" / "gpt-tiny.yaml"
KEYS = (
    "train.micro_batch=1",
    "train.global_batch=4",
    "train.sequence=16",
    "zero.stage=3",
)
OFFLOAD = "zero.offload_optimizer.device=cpu"
READ = re.compile("(?:NCCL|CUDA)_")  # names that the libraries read

SPY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int setenv(const char *name, const char *value, int over)
{
    int (*real)(const char *, const char *, int) =
        (int (*)(const char *, const char *, int))dlsym(RTLD_NEXT, "setenv");
    int failed = real(name, value, over);
    fprintf(stderr, "set %s=%s\n", name, getenv(name));
    return failed;
}
int gethostname(char *name, size_t n)
{
    int (*real)(char *, size_t) = (int (*)(char *, size_t))dlsym(RTLD_NEXT, "gethostname");
    const char *word = getenv("SPY_HOST");
    return word ? snprintf(name, n, "%s", word) < 0 : real(name, n);
}
"""


@pytest.fixture(scope="module")
def spy(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Build a library that prints a program's changes of its environment on stderr; SPY_HOST names
    its host."""
    folder = tmp_path_factory.mktemp("spy")
    (folder / "spy.c").write_text(SPY)
    subprocess.run(
        [
            "gcc",
            "-shared",
            "-fPIC",
            folder / "spy.c",
            "-o",
            folder / "spy.so",
            "-ldl",
        ],
        check=True,
    )
    return folder / "spy.so"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    trainer.write_tokens(path, [i * i % 251 for i in range(3000)])
    return path


def built(ranks: int, *keys: str) -> pathlib.Path:
    return trainer.build(
        trainer.generate(SPEC, *KEYS, f"cluster.ranks={ranks}", *keys),
        trainer.EMULATED,
    )


def run(
    program: pathlib.Path,
    tokens: pathlib.Path,
    spy: pathlib.Path,
    *options: str,
    **settings: str,
) -> subprocess.Popen[str]:
    """Start a program without this machine's settings for the libraries."""
    plain = {name: text for name, text in os.environ.items() if not READ.match(name)}
    return subprocess.Popen(
        [program, "--data", tokens, "--steps", "0", *options],
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=plain | {"LD_PRELOAD": str(spy)} | settings,
    )


def told(runs: list[subprocess.Popen[str]]) -> list[str]:
    """Return the settings that the libraries of all ranks find, each line as often as it is set."""
    texts = [one.communicate(timeout=LIMIT)[1] for one in runs]
    assert [one.returncode for one in runs] == [0] * len(runs), texts
    return sorted(re.findall("^set ((?:NCCL|CUDA)_.*)$", "".join(texts), re.M))


# ---- the table

ALWAYS = {
    "CUDA_MODULE_LOADING": "LAZY",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    "NCCL_MAX_P2P_NCHANNELS": "8",
    "NCCL_ALGO": "reducescatter:ring;reduce:ring",
    "NCCL_PROTO": "reducescatter:simple;reduce:simple",
}
PLAYED = ALWAYS | {"NCCL_GRAPH_MIXING_SUPPORT": "0"}
EAGER = {"CUDA_MODULE_LOADING": "EAGER"}
UNREGISTERED = {"NCCL_GRAPH_REGISTER": "0", "NCCL_LOCAL_REGISTER": "0"}
SHARED = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_P2P_DISABLE": "1",
}
HOSTID = "NCCL_HOSTID"  # differs by rank


def lines(found: dict[str, str], ranks: int) -> list[str]:
    hosts = [f"{HOSTID}=rank{r}" for r in range(ranks) if SHARED.keys() <= found.keys()]
    return sorted([f"{name}={text}" for name, text in found.items()] * ranks + hosts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks,keys,options,settings,found",
    [
        (1, (), (), {}, PLAYED),
        (1, (), ("--no-graph",), {}, ALWAYS),
        (1, (OFFLOAD,), (), {}, PLAYED),
        (2, (), (), {}, PLAYED),
        (2, (), ("--no-graph",), {}, ALWAYS | EAGER),
        (2, (OFFLOAD,), (), {}, PLAYED | EAGER),
        (2, (), (), {"ZR_SHARE_GPU": "1"}, PLAYED | SHARED),
        (
            2,
            (),
            (),
            {"NCCL_ALGO": "ring", "CUDA_MODULE_LOADING": "EAGER"},
            PLAYED | EAGER | {"NCCL_ALGO": "ring"},
        ),
    ],
    ids=[
        "one rank",
        "one rank, no graphs",
        "one rank, offload",
        "graphs",
        "no graphs",
        "offload",
        "a shared device",
        "the user's own",
    ],
)
def test_what_the_libraries_find(
    tokens: pathlib.Path,
    spy: pathlib.Path,
    ranks: int,
    keys: tuple[str, ...],
    options: tuple[str, ...],
    settings: dict[str, str],
    found: dict[str, str],
) -> None:
    """The list of settings is complete. Kernels are loaded eagerly only if several ranks launch
    step by step."""
    done = run(built(ranks, *keys), tokens, spy, *options, **settings)
    assert told([done]) == lines(found, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("setting,blocks", [("0", 0), ("1", 2)])
def test_ranks_may_sleep_while_they_wait(
    tokens: pathlib.Path, setting: str, blocks: int
) -> None:
    done = subprocess.run(
        [built(2), "--data", tokens, "--steps", "1"],
        text=True,
        capture_output=True,
        timeout=LIMIT,
        env=os.environ | {"ZR_EMULATE_TOLD": "1", "ZR_BLOCKING_SYNC": setting},
    )
    assert done.returncode == 0, done.stderr
    sleeping = 4  # cudaDeviceScheduleBlockingSync
    assert re.findall(r"^waits (\d+)$", done.stderr, re.M) == [str(sleeping)] * blocks


@pytest.mark.slow
@pytest.mark.parametrize(
    "names,settings,more",
    [
        (("a", "b"), {}, UNREGISTERED),
        (
            ("a", "b"),
            {"NCCL_GRAPH_REGISTER": "1"},
            UNREGISTERED | {"NCCL_GRAPH_REGISTER": "1"},
        ),
        (("a", "b"), {"ZR_EMULATE_NCCL": "23199"}, UNREGISTERED),
        (("a", "b"), {"ZR_EMULATE_NCCL": "23200"}, {}),
        (("a", "a"), {}, {}),
    ],
)
def test_what_they_find_on_two_hosts(
    tokens: pathlib.Path,
    spy: pathlib.Path,
    names: tuple[str, str],
    settings: dict[str, str],
    more: dict[str, str],
) -> None:
    """Buffers are not registered on two hosts, up to NCCL 2.31."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    launched = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    runs = [
        run(
            built(2),
            tokens,
            spy,
            RANK=str(r),
            SPY_HOST=name,
            ZR_EMULATE_UUID=str(r),
            LOCAL_RANK=str(r if names[0] == names[1] else 0),
            **launched,
            **settings,
        )
        for r, name in enumerate(names)
    ]
    assert told(runs) == lines(PLAYED | more, 2)


@pytest.mark.slow
def test_what_is_counted_no_longer(tokens: pathlib.Path, spy: pathlib.Path) -> None:
    """Rank 0 reports if the user sets NCCL's buffers or channels, because the allowance no longer
    holds."""
    one = run(built(2), tokens, spy, NCCL_BUFFSIZE="65536", NCCL_DEBUG="WARN")
    said = one.communicate(timeout=LIMIT)[1]
    assert one.returncode == 0, said
    assert re.findall("^(NCCL_.*) is set: (.*)$", said, re.M) == [
        (
            "NCCL_BUFFSIZE=65536",
            "NCCL may use a different amount of memory than planned",
        )
    ]


# ---- channels


@pytest.mark.slow
@pytest.mark.parametrize("margin", [0, 2, 12, 64])
def test_the_allowance_is_what_the_runtime_bounds(
    tokens: pathlib.Path, spy: pathlib.Path, margin: int
) -> None:
    """The allowance counts the channels for sends and receives to which every rank limits NCCL."""
    found = told([run(built(2, f"train.sm_margin={margin}"), tokens, spy)])
    channels = reserve.channels(margin)
    assert found.count(f"NCCL_MAX_P2P_NCHANNELS={channels}") == 2


# ---- NCCL functions that move pieces

NAMES = {"alltoall": "ncclSend/ncclRecv", "allreduce": "ncclAllReduce"}


def function(step: Step) -> str:
    """Return the NCCL function of a gather. A whole unit takes one all-gather. Pieces of a cut unit
    are not consecutive, and sends to every peer would pass a node's wire once for each, so they are
    broadcast."""
    numbers = {i.name: i.value for i in step.ints}
    whole = step.op == "gather" and numbers["step"] == numbers["bytes"]
    return NAMES.get(step.op) or ("ncclAllGather" if whole else "ncclBroadcast")


def begun(program: pathlib.Path, tokens: pathlib.Path, steps: int) -> Counter[str]:
    """Return the collectives of rank 0."""
    done = subprocess.run(
        [program, "--data", tokens, "--steps", str(steps)],
        text=True,
        capture_output=True,
        timeout=LIMIT,
        env=os.environ | {"ZR_EMULATE_TOLD": "1"},
    )
    assert done.returncode == 0, done.stderr
    return Counter(re.findall("^rank 0 begins (.*)$", done.stderr, re.M))


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys,cut", [((), False), (("zero.allgather_bucket_size=3000",), True)]
)
def test_pieces_of_a_cut_unit_are_broadcast(
    tokens: pathlib.Path, keys: tuple[str, ...], cut: bool
) -> None:
    """Two more training steps have twice the plan's collectives, by name."""
    program, p = (
        built(2, *keys),
        plans.planned(str(SPEC), *KEYS, "cluster.ranks=2", *keys),
    )
    want = Counter(
        function(s) for x in p.step for s in x.steps * x.repeat if s.op in COLLECTIVES
    )
    assert ("ncclBroadcast" in want, "ncclAllGather" in want) == (cut, not cut)
    assert begun(program, tokens, 3) - begun(program, tokens, 1) == want + want


# ---- registered memory


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys,options,settings,times",
    [
        ((), (), {}, 0),
        ((), ("--no-graph",), {}, 3),
        ((OFFLOAD,), (), {}, 3),
        ((OFFLOAD,), (), {"NCCL_LOCAL_REGISTER": "0"}, 0),
        (("zero.stage=0", "zero.overlap_comm=false"), ("--no-graph",), {}, 1),
    ],
    ids=["graphs", "no graphs", "offload", "the user's own", "one communicator"],
)
def test_the_arena_is_registered_where_no_graph_does_it(
    tokens: pathlib.Path,
    keys: tuple[str, ...],
    options: tuple[str, ...],
    settings: dict[str, str],
    times: int,
) -> None:
    """It is registered once with each communicator. The emulation ends a program that leaves it
    registered."""
    done = subprocess.run(
        [built(2, *keys), "--data", tokens, "--steps", "1", *options],
        text=True,
        capture_output=True,
        timeout=LIMIT,
        env=os.environ | {"ZR_EMULATE_TOLD": "1"} | settings,
    )
    assert done.returncode == 0, done.stderr
    arena = re.search(r"^device memory: arena (\d+) bytes", done.stdout, re.M)[1]
    lines = re.findall(r"^(rank \d registers .*)$", done.stderr, re.M)
    assert sorted(lines) == sorted(
        f"rank {r} registers {arena} bytes" for r in (0, 1) for _ in range(times)
    )


# ---- sums by NCCL


FAST = ("train.reduction=fast", "targets=[sm_90]")


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys,ranks,settings,refused",
    [
        (FAST, 2, {"NCCL_ALGO": "tree"}, "NCCL_ALGO=tree"),
        (FAST, 2, {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL128"}, "NCCL_PROTO=LL128"),
        (FAST, 2, {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}, ""),
        (FAST, 2, {"NCCL_ALGO": "reducescatter:ring;reduce:ring"}, ""),
        (FAST, 1, {"NCCL_ALGO": "tree"}, ""),
        ((), 2, {"NCCL_ALGO": "tree", "NCCL_PROTO": "LL"}, ""),
    ],
)
def test_fast_sums_need_the_ring(
    tokens: pathlib.Path,
    keys: tuple[str, ...],
    ranks: int,
    settings: dict[str, str],
    refused: str,
) -> None:
    """NCCL's sums have one order only if the user's variables leave it the ring and the simple
    protocol. No other plan adds floats by NCCL."""
    done = subprocess.run(
        [built(ranks, *keys), "--data", tokens, "--steps", "1"],
        text=True,
        capture_output=True,
        timeout=LIMIT,
        env=os.environ | settings,
    )
    assert done.returncode == (2 if refused else 0), done.stderr
    if refused:
        assert re.fullmatch(
            f"rank \\d: {refused} is set, but train.reduction: fast repeats only with NCCL's ring "
            "algorithm and simple protocol; unset it, .*\n",
            done.stderr,
        )


@pytest.mark.parametrize(
    "name,value,refused",
    [
        ("NVIDIA_TF32_OVERRIDE", "1", True),
        ("NVIDIA_TF32_OVERRIDE", "0", False),
        ("CUBLAS_EMULATE_SINGLE_PRECISION", "1", True),
        ("CUBLAS_EMULATION_STRATEGY", "performant", True),
    ],
)
def test_products_are_of_f32(
    tokens: pathlib.Path, name: str, value: str, refused: bool
) -> None:
    """Variables that give products other bits are refused by name."""
    done = subprocess.run(
        [built(1), "--data", tokens, "--steps", "1"],
        text=True,
        capture_output=True,
        timeout=LIMIT,
        env=os.environ | {name: value},
    )
    assert done.returncode == (2 if refused else 0), done.stderr
    assert (
        f": {name}={value} is set, which changes the bits" in done.stderr
    ) == refused
