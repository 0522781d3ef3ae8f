"""`python -m calc.kernel_times`: every measured table with its error on held-out shapes, and what stands in for a missing one."""

from __future__ import annotations

from calc.command_line.tables import aligned
from calc.kernel_times.tables import index, rows

_COLUMNS = ("gpu", "kind", "dtype", "engine", "version", "held_out")


def report() -> str:
    """The tables' errors as text: median and 90th percentile, in percent."""
    errors = ("median %", "p90 %")
    tables = [
        (*(str(row[name]) for name in _COLUMNS), f"{100 * row['median']:.1f}", f"{100 * row['p90']:.1f}")
        for row in rows()
    ]
    stand_ins = [
        (source, kind, f"{100 * median:.1f}", f"{100 * p90:.1f}")
        for source in ("relation", "roofline")
        for kind, (median, p90) in index()[source].items()
    ]
    source = f"{index()['source']} ({index()['license']}, {index()['copyright']})"
    return "\n\n".join(
        (source, aligned(tables, (*_COLUMNS, *errors)), aligned(stand_ins, ("stands in", "kind", *errors)))
    )


if __name__ == "__main__":
    print(report())
