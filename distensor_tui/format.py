"""Numbers as people read them. Each function is total: None becomes a dash."""

from __future__ import annotations

from datetime import tzinfo

from distensor_tui.clock import local

NOTHING = "-"
MICRO = 1_000_000
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_RATES = ("B/s", "kB/s", "MB/s", "GB/s", "TB/s")


def amount(value: float | None) -> str:
    """1234.5 -> '1,234'; keeps three significant digits below 100."""
    if value is None:
        return NOTHING
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def memory(value: float | None) -> str:
    return NOTHING if value is None else _scaled(value, 1024.0, _BYTES)


def rate(value: float | None) -> str:
    return NOTHING if value is None else _scaled(value, 1000.0, _RATES)


def _scaled(value: float, base: float, units: tuple[str, ...]) -> str:
    index = 0
    while abs(value) >= base * 0.9995 and index < len(units) - 1:
        value, index = value / base, index + 1
    if index == 0 or abs(value) >= 99.5:
        return f"{value:.0f} {units[index]}"
    return f"{value:.1f} {units[index]}"


def memory_pair(used: float | None, total: float | None) -> str:
    """'18.2/24.0 GiB' when both have the unit of the total."""
    if used is None or total is None:
        return memory(used) if total is None else f"{NOTHING}/{memory(total)}"
    index = 0
    while total / 1024.0 ** (index + 1) >= 1 and index < len(_BYTES) - 1:
        index += 1
    scale = 1024.0**index
    return f"{used / scale:.1f}/{total / scale:.1f} {_BYTES[index]}"


def credits(micro: int | None) -> str:  # noqa: A001 - the word of the domain; the site builtin is not for programs
    """Micro-credits as credits: exact up to 6 decimals, at least 3."""
    if micro is None:
        return NOTHING
    sign, micro = "-" if micro < 0 else "", abs(micro)
    whole, part = divmod(micro, MICRO)
    decimals = f"{part:06d}".rstrip("0").ljust(3, "0")
    return f"{sign}{whole:,}.{decimals}"


def short_credits(micro: int) -> str:
    """Three decimals, rounded towards zero; exact where that would show nothing."""
    return credits(micro if abs(micro) < 1000 else micro - (micro % 1000 if micro > 0 else -(-micro % 1000)))


def money(micro: int | None, currency: str) -> str:
    """Millionths of a currency with two decimals, or all where two would show nothing. Losses are not made smaller."""
    if micro is None:
        return NOTHING
    hundredths = micro // 10_000
    if micro and not hundredths:
        return f"{credits(micro)} {currency}".rstrip()
    sign, hundredths = "-" if hundredths < 0 else "", abs(hundredths)
    return f"{sign}{hundredths // 100:,}.{hundredths % 100:02d} {currency}".rstrip()


def spent(micro: int | None, currency: str) -> str:
    """A cost with two decimals, rounded up."""
    return NOTHING if micro is None else money(-(-micro // 10_000) * 10_000, currency)


def energy(millijoules: int | None) -> str:
    """Energy in kWh, or Wh below one tenth of a kWh."""
    if millijoules is None:
        return NOTHING
    watt_hours = millijoules / 3_600_000
    return f"{watt_hours:.1f} Wh" if abs(watt_hours) < 100 else f"{watt_hours / 1000:,.2f} kWh"


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f}%"


def loss(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.3e}"


def seconds(value: float) -> str:
    """A short duration as measured: '0.41 s', '12 ms'."""
    if value < 0.0995:
        return f"{1000 * value:.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def milliseconds(value: float | None) -> str:
    """A round trip: '0.41 ms', '3.2 ms', '41 ms', '1.2 s'."""
    if value is None:
        return NOTHING
    if value >= 1000:
        return f"{value / 1000:.1f} s"
    return f"{value:.2f} ms" if value < 1 else f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms"


def span(value: float) -> str:
    """A long duration in two units at most: '38 s', '12 min', '3 h 05 min', '3 d 04 h'."""
    value = max(0, int(value))
    if value < 60:
        return f"{value} s"
    if value < 3600:
        return f"{value // 60} min"
    if value < 86400:
        return f"{value // 3600} h {value % 3600 // 60:02d} min"
    return f"{value // 86400} d {value % 86400 // 3600:02d} h"


def coarse(value: float) -> str:
    """Like `span`, but changes once a minute at most, so that an idle screen stays idle."""
    return "< 1 min" if value < 60 else span(value)


def hour(at: float | None, zone: tzinfo | None, *, with_seconds: bool = False) -> str:
    if at is None:
        return NOTHING
    try:
        return local(at, zone).strftime("%H:%M:%S" if with_seconds else "%H:%M")
    except (ValueError, OverflowError, OSError):
        return "??:??"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
