"""test_written.py -- tests zgen's outputs: `-o FILE` leaves the whole new file or the old one,
stdout stays an output, and progress goes to stderr."""

import errno
import hashlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
from zg import output

from tests.lib import law, namespaces, trainer
from tests.lib.patience import LIMIT
from tests.write.test_command import zgen

GPT = law.path("gpt")
LLAMA = law.path("llama")
KEYS = ("--emit", "plan")


def said(folder: pathlib.Path, *args: object) -> str:
    """Return the stderr of a call that cannot write. Assert that nothing is left in the folder."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = zgen(GPT, *KEYS, "-o", *args, cwd=folder)
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert before == {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    return done.stderr


@pytest.fixture(scope="module")
def plan() -> str:
    return zgen(GPT, *KEYS).stdout


@pytest.mark.slow
def test_a_file(tmp_path: pathlib.Path, plan: str) -> None:
    """A new file has the rights that the process gives; a replaced one keeps its rights."""
    file = tmp_path / "a plan"
    for mode in (0o666 & ~os.umask(os.umask(0o22)), 0o640):
        done = zgen(GPT, *KEYS, f"-o{file}")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert file.read_text() == plan and file.stat().st_mode & 0o777 == mode
        file.write_text("old")
        file.chmod(0o640)
    assert list(tmp_path.iterdir()) == [file]


def test_folders_are_made(tmp_path: pathlib.Path) -> None:
    """Missing folders are made below the current one if the output can be written, and none after a
    refusal."""
    there = tmp_path / "two" / "folders" / "plan"
    bad = ("--set", "zero.stage=4")
    for where in ("two/folders/plan", there):
        assert zgen(GPT, *bad, "-o", where, cwd=tmp_path).returncode == 2
        assert not [*tmp_path.iterdir()]
        assert zgen(GPT, *KEYS, "-o", where, cwd=tmp_path).returncode == 0
        assert there.read_text().startswith("plan")
        shutil.rmtree(tmp_path / "two")


def test_no_folder_is_made_elsewhere(tmp_path: pathlib.Path) -> None:
    """No folder is made at / or beside the current one, which might be a slip of the pen; existing
    ones work."""
    here, other = tmp_path / "here", tmp_path / "other"
    here.mkdir()
    (here / "link").symlink_to("../other")
    for where, lacks in (
        ("/zgen-typo/build/train.c", "/zgen-typo"),
        ("../other/x/train.c", other),
        (other / "x" / "y" / "train.c", other),
    ):
        for emit in ("c", "bundle"):
            done = zgen(GPT, "--emit", emit, "-o", where, cwd=here)
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr == (
                f"zgen: -o {where}: there is no folder {lacks}; allowed: an existing folder, or "
                "one below the current folder, which is created\n"
            )
            assert not other.exists() and not os.path.exists("/zgen-typo")
    other.mkdir()
    assert zgen(GPT, *KEYS, "-o", "../other/plan", cwd=here).returncode == 0
    assert zgen(GPT, *KEYS, "-o", "link/x/plan", cwd=here).returncode == 0
    assert sorted(os.listdir(other)) == ["plan", "x"]


@pytest.mark.parametrize("emit,size", [("c", "16k"), ("bundle", "64k")])
def test_a_full_disk(tmp_path: pathlib.Path, emit: str, size: str) -> None:
    """A full disk is reported with its reason, and no folder made for the file stays."""
    alone = namespaces.mounts()
    program = trainer.ROOT / "gen/zgen"
    command = (
        f"mount -t tmpfs -o size={size} none {tmp_path} && cd {tmp_path} && "
        f"{{ {program} {GPT} --emit {emit} -o new/folder/it; echo code $?; find .; }}"
    )
    done = subprocess.run(
        [*alone, "sh", "-c", command],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.stdout == "code 3\n.\n"
    assert done.stderr == (
        "zgen: cannot write new/folder/it: No space left on device\n"
    )


def test_the_reason_of_an_error() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "a'b")
    copied = shutil.Error([("a", "b", str(full)), ("c", "d", "other")])
    reasons = [
        output.why(e) for e in (full, copied, shutil.Error("same file"), OSError())
    ]
    full = "No space left on device"
    assert reasons == [full, full, "same file", "OSError"]


def test_an_error_that_names_no_file_is_given_one() -> None:
    for name, anew, told in (
        (None, False, "there"),
        ("here", False, "here"),
        ("here", True, "there"),
    ):
        with pytest.raises(OSError) as e, output.naming("there", anew):
            raise OSError(errno.ENOSPC, "full", name)
        assert (e.value.filename, e.value.strerror) == (told, "full")


def test_an_error_leaves_the_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.c").write_text("old")
    done = zgen(GPT, "--set", "zero.stage=4", "-o", tmp_path / "train.c")
    assert done.returncode == 2 and (tmp_path / "train.c").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["train.c"]


def test_an_input_is_not_written_over(tmp_path: pathlib.Path) -> None:
    """The spec and the ds_config cannot be overwritten, by another name either."""
    spec, zero = tmp_path / "spec.yaml", tmp_path / "ds.json"
    spec.write_text(GPT.read_text())
    zero.write_text('{"zero_optimization": {"stage": 2}}')
    (tmp_path / "link").symlink_to("spec.yaml")
    for out, of in ((spec, spec), (tmp_path / "link", spec), (zero, zero)):
        done = zgen(spec, "--zero", zero, "-o", out)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"is the input file {of}, which would be overwritten" in done.stderr
    assert spec.read_text() == GPT.read_text() and "stage" in zero.read_text()


@pytest.mark.slow
def test_a_link_stays_one(tmp_path: pathlib.Path, plan: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/file")
    for _ in range(2):
        assert zgen(GPT, *KEYS, "-o", tmp_path / "link").returncode == 0
        assert (tmp_path / "link").is_symlink() and (
            tmp_path / "there/file"
        ).read_text() == plan
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file"]


@pytest.mark.slow
def test_devices_and_pipes_stay_what_they_are(
    tmp_path: pathlib.Path, plan: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    running = subprocess.Popen(
        [trainer.ROOT / "gen/zgen", GPT, *KEYS, "-o", tmp_path / "pipe"]
    )
    assert (tmp_path / "pipe").read_text() == plan and running.wait() == 0
    assert zgen(GPT, *KEYS, "-o", "/dev/null").returncode == 0
    assert zgen(GPT, *KEYS, "-o", "/dev/stdout").stdout == plan
    assert pathlib.Path("/dev/null").is_char_device()


@pytest.mark.slow
def test_what_the_host_refuses(tmp_path: pathlib.Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("old")
    for where, why in (
        ("folder", "Is a directory"),
        ("file/x", "Not a directory"),
        ("/dev/full", "No space left on device"),
        ("/proc/zgen", "No such file or directory"),
        ("x" * 300, "File name too long"),
        ("loop", "Too many levels of symbolic links"),
        ("", "Is a directory"),
    ):
        found = said(tmp_path, where)
        assert (
            found.startswith(f"zgen: cannot write {where[:100] or chr(39) * 2}")
            and why in found
        )


@pytest.mark.slow
def test_a_file_and_a_folder_that_may_not_be_written(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o444)
    (tmp_path / "closed").mkdir(mode=0o555)
    (tmp_path / "closed/file").symlink_to("../file")
    keep = (
        ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
        if os.getuid() == 0
        else []
    )
    for name in ("file", "closed/new"):
        done = subprocess.run(
            [
                *keep,
                trainer.ROOT / "gen/zgen",
                GPT,
                *KEYS,
                "-o",
                tmp_path / name,
            ],
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 3 and "Permission denied" in done.stderr, done.stderr
    assert (tmp_path / "file").read_text() == "old" and not (
        tmp_path / "closed/new"
    ).exists()


WRITER = """
import os, signal, sys, time
sys.path.insert(0, {gen!r})
from zg import main, output
signal.signal(signal.SIGINT, signal.default_int_handler)    # a background job's is ignored
def slowly(fd, text):
    os.write(fd, b'half')
    print(flush=True)
    time.sleep(60)
output._into = slowly
sys.exit(main.main([{spec!r}, '-o', {file!r}]))
"""


def test_what_is_interrupted_leaves_nothing(tmp_path: pathlib.Path) -> None:
    """^C during a write leaves nothing."""
    (tmp_path / "train.c").write_text("old")
    text = WRITER.format(
        gen=str(trainer.ROOT / "gen"),
        spec=str(GPT),
        file=str(tmp_path / "train.c"),
    )
    with subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout.readline() == "\n" and len(list(tmp_path.iterdir())) == 2
        running.send_signal(signal.SIGINT)
        assert (
            running.communicate(timeout=LIMIT)[1]
            == "zgen: interrupted; nothing is written\n"
        )
    assert running.returncode == 130 and (tmp_path / "train.c").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["train.c"]


# ---- progress of long runs

SLOW = """
import sys, time
sys.path.insert(0, {gen!r})
from zg import progress
progress.SECONDS = {seconds}
progress.begin('reads')
def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
work(0.6)
progress.doing('plans')
work(0.3)
"""


@pytest.mark.parametrize(
    "seconds,want", [(0.2, "zgen: reads ...\nzgen: plans ...\n"), (5.0, "")]
)
def test_phases_are_named_when_they_take_long(seconds: float, want: str) -> None:
    text = SLOW.format(gen=str(trainer.ROOT / "gen"), seconds=seconds)
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", want)


def head_of(text: str) -> dict[str, str]:
    """Return the rows of train.c's first comment by their first words."""
    rows: dict[str, str] = {}
    for line in text.partition(" */")[0].splitlines()[2:]:
        word, _, rest = line.removeprefix(" * ").partition(" ")
        if word:
            last = word
        rows[last] = f"{rows.get(last, '')} {rest.strip()}".strip()
    return rows


def test_the_head_says_how_to_make_it_again(tmp_path: pathlib.Path) -> None:
    """The command in train.c's head, run where the files are, writes the same train.c; the hash
    beside it is that of `--emit plan`."""
    (tmp_path / "a spec.yaml").write_bytes(GPT.read_bytes())
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    args = ("--zero", tmp_path / "ds.json", "--set", "train.optimizer.lr=1.0e-4")
    args += ("--set", "train.optimizer.groups=[{match: ['*.bias'], lr_factor: 0.5}]")
    args += (
        "--set",
        f"zero.offload_optimizer={{device: nvme, nvme_path: /{'a-b/' * 30}}}",
    )
    made = zgen(tmp_path / "a spec.yaml", *args, "--set", "cluster.ranks=2").stdout
    version, _, command = head_of(made)["From"].partition(": ")
    assert version == f"zgen {(trainer.ROOT / 'VERSION').read_text().strip()}"
    name, *words = shlex.split(command)
    assert (name, zgen(*words, cwd=tmp_path).stdout) == ("zgen", made)
    plan = zgen(*words, "--emit", "plan", cwd=tmp_path).stdout
    found = head_of(made)["Plan"].partition(",")[0]
    assert found == hashlib.sha256(plan.encode()).hexdigest()


def test_the_head_says_what_is_planned() -> None:
    """The head has the hosts, the trained parameters, the bytes that the program states, and the
    groups over which states are sharded and gradients are summed."""
    keys = ["cluster.ranks=4", "cluster.local=2", "zero.stage=3", "zero.shard_size=2"]
    lora = "train.lora={rank: 4, alpha: 8}"
    sets = [word for key in (*keys, lora) for word in ("--set", key)]
    made = zgen(GPT, *sets).stdout
    head = head_of(made)
    # q, k and v of 60 x 60 in one linear, in three blocks: A is [4, 60], B is [180, 4]
    assert head["Model"].startswith(
        "152,280 parameters (2,880 of them trained), width 60"
    )
    assert head["Ranks"].startswith("4 ranks on 2 hosts; ZeRO stage 3: ")
    assert "parameters are sharded over 2 ranks" in head["Ranks"]
    assert "over 2 ranks of shard, then 2 ranks of replica" in head["Sums"]
    wire, messages, far = (
        int(re.search(rf"\.{name} = (\d+)", made)[1])
        for name in ("wire", "messages", "far")
    )
    assert 0 < far < wire
    assert head["Wire"] == (
        f"a rank receives {wire:,} bytes in a training step, {far:,} of them from other hosts, "
        f"in {messages} collectives"
    )
    step, slots = re.search(
        r"INBOX\(i\) +SLOT\(\d+, (\d+), i\) +/\* (\d+)", made
    ).groups()
    assert f"{int(step) * int(slots) / 1024:.2f} KiB more over MPI" in head["Memory"]
    assert "Options" not in head and "out/train-cuda" in head["Build"]
    assert "All-gathers PARAM_BLOCK to RING_BLOCK over GROUP_SHARD" in made
    text = " ".join(made.replace("\n *", " ").split())
    assert "waits until all ranks of GROUP_REPLICA have read INTRA" in text


@pytest.mark.parametrize(
    "threshold,said",
    [
        (0, ""),
        (
            70,
            "320 parameters are persistent",
        ),  # the norms: 2 in each of 2 blocks, and 1, of 64
        (10**6, "all parameters are persistent"),
    ],
)
def test_the_head_says_what_is_persistent(threshold: int, said: str) -> None:
    key = f"zero.stage3_param_persistence_threshold={threshold}"
    ranks = head_of(zgen(LLAMA, "--set", "zero.stage=3", "--set", key).stdout)["Ranks"]
    assert ("persistent" in ranks) == bool(said) and said in ranks
    assert ("and parameters are sharded" in ranks) == (not said.startswith("all"))


@pytest.mark.parametrize(
    "schedule,steps",
    [("type: linear, warmup: 5, steps: 60", 60), ("type: constant, warmup: 5", 1000)],
)
def test_the_head_runs_to_the_end_of_a_schedule(schedule: str, steps: int) -> None:
    """A schedule whose last learning rate is 0 has as many steps; another has no end."""
    head = head_of(zgen(LLAMA, "--set", f"train.schedule={{{schedule}}}").stdout)
    assert f"--steps {steps};" in head["Run"]


def test_the_head_of_one_rank_and_of_options() -> None:
    sets = (
        "train.dropout=0.1",
        "data.shuffle=true",
        "targets=[cpu]",
        "cluster.ranks=1",
    )
    head = head_of(zgen(GPT, *(w for key in sets for w in ("--set", key))).stdout)
    assert head["Options"] == "samples are shuffled; dropout"
    assert (
        "cuda" not in head["Build"]
        and "Wire" not in head
        and "MPI" not in head["Memory"]
    )
    assert "every rank has all parameters" in head["Ranks"]
    assert head["Sums"] == "gradients are added micro-batch by micro-batch"


def test_a_word_does_not_end_the_comment(tmp_path: pathlib.Path) -> None:
    file = "zero.offload_optimizer={device: nvme, nvme_path: /tmp/a*/*b}"
    made = zgen(GPT, "--set", "zero.stage=2", "--set", file).stdout
    assert "nvme_path: /tmp/a* / *b" in head_of(made)["From"]
    path = tmp_path / "train.c"
    path.write_text(made)
    trainer.compile_source(trainer.GCC, path, "-c", "-o", tmp_path / "train.o")
