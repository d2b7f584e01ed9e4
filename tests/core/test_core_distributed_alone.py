"""The process-group helpers in one process, with and without a group; launches; averaged weights."""

from __future__ import annotations

import json
import multiprocessing
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import distensor.core.distributed as helpers
from distensor.core import Axis, ParallelConfig, RankLayout
from distensor.core.distributed.objects import decode, encode
from distensor.core.errors import ConfigError, TransportTimeoutError

RECORDED = json.loads((Path(__file__).parent / "data" / "distributed.json").read_text())
ALONE = RECORDED["single_process"]["results"]
EMA = RECORDED["ema"]["results"]


def test_without_a_group_a_process_is_alone() -> None:
    """Recorded elsewhere: sizes of 0 and failing assertions."""
    sizes = [name for name in helpers.__all__ if name.endswith("_world_size")]
    ranks = [name for name in helpers.__all__ if name.startswith("get_") and name.endswith("_rank")]
    assert {name for name in ALONE if name.endswith(("_size", "_rank")) and name.startswith("get_")} <= {*sizes, *ranks}
    assert {name: getattr(helpers, name)() for name in sizes} == dict.fromkeys(sizes, 1)
    assert {name: getattr(helpers, name)() for name in ranks} == dict.fromkeys(ranks, 0)
    for name in ("is_distributed_initialized", "model_parallel_is_initialized"):
        assert getattr(helpers, name)() is ALONE[name]
    assert helpers.is_last_rank()
    assert helpers.is_last_tp_cp_rank()
    assert helpers.is_pipeline_first_stage()
    assert helpers.is_pipeline_last_stage()
    helpers.destroy_model_parallel()


def test_without_a_group_what_needs_one_says_what_to_call() -> None:
    with pytest.raises(ConfigError, match=r"call dist_init\(\) or init_process_group\(\) first"):
        helpers.initialize_model_parallel()
    with pytest.raises(ConfigError, match=r"call init_pp_scheduler\(\) first"):
        helpers.pp_scheduler()
    with pytest.raises(ConfigError, match=r"call initialize_model_parallel\(\) first"):
        helpers.init_pp_scheduler()


def test_none_as_the_group_gives_the_same_object_back() -> None:
    x, items = torch.zeros(5, requires_grad=True), [1, 2, 3]
    assert helpers.split_inputs_cp(x, 0, None) is x
    assert helpers.cat_outputs_cp(x, 0, None) is x
    assert helpers.cat_outputs_cp_with_grad(x, 0, None) is x
    assert helpers.broadcast(x, None) is x
    assert helpers.broadcast_split_tensor(x, 0, None) is x
    assert helpers.split_inputs_cp_object_list(items, None) is items
    assert helpers.cat_outputs_cp_object_list(items, None) is items


@pytest.fixture
def lonely() -> Iterator[None]:
    helpers.dist_init(environment={})
    yield
    helpers.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.usefixtures("lonely")
def test_a_launch_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert helpers.get_world_size() == helpers.get_tp_world_size() == 1
    x = torch.zeros(5)
    assert torch.equal(helpers.cat_outputs_cp(x, 0, helpers.get_cp_group()), x)
    assert helpers.broadcast(x, helpers.get_tp_group()) is x
    scheduler = helpers.PPScheduler()
    weight = torch.ones(1, requires_grad=True)
    stages = [lambda x: x * weight, lambda x: x * 3]
    losses = scheduler.step(stages, [x, x + 1], micro_batches=2, loss=lambda y, _: y.sum())
    assert [loss.item() for loss in losses] == [0, 15]
    assert weight.grad is not None
    assert weight.grad.item() == 15
    with pytest.raises(ConfigError, match="zbv"):
        scheduler.step(stages, [x, x], micro_batches=2, loss=lambda y, _: y.sum(), schedule="zbv")
    with pytest.raises(ConfigError, match="one rank"):
        scheduler.isend_next(x)
    helpers.dist_init(environment={})
    helpers.print_per_rank("two\nlines")
    assert capsys.readouterr().out.endswith("[rank 0 of 1] two\n[rank 0 of 1] lines\n")


@pytest.mark.usefixtures("lonely")
def test_what_was_made_is_gone_with_its_default_group() -> None:
    dist.destroy_process_group()
    assert not helpers.model_parallel_is_initialized()
    assert helpers.get_tp_group(check_initialized=False) is None
    helpers.dist_init(environment={})
    assert helpers.model_parallel_is_initialized()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def launched(pipe: Connection, rank: int, world_size: int, port: int) -> None:
    """One process of a launch on a machine that reports 8 devices."""
    torch.cuda.device_count = lambda: 8
    place = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    minutes = 0.5 if world_size == 2 else 0.05
    engine = SimpleNamespace(distributed_backend="gloo", distributed_timeout_minutes=minutes, cp_size=1, pp_size=2)
    pipe.send("ready")
    pipe.recv()
    try:
        helpers.dist_init(
            SimpleNamespace(engine_config=engine), environment={name: str(value) for name, value in place.items()}
        )
    except TransportTimeoutError as error:
        pipe.send(str(error))
        raise
    pipe.send((helpers.get_world_size(), helpers.get_pp_rank(), helpers.pp_scheduler().size))
    helpers.destroy_model_parallel()
    dist.destroy_process_group()


def launch(world_size: int) -> tuple[list[Any], list[int | None]]:
    """Start the first two processes of a launch; what they said, and their exit codes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["distensor.core.distributed"])
    port, pipes, processes = free_port(), [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=launched, args=(theirs, rank, world_size, port))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    assert [pipe.poll(30) and pipe.recv() for pipe in pipes] == ["ready", "ready"]
    for pipe in pipes:
        pipe.send("go")
    answers = [pipe.recv() if pipe.poll(30) else "no answer" for pipe in pipes]
    for process in processes:
        process.join(30)
    return answers, [process.exitcode for process in processes]


def test_the_number_of_devices_is_not_the_number_of_processes() -> None:
    """TOP-03, first part."""
    assert launch(2) == ([(2, 0, 2), (2, 1, 2)], [0, 0])


def test_processes_that_never_came_are_named() -> None:
    """TOP-03, second part."""
    answers, codes = launch(4)
    assert answers[0] == "expected 4 ranks, joined 2 within 3 s; missing: ranks 2, 3"
    assert answers[1] in (answers[0], "expected 4 ranks; the store at rank 0 ended before all had joined")
    assert codes == [1, 1]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2"),
        ({"RANK": "x"}, "RANK='x': expected an integer"),
        ({"WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT are not both set"),
    ],
)
def test_a_wrong_environment_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        helpers.dist_init(environment=environment)


def test_the_nccl_configuration_file_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"nccl_communicator_config_path='a\.yaml' is not implemented"):
        helpers.initialize_model_parallel(nccl_communicator_config_path="a.yaml")


@pytest.mark.parametrize(
    ("order", "of_rank_0"),
    [
        ("tp-cp-pp-dp", {"tp": [0, 1], "cp": [0, 2], "pp": [0, 4], "dp": [0, 8]}),
        ("tp-cp-dp-pp", {"tp": [0, 1], "cp": [0, 2], "dp": [0, 4], "pp": [0, 8]}),
    ],
)
def test_the_groups_are_those_of_the_order_string(order: str, of_rank_0: dict[str, list[int]]) -> None:
    """TOP-01, against enumeration by hand."""
    config = ParallelConfig(data_parallel=2, tensor_parallel=2, pipeline_parallel=2, context_parallel=2, order=order)
    layout = RankLayout(config)
    place = {rank: [rank >> bit & 1 for bit in range(4)] for rank in range(16)}
    for bit, name in enumerate(order.split("-")):
        others = {rank: tuple(value for at, value in enumerate(place[rank]) if at != bit) for rank in place}
        expected = sorted([rank for rank in place if others[rank] == key] for key in set(others.values()))
        assert sorted(layout.groups(Axis(name))) == expected
        assert len(expected) == 8
        assert layout.group_of(0, Axis(name)) == of_rank_0[name]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(plain)
def test_plain_data_survives_without_pickle(value: Any) -> None:
    assert decode(encode(value)) == value


@pytest.mark.parametrize("value", [{1: 2}, {1, 2}, object(), [torch.zeros(1)], SimpleNamespace()])
def test_other_data_is_refused_by_its_type(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"an object of type \w+ cannot be sent"):
        encode(value)


@given(length=st.integers(0, 30), size=st.integers(1, 5))
def test_equal_parts_or_an_error(length: int, size: int) -> None:
    from distensor.core.distributed.split import part_lengths

    if length % size == 0:
        assert part_lengths(length, size, None) == [length // size] * size
    else:
        with pytest.raises(ConfigError, match=f"{length} cannot divide cp_size {size}"):
            part_lengths(length, size, None)


class Net(nn.Module):
    def __init__(self, w: list[list[float]], b: list[float], buf: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=dtype))
        self.b = nn.Parameter(torch.tensor(b, dtype=dtype))
        self.register_buffer("buf", torch.tensor([buf], dtype=dtype))

    def lists(self) -> dict[str, Any]:
        return {name: tensor.tolist() for name, tensor in self.state_dict().items()}


def source(dtype: torch.dtype = torch.float32) -> Net:
    return Net([[2, 4], [6, 8]], [1, -1], 5, dtype)


def target(dtype: torch.dtype = torch.float32) -> Net:
    return Net([[1, 1], [1, 1]], [0, 0], 0, dtype)


def test_averaged_weights_as_recorded() -> None:
    updater, model, average = helpers.DTensorFastEmaModelUpdater(), source(), target()
    updater.update_average(model, average, beta=0.9)
    assert average.lists() == EMA["after update beta=0.9"]
    updater.update_average(model, average, beta=0.9)
    assert average.lists() == EMA["after second update beta=0.9"]
    updater.cache(average.parameters(), is_cpu=True)
    updater.copy_to(model, average)
    assert average.lists() == EMA["after copy_to"]
    with pytest.raises(ConfigError, match=EMA["second cache"][1]):
        updater.cache(average.parameters())
    updater.restore(average.parameters())
    assert {name: average.lists()[name] for name in ("w", "b")} == EMA["after restore"]
    with pytest.raises(ConfigError, match=EMA["second restore"][1]):
        updater.restore(average.parameters())


def test_averaging_a_bf16_model_in_fp32_as_recorded() -> None:
    average = target()
    helpers.DTensorFastEmaModelUpdater().update_average(source(torch.bfloat16), average, beta=0.5)
    recorded = EMA["bf16 source beta=.5"]
    assert average.w.tolist() == recorded["w"]
    assert str(average.w.dtype) == recorded["dtype"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_average_of_low_precision_is_refused(dtype: torch.dtype) -> None:
    average = target(dtype)
    with pytest.raises(ConfigError, match=EMA["half target"][1].replace("torch.float16", str(dtype))):
        helpers.DTensorFastEmaModelUpdater().update_average(source(), average)
    assert average.lists() == target().lists()


def test_models_with_other_parameters_are_refused() -> None:
    """Recorded elsewhere: silently truncated."""
    updater, average = helpers.DTensorFastEmaModelUpdater(), nn.Linear(2, 2, bias=False)
    for update in (updater.update_average, updater.copy_to):
        with pytest.raises(ConfigError, match="the source has 2 parameters and the target 1"):
            update(source(), average)
    with pytest.raises(ConfigError, match=r"'w' of the source has shape \(2, 2\) and 'weight' of the target \(2, 3\)"):
        updater.update_average(source(), nn.Linear(3, 2))
    updater.cache(source().parameters())
    with pytest.raises(ConfigError, match="1 parameters, but 2 are cached"):
        updater.restore(average.parameters())
