"""What agreeing costs, where a worker has other replicas: a column of the jobs, a line of details, never a guess."""

from __future__ import annotations

from typing import Any

import pytest
import tui_fake as fake
from test_tui_screens import live, on, text

from distensor_tui.model import Replicas, Snapshot
from distensor_tui.scene import Screen
from distensor_tui.sections import apply
from distensor_tui.views.jobs import detail, sync_line, worker_detail

JOBS = on(Screen.JOBS)
COST = {"how": "distro", "up": 1193, "down": 3579, "ring": 1117440}


def workers(*costs: Any) -> list[dict[str, Any]]:
    return [fake.worker(rank, replicas=cost) for rank, cost in enumerate(costs)]


def test_the_column_is_there_where_it_is_known_and_there_is_room() -> None:
    known, unknown = live(workers=workers(COST, None)), live(workers=workers(None))
    assert "distro 312x less" in text(known, (160, 40), JOBS)
    assert "sync" not in text(unknown, (160, 40), JOBS).splitlines()[3]
    assert "distro" not in text(known, (80, 24), JOBS)


def test_details_have_bytes_of_both_directions() -> None:
    view = live(workers=workers(COST))
    jobs, ours = view.snapshot.jobs, view.snapshot.workers
    assert jobs
    assert ours
    expected = "distro: 1.2 KiB up, 3.5 KiB down a step, 312x less than a ring all-reduce"
    assert dict(detail(jobs[0], view))["replicas"] == expected
    assert dict(worker_detail(ours[0]))["replicas"] == expected
    alone = live(workers=workers(None))
    assert alone.snapshot.jobs
    assert "replicas" not in dict(detail(alone.snapshot.jobs[0], alone))


def test_before_the_first_step_no_ratio_is_made_up() -> None:
    assert sync_line(Replicas(how="distro", up=0, down=0, ring=4000)) == "distro: 0 B up, 0 B down a step"
    ring = {**COST, "how": "allreduce", "up": 1117440, "down": 1117440}
    assert " allreduce " in text(live(workers=workers(ring)), (160, 40), JOBS)
    assert "less" not in sync_line(Replicas(**ring))
    assert sync_line(Replicas(how="", up=5, down=0, ring=0)) == ": 5 B up, 0 B down a step"


@pytest.mark.parametrize("wrong", [3, [], {}, {"how": 3, "up": "x", "down": None, "ring": -1}])
def test_another_shape_breaks_nothing(wrong: Any) -> None:
    snapshot = apply(Snapshot(), fake.snapshot(workers=workers(wrong)), full=True)
    assert snapshot.workers
    assert len(text(live(workers=workers(wrong)), (160, 40), JOBS).splitlines()) == 40
