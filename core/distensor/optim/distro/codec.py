"""Sparse updates as bytes: sorted places as Rice-coded gaps, a sign bit for each value, one or two magnitudes a row.

A message is a header and four bit streams, each over all rows, so that nothing is repeated for a tensor:

1. the magnitudes: for each row a code on a logarithmic scale, 0 for a row that sends nothing, as differences of
   neighbours (a zigzag number in a Rice code);
2. the gaps between the kept places of each row, in unary what exceeds 2**b;
3. the lower b bits of each gap, b from the row's length (`rice_parameter`);
4. the signs, and with two bits a value whether it has the row's larger magnitude.

Which places and values a message may have follows from the layout, which both ends know; everything else is refused.
Source of the code: S. W. Golomb, Run-length encodings, 1966; R. F. Rice, 1979.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from distensor.core.errors import FrameError
from distensor.core.update_bytes import rice_parameter
from distensor.optim.distro.layout import Block, Layout

Integers: TypeAlias = "NDArray[np.int64]"
Bits: TypeAlias = "NDArray[np.bool_]"
Magnitudes: TypeAlias = "NDArray[np.float32]"

VERSION = 1
STEPS = 4
"""Magnitudes are powers of 2**(1/STEPS): at most 9 % off, which error feedback returns."""
LOWEST, HIGHEST = 1, 127 * STEPS
"""Codes of the smallest and the largest magnitude, 2**-63 and 2**63.5; 0 is a row that sends nothing."""
_MIDDLE = 63 * STEPS + LOWEST
_FRACTIONS = np.array([1.0, 2.0**0.25, 2.0**0.5, 2.0**0.75], dtype=np.float32)
_HEADER = struct.Struct(">BBBBIIII")
MAX_SCALE_RICE = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What the rows of one block send.

    places: (rows, kept) int64, ascending in a row; meaningless where the row's code is 0.
    negative: (rows, kept) bool. large: the same, None with one bit a value.
    codes: (rows,) magnitude codes of all values (or of the small ones); codes_large: of the large ones, >= codes.
    """

    places: Integers
    negative: Bits
    codes: Integers
    large: Bits | None = None
    codes_large: Integers | None = None

    def values(self) -> Magnitudes:
        """(rows, kept) float32: what the receivers add; zero in a row that sends nothing."""
        magnitude = np.broadcast_to(magnitude_of(self.codes)[:, None], self.places.shape)
        if self.large is not None and self.codes_large is not None:
            magnitude = np.where(self.large, magnitude_of(self.codes_large)[:, None], magnitude)
        return np.where(self.negative, -magnitude, magnitude).astype(np.float32)


def code_of(magnitude: Magnitudes) -> Integers:
    """The nearest code of each magnitude (finite, >= 0); 0 only for what is zero or below the smallest."""
    with np.errstate(divide="ignore"):
        exact = np.log2(magnitude.astype(np.float64)) * STEPS + _MIDDLE
    rounded = np.rint(np.nan_to_num(exact, neginf=0.0))
    codes: Integers = np.clip(rounded, 0, HIGHEST).astype(np.int64)
    return codes


def magnitude_of(codes: Integers) -> Magnitudes:
    """The exact float32 of each code, the same on every machine: a table and an exponent, no power function."""
    exponent, fraction = np.divmod(codes - _MIDDLE, STEPS)
    magnitude = np.ldexp(_FRACTIONS[fraction], exponent.astype(np.int32))
    return np.where(codes == 0, np.float32(0.0), magnitude).astype(np.float32)


def encode(layout: Layout, blocks: Sequence[Rows]) -> bytes:
    """One message. `blocks` has the shapes of `layout.blocks`.

    Raises:
        ValueError: another number of blocks or rows than the layout has, or a mixture of one and two bits a value.
    """
    _check_shapes(layout, blocks)
    two_bits = any(rows.large is not None for rows in blocks)
    scales = _scale_numbers(blocks, two_bits)
    scale_rice = _best_rice(np.concatenate(scales))
    unary, fixed, values = _bit_streams(layout, blocks, two_bits)
    scale_bits = np.concatenate([_rice_bits(numbers, scale_rice) for numbers in scales])
    streams = [np.packbits(bits) for bits in (scale_bits, unary, fixed, values)]
    header = _HEADER.pack(
        VERSION, 2 if two_bits else 1, scale_rice, 0, _fingerprint(layout), *(len(part) for part in streams[:3])
    )
    return b"".join([header, *(part.tobytes() for part in streams)])


def decode(layout: Layout, message: bytes) -> list[Rows]:
    """The rows of each block of the layout.

    Raises:
        FrameError: any message that `encode` would not have made for this layout.
    """
    header, streams = _split(layout, message)
    two_bits = header[1] == 2
    codes, codes_large = _read_scales(layout, streams[0], header[2], two_bits)
    active = codes > 0
    unary = np.unpackbits(np.frombuffer(streams[1], dtype=np.uint8)).view(np.bool_)
    quotients = _unary(unary, _active_entries(layout, active))
    _check_padding(unary[int(quotients.sum()) + quotients.size :], "gaps")
    reader = _Reader(
        quotients=quotients,
        fixed=np.unpackbits(np.frombuffer(streams[2], dtype=np.uint8)),
        values=np.unpackbits(np.frombuffer(streams[3], dtype=np.uint8)).view(np.bool_),
    )
    blocks, first = [], 0
    for block in layout.blocks:
        rows = slice(first, first + block.rows)
        first += block.rows
        large = codes_large[rows] if codes_large is not None else None
        blocks.append(reader.block(block, codes[rows], large))
    reader.check_end()
    return blocks


def _check_shapes(layout: Layout, blocks: Sequence[Rows]) -> None:
    shapes = [rows.places.shape for rows in blocks]
    expected = [(block.rows, block.kept) for block in layout.blocks]
    if shapes != expected:
        raise ValueError(f"blocks of shapes {shapes}; the layout has {expected}")
    if len({rows.large is None for rows in blocks}) > 1:
        raise ValueError("some blocks have one bit a value and some have two")


def _fingerprint(layout: Layout) -> int:
    """So that ranks with other tensors or another k are told apart before anything is believed."""
    text = f"{layout.shapes} {layout.chunk} {layout.k}"
    return zlib.crc32(text.encode())


# Magnitudes


def _scale_numbers(blocks: Sequence[Rows], two_bits: bool) -> list[Integers]:
    """One number a row; with two bits another for each row that sends: how much larger the large magnitude is."""
    codes = _joined([rows.codes for rows in blocks])
    numbers = _zigzag(np.diff(codes, prepend=_MIDDLE))
    if not two_bits:
        return [numbers]
    large = _joined([rows.codes_large for rows in blocks if rows.codes_large is not None])
    return [numbers, (large - codes)[codes > 0]]


def _joined(parts: Sequence[Integers]) -> Integers:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _zigzag(differences: Integers) -> Integers:
    return np.where(differences < 0, -2 * differences - 1, 2 * differences)


def _read_scales(layout: Layout, stream: bytes, rice: int, two_bits: bool) -> tuple[Integers, Integers | None]:
    bits = np.unpackbits(np.frombuffer(stream, dtype=np.uint8)).view(np.bool_)
    numbers, used = _read_rice(bits, layout.rows, rice)
    codes = np.cumsum(np.where(numbers & 1, -((numbers + 1) >> 1), numbers >> 1)) + _MIDDLE
    if codes.size and (codes.min() < 0 or codes.max() > HIGHEST):
        raise FrameError(f"sparse update: magnitude codes up to {codes.max()}; expected 0 to {HIGHEST}")
    if not two_bits:
        _check_padding(bits[used:], "magnitudes")
        return codes, None
    active = codes > 0
    above, more = _read_rice(bits[used:], int(active.sum()), rice)
    _check_padding(bits[used + more :], "magnitudes")
    large = codes.copy()
    large[active] += above
    if large.size and large.max() > HIGHEST:
        raise FrameError(f"sparse update: magnitude codes up to {large.max()}; expected 0 to {HIGHEST}")
    return codes, large


def _best_rice(numbers: Integers) -> int:
    if not numbers.size:
        return 0
    lengths = [int((numbers >> b).sum()) + numbers.size * (b + 1) for b in range(MAX_SCALE_RICE + 1)]
    return int(np.argmin(lengths))


def _rice_bits(numbers: Integers, rice: int) -> Bits:
    """All unary parts, then all fixed parts."""
    return np.concatenate([_unary_bits(numbers >> rice), _fixed_bits(numbers, rice)])


def _read_rice(bits: Bits, count: int, rice: int) -> tuple[Integers, int]:
    """`count` numbers, and how many bits they took."""
    quotients = _unary(bits, count)
    start = int(quotients.sum()) + count
    end = start + count * rice
    if end > bits.size:
        raise FrameError(f"sparse update: {bits.size} bits of magnitudes; {end} are needed")
    return (quotients << rice) + _fixed(bits[start:end].view(np.uint8), rice), end


# Bit streams


def _unary_bits(quotients: Integers) -> Bits:
    """Each number as that many zeros and a one."""
    ends = np.cumsum(quotients + 1)
    bits = np.zeros(int(ends[-1]) if ends.size else 0, dtype=np.bool_)
    bits[ends - 1] = True
    return bits


def _unary(bits: Bits, count: int) -> Integers:
    """The first `count` numbers of a stream of `_unary_bits`."""
    ends = np.flatnonzero(bits)[:count]
    if ends.size < count:
        raise FrameError(f"sparse update: {ends.size} numbers in a stream that needs {count}")
    return np.diff(ends, prepend=-1) - 1


def _fixed_bits(numbers: Integers, width: int) -> Bits:
    """The lower `width` bits of each number, the highest first."""
    shifts = np.arange(width - 1, -1, -1)
    return ((numbers[:, None] >> shifts) & 1).astype(np.bool_).reshape(-1)


def _fixed(bits: NDArray[np.uint8], width: int) -> Integers:
    numbers = np.zeros(bits.size // width if width else 0, dtype=np.int64)
    if not width:
        return np.zeros(1, dtype=np.int64)  # broadcasts
    columns = bits.reshape(-1, width)
    for column in range(width):
        numbers = (numbers << 1) | columns[:, column]
    return numbers


def _bit_streams(layout: Layout, blocks: Sequence[Rows], two_bits: bool) -> tuple[Bits, Bits, Bits]:
    unary, fixed, values = [_no_bits()], [_no_bits()], [_no_bits()]
    for block, rows in zip(layout.blocks, blocks, strict=True):
        active = rows.codes > 0
        gaps = (np.diff(rows.places[active], axis=1, prepend=-1) - 1).reshape(-1)
        width = rice_parameter(block.length, block.kept)
        unary.append(_unary_bits(gaps >> width))
        fixed.append(_fixed_bits(gaps, width))
        values.append(rows.negative[active].reshape(-1))
        if two_bits and rows.large is not None:
            values.append(rows.large[active].reshape(-1))
    return np.concatenate(unary), np.concatenate(fixed), np.concatenate(values)


def _no_bits() -> Bits:
    return np.zeros(0, dtype=np.bool_)


def _active_entries(layout: Layout, active: Bits) -> int:
    entries, first = 0, 0
    for block in layout.blocks:
        entries += int(active[first : first + block.rows].sum()) * block.kept
        first += block.rows
    return entries


def _split(layout: Layout, message: bytes) -> tuple[tuple[int, ...], list[bytes]]:
    if len(message) < _HEADER.size:
        raise FrameError(f"sparse update of {len(message)} bytes; the header alone has {_HEADER.size}")
    header = _HEADER.unpack_from(message)
    version, value_bits, rice, zero, fingerprint, *lengths = header
    if version != VERSION or value_bits not in (1, 2) or rice > MAX_SCALE_RICE or zero != 0:
        raise FrameError(
            f"sparse update of version {version} with {value_bits} bits a value, Rice parameter {rice}; expected "
            f"version {VERSION}, 1 or 2 bits, at most {MAX_SCALE_RICE}"
        )
    if fingerprint != _fingerprint(layout):
        raise FrameError(
            f"sparse update for other tensors or another k than the {len(layout.shapes)} tensors with "
            f"{layout.elements} elements and k = {layout.k} of {layout.chunk} here"
        )
    streams, start = [], _HEADER.size
    for length in lengths:
        streams.append(message[start : start + length])
        start += length
    if start > len(message):
        raise FrameError(f"sparse update of {len(message)} bytes; its header speaks of at least {start}")
    streams.append(message[start:])
    return header, streams


def _check_padding(rest: NDArray[np.bool_], what: str) -> None:
    """A stream ends within a byte, with zeros: there is one way to write a message."""
    if rest.size >= 8 or rest.any():
        raise FrameError(f"sparse update: {rest.size} bits too many in its {what}")


class _Reader:
    """Takes one block after the other from the streams."""

    def __init__(self, *, quotients: Integers, fixed: NDArray[np.uint8], values: Bits) -> None:
        self._quotients = quotients
        self._fixed = fixed
        self._values = values
        self._entry = self._fixed_at = self._value_at = 0

    def block(self, block: Block, codes: Integers, codes_large: Integers | None) -> Rows:
        active = codes > 0
        count = int(active.sum()) * block.kept
        places = np.zeros((block.rows, block.kept), dtype=np.int64)
        places[active] = self._places(block, count)
        negative = np.zeros((block.rows, block.kept), dtype=np.bool_)
        negative[active] = self._take_values(count).reshape(-1, block.kept)
        large = None
        if codes_large is not None:
            large = np.zeros_like(negative)
            large[active] = self._take_values(count).reshape(-1, block.kept)
        return Rows(places=places, negative=negative, codes=codes, large=large, codes_large=codes_large)

    def _places(self, block: Block, count: int) -> Integers:
        width = rice_parameter(block.length, block.kept)
        quotients = self._quotients[self._entry : self._entry + count]
        self._entry += count
        bits = self._fixed[self._fixed_at : self._fixed_at + count * width]
        self._fixed_at += count * width
        if bits.size < count * width:
            raise FrameError(f"sparse update: {bits.size} bits of places; {count * width} are needed")
        gaps = ((quotients << width) + _fixed(bits, width)).reshape(-1, block.kept)
        places = np.cumsum(gaps + 1, axis=1) - 1
        if places.size and places[:, -1].max() >= block.length:
            raise FrameError(f"sparse update: place {places[:, -1].max()} in a row of {block.length} elements")
        return places

    def _take_values(self, count: int) -> Bits:
        bits = self._values[self._value_at : self._value_at + count]
        self._value_at += count
        if bits.size < count:
            raise FrameError(f"sparse update: {bits.size} value bits; {count} are needed")
        return bits

    def check_end(self) -> None:
        _check_padding(self._fixed[self._fixed_at :].view(np.bool_), "places")
        _check_padding(self._values[self._value_at :], "values")
