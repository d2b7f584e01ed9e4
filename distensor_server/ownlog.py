"""The supervisor's own log: journald where it listens, else a file of its own that cannot grow without bound."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from distensor_server.feature import Feature
from distensor_server.logfiles import KEEP, MAX_BYTES, RotatingFile
from distensor_server.node import Node

FORMAT = "%(asctime)s %(levelname)s %(message)s"


class OwnLog(Feature):
    """Writes what is logged into `server.log`, unless journald has it already.

    Where standard error is a plain file too (nohup, say), nobody bounds that one: then it gets no more lines.
    """

    def __init__(self, node: Node, *, stderr: int = 2) -> None:
        self._node = node
        self._stderr = stderr
        self._handler: FileHandler | None = None
        self._silenced: list[logging.Handler] = []

    def open(self) -> None:
        if under_journald(self._node.environment):
            return
        self._handler = FileHandler(self._node.state.own_log, max_bytes=self._node.settings.log_bytes)
        root = logging.getLogger()
        root.addHandler(self._handler)
        if is_plain_file(self._stderr):
            root.info("the log goes on in %s", self._node.state.own_log)
            self._silenced = [handler for handler in root.handlers if _writes_to(handler, self._stderr)]
        for handler in self._silenced:
            root.removeHandler(handler)

    def close(self) -> None:
        if self._handler is not None:
            root = logging.getLogger()
            for handler in self._silenced:
                root.addHandler(handler)
            self._silenced = []
            root.removeHandler(self._handler)
            self._handler.close()
            self._handler = None


class FileHandler(logging.Handler):
    """A logging handler on a `RotatingFile`; a full disk costs lines, not the work."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, keep: int = KEEP) -> None:
        super().__init__(logging.INFO)
        self._file = RotatingFile(path, max_bytes=max_bytes, keep=keep)
        self.setFormatter(logging.Formatter(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        self._file.write(self.format(record).encode("utf-8", "backslashreplace") + b"\n")

    def close(self) -> None:
        self._file.close()
        super().close()


def is_plain_file(fd: int) -> bool:
    """Whether what is written there grows a file on a disk."""
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:
        return False


def _writes_to(handler: logging.Handler, fd: int) -> bool:
    """Errors alone are few and may stay."""
    if not isinstance(handler, logging.StreamHandler) or handler.level >= logging.ERROR:
        return False
    try:
        return bool(handler.stream.fileno() == fd)
    except (OSError, ValueError, AttributeError):  # a stream without a descriptor, or a closed one
        return False


def under_journald(environment: Mapping[str, str], stderr: int = 2) -> bool:
    """Whether standard error goes to the journal: JOURNAL_STREAM names its device and inode (systemd.exec(5)).

    The variable alone proves nothing: a shell started by the service inherits it and writes elsewhere.
    """
    named = environment.get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(stderr)
    except OSError:
        return False
    return named == f"{status.st_dev}:{status.st_ino}"
