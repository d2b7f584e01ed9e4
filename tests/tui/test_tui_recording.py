"""Recordings: written from a real stream, played back with their own times, never taken for live."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import tui_fake as fake
from test_tui_app import until
from test_tui_cli import ServerThread, run

from distensor_tui import cli
from distensor_tui.absence import Absence
from distensor_tui.app import Dashboard
from distensor_tui.cli import main
from distensor_tui.clock import system_monotonic, system_now
from distensor_tui.recording import Player, RecordingError, load, outcome, record
from distensor_tui.scene import Playing
from distensor_tui.wire import Hello, Update


def written(path: Path, *rows: tuple[float, dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps({"at": at, "message": message}) + "\n" for at, message in rows))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(
        tmp_path / "r.jsonl",
        (100.0, fake.HELLO),
        (100.1, {"type": "snapshot", "seq": 1, "data": fake.snapshot()}),
        (103.0, {"type": "delta", "seq": 2, "data": {"jobs": [fake.job(step=19000)]}}),
    )


class Sink:
    def __init__(self) -> None:
        self.got: list[Hello | Update] = []

    def on_hello(self, hello: Hello) -> None:
        self.got.append(hello)

    def on_update(self, update: Update) -> None:
        self.got.append(update)

    def on_lost(self, why: Absence, retry_in: float) -> None:
        raise AssertionError(why)


class FakeTime:
    """A clock that jumps where somebody sleeps."""

    def __init__(self) -> None:
        self.at, self.slept = 50.0, [0.0]

    def monotonic(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds


def test_playing_keeps_the_times_of_the_recording(file: Path) -> None:
    sink, time, ended = Sink(), FakeTime(), []
    player = Player(load(file), sink, monotonic=time.monotonic, sleep=time.sleep, ended=lambda: ended.append(True))
    asyncio.run(player.run())
    assert [type(message) for message in sink.got] == [Hello, Update, Update]
    assert sum(time.slept) == pytest.approx(3.0)
    assert ended == [True]
    time.at += 1000
    assert player.now() == 103.0
    assert not asyncio.run(player.ask("pause")).ok


class Held:
    """Time that passes only while the player waits, and tells it something at given moments."""

    def __init__(self) -> None:
        self.at, self.plan, self.player = 0.0, [], None

    async def sleep(self, seconds: float) -> None:
        self.at += seconds
        while self.plan and self.at >= self.plan[0][0]:
            self.player.control(self.plan.pop(0)[1])


def played(file: Path, *plan: tuple[float, Playing]) -> tuple[Sink, Held]:
    sink, time = Sink(), Held()
    time.plan = list(plan)
    time.player = Player(load(file), sink, monotonic=lambda: time.at, sleep=time.sleep)
    asyncio.run(time.player.run())
    return sink, time


@pytest.mark.parametrize(
    ("plan", "seconds"),
    [
        ([], 3.0),
        ([(0.0, Playing.FASTER)], 1.5),
        ([(0.0, Playing.FASTER), (0.0, Playing.FASTER)], 0.75),
        ([(0.0, Playing.SLOWER)], 6.0),
        ([(1.0, Playing.HOLD), (11.0, Playing.HOLD)], 13.0),
        ([(2.0, Playing.AGAIN)], 5.0),
    ],
)
def test_a_recording_is_held_and_played_at_other_speeds(
    file: Path, plan: list[tuple[float, Playing]], seconds: float
) -> None:
    sink, time = played(file, *plan)
    assert time.at == pytest.approx(seconds, abs=0.3)
    again = any(what is Playing.AGAIN for _, what in plan)
    assert [type(message) for message in sink.got] == ([Hello, Update] if again else []) + [Hello, Update, Update]


def test_one_that_is_over_can_be_played_again(file: Path) -> None:
    sink, time = played(file)
    assert time.player.control(Playing.AGAIN)
    asyncio.run(time.player.run())
    assert len(sink.got) == 6
    assert not time.player.control(Playing.HOLD)
    assert time.player.speed == 0


def test_where_it_comes_from_is_no_moment(file: Path) -> None:
    moments = load(file)
    file.write_text('{"about":{"made_by":"distensor record"}}\n' + file.read_text())
    assert load(file) == moments


def test_the_outcome_is_the_last_state(file: Path) -> None:
    jobs = outcome(load(file)).jobs
    assert jobs is not None
    assert jobs[0].step == 19000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "first message must be"),
        ('{"at": 1, "message": {"type": "delta", "data": {}}}\n', "first message must be"),
        ("nonsense\n", "line 1"),
        ('{"at": "soon", "message": {}}\n', "line 1"),
        ("[1]\n", "line 1"),
        ("\ud800", "cannot read"),
    ],
)
def test_what_is_not_a_recording_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(RecordingError, match=says) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_a_missing_recording_is_65(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replay", str(tmp_path / "none")]) == 65
    assert "cannot read the recording" in capsys.readouterr().err


def test_a_build_without_a_recorded_demo_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "DEMO", tmp_path / "none.jsonl")
    assert main(["--demo"]) == 66
    assert "distensor --replay FILE" in capsys.readouterr().err


def test_the_recorded_demo_is_played(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "DEMO", file)
    assert main(["--demo"]) == 0
    assert "from a recording" in capsys.readouterr().out


def test_without_a_terminal_a_replay_is_the_text_of_its_end(file: Path) -> None:
    found = run(["--replay", str(file)])
    assert found.returncode == 0
    assert found.stdout.startswith("from a recording")
    assert "19,000" in found.stdout


def test_a_recording_of_a_server_plays_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("s")
    thread = ServerThread(folder / "s.sock", fake.snapshot(), fake.HELLO)
    rows = record(folder / "s.sock", 30.0, now=system_now, monotonic=system_monotonic)
    lines = [next(rows), next(rows), next(rows)]
    thread._loop.call_soon_threadsafe(lambda: thread.fake.push(jobs=[fake.job(step=7)]))
    lines.append(next(rows))
    rows.close()
    thread.close()
    (folder / "r.jsonl").write_text("".join(lines))
    assert lines[0].startswith('{"about":{"made_by":"distensor record"')
    jobs = outcome(load(folder / "r.jsonl")).jobs
    assert jobs is not None
    assert jobs[0].step == 7


def test_the_record_command_writes_until_its_time_is_over(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("s")
    thread = ServerThread(folder / "s.sock", fake.snapshot(), fake.HELLO)
    words = ["record", str(folder / "r.jsonl"), "--seconds", "0.3", "--socket", str(folder / "s.sock")]
    assert main(words) == 0
    thread.close()
    assert len(load(folder / "r.jsonl")) == 2


def test_recording_nobody_is_69(tmp_path: Path) -> None:
    assert main(["record", str(tmp_path / "r.jsonl"), "--socket", str(tmp_path / "none.sock")]) == 69


def test_a_place_that_cannot_be_written_is_73(tmp_path: Path) -> None:
    assert main(["record", str(tmp_path / "no" / "r.jsonl"), "--socket", str(tmp_path / "none.sock")]) == 73


def test_a_screenshot_of_a_replay_says_that_it_is_a_recording(file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "shot.svg"
    assert main(["--replay", str(file), "--screenshot", str(picture), "--size", "120x40", "--wait", "0.5"]) == 0
    text = picture.read_text()
    assert "RECORDING" in text
    assert "EARNING" in text


def test_no_screenshot_without_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "shot.svg"
    assert main(["--socket", str(tmp_path / "none.sock"), "--screenshot", str(picture)]) == 69
    assert not picture.exists()
    assert "not running" in capsys.readouterr().err


@pytest.mark.asyncio
async def test_keys_hold_and_speed_up_what_is_shown(file: Path) -> None:
    app = Dashboard(name=str(file), now=lambda: fake.NOW, monotonic=system_monotonic)
    player = Player(load(file), app, monotonic=system_monotonic, ended=app.on_replay_end)
    app.replay(player)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "RECORDING" in app.screen_text())
        await pilot.press("space")
        assert "RECORDING, held" in app.screen_text()
        await pilot.press("space", "plus", "plus", "plus", "plus")
        assert "RECORDING x16" in app.screen_text()
        await until(pilot, lambda: "RECORDING, ended" in app.screen_text())
        await pilot.press("backspace")
        assert "RECORDING x16" in app.screen_text()
        await pilot.press("p", "3")
        await until(pilot, lambda: "pause failed: This is a recording" in app.screen_text())
