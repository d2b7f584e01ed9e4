"""Sparse updates as bytes: exact there and back, small, and nothing else is believed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distensor.core.errors import ConfigError, FrameError
from distensor.optim.distro.codec import HIGHEST, Rows, code_of, decode, encode, magnitude_of
from distensor.optim.distro.layout import Layout, make_layout
from distensor.optim.distro.packing import Packing
from distensor.optim.distro.selection import add_rows, select

SIZES = st.lists(st.integers(0, 700), max_size=6)


def message_of(
    sizes: list[int], k: int, chunk: int, bits: int, seed: int, zeros: float = 0.0
) -> tuple[Layout, list[Rows], bytes]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    for tensor in tensors:
        tensor[torch.rand(tensor.shape, generator=generator) < zeros] = 0.0
    layout = make_layout([(n,) for n in sizes], k=k, chunk=chunk)
    matrices = Packing(layout).pack(tensors)
    rows = [select(m, block.kept, bits).rows for m, block in zip(matrices, layout.blocks, strict=True)]
    return layout, rows, encode(layout, rows)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 64), st.sampled_from([64, 100, 256]), st.sampled_from([1, 2]), st.integers(0, 99),
       st.sampled_from([0.0, 0.9, 1.0]))  # fmt: skip
def test_what_was_sent_arrives(sizes: list[int], k: int, chunk: int, bits: int, seed: int, zeros: float) -> None:
    layout, sent, message = message_of(sizes, k, chunk, bits, seed, zeros)
    got = decode(layout, message)
    assert len(got) == len(sent)
    for ours, theirs in zip(sent, got, strict=True):
        active = ours.codes > 0
        assert (ours.values()[active] == theirs.values()[active]).all()
        assert (ours.places[active] == theirs.places[active]).all()
        assert not theirs.values()[~active].any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(0, 10**6), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_harmless(sizes: list[int], place: int, byte: int) -> None:
    layout, _, message = message_of(sizes, 8, 64, 2, 1)
    changed = bytearray(message)
    changed[place % len(changed)] = byte
    try:
        rows = decode(layout, bytes(changed))
    except FrameError:
        return
    for block, got in zip(layout.blocks, rows, strict=True):
        assert got.places.shape == (block.rows, block.kept)
        assert (got.places >= 0).all()
        assert (got.places < block.length).all()
        assert np.isfinite(got.values()).all()
        assert encode(layout, rows)


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_noise_is_refused(noise: bytes, with_header: bool) -> None:
    layout, _, message = message_of([130, 7], 8, 64, 1, 0)
    with pytest.raises(FrameError):
        decode(layout, message[:24] + noise + b"\x01" if with_header else noise)


@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_a_message_that_ends_early_is_refused(cut: int) -> None:
    layout, _, message = message_of([500, 64, 3], 16, 64, 1, 5)
    with pytest.raises(FrameError):
        decode(layout, message[: len(message) - 1 - cut])


def test_a_message_for_other_tensors_names_both() -> None:
    _, _, message = message_of([128], 8, 64, 1, 0)
    other = make_layout([(64,), (64,)], k=8, chunk=64)
    with pytest.raises(FrameError, match=r"2 tensors with 128 elements and k = 8 of 64"):
        decode(other, message)


def test_a_place_beyond_its_row_is_refused() -> None:
    layout = make_layout([(70,)], k=8, chunk=64)  # the short row has six elements
    rows = [
        Rows(places=np.arange(8)[None], negative=np.zeros((1, 8), dtype=bool), codes=np.array([100])),
        Rows(places=np.array([[6]]), negative=np.zeros((1, 1), dtype=bool), codes=np.array([100])),
    ]
    with pytest.raises(FrameError, match="place 6 in a row of 6 elements"):
        decode(layout, encode(layout, rows))


def test_shapes_that_are_not_the_layouts_are_a_mistake_of_the_caller() -> None:
    layout = make_layout([(64,)], k=8, chunk=64)
    with pytest.raises(ValueError, match="the layout has"):
        encode(layout, [])


@settings(max_examples=50, deadline=None)
@given(st.floats(2.0**-60, 2.0**60, width=32))
def test_magnitudes_are_within_half_a_step(value: float) -> None:
    rounded = float(magnitude_of(code_of(np.array([value], dtype=np.float32)))[0])
    assert abs(math.log2(rounded / value)) <= 1 / 8 + 1e-6


def test_every_code_is_its_own_magnitude() -> None:
    codes = np.arange(1, HIGHEST + 1)
    magnitudes = magnitude_of(codes)
    assert (np.diff(magnitudes) > 0).all()
    assert (code_of(magnitudes) == codes).all()
    assert magnitude_of(np.array([0]))[0] == 0.0


@pytest.mark.parametrize(("k", "index_bits"), [(2, 12.3), (8, 10.4), (32, 8.48)])
def test_bits_of_an_entry_at_random_places(k: int, index_bits: float) -> None:
    """Floors are log2(C(4096, k)) / k: 11.5, 10.09 and 8.35 bits. A sign: one bit. Magnitudes: under 2.2 a row."""
    layout, rows, message = message_of([4096 * 256], k, 4096, 1, 3)
    entries = sum(r.places.size for r in rows)
    floor = (math.lgamma(4097) - math.lgamma(k + 1) - math.lgamma(4097 - k)) / math.log(2) / k
    assert floor < 8 * (len(message) - 20) / entries - 1 < index_bits + 2.2 / k
    assert len(layout.blocks) == 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=3), st.integers(1, 4096), st.sampled_from([1, 2]))
def test_never_larger_than_dense(sizes: list[int], k: int, bits: int) -> None:
    _, _, message = message_of(sizes, k, 4096, bits, 0)
    assert len(message) <= 4 * sum(sizes) + 32


SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=4), max_size=4)


@settings(max_examples=80, deadline=None)
@given(SHAPES, st.integers(1, 16), st.sampled_from([16, 20, 64]))
def test_rows_cover_all_elements(shapes: list[list[int]], k: int, chunk: int) -> None:
    layout = make_layout(shapes, k=k, chunk=chunk)
    assert sum(block.length * block.rows for block in layout.blocks) == sum(math.prod(shape) for shape in shapes)
    assert all(1 <= block.kept <= block.length <= chunk for block in layout.blocks)
    tensors = [torch.randn(shape) for shape in shapes]
    back = [torch.empty_like(tensor) for tensor in tensors]
    packing = Packing(layout)
    packing.unpack(packing.pack(tensors), back)
    assert all(torch.equal(a, b) for a, b in zip(tensors, back, strict=True))


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((256, 192), [(4096, 12)]),
        ((130, 67), [(4096, 2), (192, 2), (128, 1), (6, 1)]),
        ((10_000, 1), [(4096, 2), (1808, 1)]),
        ((3, 5000), [(4095, 3), (2715, 1)]),
        ((512, 512, 3, 3), [(4096, 576)]),
        ((), [(1, 1)]),
        ((0, 7), []),
    ],
)
def test_tiles_of_a_shape(shape: tuple[int, ...], rows: list[tuple[int, int]]) -> None:
    assert [(b.length, b.rows) for b in make_layout([shape], k=32).blocks] == rows


@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_has_the_tiles_of_the_whole(dim: int) -> None:
    whole = torch.randn(256, 128)
    rows = Packing(make_layout([whole.shape], k=8)).pack([whole])[0]
    parts = [part.contiguous() for part in whole.chunk(2, dim)]
    of_parts = [Packing(make_layout([part.shape], k=8)).pack([part])[0] for part in parts]
    assert {tuple(row.tolist()) for row in torch.cat(of_parts)} == {tuple(row.tolist()) for row in rows}


def test_a_prime_size_has_one_short_row() -> None:
    layout = make_layout([(1_000_003,)], k=32)
    assert [(b.length, b.rows, b.kept) for b in layout.blocks] == [(4096, 244, 32), (579, 1, 5)]


@pytest.mark.parametrize(("k", "chunk", "words"), [(0, 64, "k = 0"), (65, 64, "k = 65"), (1, 1, "chunk = 1")])
def test_what_no_row_can_send_is_refused(k: int, chunk: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_layout([(64,)], k=k, chunk=chunk)


def test_what_is_selected_is_the_largest() -> None:
    matrix = torch.tensor([[1.0, -5.0, 0.5, 3.0], [0.0, 0.0, 0.0, 0.0]])
    chosen = select(matrix, 2, 1)
    assert chosen.places[0].tolist() == [1, 3]
    assert chosen.values.tolist() == [[-4.0, 4.0], [0.0, 0.0]]
    sums = torch.zeros(2, 4)
    add_rows(sums, chosen.rows)
    assert sums.tolist() == [[0.0, -4.0, 0.0, 4.0], [0.0] * 4]


def test_two_magnitudes() -> None:
    chosen = select(torch.tensor([[8.0, -1.0, 1.0, 0.0]]), 3, 2)
    assert chosen.values.tolist() == [[8.0, -1.0, 1.0]]
    alike = select(torch.tensor([[2.0, -2.0, 0.0]]), 2, 2)
    assert alike.values.tolist() == [[2.0, -2.0]]
