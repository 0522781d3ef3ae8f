"""`make check-kernels`: compiles every kernel for every target without a GPU, writes kernels/compiled.csv, prints what changed."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from kernels.launch import TABLE, Compiled

TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")


def rows_of(target: str) -> list[list[str]]:
    """What `tests.kernels.compile_kernels` prints for a target."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_kernels", target]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    print(f"{target}: {done.stdout.count(chr(10))} configurations", flush=True)
    return list(csv.reader(done.stdout.splitlines()))


def main() -> None:
    """Write the table; its limits are held by tests/kernels/test_compiled.py."""
    before = TABLE.read_text(encoding="utf-8").splitlines()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = [row for made in pool.map(rows_of, TARGETS) for row in made]
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([Compiled._fields, *rows])
    after = TABLE.read_text(encoding="utf-8").splitlines()
    for sign, lines in (("-", set(before) - set(after)), ("+", set(after) - set(before))):
        for line in sorted(lines)[:40]:
            print(sign, line)
    print(f"{TABLE.name}: {len(rows)} rows, {len(set(after) - set(before))} of them new")


if __name__ == "__main__":
    main()
