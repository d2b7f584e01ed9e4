"""Where the key comes from. Never from the command line: every user of the machine can read that.

The order: `--token-file`; systemd's `$CREDENTIALS_DIRECTORY/distensor_api_key`; `DISTENSOR_API_KEY`; the operating
system's keyring; a file of mode 0600 in the configuration directory.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

from distensor.core.errors import AuthenticationError
from distensor.core.reading import Reading, Unavailable
from distensor_server.keys import files
from distensor_server.keys.model import ALIAS, VARIABLE, FoundKey, KeySource
from distensor_server.keys.ring import KeyRing, RingAnswer

CREDENTIAL_NAMES = ("distensor_api_key", "join-token")
"""systemd's LoadCredential= puts the key there by the first name; the second is the older one."""
KEY_FILE = "api_key"
RING_MARK = "api_key.in-keyring"
"""An empty file that says that `auth login` put the key into the keyring."""


def config_dir(environment: Mapping[str, str], platform: str) -> Path:
    """systemd's configuration directory when there is one, else the user's, as platformdirs has it."""
    from_systemd = environment.get("CONFIGURATION_DIRECTORY", "").split(":")[0]
    if from_systemd:
        return Path(from_systemd)
    home = Path(environment.get("HOME") or Path.home())
    if platform == "darwin":
        return home / "Library" / "Application Support" / "distensor"
    base = environment.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else home / ".config") / "distensor"


def take_given(option: Path | None, environment: MutableMapping[str, str]) -> FoundKey | None:
    """The key of --token-file, systemd or the environment, which loses it.

    Raises:
        AuthenticationError: a file cannot be read, or others can read it too. The message holds no secret.
    """
    variables = {name: environment.pop(name, "").strip() for name in (VARIABLE, ALIAS)}
    if option is not None:
        key = files.read_private(option, follow=True)
        if key is None:
            raise AuthenticationError(f"key file {option}: No such file or directory")
        return FoundKey(key=key, source=KeySource.OPTION, where=str(option))
    return _from_systemd(environment) or _from_variables(variables)


def _from_systemd(environment: Mapping[str, str]) -> FoundKey | None:
    directory = environment.get("CREDENTIALS_DIRECTORY")
    for name in CREDENTIAL_NAMES if directory else ():
        path = Path(str(directory)) / name
        if path.exists():
            # systemd guards this directory itself: its files are readable by this service only.
            try:
                raw = path.read_bytes()[: files.LONGEST]
            except OSError as error:
                raise AuthenticationError(f"key file {path}: {error.strerror}") from error
            return FoundKey(key=files.read_text(path, raw), source=KeySource.CREDENTIALS, where=str(path))
    return None


def _from_variables(variables: Mapping[str, str]) -> FoundKey | None:
    for name, value in variables.items():
        if value:
            return FoundKey(key=value, source=KeySource.ENVIRONMENT, where=name)
    return None


class KeyStore:
    """What `auth login` keeps and the next start finds: the keyring where there is a real one, else the file."""

    def __init__(self, config: Path, ring: KeyRing) -> None:
        self._config = config
        self._ring = ring
        self.notes: list[str] = []
        """Why a source gave nothing, for the log and `auth status`."""

    @property
    def file(self) -> Path:
        return self._config / KEY_FILE

    @property
    def _mark(self) -> Path:
        return self._config / RING_MARK

    def probe(self) -> Reading[RingAnswer]:
        """The keyring that would be used."""
        return self._ring.probe()

    def find(self, *, registered: bool) -> FoundKey | None:
        """The kept key. May block for the keyring's two seconds.

        A node that the hub knows needs its key no more, so its keyring is asked only when `auth login` used it.

        Raises:
            AuthenticationError: the file is not private, or holds no key.
        """
        if self._mark.exists() or not (registered or self.file.exists()):
            answer = self._ring.get()
            if isinstance(answer, Unavailable):
                self.notes.append(f"keyring: {answer.reason}")
            elif answer.key is not None:
                return FoundKey(key=answer.key.strip(), source=KeySource.KEYRING, where=answer.backend)
        key = files.read_private(self.file)
        return None if key is None else FoundKey(key=key, source=KeySource.FILE, where=str(self.file))

    def keep(self, key: str, *, in_file: bool = False) -> FoundKey:
        """Store the key, and remove older copies of it.

        Raises:
            StoreError: neither the keyring nor the file takes it.
        """
        answer = Unavailable(reason="not asked") if in_file else self._ring.set(key)
        if isinstance(answer, Unavailable):
            self.notes.append(f"keyring: {answer.reason}")
            files.write_private(self.file, key)
            files.remove(self._mark)
            return FoundKey(key=key, source=KeySource.FILE, where=str(self.file))
        files.write_private(self._mark, "this machine's key is in the keyring")
        files.remove(self.file)
        return FoundKey(key=key, source=KeySource.KEYRING, where=answer.backend)

    def forget(self) -> tuple[str, ...]:
        """Remove what `keep` stored; where something was removed.

        Raises:
            StoreError: the file cannot be removed.
        """
        removed = [str(self.file)] if files.remove(self.file) else []
        if self._mark.exists():
            answer = self._ring.delete()
            if isinstance(answer, Unavailable):
                self.notes.append(f"keyring: {answer.reason}")
            else:
                removed.append(answer.backend)
                files.remove(self._mark)
        return tuple(removed)
