"""Frames and the reader of them: what we write we read, and nothing else passes."""

from __future__ import annotations

import socket
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.errors import FrameError
from distensor.transport import Channel, FrameLimits, Tag
from distensor.transport.frames import MAGIC, PREFIX_SIZE, VERSION, FrameKind, decode_prefix, encode_prefix
from distensor.transport.wire import WireClosedError, WireReader, WireWriter

LIMITS = FrameLimits(header=1000, body=1 << 20, queued=1 << 20)
tags = st.builds(
    Tag,
    st.sampled_from(Channel),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
)


class Plain:
    """A TLS connection's reading and writing half over plain bytes: `chunk` bytes a read at most."""

    def __init__(self, data: bytes = b"", chunk: int = 1 << 14) -> None:
        self.data = bytearray(data)
        self.chunk = chunk

    def read(self, size: int, view: memoryview) -> int:
        count = min(size, self.chunk, len(self.data))
        view[:count] = self.data[:count]
        del self.data[:count]
        return count

    def write(self, data: memoryview) -> int:
        part = data[: self.chunk]
        self.data += part
        return len(part)


def read_all(reader: WireReader) -> None:
    while True:
        reader.frame()


@given(st.sampled_from(FrameKind), st.integers(0, 2**64 - 1), tags, st.integers(0, 1000), st.integers(0, 1 << 20))
def test_prefixes_go_both_ways(kind: FrameKind, epoch: int, tag: Tag, header: int, body: int) -> None:
    data = encode_prefix(kind, epoch, tag, header, body)
    assert len(data) == PREFIX_SIZE
    prefix = decode_prefix(data, epoch=epoch, limits=LIMITS)
    assert (prefix.kind, prefix.epoch, prefix.tag) == (kind, epoch, tag)
    assert (prefix.header_size, prefix.body_size) == (header, body)
    assert isinstance(prefix.tag.channel, Channel)


@given(st.binary(min_size=PREFIX_SIZE, max_size=PREFIX_SIZE))
def test_random_bytes_are_no_prefix(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode_prefix(data, epoch=1, limits=LIMITS)


@given(st.integers(0, PREFIX_SIZE - 1), st.integers(1, 255))
def test_a_changed_byte_gives_another_frame_or_an_error(index: int, change: int) -> None:
    good = encode_prefix(FrameKind.DATA, 3, Tag(Channel.TIED, 4, 5, 6), 7, 8)
    bad = bytearray(good)
    bad[index] ^= change
    try:
        prefix = decode_prefix(bytes(bad), epoch=3, limits=LIMITS)
    except FrameError:
        return
    assert encode_prefix(prefix.kind, 3, prefix.tag, prefix.header_size, prefix.body_size) == bad


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((0, b"HTTP"), "starts with"),
        ((4, bytes([VERSION + 1])), f"version {VERSION + 1}, we speak version {VERSION}"),
        ((5, b"\x00"), "unknown frame kind 0"),
        ((6, b"\x63"), "channel 99"),
        ((7, b"\x01"), "reserved byte 1"),
        ((8, (9).to_bytes(8)), "epoch 9 arrived in epoch 3"),
        ((36, (1001).to_bytes(4)), "1001 header"),
        ((40, (1 << 63).to_bytes(8)), "over the limits of 1000 and 1048576"),
    ],
)
def test_each_wrong_field_is_named(change: tuple[int, bytes], words: str) -> None:
    data = bytearray(encode_prefix(FrameKind.DATA, 3, Tag(Channel.P2P), 0, 0))
    data[change[0] : change[0] + len(change[1])] = change[1]
    with pytest.raises(FrameError, match=words):
        decode_prefix(bytes(data), epoch=3, limits=LIMITS)


def test_short_and_long_prefixes_are_refused() -> None:
    for size in (0, PREFIX_SIZE - 1, PREFIX_SIZE + 1):
        with pytest.raises(FrameError, match=f"got {size}"):
            decode_prefix(MAGIC.ljust(size, b"\0")[:size], epoch=1, limits=LIMITS)


@pytest.mark.parametrize("tag", [Tag(Channel.P2P, -1), Tag(Channel.P2P, 0, 1 << 32), Tag(Channel.P2P, 0, 0, 1 << 64)])
def test_numbers_that_do_not_fit_are_our_own_error(tag: Tag) -> None:
    with pytest.raises(FrameError, match="does not fit a frame"):
        encode_prefix(FrameKind.DATA, 1, tag, 0, 0)


frames = st.lists(
    st.tuples(tags, st.binary(max_size=100), st.one_of(st.binary(max_size=300), st.integers(16_000, 70_000))),
    max_size=6,
)


@given(frames, st.integers(1, 40_000), st.integers(1, 40_000))
def test_any_row_of_frames_arrives_whatever_the_cuts(items: list[Any], write_chunk: int, read_chunk: int) -> None:
    pipe = Plain(chunk=write_chunk)
    writer = WireWriter(pipe, 1)  # type: ignore[arg-type]
    sent = []
    for tag, header, body in items:
        data = body if isinstance(body, bytes) else bytes(range(256)) * (body // 256 + 1)
        head = encode_prefix(FrameKind.DATA, 1, tag, len(header), len(data)) + header
        writer.data(head, [memoryview(data)[: len(data) // 2], memoryview(data)[len(data) // 2 :]])
        sent.append((tag, header, data))
    assert writer.bytes_sent == len(pipe.data)
    pipe.chunk = read_chunk
    total = len(pipe.data)
    reader = WireReader(pipe, 1, FrameLimits())  # type: ignore[arg-type]
    for tag, header, data in sent:
        prefix, got_header, got_body = reader.frame()
        assert (prefix.tag, got_header) == (tag, header)
        assert bytes(got_body) == data
    with pytest.raises(WireClosedError):
        reader.frame()
    assert reader.bytes_received == total
    assert reader.messages_received == writer.messages_sent == len(sent)


@given(st.binary(max_size=400))
def test_no_bytes_crash_the_reader(data: bytes) -> None:
    reader = WireReader(Plain(data), 1, LIMITS)  # type: ignore[arg-type]
    with pytest.raises((FrameError, WireClosedError)):
        read_all(reader)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.binary(max_size=64))
def test_a_lie_about_sizes_costs_no_memory(header: int, body: int, rest: bytes) -> None:
    prefix = bytearray(encode_prefix(FrameKind.DATA, 1, Tag(Channel.P2P), 0, 0))
    prefix[36:48] = header.to_bytes(4) + body.to_bytes(8)
    tracemalloc.start()
    try:
        reader = WireReader(Plain(bytes(prefix) + rest), 1, FrameLimits(header=1 << 16, body=1 << 50))  # type: ignore[arg-type]
        with pytest.raises((FrameError, WireClosedError)):
            read_all(reader)
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


def test_the_largest_bodies_are_mapped_not_zeroed() -> None:
    body = bytes(range(256)) * (40 << 12)
    prefix = encode_prefix(FrameKind.DATA, 1, Tag(Channel.P2P), 0, len(body))
    _, _, got = WireReader(Plain(prefix + body), 1, FrameLimits()).frame()  # type: ignore[arg-type]
    assert isinstance(got, memoryview)
    assert not got.readonly
    assert got == body


def test_limits_of_the_sender_come_before_the_wire() -> None:
    from distensor.transport.link import PeerLink
    from distensor.transport.mailbox import Mailbox
    from distensor.transport.rates import RateLimit

    ours, theirs = socket.socketpair()
    free = RateLimit(SYSTEM_CLOCK)
    mailbox = Mailbox(queued_limit=10)
    link = PeerLink(1, 1, ours, theirs, mailbox, LIMITS, lambda *_: None, SYSTEM_CLOCK, free, free)  # type: ignore[arg-type]
    with pytest.raises(FrameError, match="send it in parts"):
        link.send(Tag(Channel.P2P), b"", [bytes(LIMITS.body + 1)])
    with pytest.raises(FrameError, match="send it in parts"):
        link.send(Tag(Channel.P2P), bytes(LIMITS.header + 1), [])
    ours.close()
    theirs.close()
