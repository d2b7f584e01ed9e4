"""Options from a TOML file: each key is an option of the command without its dashes."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from pathlib import Path

from distensor.core.commandline import UsageParser
from distensor.core.errors import ConfigError

_NOT_IN_A_FILE = frozenset({"--config", "--help"})


class ConfiguredParser(UsageParser):
    """A parser with `--config FILE`. What the command line says comes before what the file says; options that may be
    repeated are those of both."""

    def options(self, argv: Sequence[str]) -> argparse.Namespace:
        """The options of the file, if one is named, and of the command line.

        Raises:
            ConfigError: the file cannot be read or is not TOML, or has a key that is no option, or a value of a wrong
                kind. A value that an option refuses ends the program, like on the command line.
        """
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument("--config", type=Path)
        path: Path | None = first.parse_known_args(list(argv))[0].config
        return self.parse_args([*([] if path is None else self._words(path)), *argv])

    def add_config(self) -> None:
        """The option itself, for the help."""
        self.add_argument(
            "--config",
            type=Path,
            metavar="FILE",
            help='a TOML file with options: `listen = "0.0.0.0:50051"`; the command line comes before it',
        )

    def _words(self, path: Path) -> list[str]:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"config file {path}: {error.strerror}") from error
        except ValueError as error:  # not TOML, or no text
            raise ConfigError(f"config file {path}: {error}") from error
        return [word for key, value in values.items() for word in self._option(path, key, value)]

    def _option(self, path: Path, key: str, value: object) -> list[str]:
        name = "--" + key.replace("_", "-")
        action = self._option_string_actions.get(name)
        if action is None or name in _NOT_IN_A_FILE:
            known = sorted(one[2:] for one in self._option_string_actions.keys() - _NOT_IN_A_FILE if one[:2] == "--")
            raise ConfigError(f"config file {path}: there is no option {key[:70]!r}; there are {', '.join(known)}")
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise ConfigError(f"config file {path}: {key} = {value!r}: expected true or false")
            return [name] if value else []
        values = value if isinstance(value, list) and isinstance(action.default, list) else [value]
        for one in values:
            if isinstance(one, bool) or not isinstance(one, str | int | float):
                raise ConfigError(f"config file {path}: {key} = {value!r}: expected a text or a number")
        return [f"{name}={one}" for one in values]
