"""On a real pseudo terminal: it starts, ends, and leaves the terminal as it was, whatever happens."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import tui_fake as fake
from test_tui_cli import ServerThread
from tui_pty import Terminal

COLOUR = re.compile(rb"\x1b\[[\d;]*[34](8;|[0-7])[\d;]*m")
ENTERED, LEFT = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s") / "s.sock"


@pytest.fixture
def server(path: Path) -> Iterator[fake.FakeSupervisor]:
    thread = ServerThread(path, fake.snapshot(), fake.HELLO)
    yield thread.fake
    thread.close()


Open = Callable[..., Terminal]


@pytest.fixture
def terminal(path: Path) -> Iterator[Open]:
    opened: list[Terminal] = []

    def start(*words: str, size: tuple[int, int] = (120, 40), shell: bool = False, **environ: str) -> Terminal:
        opened.append(Terminal(["--socket", str(path), *words], size, shell=shell, **environ))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_it_is_light(server: fake.FakeSupervisor, terminal: Open) -> None:
    """The bar is 60 MiB, with live data on the screen."""
    shown = terminal()
    shown.until_shown("EARNING")
    resident = psutil.Process(shown.process.pid).memory_info().rss / (1 << 20)
    assert resident <= 60, f"{resident:.1f} MiB"


def test_q_quits_soon_and_restores(server: fake.FakeSupervisor, terminal: Open) -> None:
    screen = terminal()
    screen.until_shown("EARNING")
    pressed = time.monotonic()
    screen.press("q")
    assert screen.until_ended() == 0
    assert time.monotonic() - pressed < 10  # the bar of 0.2 s is measured by the benchmark, on a quiet machine
    assert screen.restored


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_restore_the_terminal(server: fake.FakeSupervisor, terminal: Open, number: signal.Signals) -> None:
    screen = terminal()
    screen.until_shown("EARNING")
    screen.process.send_signal(number)
    assert screen.until_ended() == 128 + number
    assert screen.restored
    assert b"Traceback" not in screen.output


def test_sigterm_while_the_supervisor_is_down(terminal: Open) -> None:
    screen = terminal()
    screen.until_shown("not running")
    screen.process.terminate()
    assert screen.until_ended() == 143
    assert screen.restored


def test_sigterm_with_a_box_open(server: fake.FakeSupervisor, terminal: Open) -> None:
    screen = terminal()
    screen.until_shown("EARNING")
    screen.press("p")
    screen.until_shown("Pause this node?")
    screen.process.terminate()
    assert screen.until_ended() == 143
    assert screen.restored
    assert b"Traceback" not in screen.output


def test_sigterm_during_a_resize(server: fake.FakeSupervisor, terminal: Open) -> None:
    screen = terminal()
    screen.until_shown("EARNING")
    for size in [(80, 24), (200, 60), (60, 15)]:
        screen.resize(*size)
    screen.process.terminate()
    assert screen.until_ended() == 143
    assert screen.restored


def test_sigterm_at_the_very_start(server: fake.FakeSupervisor, terminal: Open) -> None:
    screen = terminal()
    screen.until_shown(ENTERED)
    screen.process.terminate()
    assert screen.until_ended() == 143
    assert screen.restored


def test_a_closed_window_ends_it(server: fake.FakeSupervisor, terminal: Open) -> None:
    screen = terminal()
    screen.until_shown("EARNING")
    screen.hang_up()
    assert screen.process.wait(10) == 129


def test_a_second_launch_is_fine(server: fake.FakeSupervisor, terminal: Open) -> None:
    for _ in range(2):
        screen = terminal()
        screen.until_shown("EARNING")
        screen.process.terminate()
        screen.until_ended()
        assert screen.restored


def test_down_to_one_cell_and_back(server: fake.FakeSupervisor, terminal: Open) -> None:
    screen = terminal(size=(200, 60))
    screen.until_shown("[atlas-3:1]")
    for size in [(80, 24), (40, 10), (10, 3), (1, 1)]:
        screen.output = b""
        screen.resize(*size)
        screen.until(lambda: bool(screen.output))  # drawn again, so that the next size is not taken for the last one
    screen.output = b""
    screen.resize(200, 60)
    screen.until_shown("[atlas-3:1]")
    screen.press("q")
    assert screen.until_ended() == 0
    assert screen.restored


def test_small_and_large_again_before_it_can_look(server: fake.FakeSupervisor, terminal: Open) -> None:
    """The size that it sees is the one that it knows; what the terminal shows is gone all the same."""
    screen = terminal()
    screen.until_shown("EARNING")
    screen.forget()
    screen.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, screen.process.pid, os.WSTOPPED | os.WNOWAIT)
    screen.forget()
    screen.resize(10, 3)
    screen.resize(120, 40)
    screen.process.send_signal(signal.SIGCONT)
    screen.until_shown("EARNING")
    screen.press("q")
    assert screen.until_ended() == 0
    assert screen.restored, "what it found when it continued was its own raw terminal"


def test_ctrl_z_gives_the_terminal_to_the_shell_and_fg_draws_the_screen_again(
    server: fake.FakeSupervisor, terminal: Open
) -> None:
    screen = terminal(shell=True)
    screen.until_shown("EARNING")
    screen.forget()
    screen.press("\x1a")
    screen.until_shown("stopped, canonical True")
    assert LEFT.encode() in screen.output
    screen.forget()
    screen.press("bg\r")
    screen.until_shown("stopped, canonical True")  # a program in the background may not draw
    assert ENTERED.encode() not in screen.output
    screen.forget()
    screen.press("fg\r")
    screen.until_shown("EARNING")
    assert ENTERED.encode() in screen.output
    screen.press("2")
    screen.until_shown("Workers on this node")
    screen.press("q")
    assert screen.until_ended() == 0


def test_ctrl_z_without_a_shell_does_not_freeze_the_window(server: fake.FakeSupervisor, terminal: Open) -> None:
    screen = terminal()
    screen.until_shown("EARNING")
    screen.forget()
    screen.press("\x1a")
    screen.until_shown("EARNING")
    assert LEFT.encode() in screen.output
    screen.press("q")
    assert screen.until_ended() == 0
    assert screen.restored


@pytest.mark.parametrize("environ", [{"TERM": "linux"}, {"LANG": "C", "LC_ALL": "C"}, {"NO_COLOR": "1"}], ids=str)
def test_poor_terminals(server: fake.FakeSupervisor, terminal: Open, environ: dict[str, str]) -> None:
    screen = terminal(**environ)
    screen.until_shown("EARNING")
    if "NO_COLOR" not in environ:
        assert "╭" not in screen.output.decode()
    assert bool(COLOUR.search(screen.output)) != ("NO_COLOR" in environ)
    assert b"\x1b[?1000h" in screen.output
    screen.press("q")
    assert screen.until_ended() == 0


def test_the_mouse_may_stay_with_the_terminal(server: fake.FakeSupervisor, terminal: Open) -> None:
    screen = terminal("--no-mouse")
    screen.until_shown("EARNING")
    screen.press("2")
    screen.until_shown("Workers on this node")
    screen.press("q")
    assert screen.until_ended() == 0
    assert b"\x1b[?1000h" not in screen.output


@pytest.mark.parametrize(("size", "environ"), [((59, 40), {}), ((120, 14), {}), ((120, 40), {"TERM": "dumb"})])
def test_where_nothing_can_be_drawn_it_is_text(
    server: fake.FakeSupervisor, terminal: Open, size: tuple[int, int], environ: dict[str, str]
) -> None:
    screen = terminal(size=size, **environ)
    assert screen.until_ended() == 0
    assert b"EARNING" in screen.output
    assert ENTERED.encode() not in screen.output
