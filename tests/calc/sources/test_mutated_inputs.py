"""A mutated file is read or refused in one line, whatever it is."""

from __future__ import annotations

from tests.calc.sources.mutated_inputs import run


def test_a_mutated_file_is_read_or_refused_in_one_line():
    found, _ = run(1500, seed=1)
    assert (
        min(found[f"{kind}: {outcome}"] for kind in ("config", "yaml", "folder") for outcome in ("read", "refused"))
        > 10
    )
