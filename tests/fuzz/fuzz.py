"""fuzz.py -- runs one of these fuzzers for any time, with sanitizers.

fuzz.py choices|data|run|weights MUTANTS [SECONDS [FROM]]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS.parent / "gen")]

from tests.lib.files import READERS, build  # noqa: E402

if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 5 or sys.argv[1] not in READERS:
        sys.exit(__doc__)
    _, name, mutants, *more = sys.argv
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = build(f"fuzz/{name}.c")
        words = [fuzzer, folder, mutants, *(more or ["1000000"])]
        sys.exit(subprocess.run(words).returncode)
