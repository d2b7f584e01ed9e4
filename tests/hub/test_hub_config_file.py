"""`distensor hub --config FILE` and `distensor hub status`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from hub_kit import HubProcess

from distensor.core.errors import ConfigError
from distensor.hub import cli
from distensor.hub.cli import config_of, hub_parser


def parsed(tmp_path: Path, text: str, *words: str) -> argparse.Namespace:
    file = tmp_path / "hub.toml"
    file.write_text(text)
    return hub_parser().options([*words, "--config", str(file)])


def test_the_command_line_comes_before_the_file(tmp_path: Path) -> None:
    text = 'listen = "127.0.0.1:7"\nadvertise = "a"\ntrainer_gone = 60\nother-hub = ["b:1", "c:2"]\nstandby = false\n'
    config = config_of(parsed(tmp_path, text, "--advertise", "z", "--other-hub", "d:3"))
    assert (str(config.listen), config.advertise, config.patience.trainer_gone) == ("127.0.0.1:7", "z", 60.0)
    assert [str(other) for other in config.other_hubs] == ["b:1", "c:2", "d:3"]
    assert not config.standby


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('listn = "a:1"', "no option 'listn'; there are advertise,"),
        ('lis = "a:1"', "no option 'lis'"),
        ('config = "other"', "no option 'config'"),
        ("help = true", "no option 'help'"),
        ('standby = "yes"', "standby = 'yes': expected true or false"),
        ("listen = true", "listen = True: expected a text or a number"),
        ("listen = []", "listen = .*: expected"),
        ("[hub]\nlisten = 1", "no option 'hub'"),
        ("listen = ", "hub.toml"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parsed(tmp_path, text)


def test_a_file_that_is_not_there_or_a_value_that_is_none_ends_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["--config", str(tmp_path / "none")]) == 64
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "hub.toml").write_text('listen = "nowhere"')
    assert cli.main(["--config", str(tmp_path / "hub.toml")]) == 64
    assert "argument --listen: address 'nowhere'" in capsys.readouterr().err


def test_the_status_of_a_hub_that_serves_and_of_one_that_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    assert cli.main(["status", "--state", str(state)]) == 73
    assert "no hub has been started on it yet" in capsys.readouterr().err
    hub = HubProcess(state)
    try:
        assert cli.main(["status", "--state", str(state)]) == 0
        told = capsys.readouterr().out
        assert f"hub      {hub.ready['address']}" in told
        assert "serves   yes, start 1\nnodes    0 of 0 connected\nworkers  0 of 0 free\njobs     none" in told
    finally:
        hub.kill()
    assert cli.main(["status", "--state", str(state), "--json"]) == 69
    values = json.loads(capsys.readouterr().out)
    assert (values["serves"], values["known_nodes"]) == (False, 0)
    assert hub.ready["address"] in values["trouble"]
