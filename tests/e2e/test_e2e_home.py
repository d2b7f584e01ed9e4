"""Training between network namespaces, each behind an emulated home connection; a skip says why not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from distensor.testing.homenet import DATACENTRE, HOME, HomeNet, permitted
from distensor.testing.homenet.cluster import HomeCluster

CHILD = Path(__file__).parent / "home_child.py"
NOWHERE = "http://127.0.0.1:9"
PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"), NOWHERE)
PARAMETER_BYTES = 4 * (64 * 128 + 128 + 128 * 10 + 10)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def allowed() -> None:
    permission = permitted()
    if not permission.granted:
        pytest.skip(f"no emulated network here: {permission.reason}")


@pytest.fixture
def folder(allowed: None, tmp_path: Path) -> Path:
    return tmp_path


def train(net: HomeNet, cluster: HomeCluster, **parallel: int) -> dict[str, Any]:
    environment = {**os.environ, **PROXIES, "OMP_NUM_THREADS": "1", "DISTENSOR_TOKEN": cluster.trainer_token}
    words = [sys.executable, str(CHILD), json.dumps(parallel)]
    with net.popen("desk", words, env=environment, stdout=subprocess.PIPE) as child:
        out, _ = child.communicate()
    assert child.returncode == 0
    told: dict[str, Any] = json.loads(out)
    assert told["parity"] < 1e-5
    assert told["losses"] == sorted(told["losses"], reverse=True)
    return told


def test_two_homes_train_together(folder: Path) -> None:
    names = ["hub", "attic", "cellar", "desk"]
    with (
        HomeNet(names, HOME, profiles={"hub": DATACENTRE}) as net,
        HomeCluster(net, folder, nodes=["attic", "cellar"], environment=PROXIES) as cluster,
    ):
        before = net.counters()
        train(net, cluster, data_parallel=2)
        after = net.counters()
        for node in ("attic", "cellar"):
            assert after[node].sent - before[node].sent > 6 * PARAMETER_BYTES, "its gradients left by its own line"
        told = train(net, cluster, pipeline_parallel=2)
        assert "attic" in told["mesh"]


def test_homes_that_let_nobody_in_train_over_a_relay(folder: Path) -> None:
    """Both nodes listen on all interfaces, behind routers that pass no connection from outside."""
    everywhere: Mapping[str, tuple[str, ...]] = dict.fromkeys(("attic", "cellar"), ("--host", "0.0.0.0"))
    with (
        HomeNet(
            ["hub", "attic", "cellar", "desk"], HOME, profiles={"hub": DATACENTRE}, closed=["attic", "cellar"]
        ) as net,
        HomeCluster(net, folder, nodes=["attic", "cellar"], relay=True, node_options=everywhere) as cluster,
    ):
        told = train(net, cluster, data_parallel=2)
    assert "relay" in told["mesh"]
