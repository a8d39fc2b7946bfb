"""test_pages.py -- tests that files, links, commands and variables named by the pages exist and
work."""

import dataclasses
import json
import pathlib
import re
import shlex
import subprocess

import config_keys
import pytest
from zg import main
from zg.facts.commands import COMMANDS
from zg.facts.queues import QUEUES
from zg.plan import text

from tests.lib import trainer

ROOT = trainer.ROOT
DOCS = ROOT / "docs"
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for where in ("", "docs", "examples", "bench", "tests/data/ds_configs")
    for path in ROOT.joinpath(where).glob("*.md")
)
CODE = re.compile(r"^```.*?^```$|^(?: {4}.*\n)+|`[^`\n]+`", re.M | re.S)


def page(name: str) -> str:
    return (ROOT / name).read_text()


def anchors(name: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page(name), re.M)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
    }


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    prose = CODE.sub("", page(name))
    for link in re.findall(r"\]\(([^)]+)\)", prose):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        there = (ROOT / name).parent / path if path else ROOT / name
        assert there.exists(), link
        if anchor:
            target = there.resolve().relative_to(ROOT).as_posix()
            assert anchor in anchors(target), link


@pytest.mark.parametrize("name", PAGES)
def test_files_that_are_named_are_there(name: str) -> None:
    roots = "gen|tools|kernels|runtime|templates|tests|bench|model_specs|examples"
    for word in re.findall(rf"`((?:{roots})/[\w./*]+)`", page(name)):
        assert list(ROOT.glob(word.rstrip("/"))), word


def test_the_readme_is_short() -> None:
    readme = page("README.md")
    assert len(readme.split()) <= 1200
    assert [x for x in readme.splitlines() if len(x) > 100] == []


def commands(name: str) -> list[str]:
    """Return the lines of gen/zgen in a page's code blocks, without comments, pipes and
    redirections."""
    said = page(name)
    found = []
    for line in re.findall(r"^ {4}(gen/zgen (?:.*\\\n)*.*)$", said, re.M):
        line = re.sub(r" +(#|[|>] |&& ).*", "", line.replace("\\\n", " "))
        found.append(re.sub(r" -o \S+", "", line))
    return found


@pytest.mark.slow
def test_the_readmes_commands_say_what_it_shows() -> None:
    """The output that the README shows is part of the output of its commands."""
    said = ""
    for command in commands("README.md"):
        done = subprocess.run(
            shlex.split(command), cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        said += done.stdout + done.stderr
    shown = re.findall(r"^```\n(.*?)^```$", page("README.md"), re.M | re.S)
    assert len(shown) == 2
    for text_ in shown:
        assert " ".join(text_.split()) in " ".join(said.split())


# Commands that cannot run here, with the reason.
SKIPPED = {"model_specs/SPEC.yaml": "letters stand for the columns of a table"}
# Files and folders of a reader's own.
THEIRS = {
    "ds_config.json": {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
    },
    "mine.yaml": {
        "train": {
            "global_batch": 8,
            "micro_batch": 2,
            "sequence": 64,
            "optimizer": {"lr": 1e-4},
        }
    },
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FOLDERS = {
    "Llama-3.2-1B": LLAMA,
    "Llama-3.2-1B-bnb-4bit": LLAMA | {"quantization_config": NF4},
    "Qwen3-0.6B": LLAMA | {"model_type": "qwen3", "head_dim": 16},
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a folder with the files that the pages' commands name."""
    here = tmp_path_factory.mktemp("reader")
    for name in ("model_specs", "tests"):
        (here / name).symlink_to(ROOT / name)
    for name, content in THEIRS.items():
        (here / name).write_text(json.dumps(content))
    (here / "here.yaml").symlink_to(ROOT / "gen" / "zg" / "devices" / "cpu.yaml")
    for name, config in FOLDERS.items():
        (here / name).mkdir()
        (here / name / "config.json").write_text(json.dumps(config))
    for name in PAGES:  # specs that an earlier command of the page writes
        for command, spec in re.findall(
            r"^ {4}(gen/zgen (?:[^\n]*\\\n)*[^\n]*--emit spec) -o (build/\S+)$",
            page(name),
            re.M,
        ):
            words = shlex.split(command.replace("\\\n", " "))
            words = [ROOT / words[0], *words[1:], "-o", spec]
            subprocess.run(words, cwd=here, check=True)
    assert (here / "build").is_dir()
    return here


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.exhaustive] * ("--fit" in command))
        for command in sorted(
            {
                command
                for name in PAGES
                if name != "README.md"
                for command in commands(name)
                if not any(word in command for word in SKIPPED)
            }
        )
    ],
)
def test_the_pages_commands_run(command: str, reader: pathlib.Path) -> None:
    """All commands of the pages run, except those of the README, which the test above runs."""
    words = shlex.split(command)
    done = subprocess.run(
        [ROOT / words[0], *words[1:]],
        cwd=reader,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout, done.stderr


def test_a_skipped_command_is_there() -> None:
    every = " ".join(command for name in PAGES for command in commands(name))
    assert all(word in every for word in SKIPPED)


def test_a_word_has_one_meaning() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", page("docs/words.md"), re.M)
    words = [
        word.strip("` ") for row in rows if row != "word" for word in row.split(", ")
    ]
    assert len(words) > 40 and len(words) == len(set(words))


def test_the_picture_is_what_its_command_draws(tmp_path: pathlib.Path) -> None:
    """docs/step.svg equals the output of the command in docs/design.md."""
    command = re.search(
        r"^    (gen/zgen .*?) -o build/step\.svg$",
        page("docs/design.md"),
        re.M | re.S,
    )
    words = shlex.split(command[1].replace("\\\n", " "))
    made = subprocess.run(
        [ROOT / words[0], *words[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout == page("docs/step.svg")


def test_the_demos_picture_is_of_the_run_that_the_readme_tells_of() -> None:
    readme, drawn = page("README.md"), page("docs/demo-loss.svg")
    told = re.search(
        r"validation loss (\S+) nats a token over \d+ tokens, bigram model (\S+):",
        readme,
    )
    validation, bigram = (f"{float(x):.2f}" for x in told.groups())
    assert f"validation {validation}<" in drawn
    assert f"bigram model {bigram}<" in drawn
    assert "of 1200 steps" in drawn and "1200 steps" in readme


# ---- docs/plan.md


@pytest.mark.parametrize("record", list(text._WORD), ids=text._WORD.get)
def test_the_plans_page_has_every_field(record: type) -> None:
    (row,) = re.findall(
        rf"^\| `{text._WORD[record]}` \| (.*) \|$", page("docs/plan.md"), re.M
    )
    told = re.findall(r"`(\w+)`", row)
    assert told == [f.name for f in dataclasses.fields(record)]


def test_the_plans_page_has_every_command() -> None:
    plan = page("docs/plan.md")
    for name, command in COMMANDS.items():
        (row,) = re.findall(rf"^\| `{name}` \| ([^|]*)\|", plan, re.M)
        assert tuple(re.findall(r"`(\w+)`", row)) == command.numbers
    assert all(f"`{name}`" in plan for name in QUEUES)
    assert f'"plan {text.FORMAT}"' in plan


# ---- docs/running.md


def test_running_has_every_word_of_emit() -> None:
    part = page("docs/running.md").split("## Outputs of `--emit`")[1]
    rows = re.findall(r"^\| `([\w.]+)` \|", part.split("\n## ")[0], re.M)
    given = main.arguments.__code__.co_consts
    (choices,) = [x for x in given if isinstance(x, tuple) and "plan" in x]
    assert rows == list(choices)


def test_running_has_every_variable() -> None:
    """docs/running.md lists every variable that the runtime and the kernels read, or set for a
    library; launchers' own variables are excepted."""
    read = set()
    for folder in ("runtime", "kernels"):
        for path in (ROOT / folder).rglob("*.[ch]"):
            read |= set(
                re.findall(
                    r'\b(?:getenv\(|zr_setting\(z, |given\()"([A-Z_0-9]+)"',
                    path.read_text(),
                )
            )
    ours = {x for x in read if x.startswith(("ZR_", "ZK_"))}
    assert len(ours) > 8
    told = page("docs/running.md")
    assert {x for x in ours if f"`{x}" not in told} == set()


def test_running_has_every_exit_code() -> None:
    header = page("runtime/zr_fail.h")
    (codes,) = re.findall(r"enum \{\s*ZR_OK\b[^}]*\}", header)
    numbers = {int(n) for n in re.findall(r"= (\d+)", codes)}
    part = page("docs/running.md").split("## Exit codes")[1]
    rows = {int(n) for n in re.findall(r"^\| (\d+) \|", part, re.M)}
    assert numbers <= rows and 8 in rows


# ---- docs/memory.md


def printed(command: str) -> list[str]:
    """Return the numbers of --emit memory, device arena, beside it, together, host arena, file, and
    the step of --emit time on an H100."""
    timed = command.replace("--emit memory", "--set cluster.device=h100 --emit time")
    assert timed != command
    done, time = (
        subprocess.run(shlex.split(words), cwd=ROOT, capture_output=True, text=True)
        for words in (command, timed)
    )
    assert done.returncode == time.returncode == 0, done.stderr + time.stderr
    step = re.findall(r"^a step +(\S+ s)$", time.stdout, re.M)
    device = {
        tuple(re.findall(r"([\d,]+) \(", line))
        for line in re.findall(r"^sm_.*$", done.stdout, re.M)
    }
    assert len(device) == 1, "the targets differ"
    (host,) = re.findall(r"^its host arena +([\d,]+) \(", done.stdout, re.M)
    file = re.findall(r"^the file arena +([\d,]+) \(", done.stdout, re.M)
    return [*device.pop(), host, *(file or ["0"]), *step]


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2, 3))]
)
def test_the_table_of_20b_is_what_its_commands_print(row: int) -> None:
    given = [x for x in commands("docs/memory.md") if "internlm2-20b" in x]
    part = page("docs/memory.md").split("## 20B parameters on 8 GPUs")[1]
    rows = re.findall(r"^\| \w[^|]* \| (\d.*) \|$", part.split("\n## ")[0], re.M)
    assert len(rows) == len(given) == 4
    assert rows[row].split(" | ") == printed(given[row])


# ---- docs/config.md


def test_each_key_says_what_it_does() -> None:
    ours = page("docs/config.md").partition("## ds_config.json")[0]
    keys = re.findall(r"^\| `([^`]+)` \| (\w[^|]+) \|", ours, re.M)
    assert dict(keys) == config_keys.DOES


# ---- SECURITY.md


def test_what_the_page_on_security_says_of_the_sources() -> None:
    """The page's statements on the sources hold: which files make sockets and map memory, and that
    no program is started."""
    found: dict[str, set[str]] = {}
    calls = r"\b(socket|listen|mmap|system|popen|exec[lv]p?e?|dlopen|chmod)\("
    for folder in ("runtime", "kernels"):
        for path in (ROOT / folder).rglob("*.[ch]*"):
            for call in re.findall(calls, path.read_text()):
                found.setdefault(call, set()).add(path.name)
    assert found == {
        "socket": {"zr_meet.c"},
        "listen": {"zr_meet.c"},
        # opens only files that it makes itself
        "mmap": {"memory.c", "far.c", "zr_ranks.c", "zr_disk.c", "host.c"},
    }
    page_ = " ".join(page("SECURITY.md").split())
    for name, source, text_ in (
        ("HELLO_MS", "runtime/zr_meet.c", "{0} seconds"),
        ("GUESTS", "runtime/zr_meet.c", "at most {1} at once"),
        ("ZR_HEADER_MAX", "runtime/zr_safetensors.h", "of at most {2} MB"),
        ("BYTES", "gen/zg/read/usertext.py", "At most {3} KiB"),
    ):
        (number,) = re.findall(rf"\b{name} = (\d+)", page(source))
        n = int(number)
        assert text_.format(n // 1000, n, n // 10**6, n) in page_, name
