"""test_cuda.py -- tests the program for GPUs on a machine without one: it compiles for every
processor, keeps within registers, links, and reports missing devices and libraries. Under emulation
it tests how ranks start and stop. test_emulated.py tests its results."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import time

import pytest

from tests import cuda_budget
from tests.lib import plans, trainer
from tests.lib.patience import LIMIT, patient
from tests.lib.program import wait_for_step
from tests.lib.trainer import ROOT

SPEC = ROOT / "model_specs" / "gpt-tiny.yaml"
CUDA = ROOT / "kernels" / "cuda"
SMALL = ("train.micro_batch=1", "train.global_batch=2", "cluster.ranks=2")


def code(path) -> str:
    """Return a source without its comments."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(), flags=re.S)


# ---- rules


def test_launches_come_from_the_plan() -> None:
    """Only cuda.h launches kernels, with the grid that it is given: no other file has a size of its
    own."""
    kernels = sorted(CUDA.glob("*.cu"))
    assert "cudaLaunchKernelEx" in code(CUDA / "cuda.h") and len(kernels) >= 10
    for path in [*kernels, *CUDA.glob("*.h")]:
        if path.name != "cuda.h":
            assert not re.search(r"<<<|\bdim3\b|cudaLaunchKernel", code(path)), (
                path.name
            )


def test_ptx_is_written_in_one_place() -> None:
    """Inline assembly stands only where a plain C++ compiler does not look."""
    for path in CUDA.glob("*.cu"):
        assert not re.search(r"\basm\b", code(path)), path.name


# ---- the program


@pytest.fixture(scope="module")
def program():
    return trainer.build(trainer.generate(SPEC), trainer.CUDA)


def run(program, *args: object, **settings: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | settings
    return subprocess.run(
        [program, *map(str, args)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


@pytest.mark.slow
def test_without_a_device(program, tmp_path) -> None:
    trainer.write_tokens(tmp_path / "tokens.bin", [1, 2, 3] * 1000)
    done = run(program, "--data", tmp_path / "tokens.bin", "--steps", 1)
    assert done.returncode == 3, done.stderr
    assert re.fullmatch(
        r"rank \d+: no CUDA device: [^;\n]+; run this where .*\n", done.stderr
    )
    assert done.stdout == ""


@pytest.mark.slow
def test_what_it_says_of_itself(program) -> None:
    done = run(program, "--version")
    assert done.returncode == 0 and "\nkernels none\n" in done.stdout
    text = run(program, "--help").stdout
    assert "--no-graph" in text and "\n  7  a rank or a device hangs" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,value", [("ZR_TIMEOUT_S", "soon"), ("ZR_TIMEOUT_S", "-1")]
)
def test_settings_are_checked(program, name: str, value: str) -> None:
    done = run(program, "--steps", 0, **{name: value})
    assert done.returncode == 2 and name in done.stderr


# ---- ranks, under emulation


@pytest.fixture(scope="module")
def emulated():
    return trainer.build(trainer.generate(SPEC, *SMALL), trainer.EMULATED)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda") / "tokens.bin"
    trainer.write_tokens(path, [i * i % 251 for i in range(3000)])
    return path


def start(
    program, tokens, steps: int, *options: str, **settings: object
) -> subprocess.Popen:
    return subprocess.Popen(
        [program, "--data", tokens, "--steps", str(steps), "--hash", *options],
        text=True,
        env=os.environ | {key: str(value) for key, value in settings.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def torchrun(port: int, rank: int) -> dict[str, object]:
    return {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def slurm(port: int, rank: int) -> dict[str, object]:
    return {
        "SLURM_PROCID": rank,
        "SLURM_STEP_NUM_TASKS": 2,
        "SLURM_LOCALID": rank,
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_JOB_ID": port,
    }


def openmpi(port: int, rank: int) -> dict[str, object]:
    return {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": 2,
        "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "ZR_ADDR": f"127.0.0.1:{port}",
    }


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [torchrun, slurm, openmpi])
def test_a_launcher_starts_the_same_run(emulated, tokens, launcher) -> None:
    plain = start(emulated, tokens, 2)
    port = free_port()
    ranks = [start(emulated, tokens, 2, **launcher(port, rank)) for rank in (1, 0)]
    said = [run.communicate(timeout=LIMIT) for run in (plain, *ranks)]
    assert [run.returncode for run in (plain, *ranks)] == [0, 0, 0], said
    weights = [re.findall(r"^weights \w+$", out, re.M) for out, _ in said]
    assert weights[0] and weights == [weights[0], [], weights[0]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices,settings,codes",
    [
        (("one", "two"), {}, [0, 0]),
        (("one", "one"), {}, [3, 3]),
        (("one", "two"), {"ZR_EMULATE_DEVICES": 1}, [0, 0]),
        (("one", "one"), {"ZR_SHARE_GPU": 1}, [0, 0]),
    ],
)
def test_each_rank_has_a_device_of_its_own(
    emulated, tokens, devices, settings, codes
) -> None:
    """Tasks that see one device each are compared by its UUID: two tasks on one device are
    refused."""
    port = free_port()
    ranks = [
        start(
            emulated,
            tokens,
            1,
            **torchrun(port, rank),
            ZR_EMULATE_UUID=device,
            **settings,
        )
        for rank, device in enumerate(devices)
    ]
    said = [rank.communicate(timeout=LIMIT)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == codes, said
    alone = (
        "each of the 2 ranks on this host sees only one device: NCCL cannot use P2P between them"
        in said[0]
    )
    assert alone == ("ZR_EMULATE_DEVICES" in settings)
    host = socket.gethostname()
    assert codes == [0, 0] or all(
        re.match(
            rf"rank {rank} on host {host}: rank 0 on host {host} and rank 1 on host {host} both have GPU-6f6e6500-0000-"
            r"0000-0000-000000000000; .* or set ZR_SHARE_GPU=1 for a test",
            text,
        )
        for rank, text in enumerate(said)
    ), said


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings,told",
    [
        ({}, 0),
        ({"ZR_EMULATE_NO_P2P": 1}, 1),
        ({"ZR_EMULATE_NO_P2P": 1, "ZR_SHARE_GPU": 1}, 0),
    ],
)
def test_gpus_that_do_not_reach_each_other(emulated, tokens, settings, told) -> None:
    """GPUs without peer access use /dev/shm through NCCL; a message at the start gives its size
    once."""
    running = start(emulated, tokens, 0, **settings)
    error = running.communicate(timeout=LIMIT)[1]
    shm = os.statvfs("/dev/shm")
    size = shm.f_blocks * shm.f_frsize / 2**30
    assert running.returncode == 0, error
    assert error.count("(no P2P)") == told
    assert error.count(f"NCCL needs /dev/shm, which has {size:.3f} GiB") == told, error


@pytest.mark.slow
def test_a_launcher_of_another_size(emulated, tokens) -> None:
    done = start(emulated, tokens, 1, RANK=0, WORLD_SIZE=3)
    assert (
        "the launcher has 3 ranks" in done.communicate(timeout=LIMIT)[1]
        and done.returncode == 4
    )


@pytest.mark.slow
def test_rank_0_hears_its_own_name_otherwise(emulated, tokens) -> None:
    """Ranks connect under PyTorchJob, which tells rank 0 that it is localhost and the others its
    service's name. Strangers who try the port are dropped."""
    port = free_port()
    first = start(
        emulated, tokens, 1, **torchrun(port, 0) | {"MASTER_ADDR": "localhost"}
    )
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0"):
        for _ in range(100):
            with (
                contextlib.suppress(ConnectionRefusedError),
                socket.create_connection(("127.0.0.2", port)) as stranger,
            ):
                stranger.sendall(said)
                break
            time.sleep(0.1)
    other = start(
        emulated, tokens, 1, **torchrun(port, 1) | {"MASTER_ADDR": "127.0.0.2"}
    )
    said = [run.communicate(timeout=LIMIT) for run in (first, other)]
    assert [run.returncode for run in (first, other)] == [0, 0], said


@pytest.mark.slow
def test_pods_start_a_rank_for_each_gpu(tokens) -> None:
    """PyTorchJob's pods have a RANK and no LOCAL_RANK: two of them start four ranks."""
    program = trainer.build(
        trainer.generate(SPEC, *SMALL[:1], "train.global_batch=4", "cluster.ranks=4"),
        trainer.EMULATED,
    )
    port = free_port()
    pods = [
        {name: x for name, x in torchrun(port, pod).items() if name != "LOCAL_RANK"}
        for pod in (1, 0)
    ]
    runs = [
        start(program, tokens, 1),
        *(start(program, tokens, 1, **pod) for pod in pods),
    ]
    said = [run.communicate(timeout=LIMIT) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], said
    weights = [re.findall(r"^weights \w+$", out, re.M) for out, _ in said]
    assert weights[0] and weights == [weights[0], [], weights[0]]
    # A single rank of a host, not a pod
    wrong = start(program, tokens, 1, **torchrun(port, 0))
    assert "the launcher has 2 ranks" in wrong.communicate(timeout=LIMIT)[1]
    assert wrong.returncode == 4


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--no-graph",)])
def test_a_launchers_rank_that_dies_ends_the_others(emulated, tokens, options) -> None:
    port = free_port()
    first, other = (
        start(emulated, tokens, 1000, *options, **torchrun(port, rank))
        for rank in (0, 1)
    )
    wait_for_step(first, 1)
    begun = time.monotonic()
    other.send_signal(signal.SIGKILL)
    error = first.communicate(timeout=LIMIT)[1]
    assert first.returncode == 5 and time.monotonic() - begun < patient(10)
    assert "connection to rank 1 at 127.0.0.1 is lost" in error
    other.communicate()


@pytest.mark.slow
def test_an_error_of_nccl(emulated, tokens) -> None:
    """An error of NCCL in a rank's own thread is handled as in its watchdog's, like a hang; the
    other ranks see a death."""
    port = free_port()
    runs = [
        start(emulated, tokens, 3, "--no-graph", **torchrun(port, rank), **more)
        for rank, more in enumerate(({}, {"ZR_EMULATE_NCCL_ERROR": 20}))
    ]
    said = [run.communicate(timeout=120)[1] for run in runs]
    assert [run.returncode for run in runs] == [5, 7], said
    assert re.search(r"rank 1 on host \S+: step \d+: an? .*: NCCL: ", said[1]), said


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--no-graph",)])
def test_an_error_that_only_nccl_knows_of(emulated, tokens, options) -> None:
    """A rank whose network is gone has a collective that never ends. Its watchdog asks NCCL for the
    error, unless the next collective reports it before."""
    port = free_port()
    runs = [
        start(emulated, tokens, 3, *options, **torchrun(port, rank), **more)
        for rank, more in enumerate(({}, {"ZR_EMULATE_CUT": 20}))
    ]
    said = [run.communicate(timeout=LIMIT)[1] for run in runs]
    assert [run.returncode for run in runs] == [5, 7], said
    assert re.search(
        r"rank 1 on host \S+: step \d+(, queue \w+|: an? [\w -]+): NCCL: remote process exited or there was a "
        r"network error(; check for a rank or a network that is down| \(.*\))\n",
        said[1],
    ), said
    assert "connection to rank 1 at 127.0.0.1 is lost" in said[0], said


@pytest.mark.slow
def test_a_rank_that_hangs_is_noticed(emulated, tokens) -> None:
    """The watchdog of the other rank names the place where a stopped rank hangs."""
    running = start(emulated, tokens, 1000, ZR_TIMEOUT_S=20)
    wait_for_step(running, 1)
    listed = f"/proc/{running.pid}/task/{running.pid}/children"
    with open(listed, encoding="ascii") as f:
        ranks = [int(word) for word in f.read().split()]
    os.kill(ranks[1], signal.SIGSTOP)
    error = running.communicate(timeout=LIMIT)[1]
    assert running.returncode == 7
    assert re.search(
        r"rank 0: step \d+ has not ended in 20 s \(ZR_TIMEOUT_S\); the last issued "
        r"command is [\w -]+ on queue main",
        error,
    )


@pytest.mark.slow
@pytest.mark.parametrize("at", ["start", "end"])
def test_nccl_hangs_at_the(emulated, tokens, at: str) -> None:
    """Making and ending communicators is under the watchdog's clock."""
    running = start(emulated, tokens, 1, ZR_TIMEOUT_S=15, ZR_EMULATE_ENDLESS=at)
    try:
        error = running.communicate(timeout=120)[1]
    finally:
        running.kill()
    assert (
        running.returncode == 7
        and "has not ended in 15 s (ZR_TIMEOUT_S); the last issued command "
        f"is NCCL's {at} on queue main; check for a rank, a network"
        in error
    ), error


# ---- names for a profiler


def ranges(program, tokens, folder, *options: str) -> list[str]:
    """Return NVTX's ranges of rank 0 in two steps, as tests/emulation/ranges.c writes them."""
    library = folder / "ranges.so"
    trainer.sh(
        "gcc",
        "-shared",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-isystem",
        "out/cuda/root/include",
        "tests/emulation/ranges.c",
        "-o",
        library,
    )
    trainer.sh(
        program,
        "--data",
        tokens,
        "--steps",
        2,
        *options,
        env=os.environ
        | {
            "NVTX_INJECTION64_PATH": str(library),
            "RANGES": str(folder / "rank"),
        },
    )
    first = min(folder.glob("rank.*"), key=lambda path: int(path.suffix[1:]))
    return first.read_text().splitlines()


@pytest.mark.slow
def test_ranges_are_named_after_the_plan(emulated, tokens, tmp_path) -> None:
    """Steps contain graphs. Functions have ranges while a graph is recorded, and always without
    graphs."""
    p = plans.planned("gpt-tiny", *SMALL)
    fns = {f.name for f in p.fns}
    names = {
        "begin": "the start of a step",
        "micro_batch": "a micro-batch",
        "update": "the update",
    }
    want = {
        name: [s.op.replace(".", "_") for s in p.section(name).steps if s.op in fns]
        for name in names
    }
    for options in ((), ("--no-graph",)):
        folder = tmp_path / "".join(options)
        folder.mkdir(exist_ok=True)
        lines = ranges(emulated, tokens, folder, *options)
        assert lines[:3] == ["stream main", "stream gather", "stream reduce"]
        for step in (1, 2):
            said = []
            for name, title in names.items():
                inner = want[name] if step == 1 or options else []
                said += [
                    f"  the graph of {title}",
                    *(f"    {fn}" for fn in inner),
                ]
            at = lines.index(f"step {step}")
            assert (
                lines[at + 1 : at + 1 + len(said)] == said
                and lines[at + 1 + len(said)] == "report"
            )


# ---- machine code


@pytest.fixture(scope="module")
def uses() -> list[cuda_budget.Use]:
    with trainer.alone("ninja"):
        trainer.sh("ninja", *cuda_budget.wanted())
    return cuda_budget.all_uses()


def wrong_atomics(ptx: str) -> list[str]:
    """Return instructions that add floats to memory in an arbitrary order."""
    return re.findall(
        r"^.*\b(?:atom|red)\.[\w.:]*\.(?:f16|f32|f64|bf16|f16x2|bf16x2)\b.*$",
        ptx,
        re.M,
    )


def test_wrong_atomics_are_seen() -> None:
    assert wrong_atomics(
        "\tred.global.add.f32 [%rd1], %f1;\n\tatom.global.add.s32 %r1, [%r], 1;"
    ) == ["\tred.global.add.f32 [%rd1], %f1;"]
    assert wrong_atomics("atom.shared.add.noftz.bf16x2 %r1, [%r2], %r3;")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    sorted(path for path in CUDA.glob("*.cu") if "atomic" in code(path)),
    ids=lambda path: path.stem,
)
def test_no_float_is_summed_in_an_order_of_chance(uses, path) -> None:
    text = cuda_budget.ptx(ROOT / f"out/o/cuda/{path.stem}.o")
    assert re.search(r"\b(atom|red)\.", text) and wrong_atomics(text) == []


# ---- registers


@pytest.mark.exhaustive
def test_every_kernel_is_compiled_for_every_processor(uses) -> None:
    where = {}
    for use in uses:
        where.setdefault(use.kernel, set()).add(use.target)
    assert len(where) > 30
    assert {
        name for name, targets in where.items() if targets != set(cuda_budget.TARGETS)
    } == set()


@pytest.mark.slow
def test_no_kernel_spills(uses) -> None:
    assert [use for use in uses if use.spilled] == []


@pytest.mark.slow
def test_kernels_keep_to_their_budget(uses) -> None:
    """Registers equal the table with the compiler that made it. With any other compiler the kernels
    are the same, for the processors that they are compiled for."""
    text = cuda_budget.TABLE.read_text()
    targets = {use.target for use in uses}
    listed = [x for x in cuda_budget.read(text) if x.target in targets]
    assert listed
    if text.splitlines()[0] == cuda_budget.table([]).splitlines()[0]:
        assert sorted(uses) == listed
    assert {(x.kernel, x.target) for x in listed} == {
        (x.kernel, x.target) for x in uses
    }
