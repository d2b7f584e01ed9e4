from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distensor_server.lines import LineSplitter, Oversize


def feed_all(splitter: LineSplitter, chunks: list[bytes]) -> list[bytes | Oversize]:
    return [line for chunk in chunks for line in splitter.feed(chunk)]


@given(st.binary(max_size=400), st.lists(st.integers(1, 40), max_size=40))
def test_lines_do_not_depend_on_how_the_bytes_arrive(data: bytes, sizes: list[int]) -> None:
    chunks, rest = [], data
    for size in sizes:
        chunks.append(rest[:size])
        rest = rest[size:]
    assert feed_all(LineSplitter(1000), [*chunks, rest]) == data.split(b"\n")[:-1]


@given(st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=20), st.integers(1, 20))
def test_each_long_line_is_reported_once_and_the_others_survive(lines: list[bytes], limit: int) -> None:
    data = b"".join(line + b"\n" for line in lines)
    one_byte_at_a_time = [data[index : index + 1] for index in range(len(data))]
    expected = [Oversize(limit=limit) if len(line) > limit else line for line in lines]
    assert feed_all(LineSplitter(limit), one_byte_at_a_time) == expected


def test_a_line_without_end_does_not_use_memory() -> None:
    splitter = LineSplitter(100)
    found = [line for _ in range(1000) for line in splitter.feed(b"x" * 1000)]
    assert found == [Oversize(limit=100)]
    assert splitter.feed(b"\nok\n") == [b"ok"]
