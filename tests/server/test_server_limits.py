"""Settings: one table, layers that win in a known order, and changes by the owner while the supervisor runs."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fakes import AsyncClient, events, settings_in, supervisor_running

from distensor.core.errors import ConfigError
from distensor_server.config import LIMITS_KEYS, Limits, make_limits, read_settings_file, source_of
from distensor_server.gates.settings import describe_changes
from distensor_server.ownersfile import changed, read_owners_file, to_toml, write_owners_file
from distensor_server.policy.page import markdown
from distensor_server.policy.policy import POLICY_KEYS, DevicePolicy, Policy, check_values, make_policy
from distensor_server.policy.table import BY_NAME, GATES, KEYS, Kind, find_key


def test_every_setting_is_in_the_table_once_and_with_its_default() -> None:
    assert len(BY_NAME) == len(KEYS)
    assert {*LIMITS_KEYS, *POLICY_KEYS} == set(BY_NAME)
    assert not LIMITS_KEYS & POLICY_KEYS
    limits = Limits()
    for key in KEYS:
        holder: Any = limits if key.name in LIMITS_KEYS else limits.policy
        holder = holder if hasattr(holder, key.name) else limits.policy.device
        assert getattr(holder, key.name) == key.default == key.check(key.default)
        assert key.help
    assert {key.name for key in KEYS if key.per_device} == {field.name for field in fields(DevicePolicy)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[devices."GPU-7"]\nidle_minutes = 5', 'devices."GPU-7".idle_minutes: this holds for the whole node'),
        ('[devices."GPU-7"]\ntemperature_max = 5', "temperature_max'; did you mean temperature_max_c"),
        ('[devices."GPU-7"]\ntemperature_max_c = 500', "expected 0 to 120 C"),
        ("[gates]\nonly_when_idle = true", "unknown key 'gates'"),
        ("devices = 3", "expected tables such as"),
        ("only_when_idle = 'yes'", "only_when_idle = 'yes': expected true or false"),
        ("only_when_idle = 1", "only_when_idle = 1: expected true or false"),
        ("temperature_max_c = true", "temperature_max_c = true: expected a number"),
        ("temperature_max_c = '80'", "temperature_max_c = '80': expected a number"),
        ("temperature_max_c = nan", "temperature_max_c = nan: expected a number"),
        ("temperature_max_c = -1", "expected 0 to 120 C"),
        ("metrics_port = 1e3", "metrics_port = 1000.0: expected a whole number"),
        ("dwell_seconds = 1", "expected 5 to 3600 s"),
        ("schedule = 'weekdays'", "'weekdays' is no day"),
        ("schedule = 8", "schedule = 8: expected times such as"),
        ("schedule_zone = 'Europe/Berlín'", "expected a time zone such as Europe/Berlin"),
        ("schedule_zone = '../etc'", "expected a time zone such as Europe/Berlin"),
        ("strict = ['temperature', 'heat']", "expected a list of gates out of schedule, idle"),
        ("strict = 'temperature'", "expected a list of gates"),
        ("cpu_worker = 3", "unknown key 'cpu_worker'; did you mean cpu_workers? known are battery_min_percent,"),
        ("[limits]\ncpu_workers = 3", "unknown key 'limits'"),
        ("[devices]\ncpu_workers = 3", "devices: expected tables such as"),
        ('cpu_workers = "auto"', "cpu_workers = 'auto': expected a whole number"),
        ("cpu_workers = 1e3", "cpu_workers = 1000.0: expected a whole number"),
        ("cpu_workers = true", "cpu_workers = true: expected a whole number"),
        ("cpu_workers = -1", "cpu_workers = -1: expected 0 to 1024"),
        ("drain_seconds = 1e9", "expected 0 to 3600"),
        ("cpu_workers = 1\ncpu_workers = 2", "Cannot overwrite a value"),
        ("cpu_workers 3", "Expected '='"),
        ("only_when_idle = true\nonly_when_idle = false", "Cannot overwrite a value"),
    ],
)
def test_cfg_02_a_mistake_is_refused_by_its_path(tmp_path: Path, text: str, words: str) -> None:
    """Issues CFG-02: typos, sections, duplicates, 'yes', numbers in quotes: none becomes a default."""
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_settings_file(file)
    assert words in str(caught.value)
    assert str(file) in str(caught.value)


def test_cfg_05_each_layer_wins_over_the_one_before_and_the_source_is_told(tmp_path: Path) -> None:
    """Issue CFG-05: default, configuration file, the owner's file, command line."""
    file = tmp_path / "server.toml"
    file.write_text("cpu_workers = 2\ndrain_seconds = 10\nidle_minutes = 7\n[devices.GPU-7]\npower_max_w = 300\n")
    given = settings_in(tmp_path, config_file=file, overrides={"cpu_workers": 5})
    given.state_dir.mkdir()
    write_owners_file(given.owner_file, check_values({"cpu_workers": 4, "drain_seconds": 20}))
    layers = given.layers()
    limits = make_limits(layers)
    assert (limits.cpu_workers, limits.drain_seconds) == (5, 20.0)
    assert (limits.policy.idle_minutes, limits.policy.of_device("GPU-7").power_max_w) == (7.0, 300.0)
    assert source_of(layers, "cpu_workers") == "command line"
    assert source_of(layers, "drain_seconds") == f"file {given.owner_file}"
    assert source_of(layers, "idle_minutes") == f"file {file}"
    assert source_of(layers, "power_max_w", "GPU-7") == f"file {file}"
    assert source_of(layers, "power_max_w", "GPU-8") == "default"


def test_a_device_takes_over_what_it_does_not_set_itself() -> None:
    values = check_values({"temperature_max_c": 80, "devices": {"GPU-7": {"power_max_w": 200}}})
    assert make_limits(()) == Limits()
    policy = make_policy(values)
    assert policy.of_device("GPU-7") == DevicePolicy(temperature_max_c=80, power_max_w=200)
    assert policy.of_device("GPU-8") == policy.device == DevicePolicy(temperature_max_c=80)
    assert policy == Policy(device=policy.device, devices=policy.devices)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("only_when_idle", "true", True),
        ("temperature_max_c", "80", 80.0),
        ("temperature_max_c", " 79.5 ", 79.5),
        ("cpu_workers", "3", 3),
        ("schedule", "mon-fri 18:00-08:00", "mon-fri 18:00-08:00"),
        ("strict", "battery, idle", ("battery", "idle")),
        ("strict", "", ()),
    ],
)
def test_values_as_they_are_typed(name: str, text: str, value: Any) -> None:
    assert find_key(name).parse(text) == value


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("only_when_idle", "yes", "expected true or false"),
        ("cpu_workers", "3.5", "expected a whole number"),
        ("temperature_max_c", "hot", "expected a number"),
        ("strict", "heat", "expected a list of gates"),
    ],
)
def test_what_is_typed_wrong_is_refused(name: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_key(name).parse(text)
    assert words in str(caught.value)


LETTERS = st.sampled_from("ab \"'\\.]#=äß€😀")
TEXTS = st.text(LETTERS, max_size=12)
_SAMPLES: dict[Kind, st.SearchStrategy[Any]] = {
    Kind.SWITCH: st.booleans(),
    Kind.WINDOWS: st.just("sat,sun 10:00-12:00"),
    Kind.ZONE: st.just("Europe/Berlin"),
    Kind.GATES: st.lists(st.sampled_from(GATES), max_size=3).map(tuple),
    Kind.TEXT: TEXTS,
}


def _value_of(name: str) -> st.SearchStrategy[Any]:
    key = BY_NAME[name]
    if key.kind is Kind.WHOLE:
        return st.integers(int(key.low), int(key.high))
    if key.kind is Kind.TEXT and key.high:
        return st.text(LETTERS, max_size=int(key.high))
    return st.floats(key.low, key.high) if key.kind is Kind.NUMBER else _SAMPLES[key.kind]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_is_written_is_read_back(data: st.DataObject) -> None:
    names = data.draw(st.sets(st.sampled_from(sorted(BY_NAME)), max_size=6))
    device_names = data.draw(st.sets(st.sampled_from([key.name for key in KEYS if key.per_device]), min_size=1))
    device = data.draw(TEXTS)
    values = {name: data.draw(_value_of(name)) for name in names}
    values["devices"] = {device: {name: data.draw(_value_of(name)) for name in device_names}}
    assert check_values(tomllib.loads(to_toml(values))) == values


def test_the_owners_file_goes_when_nothing_is_set(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    values = changed({}, "power_max_w", 200.0, "GPU-7")
    write_owners_file(file, values)
    assert read_owners_file(file) == {"devices": {"GPU-7": {"power_max_w": 200.0}}}
    write_owners_file(file, changed(values, "power_max_w", None, "GPU-7"))
    assert not file.exists()
    assert read_owners_file(file) == {}


def test_what_changed_is_told() -> None:
    before = make_limits(())
    after = Limits(cpu_workers=3, policy=Policy(devices={"GPU-7": DevicePolicy(power_max_w=200.0)}))
    assert describe_changes(before, before) == "nothing changed"
    assert describe_changes(before, after) == 'cpu_workers 1 -> 3; devices."GPU-7".power_max_w 0.0 -> 200.0'


# While the supervisor runs


def _row(result: Mapping[str, Any], key: str) -> dict[str, Any]:
    return next(row for row in result["rows"] if row["key"] == key)


@pytest.mark.asyncio
async def test_the_owner_sets_and_unsets_a_limit(short_dir: Path) -> None:
    config = short_dir / "server.toml"
    config.write_text("# mine\ndrain_seconds = 20\n")
    async with supervisor_running(short_dir, config_file=config) as running:
        client = await AsyncClient.connect(short_dir / "s.sock")
        assert _row((await client.request("limits_get"))["result"], "drain_seconds")["source"] == f"file {config}"
        answer = await client.request("limits_set", key="drain_seconds", value="30")
        assert answer["ok"]
        assert (answer["result"]["before"], answer["result"]["value"]) == (20.0, 30.0)
        assert running.supervisor.node.limits.drain_seconds == 30
        shown = running.sections()["limits"]
        assert _row(shown, "drain_seconds")["source"] == f"file {shown['file']}"
        assert config.read_text() == "# mine\ndrain_seconds = 20\n"
        running.supervisor.reload()
        assert running.supervisor.node.limits.drain_seconds == 30
        assert (await client.request("limits_unset", key="drain_seconds"))["result"]["value"] == 20.0
        assert not running.supervisor.node.settings.owner_file.exists()
        assert "limit drain_seconds set to 30.0" in events(running)
        await client.close()


@pytest.mark.asyncio
async def test_a_limit_outlives_the_supervisor(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        client = await AsyncClient.connect(short_dir / "s.sock")
        await client.request("limits_set", key="temperature_max_c", value=75, device="GPU-7")
        await client.close()
    async with supervisor_running(short_dir) as running:
        assert running.supervisor.node.limits.policy.of_device("GPU-7").temperature_max_c == 75
        row = running.sections()["limits"]["rows"][-1]
        assert (row["key"], row["device"], row["value"]) == ("temperature_max_c", "GPU-7", 75.0)


@pytest.mark.asyncio
async def test_what_the_command_line_says_wins_and_that_is_told(short_dir: Path) -> None:
    async with supervisor_running(short_dir, overrides={"cpu_workers": 2}):
        client = await AsyncClient.connect(short_dir / "s.sock")
        result = (await client.request("limits_set", key="cpu_workers", value=1))["result"]
        assert result["note"] == "it is kept, but the command line says 2 and wins"
        await client.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "params", "code", "words"),
    [
        ("limits_set", {"key": "cpu_worker", "value": 1}, "unknown_key", "did you mean cpu_workers"),
        ("limits_set", {"key": "cpu_workers"}, "bad_params", "needs a value"),
        ("limits_set", {"key": "cpu_workers", "value": "many"}, "bad_value", "cpu_workers = 'many': expected a whole"),
        ("limits_set", {"key": "cpu_workers", "value": 1, "device": "cpu"}, "bad_params", "for the whole node"),
        ("limits_set", {"key": "cpu_workers", "value": 1, "force": True}, "bad_params", "does not take force"),
        ("limits_set", {"key": "update_check", "value": True}, "bad_value", "needs the address of a list"),
        ("limits_get", {"key": 7}, "bad_params", "expected a key"),
        ("limits_set", {"key": "power_max_w", "value": 1, "device": "\ud800"}, "bad_params", "expected a key"),
        ("limits_set", {"key": "update_index", "value": "https://a\nb"}, "bad_value", "expected text"),
        ("limits_unset", {}, "bad_params", "expected a key"),
    ],
)
async def test_a_wrong_change_changes_nothing(
    short_dir: Path, method: str, params: dict[str, Any], code: str, words: str
) -> None:
    async with supervisor_running(short_dir) as running:
        before = running.supervisor.node.limits
        client = await AsyncClient.connect(short_dir / "s.sock")
        answer = await client.request(method, **params)
        await client.close()
        assert answer["error"]["code"] == code
        assert words in answer["error"]["message"]
        assert running.supervisor.node.limits is before
        assert not running.supervisor.node.settings.owner_file.exists()


@pytest.mark.asyncio
async def test_a_full_disk_changes_nothing(short_dir: Path) -> None:
    async with supervisor_running(short_dir) as running:
        (short_dir / "state" / "limits.toml.new").mkdir()
        client = await AsyncClient.connect(short_dir / "s.sock")
        answer = await client.request("limits_set", key="cpu_workers", value=1)
        await client.close()
        assert answer["error"]["code"] == "not_written"
        assert running.supervisor.node.layers == running.supervisor.node.settings.layers()


@pytest.mark.asyncio
async def test_reading_the_settings_again_shows_what_changed(short_dir: Path) -> None:
    config = short_dir / "server.toml"
    config.write_text("")
    async with supervisor_running(short_dir, config_file=config) as running:
        config.write_text("idle_minutes = 10\n")
        running.supervisor.reload()
        assert "reloaded: idle_minutes 5.0 -> 10.0" in events(running)


def test_the_page_shows_the_table_as_it_is() -> None:
    """To write it again: put what `distensor_server.policy.page.markdown()` returns behind the last heading."""
    page = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
    assert page.partition("## All settings\n")[2] == markdown()
    assert all(f"`{gate}`" in page for gate in GATES)
