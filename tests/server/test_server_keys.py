"""Where the key comes from and where it is kept. No message, repr or file of another mode ever holds it."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import platformdirs
import pytest

from distensor.core.errors import AuthenticationError, StoreError
from distensor.core.reading import Unavailable
from distensor_server.keys import files
from distensor_server.keys.chain import KEY_FILE, RING_MARK, KeyStore, config_dir, take_given
from distensor_server.keys.login import read_key
from distensor_server.keys.model import FoundKey, KeySource, masked
from distensor_server.keys.ring import COMMAND, KeyRing, RingAnswer
from distensor_server.keys.ringchild import ACCOUNT, REAL, SERVICE, answer, choose

KEY = "dtj_" + "k" * 40


def private(path: Path, text: str = KEY) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


# the chain


def test_the_order_of_the_sources_that_are_given(tmp_path: Path) -> None:
    option = private(tmp_path / "key", "dtj_option\n")
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "join-token").write_text("dtj_older-name")
    environment = {
        "DISTENSOR_API_KEY": " dtj_env ",
        "DISTENSOR_JOIN_TOKEN": "dtj_alias",
        "CREDENTIALS_DIRECTORY": str(credentials),
    }

    def found(option: Path | None, environment: dict[str, str]) -> tuple[str, KeySource]:
        given = take_given(option, environment)
        assert given is not None
        assert given.key not in repr(given)
        assert not {"DISTENSOR_API_KEY", "DISTENSOR_JOIN_TOKEN"} & environment.keys(), "no child may inherit it"
        return given.key, given.source

    assert found(option, dict(environment)) == ("dtj_option", KeySource.OPTION)
    assert found(None, dict(environment)) == ("dtj_older-name", KeySource.CREDENTIALS)
    (credentials / "distensor_api_key").write_text("dtj_systemd\n")
    assert found(None, dict(environment)) == ("dtj_systemd", KeySource.CREDENTIALS)
    del environment["CREDENTIALS_DIRECTORY"]
    assert found(None, dict(environment)) == ("dtj_env", KeySource.ENVIRONMENT)
    del environment["DISTENSOR_API_KEY"]
    assert found(None, environment) == ("dtj_alias", KeySource.ENVIRONMENT)
    assert take_given(None, {}) is None


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"HOME": "/h"}, "/h/.config/distensor"),
        ("linux", {"HOME": "/h", "XDG_CONFIG_HOME": "/x"}, "/x/distensor"),
        ("linux", {"HOME": "/h", "XDG_CONFIG_HOME": "relative"}, "/h/.config/distensor"),
        ("darwin", {"HOME": "/h"}, "/h/Library/Application Support/distensor"),
        ("linux", {"HOME": "/h", "CONFIGURATION_DIRECTORY": "/etc/distensor:/b"}, "/etc/distensor"),
    ],
)
def test_the_configuration_directory(platform: str, environment: dict[str, str], expected: str) -> None:
    assert config_dir(environment, platform) == Path(expected)


def test_it_is_the_one_of_platformdirs() -> None:
    clean = {name: value for name, value in os.environ.items() if name != "CONFIGURATION_DIRECTORY"}
    assert config_dir(clean, sys.platform) == Path(platformdirs.user_config_dir("distensor"))


# files


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o610])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = private(tmp_path / "key")
    file.chmod(mode)
    with pytest.raises(AuthenticationError, match=f"mode {mode:04o}: others can read it; run `chmod 600") as caught:
        files.read_private(file)
    assert KEY not in str(caught.value)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = private(tmp_path / "key")
    owner = file.stat().st_uid
    monkeypatch.setattr(files, "ROOT_UID", -1)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(AuthenticationError, match=f"belongs to user {owner}; run `chown"):
        files.read_private(file)


def test_our_own_file_is_never_a_link_and_an_option_may_be_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(private(tmp_path / "key"))
    with pytest.raises(AuthenticationError, match="is a symbolic link"):
        files.read_private(tmp_path / "link")
    assert files.read_private(tmp_path / "link", follow=True) == KEY


def test_a_folder_that_may_not_be_searched_is_an_error_with_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may search every folder, so the answers of the system are put there."""

    def denied(*_arguments: object, **_options: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    monkeypatch.setattr(Path, "lstat", denied)
    with pytest.raises(AuthenticationError, match="api_key: Permission denied"):
        files.read_private(tmp_path / "api_key")


def test_what_is_no_key_file_is_named(tmp_path: Path) -> None:
    assert files.read_private(tmp_path / "none") is None
    with pytest.raises(AuthenticationError, match="No such file"):
        take_given(tmp_path / "none", {})
    with pytest.raises(AuthenticationError, match="is empty"):
        files.read_private(private(tmp_path / "empty", "\n"))
    with pytest.raises(AuthenticationError, match="no ordinary file"):
        files.read_private(tmp_path)
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(AuthenticationError, match="no ordinary file"):  # and it does not wait for a writer
        files.read_private(tmp_path / "fifo")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(AuthenticationError, match="not plain text"):
        files.read_private(tmp_path / "binary")


def test_a_written_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files.write_private(tmp_path / "new" / "key", KEY)
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new/key").stat().st_mode & 0o777 == 0o600
    assert files.read_private(tmp_path / "new" / "key") == KEY
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["key"]


def test_a_write_that_fails_leaves_no_copy(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    with pytest.raises(StoreError, match="key file"):
        files.write_private(tmp_path / "key", KEY)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


# the keyring


class Backend:
    """As one of `keyring`."""

    priority = 5.0

    def __init__(self, value: object = None, error: Exception | None = None) -> None:
        self.value, self.error = value, error

    def get_password(self, service: str, username: str) -> Any:
        assert (service, username) == (SERVICE, ACCOUNT)
        if self.error is not None:
            raise self.error
        return self.value

    def set_password(self, service: str, username: str, password: str) -> None:
        self.get_password(service, username)
        self.value = password

    def delete_password(self, service: str, username: str) -> None:
        self.value = None


def named(name: str, *arguments: Any, priority: float = 5.0) -> Any:
    """A backend whose class has this name."""
    module, _, kind = name.rpartition(".")
    made = type(kind, (Backend,), {"__module__": module, "priority": priority})
    return made(*arguments)


REAL_ONE = "keyring.backends.SecretService.Keyring"
KeyringLocked = type("KeyringLocked", (Exception,), {})


def test_only_backends_that_encrypt_are_used() -> None:
    plain = [
        "keyrings.alt.file.PlaintextKeyring",
        "keyring.backends.null.Keyring",
        "keyring.backends.fail.Keyring",
        "keyring.backends.chainer.ChainerBackend",
        "keyrings.alt.file.EncryptedKeyring",
    ]
    assert choose([named(name, "dtj_plain", priority=99) for name in plain]) is None
    refused = answer({"do": "set", "key": KEY}, [named(name) for name in plain])
    assert refused == {"ok": False, "reason": "no keyring that encrypts is running here"}
    for name in REAL:
        found = answer({"do": "get"}, [*(named(other) for other in plain), named(name, KEY)])
        assert found == {"ok": True, "backend": name, "value": KEY}


def test_the_backend_with_the_highest_priority_wins() -> None:
    best = named("keyring.backends.kwallet.DBusKeyring", priority=9)
    assert choose([named(REAL_ONE), best, named("keyring.backends.macOS.Keyring")]) is best


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (named(REAL_ONE, None, KeyringLocked("the key is " + KEY)), "it is locked; unlock it by logging in"),
        (named(REAL_ONE, 42), "TypeError"),
        (named(REAL_ONE, None, RuntimeError(KEY)), "RuntimeError"),
    ],
)
def test_a_keyring_that_fails_says_why_and_never_the_key(backend: Any, reason: str) -> None:
    found = answer({"do": "get"}, [backend])
    assert found["ok"] is False
    assert reason in found["reason"]
    assert KEY not in json.dumps(found)


def test_set_and_delete() -> None:
    backend = named(REAL_ONE)
    assert answer({"do": "set", "key": KEY}, [backend])["ok"] is True
    assert answer({"do": "get"}, [backend])["value"] == KEY
    assert answer({"do": "delete"}, [backend])["ok"] is True
    assert answer({"do": "delete"}, [backend])["ok"] is True, "there is nothing left, which is what was wanted"
    assert backend.value is None
    assert answer({"do": "dance"}, [backend])["reason"] == "ValueError"


def ring(program: str, *, limit: float = 10.0) -> KeyRing:
    return KeyRing({"PATH": "/bin", "SECRET": "s"}, command=[sys.executable, "-c", program], limit=limit)


def said(reading: object) -> str:
    assert isinstance(reading, Unavailable)
    return reading.reason


def test_a_keyring_that_hangs_costs_its_limit_and_no_more() -> None:
    found = ring("import time; time.sleep(60)", limit=0.3).get()
    assert said(found) == "it did not answer within 0.3 s; unlock it by logging in to the desktop"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise SystemExit(3)", "the process that asks it failed"),
        ("print('[]')", "gave an answer that is none"),
        ("""print('{"ok": true, "value": 7, "backend": "b"}')""", "no text"),
        ("""print('{"ok": false, "reason": "locked"}')""", "locked"),
    ],
)
def test_a_keyring_that_answers_nonsense(program: str, reason: str) -> None:
    assert reason in said(ring(program).get())


def test_the_key_goes_to_the_child_by_stdin_and_nothing_else_does() -> None:
    program = (
        "import json, os, sys; request = json.load(sys.stdin); "
        "assert request['key'] not in ' '.join(sys.argv) + str(os.environ) and 'SECRET' not in os.environ; "
        "print(json.dumps({'ok': True, 'backend': 'b', 'value': request['key']}))"
    )
    found = ring(program).set(KEY)
    assert found == RingAnswer(backend="b", key=KEY)
    assert KEY not in repr(found)


def test_the_real_child_answers_on_this_machine() -> None:
    """Without a desktop there is no backend that encrypts, and with one it is of the list."""
    found = KeyRing(dict(os.environ), command=COMMAND, limit=30).probe()
    assert isinstance(found, Unavailable) or found.backend in REAL


# the store


class FakeRing(KeyRing):
    """A keyring in memory; None: there is none."""

    def __init__(self, value: str | None = None, *, there: bool = True) -> None:
        self.value, self.there, self.asked = value, there, 0

    def _ask(self, request: Any) -> Any:
        self.asked += 1
        if not self.there:
            return Unavailable(reason="no keyring")
        if request["do"] == "set":
            self.value = request["key"]
        if request["do"] == "delete":
            self.value = None
        return RingAnswer(backend="fake", key=self.value)


def test_a_kept_key_is_found_again_in_the_keyring(tmp_path: Path) -> None:
    store = KeyStore(tmp_path, FakeRing())
    private(tmp_path / KEY_FILE, "dtj_old")
    kept = store.keep(KEY)
    assert (kept.source, kept.where) == (KeySource.KEYRING, "fake")
    assert not (tmp_path / KEY_FILE).exists(), "no older copy in plain text"
    assert KEY not in (tmp_path / RING_MARK).read_text()
    again = store.find(registered=True)
    assert again is not None
    assert (again.key, again.source) == (KEY, KeySource.KEYRING)
    assert store.forget() == ("fake",)
    assert store.find(registered=False) is None


def test_without_a_keyring_it_is_kept_in_the_file(tmp_path: Path) -> None:
    store = KeyStore(tmp_path, FakeRing(there=False))
    assert store.keep(KEY) == FoundKey(key=KEY, source=KeySource.FILE, where=str(tmp_path / KEY_FILE))
    found = store.find(registered=False)
    assert found is not None
    assert found.key == KEY
    assert store.notes == ["keyring: no keyring"]
    assert store.forget() == (str(tmp_path / KEY_FILE),)
    assert store.forget() == ()


def test_the_owner_may_want_the_file(tmp_path: Path) -> None:
    keyring = FakeRing()
    assert KeyStore(tmp_path, keyring).keep(KEY, in_file=True).source is KeySource.FILE
    assert keyring.asked == 0


def test_the_keyring_is_not_asked_where_the_key_is_not_needed(tmp_path: Path) -> None:
    keyring = FakeRing(KEY)
    assert KeyStore(tmp_path, keyring).find(registered=True) is None
    private(tmp_path / KEY_FILE)
    found = KeyStore(tmp_path, keyring).find(registered=False)
    assert found is not None
    assert (found.source, keyring.asked) == (KeySource.FILE, 0)


def test_a_locked_keyring_falls_back_to_the_file(tmp_path: Path) -> None:
    (tmp_path / RING_MARK).touch()
    private(tmp_path / KEY_FILE)
    store = KeyStore(tmp_path, FakeRing(there=False))
    found = store.find(registered=False)
    assert found is not None
    assert found.source is KeySource.FILE
    assert store.notes == ["keyring: no keyring"]


# how a key is shown


@pytest.mark.parametrize("key", [KEY, "dt_p_" + "x" * 40, "x" * 60])
def test_a_masked_key_shows_its_kind_and_four_characters(key: str) -> None:
    shown = masked(key)
    assert len(shown) <= 16
    assert shown.endswith(f"...{key[-4:]}")
    assert key[8:-4] not in shown


def test_a_short_text_is_not_shown_at_all() -> None:
    assert masked("dtj_short") == "..."


@pytest.mark.parametrize(("key", "words"), [("dt_p_" + "x" * 30, "not used by this version"), (KEY, "altered")])
def test_what_is_no_key_for_a_node_is_said_without_it(key: str, words: str) -> None:
    with pytest.raises(AuthenticationError, match=words) as caught:
        read_key(key)
    assert key not in str(caught.value)
