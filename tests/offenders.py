"""One test over many values, which lists those that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.recorded.recording import drawn


def each(
    values: Iterable[Any], name: Callable[[Any], str] = str, sampled: int | None = None
) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Makes of a check of one value a test of all `values`: it fails with a line for each value that does. With
    `sampled` the fast tier and `make test` check so many of them, others each day."""
    given = list(values)

    def decorate(check: Callable[[Any], None]) -> Callable[[], None]:
        def test() -> None:
            assert given
            offenders = []
            for value in given if sampled is None else drawn(given, sampled):
                try:
                    check(value)
                except Exception as error:
                    offenders.append(f"{name(value)}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            assert not offenders, f"{len(offenders)} of {len(given)}:\n" + "\n".join(offenders)

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        return test

    return decorate
