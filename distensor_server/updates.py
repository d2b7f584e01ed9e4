"""Whether there is a newer version: asked once a day at most, only with the owner's consent, and never installed here.

The index is one JSON object at `update_index`: {"v": 1, "version": "0.2.0", "sha256": "<64 hex digits of the wheel>"}.
The request carries the name and version of this program and nothing of the node.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from distensor import __version__
from distensor.comm.address import without_user
from distensor_server.config import Limits
from distensor_server.feature import Feature, SectionBuilder
from distensor_server.node import Node
from distensor_server.picture import Picture
from distensor_server.sections import Section
from distensor_server.statedir import read_json, write_json

DAY_SECONDS = 86400.0
LARGEST_INDEX = 65536
FETCH_SECONDS = 20.0
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Fetch: TypeAlias = Callable[[str], bytes]
"""URL in, content out; blocks. Raises OSError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    version: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What the last check found. Times are Unix time."""

    at: float = 0.0
    release: Release | None = None
    error: str | None = None


def fetch_https(url: str) -> bytes:
    """The content at `url`, at most LARGEST_INDEX bytes. Follows redirects, but never away from HTTPS.

    Raises:
        OSError: there is no such content, or a proxy variable is malformed.
    """
    # Here, because it costs 20 ms and most nodes never ask.
    import http.client
    import urllib.request

    class OnlyHttps(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *given: Any) -> urllib.request.Request | None:
            if not str(given[-1]).startswith("https://"):
                raise OSError(f"refused to follow a redirect to {given[-1]!r:.200}")
            return super().redirect_request(*given)

    if not url.startswith("https://"):
        raise OSError(f"{url!r:.200} is not an https address")
    request = urllib.request.Request(url, headers={"User-Agent": f"distensor-server/{__version__}"})  # noqa: S310 - https
    try:
        opener = urllib.request.build_opener(OnlyHttps)
        with opener.open(request, timeout=FETCH_SECONDS) as response:
            content: bytes = response.read(LARGEST_INDEX + 1)
    except (http.client.HTTPException, ValueError) as error:
        # Neither is an OSError. Its text is left out: it may repeat a proxy variable with a password.
        raise OSError(f"no answer over HTTP ({type(error).__name__}); is a proxy variable malformed?") from None
    return content


def parse_index(content: bytes) -> Release:
    """Raises ValueError with what is wrong."""
    if len(content) > LARGEST_INDEX:
        raise ValueError(f"the index has more than {LARGEST_INDEX} bytes")
    value = json.loads(content)
    if not isinstance(value, dict) or value.get("v") != 1:
        raise ValueError('the index is not a JSON object with "v": 1')
    version, digest = value.get("version"), value.get("sha256")
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise ValueError(f"version {version!r:.40}, expected three numbers like 0.2.0")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ValueError(f"sha256 {digest!r:.80}, expected 64 hex digits")
    return Release(version=version, sha256=digest)


def is_newer(version: str, than: str) -> bool:
    """False where either is not three numbers: a version of a developer's tree is not told to go back."""
    ours, theirs = _VERSION.match(than), _VERSION.fullmatch(version)
    if ours is None or theirs is None:
        return False
    return tuple(map(int, theirs.groups())) > tuple(map(int, ours.groups()))


def command_for(release: Release, prefix: Path) -> str:
    """What the owner would do; `prefix` is the environment that this runs in.

    An environment of the installer lies beside the link `current` that points to it (installers/).
    """
    if (prefix.parent / "current").is_symlink():
        return "run the installer again: it updates and keeps all settings"
    return f"pip install --upgrade distensor-server=={release.version}"


class UpdateCheck(Feature):
    """Section `update`, and an event when a newer version is first seen."""

    def __init__(self, node: Node, *, fetch: Fetch = fetch_https, prefix: Path = Path(sys.prefix)) -> None:
        self._node = node
        self._fetch = fetch
        self._prefix = prefix
        self._path: Path = node.state.root / "update.json"
        self._checked = Checked()
        self._changed = asyncio.Event()

    def open(self) -> None:
        self._checked = _parse_checked(read_json(self._path) or {})

    def sections(self) -> Mapping[str, SectionBuilder]:
        return {"update": self._section}

    def _section(self, _picture: Picture) -> Section:
        release = self._available()
        return {
            "consent": self._node.limits.update_check,
            "checked_at": self._checked.at or None,
            "error": self._checked.error,
            "available": None if release is None else release.version,
            "sha256": None if release is None else release.sha256,
            "command": None if release is None else command_for(release, self._prefix),
        }

    def _available(self) -> Release | None:
        release = self._checked.release
        return release if release is not None and is_newer(release.version, __version__) else None

    def on_limits(self, limits: Limits) -> None:
        self._changed.set()

    def background(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (self._run(),)

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            if not self._node.limits.update_check:
                await self._changed.wait()
                continue
            wait = self._seconds_to_next()
            if wait > 0:
                # In steps, because monotonic time stands still while the machine sleeps and a day does not.
                await self._node.clock.sleep_async(min(wait, 600.0))
            else:
                await self._check(self._node.limits.update_index)

    def _seconds_to_next(self) -> float:
        """A last check in the future is that of a clock that was wrong."""
        passed = self._node.clock.now() - self._checked.at
        return DAY_SECONDS - passed if passed >= 0 else 0.0

    async def _check(self, url: str) -> None:
        before = self._available()
        now = round(self._node.clock.now(), 3)
        try:
            release = parse_index(await asyncio.to_thread(self._fetch, url))
            self._checked = Checked(at=now, release=release)
        except (OSError, ValueError, RecursionError) as error:
            # What was known stays known: a server that is away takes no version back.
            text = f"{without_user(url):.200}: {error}"[:400]
            self._checked = Checked(at=now, release=self._checked.release, error=text)
        self._node.journal.guarded(lambda: write_json(self._path, {"v": 1, **asdict(self._checked)}))
        found = self._available()
        if found is not None and found != before:
            text = f"version {found.version} is available: {command_for(found, self._prefix)}"
            self._node.journal.add("info", "update", text)
        self._node.on_change()


def _parse_checked(stored: Mapping[str, Any]) -> Checked:
    """What is torn or strange is like never checked."""
    try:
        release = stored["release"]
        kept = None if release is None else parse_index(json.dumps({"v": 1, **release}).encode())
        error = stored.get("error")
        return Checked(at=float(stored["at"]), release=kept, error=None if error is None else str(error)[:400])
    except (KeyError, TypeError, ValueError, OverflowError):
        return Checked()
