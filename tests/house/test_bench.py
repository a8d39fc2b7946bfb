"""test_bench.py -- tests bench/gpu.sh on a machine without a GPU: its messages, files and refusals;
its operands of kernels and their copies to a GPU and back; and the arithmetic of other
benchmarks."""

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from unittest import mock

import numpy as np
import pytest
from zg.predict.device import load as load_device
from zg.read.spec import load
from zg.search import search

from tests.lib import device, namespaces, zk
from tests.lib.hosts import running
from tests.lib.patience import LIMIT
from tests.lib.trainer import ROOT, sh

# a number of seconds that no other run of this test sleeps
SLEEP = 3600 + os.getpid()
SCRIPT = ROOT / "bench" / "gpu.sh"
sys.path.append(str(ROOT / "bench"))


def call(*args: object, **settings: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | settings
    return subprocess.run(
        [SCRIPT, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=env,
    )


@pytest.mark.parametrize(
    "part",
    [
        "gpu_check",
        "gpu_speed",
        "gpu_kernels",
        "saving",
        "file_tier",
        "shared_samples",
        "peers",
        "lora",
        "calibrate",
        "calibrate_gpu",
        "gpu_found",
        "predict",
    ],
)
def test_every_part_can_begin(part: str) -> None:
    """Every part of the benchmark finds its imports from inside bench/."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {part}"],
        cwd=ROOT / "bench",
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr


# ---- the command


def test_without_a_device_it_says_so(tmp_path: pathlib.Path) -> None:
    done = call("meet", tmp_path / "made" / "gpu.json")
    assert done.returncode == 3 and "no NVIDIA GPU is here" in done.stderr
    made = json.loads((tmp_path / "made" / "gpu.json").read_text())
    assert made["status"] == "no GPU" and "driver" in made["why"]
    assert list(made["parts"]) == ["facts"] and made["parts"]["facts"]["status"] == "ok"
    assert any(line.startswith("gcc: /") for line in made["parts"]["facts"]["said"])


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--parts",),
        ("--parts", "lawn"),
        ("--limit", "soon"),
        ("--speed",),
        ("a", "b"),
        ("meet", "speed"),
        ("--rehearse", "a"),
    ],
)
def test_usage(args: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    assert call(*args, OUT=str(tmp_path)).returncode == 2
    assert not list(tmp_path.iterdir())


def test_sources_of_another_generator_are_refused(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "origin").write_text("0000 measurement\n")
    done = call("meet", "--from", tmp_path, tmp_path / "gpu.json")
    assert done.returncode == 2 and "--prepare" in done.stderr


# A program of bench/ that notes its arguments, and its folder of ready programs, and fails or
# waits where it is told to.
STAND_IN = """
import os, pathlib, sys, time
name = next((word for word in sys.argv[1:] if "/" not in word), "bits")
note = f"{name} {os.environ.get('ZR_TEST_READY', '')}".strip()
with pathlib.Path("order").open("a") as order:
    order.write(note + "\\n")
if sys.argv[-1].endswith(".json"):
    pathlib.Path(sys.argv[-1]).write_text('{"x": 1}')
if name == "%(waits)s":
    pathlib.Path("pid").write_text(str(os.getpid()))
    time.sleep(600)
sys.exit(name == "%(fails)s")
"""
CASES = "print('gpt2-124m gpt2-1558m-8 llama3-8b-8 qwen3-0.6b')\n"
PARTS = {
    "meet": "build losses bits law small small",
    "speed": "build tune-gpt2-124m gpt2-124m ceilings profile tune-gpt2-1558m-8 gpt2-1558m-8 "
    "table table table table",
    "odd": "build memory ranks tune-llama3-8b-8 llama3-8b-8 tune-qwen3-0.6b qwen3-0.6b offload "
    "once once small small",
}


def stand_ins(root: pathlib.Path, waits: str = "", fails: str = "") -> dict[str, str]:
    """Copy bench/gpu.sh and put programs in place of those that it calls, which write their names
    to the file `order`. Return the environment of a rehearsal, which has a note of a commit."""
    for name in ("bench", "tests", "runtime/cuda", "ready"):
        (root / name).mkdir(parents=True)
    (root / "ready" / "program").touch()
    (root / "commit").write_text("abc, 0 files changed\n")
    toolkit = root / "runtime" / "cuda" / "toolkit"
    toolkit.write_text("#!/bin/sh\n")
    toolkit.chmod(0o755)
    for name in ("gpu.sh", "gpu_parts.sh", "gpu_report.py", "gpu_found.py"):
        shutil.copy(ROOT / "bench" / name, root / "bench")
    (root / "bench" / "gpu_cases.py").write_text(CASES)
    made = STAND_IN % {"waits": waits, "fails": fails}
    for name in ("gpu_check", "gpu_speed", "gpu_kernels"):
        (root / "bench" / f"{name}.py").write_text(made)
    (root / "tests" / "kernel_bits.py").write_text(made)
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "ZR_BENCH_FROM": str(root)}


def rehearse(root: pathlib.Path, env: dict[str, str], *words: object) -> dict:
    """Rehearse with stand-ins and return the JSON."""
    done = subprocess.run(
        [root / "bench" / "gpu.sh", "--rehearse", *map(str, words), root / "gpu.json"],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode in (0, 1), done.stderr
    return json.loads((root / "gpu.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_the_parts_of_a_call_in_order(tmp_path: pathlib.Path, name: str) -> None:
    """A call's parts run in order, for the models of the card, also without git."""
    made = rehearse(tmp_path, stand_ins(tmp_path), name)
    assert (tmp_path / "order").read_text().split() == PARTS[name].split()
    assert made["status"] == "done" and made["commit"] == "abc, 0 files changed"
    assert list(made["parts"])[0] == "facts"
    others = {x: p for x, p in made["parts"].items() if x not in ("facts", "kernels")}
    assert {p["status"] for p in others.values()} == {"ok"}
    with tarfile.open(tmp_path / "gpu.tar.gz") as kept:
        assert "gpu/facts.log" in kept.getnames()
    assert {"git: none", "clang: none"} <= set(made["parts"]["facts"]["said"])
    python = tmp_path / "out" / "bench" / "bare" / "python3"
    for package, code in (("numpy", 0), ("pydantic", 1)):
        assert subprocess.run([python, "-c", f"import {package}"]).returncode == code


def test_where_nothing_builds_ready_programs_run(tmp_path: pathlib.Path) -> None:
    env = stand_ins(tmp_path, fails="build")
    made = rehearse(tmp_path, env, "--parts", "build,losses")
    ready = f"{tmp_path}/ready"
    order = (tmp_path / "order").read_text().splitlines()
    assert order == ["build", f"ready {ready}", f"losses {ready}"]
    assert made["parts"]["build"]["status"] == "failed: 1"
    assert os.access(tmp_path / "ready" / "program", os.X_OK)


DRIVER = """
int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *n) { return *n = 1, 0; }
int cuDeviceGetAttribute(int *x, int what, int n) { return *x = what == 75 ? 9 : n, 0; }
int cuDeviceGetName(char *name, int size, int n) { return name[0] = 'G', name[1] = 0, n * size; }
int cuDeviceTotalMem_v2(unsigned long *size, int n) { return *size = %sull << 30, n; }
"""


@pytest.mark.parametrize("memory,card", [(79, "80"), (139, "140")])
def test_a_card_has_its_models(tmp_path: pathlib.Path, memory: int, card: str) -> None:
    """Processor and memory come from the driver, whose library stands in here."""
    (tmp_path / "driver").mkdir()
    source, library = tmp_path / "driver.c", tmp_path / "driver" / "libcuda.so.1"
    source.write_text(DRIVER % memory)
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True)
    env = stand_ins(tmp_path) | {"LD_LIBRARY_PATH": str(library.parent)}
    stand_in = tmp_path / "bench" / "gpu_check.py"
    asked = 'print(*(os.environ[x] for x in ("ZR_BENCH_CARD", "ZR_GENCODE")))\n'
    stand_in.write_text(f"import os\n{asked}")
    subprocess.run(
        [tmp_path / "bench" / "gpu.sh", "--parts", "build", tmp_path / "gpu.json"],
        env=env,
        check=True,
        capture_output=True,
        timeout=LIMIT,
    )
    made = json.loads((tmp_path / "gpu.json").read_text())
    assert (made["target"], made["card"], made["kind"]) == ("sm_90", card, "cuda")
    said = made["parts"]["build"]["said"]
    assert said == [f"{card} -gencode arch=compute_90a,code=sm_90a"]


# $1: a folder over an installed toolkit, if there is one
HIDDEN = """
[ ! -d /usr/local/cuda ] || mount --bind "$1" "$(readlink -f /usr/local/cuda)"
exec bench/gpu_parts.sh toolkit
"""


def test_a_toolkit_in_parts_is_found(tmp_path: pathlib.Path) -> None:
    """A toolkit beside nvcc and libraries in wheels make one folder."""
    alone = namespaces.mounts()
    env = stand_ins(tmp_path)
    shutil.copy(ROOT / "runtime" / "cuda" / "toolkit", tmp_path / "runtime" / "cuda")
    for name in (
        "my/bin/nvcc",
        "my/include/cuda_runtime.h",
        "my/lib64/libcudart.so.13",
        "nvidia/cu13/include/cublasLt.h",
        "nvidia/cu13/lib/libcublasLt.so.13",
        "nvidia/nccl/include/nccl.h",
        "nvidia/nccl/lib/libnccl.so.2",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch(0o755)
    (tmp_path / "empty").mkdir()
    env |= {"PYTHONPATH": str(tmp_path), "PATH": f"{tmp_path}/my/bin:{env['PATH']}"}
    env |= {"python": "python3", "TORCH_PYTHON": "python3", "ZR_BENCH_KIND": "cuda"}
    for name in ("CUDA_HOME", "NCCL_HOME"):
        env.pop(name, None)
    done = subprocess.run(
        [*alone, "bash", "-c", HIDDEN, "hidden", tmp_path / "empty"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    farm = tmp_path / "out" / "bench" / "cuda"
    assert done.stdout == f"{farm}\n", done.stderr
    for name in ("nccl.h", "cublasLt.h", "cuda_runtime.h"):
        assert (farm / "include" / name).exists()


def test_a_part_without_time_is_left_out(tmp_path: pathlib.Path) -> None:
    env = stand_ins(tmp_path)
    made = rehearse(tmp_path, env, "--parts", "losses", "--limit", "9")
    assert {p["status"] for p in made["parts"].values()} == {"left out"}


def test_the_json_is_whole_after_a_cut(tmp_path: pathlib.Path) -> None:
    """A call that is killed leaves JSON with the parts before and the one that ran."""
    env = stand_ins(tmp_path, waits="law")
    words = ("--rehearse", "--parts", "losses,law,bits", tmp_path / "gpu.json")
    with subprocess.Popen([tmp_path / "bench" / "gpu.sh", *words], env=env) as run:
        while not (tmp_path / "pid").exists():
            assert run.poll() is None
            time.sleep(0.1)
        run.kill()
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    made = json.loads((tmp_path / "gpu.json").read_text())
    assert made["status"] == "running" and "bits" not in made["parts"]
    assert made["parts"]["losses"]["found"] == {"x": 1}
    assert made["parts"]["law"]["status"] == "running"


@pytest.mark.parametrize("stop,code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_part_that_runs(
    tmp_path: pathlib.Path, stop: signal.Signals, code: int
) -> None:
    """A signal to the script alone also ends the processes that the running part has started."""
    env = stand_ins(tmp_path)
    left = (
        f'import pathlib, subprocess; pathlib.Path("begun").touch(); '
        f'subprocess.run(["sleep", "{SLEEP}"])\n'
    )
    (tmp_path / "bench" / "gpu_check.py").write_text(left)
    with subprocess.Popen(
        [tmp_path / "bench" / "gpu.sh", "--rehearse", "--parts", "losses"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=env,
    ) as run:
        while not (tmp_path / "begun").exists():
            assert run.poll() is None
            time.sleep(0.1)
        run.send_signal(stop)
        said = run.communicate(timeout=LIMIT)[1]
    assert run.returncode == code and said.splitlines()[-1].startswith(
        "gpu.sh: stopped"
    )
    assert not running(pathlib.Path("sleep"), SLEEP)
    made = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert made["status"] == "stopped"


@pytest.mark.exhaustive
def test_all_calls_by_emulation(tmp_path: pathlib.Path) -> None:
    """All three calls succeed with the sources alone, from nothing, and the few programs that a
    machine with a GPU has."""
    root = tmp_path / "sources"
    listed = sh("git", "ls-files", "--cached", "--others", "--exclude-standard")
    for name in listed.splitlines():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [root / "bench" / "gpu.sh", "--rehearse"],
        env=os.environ | {"PATH": path, "OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=4 * LIMIT,
    )
    assert done.returncode == 0, done.stderr
    for name in PARTS:
        made = json.loads((tmp_path / f"{name}.json").read_text())
        assert made["status"] == "done" and made["commit"] == "unknown"
        assert {p["status"] for p in made["parts"].values()} == {"ok"}


@pytest.mark.exhaustive
def test_ready_programs_need_no_compiler(tmp_path: pathlib.Path) -> None:
    """Programs that `--prepare` has built train where there is no compiler; objects that it has
    built are linked where there is no ninja."""
    done = call("--rehearse", "--prepare", tmp_path / "made")
    assert done.returncode == 0, done.stderr
    made, tools = tmp_path / "made", tmp_path / "tools"
    tools.mkdir()
    env = os.environ | {
        "PATH": str(tools),
        "ZR_BENCH_KIND": "emulated",
        "ZR_BENCH_FROM": str(made),
        "ZR_TEST_READY": str(made / "ready"),
    }
    for tool, command in (("", "ready"), ("gcc", "memory")):
        if tool:
            for name in (tool, "as", "ld"):
                (tools / name).symlink_to(shutil.which(name))
        check = (ROOT / "bench" / "gpu_check.py", command, tmp_path / f"{command}.json")
        done = subprocess.run([sys.executable, *check], env=env, timeout=LIMIT)
        assert done.returncode == 0, command


# ---- the report


def test_a_part_that_failed_or_hung_is_recorded(
    tmp_path: pathlib.Path,
) -> None:
    import gpu_report

    parts = tmp_path / "parts"
    parts.mkdir()
    for name, status, log, found in (
        ("good", 0, "a\nb\n", '{"x": 1}'),
        ("bad", 9, "why\n", ""),
        ("slow", 124, "", '{"x": '),
        ("late", "left out", None, ""),
        ("now", "running", "so far\n", '{"x": 2}'),
    ):
        (parts / f"{name}.status").write_text(f"{status}\n7\n")
        if log is not None:
            (parts / f"{name}.log").write_text(log)
        if found:
            (parts / f"{name}.json").write_text(found)
    os.utime(parts / "now.status", (time.time() + 1, time.time() - 100))
    assert gpu_report.main([str(parts), str(tmp_path / "gpu.json"), "running"]) == 0
    made = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert made["good"] == {
        "status": "ok",
        "seconds": 7,
        "said": ["a", "b"],
        "found": {"x": 1},
    }
    assert made["bad"]["status"] == "failed: 9" and made["bad"]["said"] == ["why"]
    assert made["slow"]["status"] == "took too long" and made["slow"]["found"] is None
    assert made["late"]["status"] == "left out"
    assert made["now"]["status"] == "running" and made["now"]["seconds"] >= 100
    assert made["now"]["found"] == {"x": 2} and made["now"]["said"] == ["so far"]


def test_the_commit_is_known_without_git(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gpu_report

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ZR_BENCH_FROM", str(tmp_path))
    commit = gpu_report.commit.__wrapped__
    assert commit() == "unknown"
    (tmp_path / "commit").write_text("abc, 1 files changed\n")
    assert commit() == "abc, 1 files changed"


def test_counters_are_of_all_kernels_of_attention() -> None:
    """The part `counters` profiles each kernel of attention on tensor cores."""
    script = (ROOT / "bench/gpu_parts.sh").read_text()
    (counted,) = re.findall(r"--kernel-name 'regex:(.*)'", script)
    for name in ("attention", "attention_bwd"):
        text = (ROOT / f"kernels/cuda/{name}.cu").read_text()
        found = re.findall(r"__global__ void __launch_bounds__\(.*\)\s+(\w+)\(", text)
        assert len(found) == text.count("__global__") > 1
        assert all(re.search(counted, kernel) for kernel in found), found


CARDS = {"80": 76, "140": 130}  # GiB that a plan may have


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS)
def test_models_fit_their_card(tmp_path: pathlib.Path, card: str) -> None:
    """The models of a card leave room for libraries, and each is there in one size. Every operand of
    their kernels is known to the part `table`."""
    import gpu_cases
    import gpu_kernels

    cases = [c for c in gpu_cases.MEASURED if c.card in ("", card)]
    assert len(cases) == 4 == len({c.source.spec for c in cases})
    for c in cases:
        spec = tmp_path / f"{c.name}.yaml"
        spec.write_text(c.source.text())
        p = search.find(load(str(spec), c.source.keys)).plan
        assert p.arena("sm_90") < CARDS[card] << 30, c.name
        for kernel in gpu_kernels.kernels(p):
            gpu_kernels.words_of(
                mock.MagicMock(target=gpu_kernels.TARGET), p, kernel, lambda size: size
            )


# ---- kernels one by one


@pytest.mark.slow
def test_every_kernel_of_a_step_is_timed(tmp_path: pathlib.Path) -> None:
    """Every kernel of a step of the tiny models runs on operands of exactly the sizes that the
    facts of kernels say."""
    env = os.environ | {
        "ZR_BENCH_KIND": "emulated",
        "ZR_BENCH_FROM": str(tmp_path),
    }
    zk.library(zk.EMULATED)
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "gpu_kernels.py", "small"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=env,
    )
    assert done.returncode == 0 and "kernels ran" in done.stdout, done.stderr


def test_operands_go_to_the_device_and_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Results through copies to the device equal those without, also if the sources of a sum lie in
    its own buffer."""
    found = []
    for there in (False, True):
        monkeypatch.setattr(zk, "ON_DEVICE", there)
        k, x = (
            zk.Kernels(zk.EMULATED),
            np.random.default_rng(1).standard_normal(70).astype("f4"),
        )
        assert (k.device is not None) == there
        y, w, ctl = np.zeros(35, np.float32), x[:49].copy(), zk.Ctl()
        k.zk_linear_fwd(y, x[:35], w, None, 5, 7, 7, zk.IN_OUT)
        leaves = (zk.ctypes.c_void_p * 3)(
            *(x.ctypes.data + 4 * 20 * i for i in range(3))
        )
        k.zk_push(x[:20], 20, leaves, 3, 1, 20, ctl, 3, 0, 4)
        k.zk_count(ctl, 3)
        sums = np.zeros(2, np.uint64)
        k.zk_hash(sums, x, zk.spans([dict(elems=70, count=1, key=3)]), 1, 0, 70, 1)
        found.append((y.tobytes(), x.tobytes(), sums.tobytes(), ctl.leaves))
    assert found[0] == found[1] and found[0][3] == 3


def test_spans_that_overlap_are_one() -> None:
    assert device.joined([(8, 9), (0, 4), (3, 6), (6, 8), (4, 5)]) == [
        (0, 6),
        (6, 8),
        (8, 9),
    ]


# ---- the bounds of bench/precision.py


def test_precision_has_bounds() -> None:
    """f16 may deviate by 2^-8 of a fall of one nat during training, and by another seed's distance
    at the end."""
    import precision

    def lines(off: float, val: float) -> list[dict]:
        return [{"loss": 3 - n / 99 + off, "skipped": 0} for n in range(100)] + [
            {"val_loss": val}
        ]

    def holds(off: float, val: float) -> bool:
        base = lines(0, 2.0)
        return precision.holds(
            [
                precision.figures("", x, base)
                for x in (base, lines(0.5, 1.75), lines(off, val))
            ]
        )

    assert holds(0.0039, 2.25) and holds(-0.0039, 1.0)
    assert not holds(0.004, 2.0) and not holds(-0.004, 2.0) and not holds(0, 2.26)


def test_a_collective_is_from_its_last_begin_to_its_last_end() -> None:
    """The time of a collective excludes the wait for a late rank; it is that of the larger one of
    two, in the median step."""
    import mpi

    def command(rank: int, step: int, name: str, ts: int, dur: int, size: int) -> dict:
        args = {"step": step, "bytes": size}
        return {
            "ph": "X", "pid": rank, "name": name, "ts": ts, "dur": dur, "args": args
        }  # fmt: skip

    events: list[dict] = [{"ph": "M", "pid": 0, "name": "process_name"}]
    for step, longer in enumerate((0, 500, 3)):
        at = 10000 * step
        for rank, late in ((0, 40), (1, 0)):
            events += [
                command(rank, step, "alltoall", at + 10, 1, 4096),
                command(rank, step, "done", at + 20, 1, 0),
                command(rank, step, "alltoall", at + 100 + late, 5, 1 << 26),
                command(rank, step, "sum_embed", at + 150, 20, 0),
                command(rank, step, "done", at + 200 - late, 10 + longer, 0),
            ]
    kind = mpi.KINDS["reduce-scatter"]
    assert mpi.seconds(events, kind) == pytest.approx(1e-6 * (210 + 3 - 140))
    gather = [{**e, "name": "gather"} for e in events if e["name"] == "alltoall"]
    one = mpi.seconds(gather, mpi.KINDS["all-gather"])
    assert one == pytest.approx(1e-6 * 5)
    with pytest.raises(KeyError):
        mpi.seconds([e for e in events if e["pid"] == 0], kind)


# ---- bench/peers.py, without its peers


def test_a_ratio_is_of_one_round() -> None:
    """The reported ratio is the median of the rounds' ratios (2, 3 and 1 on a machine that slows
    down), not the ratio of medians."""
    import peers
    import results

    row, rounds = peers.ROWS[0], []
    for theirs, own in ((2.0, 1.0), (12.0, 4.0), (7.0, 7.0)):
        ran = [peers.Ran(s, 0.5, 1000, 3.0, 0.25, "avx2, pairs") for s in (theirs, own)]
        rounds.append(dict(zip((peers.key(row), "mine"), ran, strict=True)))
    made = peers.figures(row, rounds, "mine", 2.5)
    assert (made["ratio"], made["between"]) == (2, [1, 3])
    assert (made["step"], made["ours"]) == (7, 4)
    result = {
        "rows": [made],
        "saved": [],
        "orders": [{"by": "avx2, tiles", "step": 4.5}],
        "objects": "Ours by avx2.",
    }  # fmt: skip
    lines = results.text(peers.tables(result)).splitlines()
    (line,) = [x for x in lines if "| 7.000 |" in x]
    assert (
        "| 7.000 | 4.000 | avx2, pairs | 2.00 | 1.00 to 3.00 | 2.500 | 1.60 |" in line
    )
    assert line.endswith("| 0.5 | 0.50 | 0.25 |")
    assert "Ours by avx2." in lines and lines[-1] == "| avx2, tiles | 4.500 |"
    assert peers.other_order(rounds[0]["mine"]) == "tiles"
    drawn = peers.picture(result)
    assert drawn.count("<rect") == 3 and ">4.00</text>" in drawn


def test_each_peer_has_ours_beside_it() -> None:
    import peers

    assert len({peers.key(row) for row in peers.ROWS}) == len(peers.ROWS)
    for row in peers.ROWS:
        keys = peers.case_of(row).keys
        assert {
            f"zero.stage={row.stage}",
            f"cluster.ranks={row.ranks}",
            f"train.precision={row.precision}",
        } <= set(keys)


@pytest.mark.parametrize("name", ["gpt2-124m", "qwen3-0.6b-4", "demo"])
def test_a_models_program_has_its_layers_and_tokens(name: str) -> None:
    import peers

    import bench

    row = next(row for row in peers.ROWS if row.model.name == name)
    case = peers.case_of(row)
    words = (case.spec, *bench.settings(case), "--emit", "plan")
    p = bench.parse(bench.sh("gen/zgen", *words))
    assert p.head.batch * p.head.sequence == bench.TOKENS
    assert p.head.sequence == row.model.sequence
    layers = {"gpt2-124m": 12, "qwen3-0.6b-4": 4, "demo": 4}
    assert max(f.count for f in p.flats) == layers[name]


def test_rows_are_chosen_by_name() -> None:
    import peers

    def chosen(**given: object) -> tuple[list[str], bool]:
        usual = {"only": "", "spec": peers.GPT2.spec, "llmc": None}
        said = argparse.Namespace(**(usual | given))
        rows, first = peers.chosen(said)
        return [peers.key(row) for row in rows], first is not None

    assert len(chosen()[0]) == len(peers.ROWS) and chosen()[1]
    demo = ["demo, PyTorch, 1, f32", "demo, PyTorch, compiled, 1, f32"]
    assert chosen(only="demo") == (demo, False)
    assert chosen(only="gpt-tiny, DDP, 2", spec="x/gpt-tiny.yaml") == (
        ["gpt-tiny, DDP, 2, f32"],
        False,
    )
    assert chosen(only="llm.c", llmc="x")[0] == ["gpt2-124m, llm.c, 1, f32"]


def test_a_peer_that_trains_something_else_is_told() -> None:
    import peers

    row, own = peers.ROWS[0], peers.Ran(1.0, 0.5, 1000, 10.9)
    peers.check_loss(row, peers.Ran(1.0, 0.5, 1000, 10.5), own)
    for loss in (10.3, 11.5):
        with pytest.raises(SystemExit, match=f"loss {loss}, ours 10.9"):
            peers.check_loss(row, peers.Ran(1.0, 0.5, 1000, loss), own)


def test_others_count_against_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import bench

    monkeypatch.setattr(bench, "BEGUN", (100.0, 10.0))
    monkeypatch.setattr(bench, "clocks", lambda: (130.0, 30.0))
    assert bench.others() == 0.5


def test_what_a_run_has_started_is_its_own() -> None:
    """The processor time of an ended child counts as the run's own, up to a tick or two."""
    import bench

    busy, own = bench.clocks()
    child = "import time\nwhile time.process_time() < 1: pass"
    subprocess.run([sys.executable, "-c", child], check=True)
    all_, mine = (
        now - was for now, was in zip(bench.clocks(), (busy, own), strict=True)
    )
    assert mine >= 1 and all_ >= mine - 0.1


def test_the_flops_that_a_table_of_speed_has() -> None:
    """The flops are those of `--emit explain`: six per parameter and token, plus attention."""
    import bench

    found = bench.flops(bench.Case("model_specs/gpt-tiny.yaml", "one", ()))
    tokens, parameters = 8 * 33, 149_400
    assert 6 * parameters * tokens < found < 7 * parameters * tokens


# ---- predicted times


def test_every_program_of_predict_has_a_prediction(tmp_path: pathlib.Path) -> None:
    """All 21 programs are planned, by names of their own, and those of two hosts meet there."""
    import predict
    from zg.predict import play

    assert len({c.name for c in predict.CASES}) == len(predict.CASES) == 21
    for c in predict.CASES:
        keys = (*c.keys, f"zero.offload_optimizer.nvme_path={tmp_path}")
        read = load(str(predict.source(c.model, tmp_path)), [*keys], None, None)
        p = search.find(read).plan
        assert play.step(predict.clock_of(read, p, 2 if c.rate else 1)).seconds > 0
        assert bool(c.rate) == (0 < p.head.local < p.head.ranks)
        assert (predict.DISK in c.keys) == bool(p.filed)


def test_a_link_is_what_its_transfers_tell() -> None:
    """Transfers take a latency and their bytes at a bandwidth; one that was late is left out."""
    import calibrate

    def took(size: int) -> tuple[int, float]:
        return size, 1e-4 + size / 2e9

    moved = [took(1 << 30)] * 4 + [took(4096)] * 7 + [(4096, 0.5)]
    found = calibrate.link(moved)
    assert found["bandwidth"] == pytest.approx(2e9, rel=1e-3)
    assert found["latency"] == pytest.approx(1e-4, rel=0.01)
    assert calibrate.link(moved, 2.0)["bandwidth"] == pytest.approx(4e9, rel=1e-3)


def test_a_gpu_has_a_column() -> None:
    """B200 and B300 share the tables of sm_100."""
    import gpu_found

    columns = {code: gpu_found.Gpu(code, 0, "").column for code in (80, 90, 100, 103)}
    assert columns == {80: "sm_80", 90: "sm_90", 100: "sm_100", 103: "sm_100"}


def calibrated_gpu(path: pathlib.Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "bench" / "calibrate.py", "--gpu", "-o", path],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


@pytest.mark.slow
def test_gpus_are_calibrated(tmp_path: pathlib.Path) -> None:
    """The file is whole in the emulation: zgen reads it, every kernel of its plans has a curve, and
    its head names the numbers that were not measured."""
    path = tmp_path / "gpu.yaml"
    done = calibrated_gpu(path, ZR_BENCH_KIND="emulated")
    assert done.returncode == 0, done.stderr
    made, usual = load_device(str(path)), load_device("h100")
    head = [x for x in path.read_text().splitlines() if x.startswith("#")]
    assert [x.split(":")[0] for x in head[1:-1]] == ["# peak", "# network", "# peers"]
    assert made.target == "sm_90" and made.peak == usual.peak
    assert made.network == usual.network and made.peers.hop == usual.peers.hop
    assert made.peers.bandwidth != usual.peers.bandwidth
    assert [r.precision for r in made.rates] == ["bf16", "f32"]
    for rates in made.rates:
        assert {
            "zk_linear_fwd",
            "zk_attention_bwd",
            "zk_update",
            "zk_rope",
        } <= rates.cold.keys()


def test_without_gpus_none_is_calibrated(tmp_path: pathlib.Path) -> None:
    import gpu_found

    if gpu_found.gpus():
        pytest.skip("this machine has a GPU")
    done = calibrated_gpu(tmp_path / "gpu.yaml")
    assert done.returncode == 3 and "shows no GPU" in done.stderr
    assert not (tmp_path / "gpu.yaml").exists()


def test_a_profile_is_of_the_rank_that_took_least(tmp_path: pathlib.Path) -> None:
    import calibrate

    def event(rank: int, name: str, took: float, **more: object) -> dict[str, object]:
        args = {"step": 3, "call": 0, **more}
        return {
            "ph": "X",
            "name": name,
            "pid": rank,
            "tid": 0,
            "dur": took,
            "args": args,
        }

    main = {"ph": "M", "name": "thread_name", "tid": 0, "args": {"name": "main"}}
    events = [
        main,
        event(0, "gather", 30.0, bytes=64),
        event(1, "gather", 10.0, bytes=64),
        event(0, "wait", 5.0, **{"for": "gather"}),
        event(0, "next", 2.0),
        event(0, "factor", 1.0),
    ]
    (tmp_path / "trace").write_text(json.dumps(events))
    found = calibrate.profile(tmp_path / "trace")
    assert found.moved("main", "gather") == [(64, pytest.approx(1e-5))]
    assert ("main", "wait") not in found.commands
    assert found.shortest() == pytest.approx(1e-6)
