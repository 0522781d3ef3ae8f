"""Units: bytes, FLOPs and parameters are exact integers; GiB is 2**30 and GB is 10**9, never mixed."""

from __future__ import annotations

KiB, MiB, GiB, TiB, PiB, EiB = 2**10, 2**20, 2**30, 2**40, 2**50, 2**60
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12

_BINARY = ((EiB, "EiB"), (PiB, "PiB"), (TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB"))
_DECIMAL = (
    (10**24, "Y"),
    (10**21, "Z"),
    (10**18, "E"),
    (10**15, "P"),
    (10**12, "T"),
    (10**9, "G"),
    (10**6, "M"),
    (10**3, "k"),
)
_COUNT = ((10**15, " Q"), (10**12, " T"), (10**9, " B"), (10**6, " M"), (10**3, " K"))


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient of two integers, rounded up."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return ceil_div(value, multiple) * multiple


def _scaled(value: float, scale: tuple[tuple[int, str], ...], digits: int) -> tuple[str, str] | None:
    for size, suffix in scale:
        if abs(value) >= size:
            return f"{value / size:,.{digits}f}", suffix
    return None


def show_bytes(value: float, digits: int = 2) -> str:
    """Bytes for reading: `12.55 GiB`. Exact bytes travel with it in CSV and JSON."""
    scaled = _scaled(value, _BINARY, digits)
    return f"{scaled[0]} {scaled[1]}" if scaled else f"{value:,.0f} B"


def show_bytes_decimal(value: float, digits: int = 2) -> str:
    """Bytes in powers of ten, as marketing and networks count: `13.48 GB`."""
    scaled = _scaled(value, _DECIMAL, digits)
    return f"{scaled[0]} {scaled[1]}B" if scaled else f"{value:,.0f} B"


def axis_of_bytes(most: float, binary: bool) -> tuple[int, str]:
    """What an axis up to `most` bytes divides by, and its unit: the one in which `most` itself is shown."""
    scale = _BINARY if binary else tuple((size, f"{letter}B") for size, letter in _DECIMAL)
    return next(((size, unit) for size, unit in scale if most >= size), (1, "B"))


def show_count(value: float, digits: int = 2) -> str:
    """A count of parameters or tokens, from thousands (K) to quadrillions (Q): `6.74 B`."""
    scaled = _scaled(value, _COUNT, digits)
    return f"{scaled[0]}{scaled[1]}" if scaled else f"{value:,.0f}"


def show_flops(value: float, digits: int = 2) -> str:
    """A count of floating-point operations (not a rate): `175.57 TFLOP`."""
    scaled = _scaled(value, _DECIMAL, digits)
    return f"{scaled[0]} {scaled[1]}FLOP" if scaled else f"{value:,.0f} FLOP"


def show_energy(kwh: float) -> str:
    """Energy, given in kWh: `20.06 GWh`."""
    scaled = _scaled(kwh * 1000, _DECIMAL, 2)
    return f"{scaled[0]} {scaled[1]}Wh" if scaled else f"{kwh * 1000:,.3g} Wh"


def show_seconds(value: float) -> str:
    """A duration for reading: microseconds to years."""
    if not value:
        return "0 s"
    for size, suffix in ((365.25 * 86400, "years"), (86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if value >= size:
            return f"{value / size:,.2f} {suffix}"
    for size, suffix in ((1e-3, "ms"), (1e-6, "µs")):
        if value >= size:
            return f"{value / size:,.2f} {suffix}"
    return f"{value * 1e9:,.1f} ns"


SHOW = {"bytes": show_bytes, "parameters": show_count, "FLOPs": show_flops, "seconds": show_seconds, "kWh": show_energy}


def show_value(value: float, unit: str) -> str:
    """A value in its unit, as tables and charts print it."""
    return SHOW[unit](value) if unit in SHOW else f"{value:,} {unit}".rstrip()
