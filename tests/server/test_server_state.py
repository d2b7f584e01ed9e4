"""What is kept on disk: whole or not at all, and never by two supervisors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distensor.core.control import Earnings, Unit, UnitKey
from distensor.core.errors import SessionError, StoreError
from distensor.core.ids import Epoch, JobId, Rank
from distensor_server.eventlog import MAX_REPEATS, EventLog
from distensor_server.holds import is_over, load_hold, parse_drain, parse_pause, save_hold
from distensor_server.localserver import RequestError
from distensor_server.logfiles import LastLine, RotatingFile
from distensor_server.picture import Hold, HoldKind, LoggedEvent
from distensor_server.receipts import ReceiptLog, Totals, load_totals, local_day, save_totals
from distensor_server.statedir import StateDirectory, read_json, write_json
from distensor_server.workforce import file_word, prune_logs

NOON = 1_800_000_000.0


def unit(step: int) -> Unit:
    key = UnitKey(job_id=JobId("j_1"), epoch=Epoch(1), step=step, rank=Rank(0))
    return Unit(key=key, micro_batches=2)


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    words = rf"in use by another supervisor \(process {os.getpid()}\)"
    with StateDirectory(tmp_path / "state"), pytest.raises(SessionError, match=words):
        StateDirectory(tmp_path / "state").open()
    StateDirectory(tmp_path / "state").open()


def test_only_the_owner_may_look(tmp_path: Path) -> None:
    with StateDirectory(tmp_path / "state") as state:
        for path in (state.root, state.receipts, state.logs):
            assert path.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"state directory .*/file/state: .* --state"):
        StateDirectory(tmp_path / "file" / "state").open()


def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    code = (
        f"from pathlib import Path; from distensor_server.statedir import StateDirectory as S; "
        f"S(Path({str(tmp_path)!r})).open(); import os; os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == -9
    StateDirectory(tmp_path).open()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_damaged_file_is_like_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    assert read_json(path) is None
    assert load_totals(path) == Totals()
    assert load_hold(path, NOON) is None


def test_json_is_replaced_as_a_whole_and_private(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert read_json(path) == {"a": 2}
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(StoreError, match="cannot write"):
        write_json(tmp_path / "none" / "file.json", {})


def test_receipts_survive_and_torn_lines_do_not_swallow_others(tmp_path: Path) -> None:
    log = ReceiptLog(tmp_path)
    log.append(unit(1), NOON)
    log.close()
    file = tmp_path / f"{local_day(NOON)}.jsonl"
    with file.open("ab") as torn:
        torn.write(b'{"v": 1, "at": 18000')
    again = ReceiptLog(tmp_path)
    again.append(unit(2), NOON + 1)
    assert list(again.since(NOON - 1, NOON + 2)) == [unit(1), unit(2)]
    assert list(again.since(NOON + 1, NOON + 2)) == [unit(2)]
    again.close()
    assert file.stat().st_mode & 0o777 == 0o600


def test_receipts_of_two_days_are_found(tmp_path: Path) -> None:
    log = ReceiptLog(tmp_path)
    log.append(unit(1), NOON)
    log.append(unit(2), NOON + 86400)
    log.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert list(log.since(NOON - 5, NOON + 86400)) == [unit(1), unit(2)]


def test_receipts_without_a_directory_say_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot write receipts"):
        ReceiptLog(tmp_path / "none").append(unit(1), NOON)


def confirmed(micro: int) -> Earnings:
    return Earnings(confirmed_micro=micro)


def test_today_counts_from_what_was_confirmed_before(tmp_path: Path) -> None:
    totals = Totals().confirmed("mon", confirmed(3000)).claimed("mon").confirmed("mon", confirmed(5000))
    assert (totals.today_micro, totals.claimed_units) == (5000, 1)
    save_totals(tmp_path / "totals.json", totals)
    tuesday = load_totals(tmp_path / "totals.json").confirmed("tue", confirmed(6000))
    assert (tuesday.today_micro, tuesday.claimed_units) == (1000, 0)
    assert totals.on_day("tue").today_micro == 0


@given(st.lists(st.tuples(st.sampled_from(["mon", "tue", "wed"]), st.integers(0, 10**9)), max_size=20))
def test_today_is_never_negative_nor_more_than_all(news: list[tuple[str, int]]) -> None:
    totals = Totals()
    for day, micro in sorted(news, key=lambda item: item[0]):
        totals = totals.confirmed(day, confirmed(micro))
        assert 0 <= totals.today_micro <= micro


def test_a_pause_survives_a_restart_until_its_time(tmp_path: Path) -> None:
    path = tmp_path / "hold.json"
    hold = Hold(kind=HoldKind.PAUSE, until=NOON + 10)
    save_hold(path, hold)
    assert load_hold(path, NOON) == hold
    assert load_hold(path, NOON + 10) is None
    save_hold(path, Hold(kind=HoldKind.DRAIN))
    assert load_hold(path, NOON + 10**9) == Hold(kind=HoldKind.DRAIN)
    save_hold(path, None)
    assert load_hold(path, NOON) is None


@pytest.mark.parametrize("content", [{"kind": "nap"}, {"kind": "pause", "until": "soon"}, {"kind": []}, {"until": 1}])
def test_a_hold_file_with_nonsense_is_no_hold(tmp_path: Path, content: dict[str, object]) -> None:
    write_json(tmp_path / "hold.json", content)
    assert load_hold(tmp_path / "hold.json", NOON) is None


def test_what_pause_and_drain_take() -> None:
    assert parse_pause({}, NOON) == Hold(kind=HoldKind.PAUSE)
    assert parse_pause({"seconds": 60}, NOON) == Hold(kind=HoldKind.PAUSE, until=NOON + 60, lasts=True)
    assert parse_pause({"until": NOON + 5}, NOON) == Hold(kind=HoldKind.PAUSE, until=NOON + 5)
    assert not is_over(Hold(kind=HoldKind.PAUSE), NOON)
    assert parse_drain({}, 90.0) == 90.0
    assert parse_drain({"seconds": 5}, 90.0) == 5.0


@pytest.mark.parametrize(
    "params",
    [
        {"seconds": 0},
        {"seconds": -5},
        {"seconds": True},
        {"seconds": "1h"},
        {"seconds": 1e300},
        {"until": 5},
        {"hours": 1},
        {"seconds": 5, "until": NOON + 5},
    ],
)
def test_a_pause_that_makes_no_sense_is_refused(params: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        parse_pause(params, NOON)


def test_a_drain_that_makes_no_sense_is_refused() -> None:
    for params in ({"minutes": 1}, {"seconds": 0}, {"seconds": None}):
        with pytest.raises(RequestError):
            parse_drain(params, 90.0)


def test_log_files_are_bounded_in_size_and_number(tmp_path: Path) -> None:
    with RotatingFile(tmp_path / "w.log", max_bytes=100, keep=3) as log:
        for number in range(40):
            log.write(f"line {number:04}\n".encode())
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["w.log", "w.log.1", "w.log.2"]
    assert all(path.stat().st_size <= 100 for path in tmp_path.iterdir())
    text = "".join((tmp_path / name).read_text() for name in reversed(files))
    assert text == "".join(f"line {number:04}\n" for number in range(40))[-len(text) :]
    assert text.endswith("line 0039\n")


def test_a_log_goes_on_where_it_ended(tmp_path: Path) -> None:
    for word in (b"first\n", b"second\n"):
        with RotatingFile(tmp_path / "w.log", max_bytes=8) as log:
            log.write(word)
    assert (tmp_path / "w.log").read_bytes() == b"second\n"
    assert (tmp_path / "w.log.1").read_bytes() == b"first\n"


@pytest.mark.parametrize(
    ("chunks", "last"),
    [
        ([b"a\nValueError: x\n"], "ValueError: x"),
        ([b"a\nValue", b"Error: x\n\n\n"], "ValueError: x"),
        ([b"a\nno newline"], "no newline"),
        ([b""], ""),
        ([b"x" * 10000], "x" * 4096),
    ],
)
def test_the_last_line_with_text_is_remembered(chunks: list[bytes], last: str) -> None:
    lines = LastLine()
    for chunk in chunks:
        lines.feed(chunk)
    assert lines.text == last


def test_old_worker_logs_are_removed(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"w{number}.log").touch()
        os.utime(tmp_path / f"w{number}.log", (number, number))
    prune_logs(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w4.log", "w5.log"]


def test_a_name_of_the_hubs_cannot_lead_out_of_the_directory() -> None:
    assert file_word("../../etc/passwd") == "______etc_passwd"
    assert file_word("") == "worker"
    assert len(file_word("x" * 500)) == 100


def test_equal_events_are_told_once_in_a_while() -> None:
    log = EventLog(quiet=10)

    def event(at: float, text: str = "x") -> LoggedEvent:
        return LoggedEvent(at=at, severity="info", source="s", text=text)

    assert [bool(log.add(event(at))) for at in (0.0, 5.0, 9.9, 10.0, 11.0)] == [True, False, False, True, False]
    assert log.add(event(3.0, "other"))
    assert log.add(event(1.0)), "a clock that was set back hides nothing"
    for number in range(300):
        log.add(event(100.0 + number, str(number)))
    assert len(list(log)) == 200


def test_equal_events_are_counted_and_told_ever_more_rarely() -> None:
    log = EventLog(quiet=10)

    def say(at: float) -> str | None:
        shown = log.add(LoggedEvent(at=at, severity="error", source="disk", text="full"))
        return shown and shown.text

    told = [(at, text) for at in range(1400) if (text := say(float(at))) is not None]
    assert told == [
        (0, "full"),
        (10, "full (10 times in 10 s)"),
        (70, "full (60 times in 60 s)"),
        (430, "full (360 times in 6 min)"),
        (1030, "full (600 times in 10 min)"),
    ]
    assert log.due(1500.0) == []
    (rest,) = log.due(1630.0)
    assert rest.text == "full (369 times in 10 min)"
    assert log.due(9999.0) == []
    assert say(9999.0) == "full", "forgotten: news again"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 700)), max_size=60))
def test_no_event_is_lost_from_the_count(gaps: list[tuple[str, float]]) -> None:
    log, now, said, told = EventLog(), 0.0, 0, 0

    def count(text: str) -> int:
        return int(text.partition("(")[2].partition(" times")[0] or 1)

    for text, gap in gaps:
        now += gap
        told += sum(count(shown.text) for shown in log.due(now))
        said += 1
        shown = log.add(LoggedEvent(at=now, severity="info", source="s", text=text))
        told += count(shown.text) if shown else 0
    told += sum(count(shown.text) for shown in log.due(now + 600))
    assert told == said


def test_what_is_remembered_of_events_is_bounded() -> None:
    log = EventLog()
    for number in range(3 * MAX_REPEATS):
        log.add(LoggedEvent(at=number / 10, severity="info", source=f"w_{number}", text="ready"))
        log.add(LoggedEvent(at=number / 10, severity="info", source="hub", text="away"))
    assert len(log._repeats) == MAX_REPEATS
    told = [shown.text for shown in log.due(3 * MAX_REPEATS / 10 + 600)]
    assert any(text.startswith("away (") for text in told), "what has something to tell stays"


def test_a_source_that_floods_is_cut_short_and_hides_no_other() -> None:
    log = EventLog(quiet=10, burst=5)

    def say(at: float, source: str, text: str) -> str | None:
        shown = log.add(LoggedEvent(at=at, severity="info", source=source, text=text))
        return shown and shown.text

    flood = [say(n / 100, "w_1", f"line {n}") for n in range(100)]
    assert flood[:5] == [f"line {n}" for n in range(5)]
    assert flood[5] == "over 5 events in 10 s: the others are not shown"
    assert flood[6:] == [None] * 94
    assert say(1.0, "hub", "connected") == "connected"
    assert say(20.0, "w_1", "later") == "later"


def test_days_are_the_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    time.tzset()
    try:
        assert local_day(1_800_000_000) == "2027-01-15"
        assert local_day(1_800_010_800 + 3600 * 5) == "2027-01-16"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_totals_file_is_plain_json(tmp_path: Path) -> None:
    save_totals(tmp_path / "t.json", Totals(day="mon", last_micro=5))
    assert json.loads((tmp_path / "t.json").read_text())["last_micro"] == 5
