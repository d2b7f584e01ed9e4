"""The operator's files: what they name exists, and what can be checked without Docker is."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from distensor.cloud.cli import cloud_parser
from distensor.cloud.metrics import Metrics
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.ids import Generation, new_job_id
from distensor.hub import cli
from distensor.hub.cli import config_of
from distensor.hub.machine import DEFAULT_PATIENCE, HubMachine
from distensor.hub.pki import Authority

ROOT = Path(__file__).resolve().parents[2]
HUB = ROOT / "installers" / "hub"
YAML = sorted((*HUB.rglob("*.yaml"), *HUB.rglob("*.yml")))
RULES = "extends: default\nrules: {line-length: {max: 120}, document-start: disable}\n"
_METRIC = re.compile(r"\b(?:distensor|process)_[a-z_]+")


def read_yaml(name: str) -> Any:
    return yaml.safe_load((HUB / name).read_text())


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_yaml_is_tidy(path: Path) -> None:
    found = list(linter.run(path.read_text(), YamlLintConfig(RULES), str(path)))
    assert [f"{one.line}: {one.desc}" for one in found] == []


def test_the_settings_that_are_shown_are_settings(tmp_path: Path) -> None:
    shown = (HUB / "hub.toml").read_text()
    written = tmp_path / "hub.toml"
    written.write_text(re.sub(r"^# (?=[a-z-]+ = )", "", shown, flags=re.MULTILINE))  # the optional ones too
    assert written.read_text().count("\n# ") < shown.count("\n# ")
    password = tmp_path / "password"
    password.write_text("secret\n")
    parser = cli.hub_parser()
    options = parser.options(["--config", str(written), "--database-password-file", str(password)])
    config = config_of(options)
    assert (str(config.listen), config.advertise, config.standby) == ("0.0.0.0:50051", "hub.example.org", True)
    assert [str(other) for other in config.other_hubs] == ["hub2.example.org:50051"]
    assert config.database is not None
    assert config.database.host == "db.example.org"


def test_the_image_copies_what_is_there_and_starts_a_hub() -> None:
    lines = (HUB / "Dockerfile").read_text().splitlines()
    for line in lines:
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), line
    [command] = [json.loads(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD ")]
    assert command[0] == "hub"
    assert str(config_of(cli.hub_parser().options(command[1:])).listen) == "0.0.0.0:50051"


def test_compose_names_services_secrets_volumes_and_files_that_are_there() -> None:
    compose = read_yaml("compose.yaml")
    services = compose["services"]
    assert "redis" not in services, "nothing uses it"
    for service in services.values():
        assert set(service.get("secrets", [])) <= set(compose["secrets"])
        assert set(service.get("depends_on", {})) <= set(services)
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert (HUB / source).is_file() if source.startswith(".") else source in compose["volumes"]
    build = services["hub"]["build"]
    assert (HUB / build["context"] / build["dockerfile"]).is_file()
    [target] = read_yaml("prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in services
    assert f"--http=0.0.0.0:{port}" in services[host]["command"]
    assert f"--http-host={host}" in services[host]["command"], "others than known hosts are refused"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With a program that is there in the place of the one that the operator installs."""
    unit = tmp_path / "distensor-hub.service"
    text = (HUB / "distensor-hub.service").read_text()
    assert "/opt/distensor/bin/python -m distensor hub --config /etc/distensor/hub.toml" in text
    unit.write_text(text.replace("/opt/distensor/bin/python", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    ours = [line for line in done.stderr.splitlines() if "distensor-hub" in line]
    assert (done.returncode, ours) == (0, [])


def test_the_dashboard_asks_for_metrics_that_the_hub_has(tmp_path: Path) -> None:
    machine = HubMachine(
        generation=Generation(1),
        nodes=(),
        jobs=(),
        submissions={},
        earnings={},
        signer=Authority.load_or_create(tmp_path, SYSTEM_CLOCK),
        new_job_id=new_job_id,
        patience=DEFAULT_PATIENCE,
        now=0.0,
    )
    metrics = Metrics(machine, SYSTEM_CLOCK, lambda: True)
    metrics.http.count("GET", "/v1/jobs", 200, 0.01)
    known = {sample.name for metric in metrics.registry.collect() for sample in metric.samples}
    dashboard = json.loads((HUB / "grafana" / "hub.json").read_text())
    asked = {name for panel in dashboard["panels"] for query in panel["targets"] for name in metrics_of(query["expr"])}
    assert len(asked) >= 8
    assert asked <= known
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    sources = {source["uid"] for source in read_yaml("grafana/sources.yml")["datasources"]}
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == sources


def metrics_of(expression: str) -> list[str]:
    return _METRIC.findall(expression)


def test_compose_starts_a_hub_with_its_api_by_options_that_there_are(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret\n")
    command = read_yaml("compose.yaml")["services"]["hub"]["command"]
    words = [re.sub(r"\$\{DISTENSOR_HOST:\?[^}]*\}", "hub.example.org", word) for word in command]
    words = [word.replace("/run/secrets/database_password", str(password)) for word in words]
    assert words[0] == "cloud"
    options = cloud_parser().options(words[1:])
    config = config_of(options)
    assert (config.advertise, options.open_metrics, options.plain_http) == ("hub.example.org", True, True)
    assert config.database is not None
    assert (config.database.host, config.database.user, config.database.password) == ("database", "hub", "secret")


def test_what_make_offers_to_operators_names_what_is_there() -> None:
    text = (ROOT / "Makefile").read_text()
    for target in ("cloud-up", "cloud-hub", "cloud-api", "sandbox-up", "bench-hub"):
        assert re.search(rf"^{target}:.* ## ", text, re.MULTILINE), target
    for path in ("installers/hub/compose.yaml", "installers/hub/sandbox.py", "benchmarks/hub.py"):
        assert path in text
        assert (ROOT / path).is_file()


def test_the_sandbox_runs_workers_until_it_is_told_to_stop() -> None:
    command = [sys.executable, str(HUB / "sandbox.py"), "--workers", "2", "--nodes", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sandbox:
        assert sandbox.stdout is not None
        lines = []
        for line in sandbox.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        sandbox.send_signal(signal.SIGINT)
        assert sandbox.wait(40) == 0
    text = "".join(lines)
    assert "(2 workers)" in text
    assert "export DISTENSOR_TOKEN=dtj_" in text
