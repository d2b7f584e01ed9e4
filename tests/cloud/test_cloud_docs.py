"""docs/api.md, word for word."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from cloud_kit import CloudHub

from distensor.cloud.app import ROUTERS
from distensor.comm.keys import KeyKind

Run = Callable[..., "CompletedProcess[str]"]
PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text()
CALLS = re.findall(r"^```bash\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_each_call_of_the_page_is_answered(hub: CloudHub, run: Run) -> None:
    """In the order of the page, by an admin; about a job that has ended, so that its stream ends too."""
    admin = hub.client("me", KeyKind.ADMIN)
    assert admin.post(f"/v1/jobs/{hub.jobs['me']}/cancel").status == 200
    names = {"API": f"http://{hub.address}", "KEY": admin.key, "JOB": hub.jobs["me"], "NODE": hub.nodes["me"]}
    assert len(CALLS) > 20
    for call in CALLS:
        done = run(["bash", "-c", call], env={**os.environ, **names})
        assert done.returncode == 0, f"{call}\n{done.stdout}{done.stderr}"
        assert done.stdout, call


def test_the_page_names_every_group_of_routes() -> None:
    for router in ROUTERS:
        assert router.prefix == "" or router.prefix in PAGE
