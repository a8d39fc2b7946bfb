"""files.py -- compiles the small C programs that tests run on the readers of files, with sanitizers."""
from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READERS = ["zr_data.c", "zr_file.c", "zr_json.c", "zr_safetensors.c", "zr_weights.c"]


def build(source: str, into: Path) -> Path:
    """The program made of tests/`source` and the readers, every undefined behaviour fatal."""
    program = into / Path(source).stem
    subprocess.run(
        ["gcc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-ffp-contract=off",
         "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{ROOT}/runtime",
         str(ROOT / "tests" / source), *(str(ROOT / "runtime" / name) for name in READERS), "-o", str(program)],
        check=True)
    return program


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """Runs a program of `build`; an exit code that the tests do not know is a crash."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 2), done.stderr
    return done
