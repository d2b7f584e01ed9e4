"""The real command on a real pseudo terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence

DEADLINE = 20.0
SHELL = """
import os, signal, subprocess, sys, fcntl, termios

def foreground(group):
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.tcsetpgrp(0, group)
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
child = subprocess.Popen(sys.argv[1:], process_group=0, preexec_fn=lambda: foreground(os.getpid()))
while True:
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    foreground(os.getpgrp())
    if not os.WIFSTOPPED(status):
        sys.exit(os.waitstatus_to_exitcode(status))
    print("stopped, canonical", bool(termios.tcgetattr(0)[3] & termios.ICANON), flush=True)
    if sys.stdin.readline() == "fg\\n":
        foreground(child.pid)
    os.kill(child.pid, signal.SIGCONT)
"""
"""A shell that runs one program: 'fg' and 'bg' continue it when it was stopped."""


class Terminal:
    """`distensor` on a pty of the given size. `output` is every byte it ever wrote."""

    def __init__(
        self, words: Sequence[str], size: tuple[int, int] = (120, 40), *, shell: bool = False, **environ: str
    ) -> None:
        self._master, slave = pty.openpty()
        self.resize(*size)
        self.before = termios.tcgetattr(slave)
        self._slave: int | None = slave
        self.output = b""
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [*([sys.executable, "-c", SHELL] if shell else []), sys.executable, "-m", "distensor_tui", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": "/nonexistent",
                "TERM": "xterm-256color",
                "LANG": "C.UTF-8",
                **environ,
            },
        )

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        if hasattr(self, "process"):
            self.process.send_signal(signal.SIGWINCH)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def read(self, seconds: float = 0.05) -> None:
        if select.select([self._master], [], [], seconds)[0]:
            try:
                self.output += os.read(self._master, 1 << 16)
            except OSError:  # EIO: the other side has closed
                time.sleep(0.01)

    def forget(self) -> None:
        """Drop what came, and all that a stopped process still had on the way."""
        self.output = b"?"
        while self.output:
            self.output = b""
            self.read()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain; the terminal got {self.output[-2000:]!r}"
            self.read()

    def until_shown(self, text: str) -> None:
        self.until(lambda: text.encode() in self.output)

    def until_ended(self) -> int:
        self.until(lambda: self.process.poll() is not None)
        for _ in range(5):
            self.read(0.01)
        return int(self.process.returncode)

    def hang_up(self) -> None:
        """The window is closed."""
        assert self._slave is not None
        os.close(self._slave)
        self._slave = None
        os.close(self._master)

    @property
    def restored(self) -> bool:
        """Left the alternate screen, cursor on, mouse off, line settings as before."""
        assert self._slave is not None
        tail = self.output[self.output.rindex(b"\x1b[?1049l") :] if b"\x1b[?1049l" in self.output else b""
        mouse_off = self.output.rfind(b"\x1b[?1000l") > self.output.rfind(b"\x1b[?1000h")
        return b"\x1b[?25h" in tail and mouse_off and termios.tcgetattr(self._slave) == self.before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self._slave is not None:
            os.close(self._slave)
            os.close(self._master)
