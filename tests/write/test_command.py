"""test_command.py -- tests the command lines of gen/zgen and of emitted programs, as users meet
them.

It covers help, exit codes, leftovers of a refusal, odd places, signals, and weights from run to
run. test_spec.py tests the content of specs; test_ranks.py tests options, signals and dead ranks of
a program made for tests.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from zg.read import spec as reader

from tests.lib import law, namespaces, oracle, program, trainer
from tests.lib.patience import LIMIT
from tests.reference import known

GPT = law.path("gpt")
HF = trainer.ROOT / "tests" / "reference" / "hf"


def zgen(*args: object, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(trainer.ROOT / "gen/zgen"), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        **{"cwd": trainer.ROOT, **options},
    )


@functools.cache
def built(*keys: str) -> pathlib.Path:
    return trainer.build(trainer.generate(GPT, *keys))


@pytest.fixture
def tokens(tmp_path: pathlib.Path) -> pathlib.Path:
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 33 * 50))
    return tmp_path / "tokens"


def weights(done: program.Result) -> str:
    assert done.code == 0, done.err
    return done.line("weights ").split()[1]


# ---- gen/zgen: refusals

# Words after the spec, and a part of the message.
REFUSED = [
    (["--set", "zero.stage=4"], "zero.stage"),
    (["--set", "zero.stages=3"], "zero.stages"),
    (
        [
            "--set",
            "cluster.ranks=7",
            "--set",
            "train.global_batch=8",
            "--set",
            "train.micro_batch=1",
        ],
        "7",
    ),
    (["--set", "cluster.ranks=-1"], "cluster.ranks"),
    (["--set", "train.micro_batch=.nan"], "train.micro_batch"),
    (["--set", "cluster.ranks=1e30"], "cluster.ranks"),
    (["--set", "cluster.ranks"], "cluster.ranks"),
    (["--zero", "FOLDER/key.json"], "stagee"),
    (["--zero", "FOLDER/cut.json"], "cut.json"),
    (["--zero", "FOLDER/none.json"], "none.json"),
    (["--emit", "pascal"], "--emit"),
    (["--zerro", "x"], "--zerro"),
    (["extra"], "extra"),
]


def refused(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "args,said", REFUSED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_what_is_refused_is_named_and_nothing_written(
    tmp_path: pathlib.Path, args: list[str], said: str
) -> None:
    (tmp_path / "key.json").write_text(
        '{"zero_optimization": {"stage": 3, "stagee": 1}}'
    )
    (tmp_path / "cut.json").write_text('{"zero_optimization": {"stage": 3')
    refused(
        zgen(GPT, *(arg.replace("FOLDER", str(tmp_path)) for arg in args)),
        said,
    )


@pytest.mark.parametrize(
    "name,content",
    [
        ("none.yaml", None),
        ("cut.yaml", b"model: [1, 2\n"),
        ("bytes.yaml", b"\x00\xff\xfe"),
        ("empty.yaml", b""),
        ("list.yaml", b"- 1\n"),
        (
            "object.yaml",
            b'model: !!python/object/apply:os.system ["touch FOLDER/made"]\n',
        ),
    ],
)
def test_files_that_are_no_spec(
    tmp_path: pathlib.Path, name: str, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content.replace(b"FOLDER", bytes(tmp_path)))
    done = zgen(tmp_path / name)
    refused(done, name)
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "made").exists()
    if content:
        assert re.match(rf"{re.escape(str(tmp_path / name))}:\d+", done.stderr), (
            done.stderr
        )


def test_a_folder_is_no_spec_and_no_spec_is_no_call(
    tmp_path: pathlib.Path,
) -> None:
    refused(zgen(tmp_path), str(tmp_path))
    refused(zgen(), "SPEC or --from DIR is required")
    refused(zgen("--emti=plan", "x"), "did you mean --emit? ")


@pytest.mark.slow
def test_output_that_nobody_takes(tmp_path: pathlib.Path) -> None:
    """Output to a full disk, or to a reader that has gone, ends with a line, no traceback and not
    0."""
    left, right = os.pipe()
    os.close(left)
    for sink in (os.open("/dev/full", os.O_WRONLY), right):
        done = subprocess.run(
            [trainer.ROOT / "gen/zgen", GPT, "--emit", "memory"],
            timeout=LIMIT,
            stdout=sink,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(sink)
        assert done.returncode == 3, done.stderr
        assert len(done.stderr.splitlines()) == 1 and "cannot write" in done.stderr


# ---- gen/zgen: help, and output from the input alone


@pytest.mark.slow
def test_help_of_zgen(tmp_path: pathlib.Path) -> None:
    done = zgen("--help")
    assert done.returncode == 0 and done.stderr == ""
    for option in (
        "--zero",
        "--set",
        "--emit",
        "--flat",
        "-o FILE",
        "-h",
        "model.units[1].blocks=3",
    ):
        assert option in done.stdout
    assert "exit codes:\n  0    done\n" in done.stdout
    examples = re.findall(r"^ *(gen/zgen .*)$", done.stdout, re.M)
    assert len(examples) >= 3
    # They work, except for files that users must have
    for n, line in enumerate(examples):
        words = shlex.split(re.split(">|&&", line)[0])[1:]
        if "-o" in words:
            words[words.index("-o") + 1] = str(tmp_path / str(n))
        if "--from" in words:
            words[words.index("--from") + 1] = str(HF / "qwen3")
        if "--zero" not in words:
            assert zgen(*words).returncode == 0, line


@pytest.mark.slow
def test_the_same_input_gives_the_same_bytes_anywhere(
    tmp_path: pathlib.Path,
) -> None:
    """The output is the same from another folder, through a link, from a folder with a space, and
    with another hash seed, time zone or language."""
    odd = tmp_path / "a folder" / "gpt-tiny.yaml"
    odd.parent.mkdir()
    shutil.copy(GPT, odd)
    (tmp_path / "zgen").symlink_to(trainer.ROOT / "gen/zgen")
    first = zgen(GPT)
    environ = os.environ | {
        "PYTHONHASHSEED": "7",
        "TZ": "Asia/Kathmandu",
        "LC_ALL": "C",
    }
    others = [
        zgen(odd, cwd=tmp_path, env=environ),
        subprocess.run(
            [tmp_path / "zgen", GPT], capture_output=True, text=True, cwd="/"
        ),
    ]
    assert (
        first.returncode == 0 and "/* train.c -- gpt-tiny in training" in first.stdout
    )
    assert [other.stdout for other in others] == [first.stdout] * 2


@pytest.mark.slow
def test_zgen_reads_through_pipes() -> None:
    with open(GPT) as spec:
        done = zgen("/dev/stdin", "--emit", "plan", stdin=spec)
    assert done.returncode == 0 and done.stdout == zgen(GPT, "--emit", "plan").stdout


# ---- the program: help, version, refusals


def test_help_of_a_program() -> None:
    done = program.run(built(), "--help")
    assert done.code == 0 and done.err == ""
    assert "Trains gpt-tiny on 2 ranks" in done.out
    page = (trainer.ROOT / "docs/running.md").read_text()
    line = re.search(r"`out/train (--data.*?)` \|", page)[1].replace("\\|", "|")
    for option in re.findall(r"--[a-z-]+", line):
        assert re.search(rf"^  {option} ", done.out, re.M), option
    for code in (0, 2, 3, 4, 5, 6):
        assert re.search(rf"^  {code}  ", done.out, re.M)


def test_version_of_a_program() -> None:
    """--version of a program names its plan, by the hash of the text that zgen prints."""
    done = program.run(built(), "--version")
    assert done.code == 0 and done.err == ""
    text = zgen(GPT, "--emit", "plan").stdout
    assert done.line("plan ").split()[1] == hashlib.sha256(text.encode()).hexdigest()
    assert re.fullmatch("[0-9a-f]{64}", done.line("layout ").split()[1])
    assert done.out.splitlines()[0] == "gpt-tiny, 2 ranks"
    assert re.fullmatch("kernels (avx2|avx512|avx512bf16|amx)", done.line("kernels "))


@pytest.mark.parametrize(
    "args,said",
    [
        (["--steps", "1"], "--data"),
        (["--data", "TOKENS"], "--steps"),
        (["--data", "TOKENS", "--steps", "two"], "--steps"),
        (["--nothing"], "--nothing"),
        (["--data", "FOLDER/none", "--steps", "1"], "none"),
        (["--data", "FOLDER", "--steps", "1"], "FOLDER"),
        (["--data", "FOLDER/short", "--steps", "1"], "short"),
        (["--data", "FOLDER/odd", "--steps", "1"], "odd"),
        (["--data", "FOLDER/beyond", "--steps", "1"], "300"),
        (
            ["--data", "TOKENS", "--steps", "1", "--val", "FOLDER/beyond"],
            "300",
        ),
        (
            ["--data", "TOKENS", "--steps", "1", "--load", "FOLDER/none"],
            "none",
        ),
        (["--data", "TOKENS", "--steps", "1", "--load", "FOLDER/cut"], "cut"),
        (
            ["--data", "TOKENS", "--steps", "1", "--load", "FOLDER/other"],
            "other",
        ),
        (
            ["--data", "TOKENS", "--steps", "1", "--log", "FOLDER/none/log"],
            "none/log",
        ),
    ],
)
def test_a_program_refuses(
    tmp_path: pathlib.Path, tokens: pathlib.Path, args: list[str], said: str
) -> None:
    """A program refuses with exit code 2, a line on stderr, nothing on stdout, and no file made."""
    trainer.write_tokens(tmp_path / "short", np.zeros(33))
    (tmp_path / "odd").write_bytes(b"\0" * 1001)
    trainer.write_tokens(tmp_path / "beyond", np.where(np.arange(500) == 77, 300, 5))
    for name, content in (
        ("cut", b'\x40\0\0\0\0\0\0\0{"wte'),
        ("other", None),
    ):
        (tmp_path / name).mkdir()
        if content:
            (tmp_path / name / "model.safetensors").write_bytes(content)
        else:
            save_file(
                {"x": np.zeros(3, np.float32)},
                tmp_path / name / "model.safetensors",
            )
    words = [
        a.replace("TOKENS", str(tokens)).replace("FOLDER", str(tmp_path)) for a in args
    ]
    before = sorted(tmp_path.rglob("*"))
    done = program.run(built(), *words, "--save", tmp_path / "saved")
    assert (done.code, done.out) == (2, ""), done.err
    assert said.replace("FOLDER", str(tmp_path)) in done.err
    left = [
        path for path in tmp_path.rglob("*") if path not in before and path.is_file()
    ]
    assert len(done.err.splitlines()) == 1 and left == []


def test_weights_are_saved_though_nobody_listens(
    tmp_path: pathlib.Path, tokens: pathlib.Path
) -> None:
    """Weights are saved even if the output's reader has gone or its disk is full; a message says
    so."""
    left, right = os.pipe()
    os.close(left)
    for n, sink in enumerate((os.open("/dev/full", os.O_WRONLY), right)):
        done = subprocess.run(
            [
                built(),
                "--data",
                tokens,
                "--steps",
                "1",
                "--save",
                tmp_path / str(n),
            ],
            timeout=LIMIT,
            stdout=sink,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(sink)
        assert done.returncode == 0, done.stderr
        assert "cannot write standard output" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("standard output is incomplete")
        assert (tmp_path / str(n) / "model.safetensors").exists()


# ---- odd places


def test_a_folder_with_a_space(tmp_path: pathlib.Path, tokens: pathlib.Path) -> None:
    folder = tmp_path / "my run, 1"
    folder.mkdir()
    for path, name in ((built(), "a train"), (tokens, "the tokens")):
        shutil.copy(path, folder / name)
    for step in (0, 1):
        load = ["--load", folder / "out 0"] if step else []
        done = program.run(
            folder / "a train",
            "--data",
            folder / "the tokens",
            "--steps",
            2,
            "--save",
            folder / f"out {step}",
            "--log",
            folder / "the log",
            *load,
        )
        assert done.code == 0, done.err
    assert (folder / "out 1" / "model.safetensors").stat().st_size > 1000
    assert json.loads((folder / "the log").read_text().splitlines()[-1])["end"] == 2


@pytest.mark.slow
def test_all_is_built_in_a_folder_with_a_space(tmp_path: pathlib.Path) -> None:
    """The README's commands, from spec to weights, work in a copy of the sources whose path has a
    space. test_bundle.py compiles objects in such a folder."""
    root = trainer.with_objects(trainer.checkout(tmp_path / "the sources"))
    trainer.write_tokens(root / "tokens", law.tokens(256, 5000))
    for command in (
        "gen/zgen model_specs/gpt-tiny.yaml -o out/train.c",
        "ninja out/train",
        "out/train --data tokens --steps 1 --save out/w",
    ):
        done = subprocess.run(
            command, shell=True, cwd=root, capture_output=True, text=True
        )
        assert done.returncode == 0, (
            f"{command}\n{done.stdout[-500:]}{done.stderr[-500:]}"
        )
    assert (root / "out/w/model.safetensors").exists()


@pytest.mark.slow
def test_two_programs_at_once(tmp_path: pathlib.Path, tokens: pathlib.Path) -> None:
    """Two programs at once share nothing: each computes the same as alone."""
    alone = {
        binary: weights(program.run(binary, "--data", tokens, "--steps", 20, "--hash"))
        for binary in (
            built("cluster.ranks=2"),
            built("cluster.ranks=4", "train.seed=7"),
        )
    }
    both = [
        (
            binary,
            subprocess.Popen(
                [
                    binary,
                    "--data",
                    tokens,
                    "--steps",
                    "20",
                    "--hash",
                    "--save",
                    tmp_path / f"w{n}",
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=program.environment(),
            ),
        )
        for n, binary in enumerate([*alone, *alone])
    ]
    for binary, run in both:
        out = run.communicate(timeout=LIMIT)[0]
        assert (
            run.returncode == 0 and out.splitlines()[-1] == f"weights {alone[binary]}"
        )
    assert len(set(alone.values())) == 2
    assert (
        len({(tmp_path / f"w{n}" / "model.safetensors").read_bytes() for n in range(4)})
        == 2
    )


def test_a_folder_that_may_not_be_written(tokens: pathlib.Path) -> None:
    """A folder that may not be written is reported before training, to a user who is not root."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        folder.chmod(0o755)
        shutil.copy(built(), folder / "train")
        shutil.copy(tokens, folder / "tokens")
        (folder / "closed").mkdir(mode=0o555)
        somebody = {"user": 65534, "group": 65534} if os.getuid() == 0 else {}
        for place in ("closed", "closed/new"):
            done = subprocess.run(
                [
                    folder / "train",
                    "--data",
                    folder / "tokens",
                    "--steps",
                    "3",
                    "--save",
                    folder / place,
                ],
                capture_output=True,
                text=True,
                timeout=LIMIT,
                cwd="/",
                env=program.environment(),
                **somebody,
            )
            assert (done.returncode, done.stdout) == (2, ""), done.stderr
            assert str(folder / place) in done.stderr and "step 1" not in done.stderr
        assert list((folder / "closed").iterdir()) == []


@pytest.mark.parametrize("size,code", [("256k", 3), ("16m", 0)])
def test_a_full_disk(
    tmp_path: pathlib.Path, tokens: pathlib.Path, size: str, code: int
) -> None:
    """A full disk is reported before training, and no partial file is left. The model takes 650
    kB."""
    alone = namespaces.mounts()
    (tmp_path / "disk").mkdir()
    command = (
        f"mount -t tmpfs -o size={size} none {tmp_path}/disk && "
        f"{built()} --data {tokens} --steps 2 --save {tmp_path}/disk/w; echo code $?; "
        f"cd {tmp_path}/disk && find . -type f"
    )
    done = program.run(pathlib.Path("/usr/bin/env"), *alone, "sh", "-c", command)
    assert f"code {code}" in done.out, done.err
    assert ("./w/model.safetensors" in done.out) == (code == 0)
    if code:
        assert "the disk has 262144 free" in done.err and "step 1" not in done.err
        assert done.out.split(f"code {code}")[1].split() == []


# ---- signals


@contextlib.contextmanager
def under_way(binary: pathlib.Path, *options: object) -> Iterator[subprocess.Popen]:
    run = subprocess.Popen(
        [str(binary), *map(str, options)],
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=program.environment(),
    )
    try:
        yield run
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_the_old_weights(
    tmp_path: pathlib.Path, tokens: pathlib.Path, number: signal.Signals
) -> None:
    saved = tmp_path / "w"
    done = program.run(built(), "--data", tokens, "--steps", 1, "--save", saved)
    assert done.code == 0, done.err
    before = (saved / "model.safetensors").read_bytes()
    with under_way(
        built(), "--data", tokens, "--steps", 1000000, "--save", saved
    ) as run:
        program.wait_for_step(run, 1)
        ranks = program.children(run.pid)
        os.killpg(run.pid, number)  # as a terminal does
        assert run.wait(LIMIT) == 128 + number
        assert "stopped by signal" in run.stderr.read() and run.stdout.read() == ""
    assert program.gone(ranks)
    assert sorted(os.listdir(saved)) == ["config.json", "model.safetensors"]
    assert (saved / "model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_a_run_interrupted_at_any_time(
    tmp_path: pathlib.Path, tokens: pathlib.Path
) -> None:
    """A run interrupted at 12 points from exec to its end leaves the whole old weights or the whole
    new ones."""
    saved = tmp_path / "w"
    options = ["--data", tokens, "--steps", 30, "--save", saved]
    begun = time.monotonic()
    assert program.run(built(), *options).code == 0
    whole = time.monotonic() - begun
    new = (saved / "model.safetensors").read_bytes()
    old = b"what was there before"
    codes = []
    for n in range(12):
        (saved / "model.safetensors").write_bytes(old)
        with under_way(built(), *options) as run:
            time.sleep(whole * n / 11)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGINT)
            codes.append(run.wait(LIMIT))
        # -2: before the program handled signals
        assert codes[-1] in (0, 130, -2), codes
        there = sorted(os.listdir(saved))
        assert there == ["config.json", "model.safetensors"], codes
        found = (saved / "model.safetensors").read_bytes()
        assert found == new or found == old and codes[-1] != 0, codes
    assert 130 in codes


# ---- weights from run to run

SPREAD = [
    ("zero.stage=0", "cluster.ranks=1"),
    ("zero.stage=3", "cluster.ranks=4"),
    ("zero.stage=1", "cluster.ranks=2", "train.precision=bf16"),
    ("zero.stage=2", "cluster.ranks=4"),
    ("zero.stage=3", "cluster.ranks=2", "train.precision=bf16"),
]


def test_weights_pass_from_any_run_to_any_other(
    tmp_path: pathlib.Path, tokens: pathlib.Path
) -> None:
    """Weights pass between any ranks, stages and storage types to the last bit of the f32 masters,
    so the hash stays."""
    done = program.run(
        built(*SPREAD[0]),
        "--data",
        tokens,
        "--steps",
        3,
        "--save",
        tmp_path / "0",
        "--hash",
    )
    first = weights(done)
    for n, keys in enumerate(SPREAD[1:], 1):
        done = program.run(
            built(*keys),
            "--steps",
            0,
            "--load",
            tmp_path / str(n - 1),
            "--save",
            tmp_path / str(n),
            "--hash",
        )
        assert weights(done) == first, keys
        one, other = [
            load_file(tmp_path / str(m) / "model.safetensors") for m in (0, n)
        ]
        # The files' headers name the plans, which differ
        assert one.keys() == other.keys()
        assert all(np.array_equal(x, other[name]) for name, x in one.items())
    begun = [
        weights(program.run(built(*keys), "--steps", 0, "--hash")) for keys in SPREAD
    ]
    assert len(set(begun)) == 1 and begun[0] != first


@pytest.mark.slow
def test_f32_weights_train_on_in_bf16(
    tmp_path: pathlib.Path, tokens: pathlib.Path
) -> None:
    """Loaded f32 masters are rounded for the kernels, not in place: a first step with hardly any
    update leaves them, and the losses are those of f32 within bf16's rounding."""
    done = program.run(
        built("zero.stage=1"),
        "--data",
        tokens,
        "--steps",
        5,
        "--save",
        tmp_path / "w",
        "--hash",
    )
    first = weights(done)
    lost = {}
    for precision in ("f32", "bf16"):
        keys = (
            "zero.stage=3",
            f"train.precision={precision}",
            "train.optimizer.lr=1e-30",
            "train.schedule.min_lr=0.0",
            "train.optimizer.weight_decay=0.0",
        )
        done = program.run(
            built(*keys),
            "--data",
            tokens,
            "--steps",
            1,
            "--load",
            tmp_path / "w",
            "--hash",
        )
        assert weights(done) == first
        lost[precision] = float(done.line("loss ").split()[1])
    # losses of 6 nats from logits of about 1, each off by 1 % at random, averaged over 264 tokens
    assert lost["f32"] != lost["bf16"] and lost["f32"] == pytest.approx(
        lost["bf16"], abs=5e-3
    )


@pytest.mark.slow
def test_samples_do_not_depend_on_the_spread(
    tmp_path: pathlib.Path, tokens: pathlib.Path
) -> None:
    """Samples from the same weights are the same text, twice and over ranks and stages. Other
    weights write other text, and the prompt is the file's beginning."""
    assert (
        program.run(
            built(), "--data", tokens, "--steps", 20, "--save", tmp_path / "w"
        ).code
        == 0
    )
    options = ["--steps", 0, "--val", tokens, "--sample", 60]

    def written(binary: pathlib.Path, *more: object) -> bytes:
        done = subprocess.run(
            [str(x) for x in (binary, *options, *more)],
            capture_output=True,
            env=program.environment(),
            timeout=LIMIT,
        )
        assert done.returncode == 0, done.stderr
        # After the validation and the start
        return done.stdout.split(b"\n", 2)[2]

    said = [
        written(built(*keys), "--load", tmp_path / "w")
        for keys in (*SPREAD[:2], SPREAD[0], SPREAD[3])
    ]
    assert len(set(said)) == 1 and len(said[0]) == 16 + 60 + 1
    prompt = law.tokens(256, 16)
    assert [c for c in said[0][:16]] == [
        c if c >= 32 or c in (9, 10) else ord(".") for c in prompt
    ]
    assert written(built(*SPREAD[0])) != said[0]


# ---- ignored targets


@pytest.mark.slow
def test_ignored_targets(tmp_path: pathlib.Path) -> None:
    """65535 in a file is no target and is read as token 0. Losses, numbers of targets and the
    validation loss of four ranks match the evaluator's, though some micro-batches have no target at
    all."""
    spec = reader.load(str(GPT))
    params = {
        name: known.weight(name, shape, known.is_norm_weight(name))
        for name, shape in oracle.shapes(spec).items()
    }
    stream = law.tokens(256, 33 * 40 + 1, holes=True)
    (tmp_path / "w").mkdir()
    save_file(
        {n: np.ascontiguousarray(x, np.float32) for n, x in params.items()},
        tmp_path / "w/model.safetensors",
    )
    trainer.write_tokens(tmp_path / "tokens", stream)
    binary = built("zero.stage=1", "cluster.ranks=4", "train.micro_batch=1")
    done = program.run(
        binary,
        "--data",
        tmp_path / "tokens",
        "--val",
        tmp_path / "tokens",
        "--steps",
        4,
        "--load",
        tmp_path / "w",
        "--save",
        tmp_path / "after",
        "--log",
        tmp_path / "log",
    )
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    micro_batches = [oracle.batch(stream, 33, g, 1, law.HOLE)[1] for g in range(32)]
    assert min((g >= 0).sum() for g in micro_batches) == 0
    valid = [
        int(sum((g >= 0).sum() for g in micro_batches[8 * s : 8 * s + 8]))
        for s in range(4)
    ]
    assert [line["valid"] for line in lines if "loss" in line] == valid and len(
        set(valid)
    ) > 1
    after, losses, norms = oracle.train(spec, params, stream, 4, law.HOLE)
    # means of losses of about 6, each off by some 30 roundings of 2^-24; norms: chains of 240 as
    # well
    assert [line["loss"] for line in lines if "loss" in line] == pytest.approx(
        losses, rel=2e-7
    )
    assert [line["norm"] for line in lines if "loss" in line] == pytest.approx(
        norms, rel=1e-5
    )
    ended = {
        n: np.float64(x)
        for n, x in load_file(tmp_path / "after/model.safetensors").items()
    }
    loss, count, _ = oracle.gradients(
        spec, ended, *oracle.batch(stream, 33, 0, 40, law.HOLE)
    )
    said = next(line for line in lines if "val_loss" in line)
    assert (
        said["val_loss"] == pytest.approx(loss, rel=2e-7)
        and said["val_tokens"] == count
    )
