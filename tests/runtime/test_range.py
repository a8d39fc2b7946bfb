"""test_range.py -- tests that a command that leaves its arena, or names a thing that does not
exist, ends the run before it does harm: in an edited train.c, on both targets."""

from __future__ import annotations

import functools
import pathlib
import re

import pytest

from tests.lib import law, program, trainer
from tests.lib.covering import covering

FAR = "INT64_C(1) << 40"
KEYS = (
    "zero.stage=3",
    "cluster.ranks=2",
    "train.micro_batch=1",
    "train.global_batch=4",
    "zero.offload_optimizer.device=nvme",
    "zero.offload_param.device=nvme",
    "zero.offload_optimizer.nvme_path=/tmp",
    "train.precision=bf16",
)
# text in train.c, its replacement, and the message
WRONG = {
    "gather from": (
        r"(zr_gather\(z, ZR_GATHER, GROUP_ALL, )",
        rf"\1({FAR}) + ",
        r"gather on queue gather: `from` is at \d{13}, \d+ bytes in each of 2 pieces",
    ),
    "gather to": (
        r"(zr_gather\(z, ZR_GATHER, GROUP_ALL, [^,]*, 0, )",
        r"\1-8 * ",
        r"gather on queue gather: `to` is at -\d+, \d+ bytes",
    ),
    "gather step": (
        r"(zr_gather\(z, ZR_GATHER, [^;]*),\s+[^,;]+,(\s+[^,;]+)\);",
        rf"\1, {FAR},\2);",
        r"`to` is at \d+, \d+ bytes in each of 2 pieces, one every \d{13}; the arena",
    ),
    "gather bytes": (
        r"(zr_gather\(z, ZR_GATHER, [^;]*),(\s+[^,;]+)\);",
        r"\1, 1000 *\2);",
        r"gather on queue gather: `from` .* the part of the arena that peers read has",
    ),
    "all-to-all": (
        r"(zr_alltoall\(z, ZR_REDUCE, GROUP_ALL, )",
        rf"\1({FAR}) + ",
        r"alltoall on queue reduce: `at` is at \d{13}",
    ),
    "inbox": (
        r"(zr_alltoall\(.*)INBOX\(",
        r"\1INBOX(2 + ",
        r"alltoall: no slot of the inbox is at \d+;",
    ),
    "sources": (
        r"(zr_call\(z, ZR_SUM, sum_block, )",
        r"\1 8 + ",
        r"sources: no slot of the inbox is at \d+;",
    ),
    "done": (
        r"(zr_done\(z, ZR_SUM, GROUP_ALL, )",
        r"\1-1 - ",
        r"done: no slot of the inbox is at -\d+;",
    ),
    "gather group": (
        r"(zr_gather\(z, ZR_GATHER, )GROUP_ALL",
        r"\1-1",
        r"gather on queue gather: group -1; there are 1;",
    ),
    "all-to-all group": (
        r"(zr_alltoall\(z, ZR_REDUCE, )GROUP_ALL",
        r"\g<1>1",
        r"alltoall on queue reduce: group 1; there are 1;",
    ),
    "done leaf": (
        r"(zr_done\(z, ZR_SUM, GROUP_ALL, INBOX\([^)]*\), )",
        rf"\1({FAR}) + ",
        r"done on queue sum: no slot whose contents die is at \d{13}",
    ),
    "wire": (
        r"zr_gather\(z, ZR_GATHER",
        "zr_gather(z, ZR_SUM",
        "gather on queue sum: queue 3; there are 3;",
    ),
    "last use": (
        r"(zr_copy\(z, ZR_UP, )([^,]*),",
        r"\1zr_last(\2),",
        r"copy on queue up: ",
    ),
    "done group": (
        r"(zr_done\(z, ZR_SUM, )GROUP_ALL",
        r"\g<1>1",
        r"done on queue sum: group 1; there are 1;",
    ),
    "allreduce group": (
        r"(zr_allreduce\(z, ZR_MAIN, )GROUP_ALL",
        r"\g<1>9",
        r"allreduce on queue main: group 9; there are 1;",
    ),
    "a group of some": (
        r'\{"all", 2\}',
        r'{"half", 1}',
        r"group half has 1 ranks, but its axes have 2; ",
    ),
    "the second group": (
        r'(?s)enum \{ (GROUP_ALL \};.*\{"all", 2\})',
        r'enum { OTHER, \1, {"both", 2}',
        r"group both has 2 ranks, but its axes have 1; ",
    ),
    "copy up": (
        r"(zr_copy\(z, ZR_UP, )",
        rf"\1({FAR}) + ",
        r"copy on queue up: `from` is at \d{13}, \d+ bytes; the host arena has \d+",
    ),
    "copy down": (
        r"(zr_copy\(z, ZR_DOWN, )",
        rf"\1({FAR}) + ",
        r"copy on queue down: `from` is at \d{13}, \d+ bytes; the arena has \d+",
    ),
    "load": (
        r"(zr_copy\(z, ZR_LOAD, )",
        rf"\1({FAR}) + ",
        r"copy on queue load: `from` is at \d{13}, \d+ bytes; the file arena has \d+",
    ),
    "store": (
        r"(zr_copy\(z, ZR_STORE, [^;]*),\s+[^,;]+\);",
        rf"\1, {FAR});",
        r"copy on queue store: `from` is at \d+, \d{13} bytes; the host arena has \d+",
    ),
    "copy elsewhere": (
        r"zr_copy\(z, ZR_UP",
        "zr_copy(z, ZR_GATHER",
        r"copy on queue gather, which does not copy",
    ),
    "call": (
        r"(zr_call\(z, ZR_MAIN, fwd_block, )zr_last\((\w+\([^()]*\))\)",
        rf"\1({FAR}) + \2",
        r"call of fwd_block on queue main: operand 0 is \d{13}; the arena has \d+ bytes",
    ),
    "call on the host": (
        r"(zr_call\(z, ZR_HOST, update_block, [^,]*, )",
        r"\1-1 - ",
        r"call of update_block on queue host: operand 1 is -\d+; the host arena",
    ),
    "allreduce": (
        r"(zr_allreduce\(z, ZR_MAIN, .*), ZK_SUMS\);",
        r"\1, INT64_MAX / 4);",
        r"allreduce on queue main: `from` is at 0, \d{19} bytes; the part",
    ),
    "record": (
        r"(zr_record\(z, ZR_MAIN, FULL_GRAD_EMBED\()",
        r"\g<1>99 + ",
        r"record on queue main: event \d+; there are \d+;",
    ),
    "wait": (
        r"(zr_waits?\(z, ZR_REDUCE, FULL_GRAD_PERSISTENT\()",
        r"\1-99 + ",
        r"wait on queue reduce: event -\d+; there are \d+;",
    ),
    "queue": (
        r"zr_record\(z, ZR_GATHER",
        "zr_record(z, ZR_QUEUES + 3",
        r"record on queue 13, which the program does not have;",
    ),
    "micro_batch": (
        r"(zr_batch\(z, )",
        r"\1-4 + ",
        r"batch on queue main: micro_batch -\d; there are 4;",
    ),
}
# tables: elements without a row would be saved as zeros
ONCE = "the rows of its masters do not have each of its elements once;"
MASTER = (
    r'    (\{"master", MASTER_BLOCK\(0\), SIZE\(MASTER_BLOCK\), SHARD_BLOCK, )0, '
    r"(SHARD_BLOCK)(, 1, 3, GROUP_ALL,\s+.*\},)\n"
)
STATES = {
    "taken out": (MASTER, "", rf"tensor h\.%d\.attn\.c_attn\.weight: {ONCE}"),
    "cut short": (MASTER, r"\g<1>0, 23552\3\n", ONCE),
    "begins late": (MASTER, r"\g<1>1024, 23552\3\n", ONCE),
    "doubled": (MASTER, r"\g<0>\g<0>", ONCE),
    "twice in part": (MASTER, r"\g<1>0, \2\3\n\g<1>23552, 1024\3\n", ONCE),
    "with a gap": (MASTER, r"\g<1>0, 1024\3\n\g<1>2048, 22528\3\n", ONCE),
    "of too few layers": (
        r'("master", .*, SHARD_BLOCK, 1, )3,',
        r"\g<1>2,",
        ONCE,
    ),
    "not hashed": (r"hash_block\},", "NULL},", ONCE),
    "of another flat": (
        r'(\{"wpe.weight", .*), 0, 0, 1, 0\}',
        r"\1, 7, 0, 1, 0}",
        rf"tensor wpe.weight: {ONCE}",
    ),
    "a tensor behind its flat": (
        r'\{"ln_f.bias", \d+',
        '{"ln_f.bias", 20480',
        rf"tensor ln_f.bias: {ONCE}",
    ),
    "elsewhere": (
        r'("master", )MASTER_EMBED\(0\)(,[^}]* hash_embed)',
        rf"\1{FAR}\2",
        r"state on queue store: `master` is at \d{13}, 40960 bytes; the file arena has",
    ),
    "of no type": (
        r"(SHARD_BLOCK, 1, 3, GROUP_ALL,\s+ZR_STORE, )ZR_F32",
        r"\g<1>9",
        "state on queue store: type 9; there are 5;",
    ),
}
# on GPUs alone, where pieces are moved
SLOT = (
    r"(zr_alltoall\(z, ZR_REDUCE, [^;]*),(\s+[^,;]+)\);",
    r"\1,\2 + 1024);",
    r"alltoall on queue reduce: 2 x \d+ bytes come; a slot of the inbox has \d+;",
)
NCCL = (
    "zero.stage=2",
    "cluster.ranks=2",
    "train.micro_batch=1",
    "train.global_batch=4",
    "train.reduction=fast",
    "targets=[sm_90]",
)


@functools.cache
def source(*keys: str) -> str:
    return trainer.generate(law.path("gpt"), *keys)


def ended(
    kind: trainer.Kind,
    folder: pathlib.Path,
    text: str,
    wrong: tuple[str, str, str],
) -> None:
    find, put, said = wrong
    place = ("--nvme", folder) if ".filed = " in text else ()
    made, found = re.subn(find, put, text)
    assert found
    trainer.write_tokens(folder / "tokens", law.tokens(256, 5000))
    done = program.run(
        trainer.build(made, kind),
        "--data",
        folder / "tokens",
        "--steps",
        2,
        *place,
    )
    assert done.code == 4, done.err
    lines = re.findall(r"^rank [01]: .*", done.err, re.M)
    assert len(lines) == 1 and re.match(
        rf"rank [01]: (step \d: )?.*{said}.*regenerate (the program|it)$", lines[0]
    ), lines


@pytest.mark.parametrize("what", WRONG)
def test_what_leaves_its_arena_is_named(tmp_path: pathlib.Path, what: str) -> None:
    ended(trainer.GCC, tmp_path, source(*KEYS), WRONG[what])


@pytest.mark.parametrize("what", STATES)
def test_masters_have_a_row_each_once(tmp_path: pathlib.Path, what: str) -> None:
    ended(trainer.GCC, tmp_path, source(*KEYS), STATES[what])


def test_what_is_left_alone_runs(tmp_path: pathlib.Path) -> None:
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 5000))
    done = program.run(
        trainer.build(source(*KEYS)),
        "--data",
        tmp_path / "tokens",
        "--steps",
        2,
        "--val",
        tmp_path / "tokens",
        "--sample",
        3,
        "--hash",
        "--nvme",
        tmp_path,
    )
    assert done.code == 0 and done.line("weights ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    covering([*WRONG], budget=len(WRONG) // 2),
)
def test_a_gpus_program_names_it_too(tmp_path: pathlib.Path, what: str) -> None:
    ended(trainer.EMULATED, tmp_path, source(*KEYS), WRONG[what])


@pytest.mark.slow
def test_what_comes_fits_its_slot(tmp_path: pathlib.Path) -> None:
    ended(trainer.EMULATED, tmp_path, source(*KEYS), SLOT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "find,put,said",
    [
        (
            r"(zr_reducescatter\(z, ZR_REDUCE, [^;]*),\s+ZR_F32\);",
            r"\1, 3);",
            "reducescatter on queue reduce: type 3; there are 3;",
        ),
        (
            r"(zr_reducescatter\(z, ZR_REDUCE, )GROUP_ALL",
            r"\g<1>1",
            "reducescatter on queue reduce: group 1; there are 1;",
        ),
        (
            r"(zr_reducescatter\(z, ZR_REDUCE, GROUP_ALL, )",
            rf"\1({FAR}) + ",
            r"reducescatter on queue reduce: `at` is at \d{13}",
        ),
        (
            r"(zr_reducescatter\(z, ZR_REDUCE, [^;]*),(\s+[^,;]+),\s+ZR_F32\);",
            r"\1,\2 * 2, ZR_F32);",
            r"reducescatter on queue reduce: 1 x \d+ bytes come; a slot of the inbox has \d+;",
        ),
    ],
)
def test_so_it_is_with_the_sums_of_nccl(
    tmp_path: pathlib.Path, find: str, put: str, said: str
) -> None:
    ended(trainer.EMULATED, tmp_path, source(*NCCL), (find, put, said))
