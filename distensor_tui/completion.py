"""Completion scripts for bash, zsh and fish, generated from the table and the parsers. Pure: text in, text out."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from distensor_tui.table import Verb


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What can follow one command."""

    name: str
    about: str
    words: tuple[str, ...]
    flags: tuple[str, ...]


def entry(verb: Verb, parser: argparse.ArgumentParser | None) -> Entry:
    """From our own parser where there is one, else from the row."""
    flags = verb.flags if parser is None else flags_of(parser)
    return Entry(
        name=verb.name, about=verb.about.rstrip("."), words=verb.words, flags=tuple(sorted({*flags, "--help"}))
    )


def flags_of(parser: argparse.ArgumentParser) -> tuple[str, ...]:
    found = [flag for action in parser._actions for flag in action.option_strings]
    return tuple(flag for flag in found if flag.startswith("--"))


def bash(entries: Sequence[Entry], flags: Sequence[str]) -> str:
    cases = [f"    {each.name}) words={_single([*each.words, *each.flags])} ;;" for each in entries]
    return "\n".join(
        [
            "# bash completion of distensor; source <(distensor completion bash)",
            "_distensor() {",
            '  local current="${COMP_WORDS[COMP_CWORD]}" verb="" words="" i',
            "  COMPREPLY=()",
            "  for ((i = 1; i < COMP_CWORD; i++)); do",
            '    case "${COMP_WORDS[i]}" in',
            "      --socket|--replay|--screenshot|--size|--wait|--screen) ((i++)) ;;",
            "      -*) ;;",
            '      *) verb="${COMP_WORDS[i]}"; break ;;',
            "    esac",
            "  done",
            '  case "$verb" in',
            f'    "") words={_single([*(each.name for each in entries), *flags])} ;;',
            *cases,
            "  esac",
            "  local IFS=$' \\t\\n'",
            '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
            "}",
            "complete -o default -F _distensor distensor",
        ]
    )


def zsh(entries: Sequence[Entry], flags: Sequence[str]) -> str:
    named = [f"    {_quote(each.name + ':' + each.about)}" for each in entries]
    cases = [f"    {each.name}) compadd -- {' '.join([*each.words, *each.flags])}; _files ;;" for each in entries]
    return "\n".join(
        [
            "#compdef distensor",
            "# zsh completion of distensor; put it into a folder of fpath as _distensor",
            "_distensor() {",
            "  local -a verbs",
            "  verbs=(",
            *named,
            "  )",
            "  if ((CURRENT == 2)); then",
            "    _describe -t commands command verbs",
            f"    compadd -- {' '.join(flags)}",
            "    return",
            "  fi",
            '  case "${words[2]}" in',
            *cases,
            "    *) _files ;;",
            "  esac",
            "}",
            'if [ "$funcstack[1]" = "_distensor" ]; then _distensor "$@"; else compdef _distensor distensor; fi',
        ]
    )


def fish(entries: Sequence[Entry], flags: Sequence[str]) -> str:
    rows = ["# fish completion of distensor; distensor completion fish > ~/.config/fish/completions/distensor.fish"]
    rows += [f"complete -c distensor -n __fish_use_subcommand -l {flag[2:]}" for flag in flags]
    for each in entries:
        rows.append(f"complete -c distensor -f -n __fish_use_subcommand -a {each.name} -d {_quote(each.about)}")
        seen = f"-n '__fish_seen_subcommand_from {each.name}'"
        rows += [f"complete -c distensor {seen} -f -a {word}" for word in each.words]
        rows += [f"complete -c distensor {seen} -l {flag[2:]}" for flag in each.flags]
    return "\n".join(rows)


def _single(words: Sequence[str]) -> str:
    return _quote(" ".join(words))


def _quote(text: str) -> str:
    """For all three shells: the texts are ours and hold no backslash."""
    return "'" + text.replace("'", "") + "'"


SHELLS: Mapping[str, Callable[[Sequence[Entry], Sequence[str]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
