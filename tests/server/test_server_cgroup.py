"""RES-01: what a container may use counts, not what its host has."""

from __future__ import annotations

from pathlib import Path

import pytest

from distensor.core.reading import Unavailable
from distensor_server.devices.cgroup import CgroupLimits, read_limits
from distensor_server.devices.host import Host, HostSample, cpu_device, threads_per_worker, usable_cpus, usable_memory

GIB = 1 << 30
HOST = (64 * GIB, 60 * GIB)


def write(root: Path, **files: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text)


def v2(tmp_path: Path, membership: str = "0::/\n") -> tuple[Path, Path]:
    root, file = tmp_path / "cgroup", tmp_path / "self"
    write(root, cgroup__controllers="cpu memory\n")
    file.write_text(membership)
    return root, file


def test_v2_limit_of_a_container(tmp_path: Path) -> None:
    root, membership = v2(tmp_path)
    write(root, memory__max="1073741824\n", memory__current="200000000\n", cpu__max="150000 100000\n")
    limits = read_limits(root, membership)
    assert (limits.memory_limit, limits.memory_free, limits.cpus) == (GIB, GIB - 200000000, 1.5)
    memory = usable_memory(*HOST, limits)
    assert (memory.total, memory.free) == (GIB, GIB - 200000000)
    info = cpu_device(HostSample(memory=memory, cpus=1.5, utilization=0.0), slots=2, name="CPU").info()
    assert info.memory_bytes == GIB
    assert isinstance(info.free_bytes, int)
    assert info.free_bytes <= GIB - 200000000


def test_v2_max_falls_back_to_the_host(tmp_path: Path) -> None:
    root, membership = v2(tmp_path)
    write(root, memory__max="max\n", memory__current="200000000\n", cpu__max="max 100000\n")
    limits = read_limits(root, membership)
    assert isinstance(limits.memory_limit, Unavailable)
    memory = usable_memory(*HOST, limits)
    assert (memory.total, memory.free) == HOST
    assert usable_cpus(8, limits) == 8.0


def test_v2_the_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    root, membership = v2(tmp_path, "0::/user.slice/app.service\n")
    write(root / "user.slice", memory__max=str(4 * GIB), memory__current=str(3 * GIB), cpu__max="50000 100000")
    write(root / "user.slice/app.service", memory__max=str(8 * GIB), memory__current="0", memory__events="oom_kill 3\n")
    limits = read_limits(root, membership)
    assert (limits.memory_limit, limits.memory_free, limits.cpus) == (4 * GIB, GIB, 0.5)
    assert limits.oom_kills == 3


def test_v2_cached_files_are_not_used_memory(tmp_path: Path) -> None:
    root, membership = v2(tmp_path)
    write(root, memory__max=str(GIB), memory__current="900000000", memory__stat="anon 1\ninactive_file 700000000\n")
    assert read_limits(root, membership).memory_free == GIB - 200000000


V1 = "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/docker/abc\n"


@pytest.mark.parametrize("place", ["docker/abc", ""])
def test_v1_limit_with_and_without_a_namespace_of_its_own(tmp_path: Path, place: str) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "self"
    membership.write_text(V1)
    write(
        root / "memory" / place,
        memory__limit_in_bytes="1073741824\n",
        memory__usage_in_bytes="300000000\n",
        memory__stat="total_inactive_file 100000000\n",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    )
    write(root / "cpu" / place, cpu__cfs_quota_us="200000\n", cpu__cfs_period_us="100000\n")
    limits = read_limits(root, membership)
    assert (limits.memory_limit, limits.memory_free) == (GIB, GIB - 200000000)
    assert (limits.cpus, limits.oom_kills) == (2.0, 2)


def test_v1_huge_number_and_minus_one_mean_no_limit(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "self"
    membership.write_text(V1)
    write(root / "memory", memory__limit_in_bytes="9223372036854771712\n", memory__usage_in_bytes="5\n")
    write(root / "cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    limits = read_limits(root, membership)
    assert isinstance(limits.memory_limit, Unavailable)
    assert isinstance(limits.cpus, Unavailable)


def test_a_system_without_cgroups_has_no_limits(tmp_path: Path) -> None:
    assert read_limits(tmp_path / "none", tmp_path / "none") == CgroupLimits()


def test_a_path_cannot_lead_out_of_the_hierarchy(tmp_path: Path) -> None:
    root, membership = v2(tmp_path, "0::/../../etc\n")
    write(root, memory__max=str(GIB), memory__current="0")
    assert read_limits(root, membership).memory_limit == GIB


def test_more_is_never_free_than_the_host_has() -> None:
    memory = usable_memory(64 * GIB, GIB // 2, CgroupLimits(memory_limit=4 * GIB, memory_free=3 * GIB))
    assert (memory.total, memory.free) == (4 * GIB, GIB // 2)


@pytest.mark.parametrize(("cpus", "slots", "threads"), [(8.0, 2, 4), (1.5, 1, 1), (2.0, 4, 1), (4.0, 0, 4)])
def test_threads_are_shared_by_the_slots(cpus: float, slots: int, threads: int) -> None:
    assert threads_per_worker(cpus, slots) == threads


def test_this_machine_can_be_sampled() -> None:
    sample = Host().sample()
    assert 0 < sample.memory.free <= sample.memory.total
    assert sample.cpus > 0
    assert isinstance(sample.utilization, float)
    assert 0 <= sample.utilization <= 1


def test_oom_kills_come_from_the_cgroup_or_else_from_the_kernel(tmp_path: Path) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free_pages 5\noom_kill 7\n")
    assert Host(limits=lambda: CgroupLimits(oom_kills=2), kernel_counters=counters).oom_kills() == 2
    assert Host(limits=CgroupLimits, kernel_counters=counters).oom_kills() == 7
    assert Host(limits=CgroupLimits, kernel_counters=tmp_path / "none").oom_kills() == 0
