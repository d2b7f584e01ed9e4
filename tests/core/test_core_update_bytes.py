"""Predicted bytes of an update: what the code really has, and the recorded sizes of a model of 1.2 billion."""

from __future__ import annotations

import json
import math

import pytest

from distensor.core.errors import ConfigError
from distensor.core.update_bytes import Topology, message_bytes, rice_parameter, row_bits, traffic_of_all
from distensor.demo import bandwidth

LLAMA = ["--params", "1.2e9", "--workers", "32", "--down", "100", "--up", "10"]


@pytest.mark.parametrize(("k", "megabytes"), [(8, 3.40), (32, 11.18)])
def test_a_message_for_1_2_billion_parameters(k: int, megabytes: float) -> None:
    """Elsewhere at k = 8: 28.3 MB as int64 and float32, 5.02 MB as 16-bit places and signs; dense bf16: 2,400 MB."""
    assert message_bytes(1.2e9, k) / 1e6 == pytest.approx(megabytes, rel=0.01)


@pytest.mark.parametrize("k", [1, 2, 8, 32, 256, 4096])
def test_no_code_of_places_is_far_from_the_floor(k: int) -> None:
    """The floor is log2 of the number of sets; the code of gaps is within 0.35 bits an entry of it."""
    floor = (math.lgamma(4097) - math.lgamma(k + 1) - math.lgamma(4097 - k)) / math.log(2)
    places = row_bits(4096, k) - k - 2.2
    assert floor < places <= floor + 0.35 * k + 1.5 or k == 4096
    assert places <= k * 13


def test_the_parameter_is_the_best_one() -> None:
    assert [rice_parameter(4096, k) for k in (1, 2, 8, 32, 1024, 4096)] == [10, 10, 8, 6, 1, 0]


def test_a_ring_moves_nearly_twice_the_model() -> None:
    ring = traffic_of_all(1e6, 4)[0]
    assert (ring.topology, ring.up, ring.down) == (Topology.RING, 3e6, 3e6)
    assert ring.seconds(up_rate=1e6, down_rate=1e7) == 3.0


def test_an_aggregator_spares_the_upload_only() -> None:
    found = {(row.method, row.topology): row for row in traffic_of_all(1e9, 5)}
    peers, aggregator = (found["DisTrO-AdamW k=8", topology] for topology in (Topology.PEERS, Topology.AGGREGATOR))
    assert peers.up == 4 * aggregator.up
    assert peers.down == aggregator.down == 4 * aggregator.up


@pytest.mark.parametrize(("parameters", "workers", "words"), [(1e6, 1, "workers = 1"), (0.0, 2, "params = 0")])
def test_what_sends_nothing_is_refused(parameters: float, workers: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        traffic_of_all(parameters, workers)


def test_the_table_has_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert bandwidth.main(LLAMA) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a step of 1.2e+09 parameters, 32 workers, 100 Mbit/s down, 10 Mbit/s up"
    ring = next(line for line in lines if line.startswith("AdamW"))
    assert ring.split() == ["AdamW", "ring", "all-reduce", "4,650.00", "4,650.00", "3,720.00", "1x", "1x"]
    assert all(len(line) <= 120 for line in lines)
    assert "nothing measured" in lines[-1]


def test_the_same_for_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert bandwidth.main([*LLAMA, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["v"] == 1
    assert answer["rows"][0]["seconds"] == pytest.approx(4.65e9 * 8 / 10e6)
    assert {row["topology"] for row in answer["rows"]} == {topology.value for topology in Topology}


@pytest.mark.parametrize(
    ("change", "words"),
    [(["--up", "0"], "above 0"), (["--workers", "1"], "workers = 1"), (["--params", "x"], "invalid float")],
)
def test_wrong_words_name_themselves(change: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bandwidth.main([*LLAMA, *change]) == 64
    assert words in capsys.readouterr().err
