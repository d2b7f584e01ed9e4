"""`ds.plan`: figures that can be counted by hand, and every problem in one message."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import distensor as ds
from distensor.core import SYSTEM_CLOCK, DeviceId, Epoch, Generation, JobId, ParallelConfig, Rank, Unavailable
from distensor.core.control import (
    DeviceInfo,
    DeviceKind,
    MeasuredWay,
    Member,
    Mesh,
    MeshMeasures,
    MeshNode,
    NodeInfo,
    Topology,
)
from distensor.core.errors import CaptureError, ConfigError, PlacementError, UserError
from distensor.core.ids import NodeId
from distensor.core.pipeline_simulation import LinkSeconds, ideal_bubble
from distensor.core.problems import SeveralProblemsError
from distensor.core.reading import Reading
from distensor.core.table import bytes_text, count_text, table
from distensor.node.held_bytes import counting_held_bytes
from distensor.program import StageRunner, capture, cut
from distensor.training import Session
from distensor.training.counting import count
from distensor.training.replies import LinkBytes

WIDTH, ROWS = 8, 12
PARAMETERS = WIDTH * WIDTH + WIDTH


def device(number: int, free: Reading[int], slots: int = 2, unusable: str | None = None) -> DeviceInfo:
    return DeviceInfo(
        device_id=DeviceId(f"cpu:{number}"),
        kind=DeviceKind.CPU,
        name=f"cpu {number}",
        slots=slots,
        memory_bytes=16 << 30,
        free_bytes=free,
        unusable=unusable,
    )


def mesh(workers: int, *free: Reading[int]) -> Mesh:
    devices = tuple(device(number, reading) for number, reading in enumerate(free or (8 << 30,)))
    info = NodeInfo(name="desk", host="127.0.0.1", version="0", devices=devices)
    away = NodeInfo(name="shed", host="127.0.0.2", version="0", devices=(device(9, 1 << 40),))
    return Mesh(
        generation=Generation(1),
        nodes=(
            MeshNode(info=info, connected=True, free_slots=workers, seconds_since_heartbeat=0.1),
            MeshNode(info=away, connected=False, free_slots=4, seconds_since_heartbeat=99.0),
        ),
    )


def squared(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(outputs, batch[1])


def model(stages: int) -> ds.DistributedModel:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    share = 4 // stages
    mapping = [[str(stage * share + index) for index in range(share)] for stage in range(stages)]
    return ds.DistributedModel(nn.Sequential(*layers), stage_mapping=ds.StageMapping(mapping))


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


@pytest.fixture(scope="module")
def planned() -> ds.Plan:
    parallel = ds.ParallelConfig(data_parallel=2, pipeline_parallel=4)
    return ds.plan(model(4), parallel=parallel, batch=batch(), loss=squared, micro_batches=3)


def test_the_figures_of_each_rank_are_those_counted_by_hand(planned: ds.Plan) -> None:
    """12 rows on 2 replicas in 3 micro-batches are 2 rows each; one replica is shown."""
    assert planned.rows == 2
    assert [rank.rank for rank in planned.ranks] == [0, 1, 2, 3]
    assert [rank.stages for rank in planned.ranks] == [(0,), (1,), (2,), (3,)]
    assert [rank.parameters for rank in planned.ranks] == [PARAMETERS] * 4
    assert [rank.fixed_bytes for rank in planned.ranks] == [PARAMETERS * 4 * 4] * 4
    assert [rank.forward_flops for rank in planned.ranks] == [2 * 2 * WIDTH * WIDTH] * 4
    parallel = ds.ParallelConfig(data_parallel=2)
    cut = ds.plan(model(4), parallel=parallel, batch=batch(), loss=squared, sync="zero3")
    assert [rank.fixed_bytes for rank in cut.ranks] == [4 * PARAMETERS * 4 * 4 // 2 + 2 * 2 * PARAMETERS * 4]
    apart = ds.plan(model(4), parallel=parallel, batch=batch(), loss=squared, sync="diloco")
    assert [rank.fixed_bytes for rank in apart.ranks] == [4 * PARAMETERS * 6 * 4]


def test_memory_is_what_autograd_keeps_of_each_micro_batch_in_flight(planned: ds.Plan) -> None:
    one = 2 * WIDTH * 4
    assert planned.ranks[0].activation_bytes == 2 * one  # the input of the product, and the tanh
    assert [rank.in_flight for rank in planned.ranks] == [3, 3, 2, 1]
    assert planned.ranks[0].memory_bytes == PARAMETERS * 4 * 4 + 3 * 2 * one


def test_what_is_counted_without_memory_is_what_is_kept_with_it() -> None:
    declared, data = model(1), batch(6)
    pieces = cut(capture(declared.module, data, loss=squared))
    (program,) = pieces.programs
    runner = StageRunner(program, pieces.weights(0))
    with counting_held_bytes(list(runner.parameters.values())) as held:
        runner.forward(pieces.flatten_batch(data), seed=0)
    assert count(program, 6).kept_bytes == held.total > 0


def test_recomputation_keeps_the_inputs_of_what_it_computes_again() -> None:
    parallel = ds.ParallelConfig(data_parallel=2, pipeline_parallel=4)
    plan = ds.plan(model(4), parallel=parallel, batch=batch(), loss=squared, micro_batches=3, recompute="stage")
    assert [rank.activation_bytes for rank in plan.ranks[:3]] == [2 * WIDTH * 4] * 3


def test_the_bubble_of_equal_stages_is_the_formula(planned: ds.Plan) -> None:
    assert planned.bubble == pytest.approx(ideal_bubble(4, 3))


def test_the_report_shows_it_all(planned: ds.Plan) -> None:
    text = str(planned)
    assert "dp 2 x tp 1 x pp 4 x cp 1 = 8 ranks, schedule 1f1b, at most 3 micro-batches of at most 2 rows" in text
    assert re.search(r"^ +3  pp 3 tp 0 cp 0  3 +72 +1\.12 KiB +256 ", text, re.MULTILINE)
    assert "pipeline bubble 50.0% of a step" in text
    assert text.endswith("mesh: not compared (no session is open)")


def measured(link: LinkSeconds, flops: float) -> Mesh:
    quick = LinkSeconds(latency=link.latency / 10)
    links = {("desk", "shed"): quick, ("shed", "desk"): link}
    return dataclasses.replace(mesh(8), measures=MeshMeasures(links=links, speed={"desk": 2 * flops, "shed": flops}))


@pytest.mark.parametrize("schedule", ["auto", "gpipe"])
def test_what_was_measured_says_how_long_a_step_will_be(schedule: str) -> None:
    """A forward of a stage takes a second here, so a micro-batch there and back takes 12 and 6 messages."""
    forward = float(2 * 2 * WIDTH * WIDTH)
    link = LinkSeconds(latency=2.0, occupied=0.5)
    seen = measured(link, forward)
    plan = ds.plan(
        model(4),
        parallel=ds.ParallelConfig(pipeline_parallel=4),
        batch=batch(),
        loss=squared,
        micro_batches=6,
        mesh=seen,
        schedule=schedule,
    )
    assert plan.over_links is not None
    assert plan.schedule == {"auto": "1f1b"}.get(schedule, schedule)
    assert (plan.over_links.nodes, plan.over_links.link, plan.over_links.speed) == (("shed", "desk"), link, forward)
    assert plan.over_links.seconds >= 12 + 6 * link.total + 5 * 3
    assert bool(plan.over_links.warm_up) is (schedule == "auto")
    assert f"over measured links: about {plan.over_links.seconds:.3g} s a step" in str(plan)
    assert "slowest link shed to desk, 2000.0 ms and 500.0 ms busy" in str(plan)
    quick = ds.plan(
        model(4),
        parallel=ds.ParallelConfig(pipeline_parallel=4),
        batch=batch(),
        loss=squared,
        micro_batches=6,
        mesh=measured(LinkSeconds(latency=0.001), forward),
        schedule=schedule,
    )
    assert quick.over_links is not None
    assert quick.over_links.seconds < plan.over_links.seconds


def test_nothing_is_said_of_links_that_nobody_measured_or_uses(planned: ds.Plan) -> None:
    assert planned.over_links is None
    seen = measured(LinkSeconds(latency=1.0), 1e9)
    alone = ds.plan(model(4), parallel=ds.ParallelConfig(data_parallel=2), batch=batch(), loss=squared, mesh=seen)
    assert alone.over_links is None


def test_looped_stages_are_on_their_ranks() -> None:
    parallel = ds.ParallelConfig(pipeline_parallel=2)
    plan = ds.plan(model(4), parallel=parallel, batch=batch(), loss=squared, mesh=mesh(2), schedule="interleaved")
    assert [rank.stages for rank in plan.ranks] == [(0, 2), (1, 3)]
    assert [rank.parameters for rank in plan.ranks] == [2 * PARAMETERS] * 2
    assert plan.problems == ()
    plan.check()


class Tokens(nn.Module):
    """ids (rows, length) -> next-token loss; 5 heads of 2, and a running sum that has no rule for cut values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(15, 10)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(10, 10, bias=False) for _ in range(4))
        self.head = nn.Linear(10, 15, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        heads = (
            project(x).unflatten(-1, (5, 2)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        x = x + x.cumsum(-1)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(15, (4, 8))
    return {"input_ids": ids, "labels": ids}


def test_a_cut_model_shows_its_layouts_and_what_each_rank_holds() -> None:
    columns = ("q_proj", "k_proj", "v_proj", "embed", "head")
    rules = {f"{name}.weight": ds.Shard(dim=0) for name in columns} | {"o_proj.weight": ds.Shard(dim=1)}
    declared = ds.DistributedModel(Tokens(), tp_spec=ds.ShardingSpec(rules))
    parallel = ds.ParallelConfig(tensor_parallel=2, context_parallel=2)
    plan = ds.plan(declared, parallel=parallel, batch=tokens(), mesh=mesh(4), context_attention="ring")
    assert [(rank.place.tp, rank.place.cp) for rank in plan.ranks] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    halves = [4 * 6 * 10 + 2 * 8 * 10, 4 * 4 * 10 + 2 * 7 * 10]
    assert [rank.parameters for rank in plan.ranks] == halves * 2
    assert plan.layouts["q_proj.weight"].local_shape(0) == (6, 10)
    rows, queries, keys = 4, 4, 8
    linear = 2 * rows * queries * (4 * 6 * 10 + 8 * 10)
    attention = 4 * rows * 6 * queries * keys
    assert plan.ranks[0].forward_flops == linear + attention
    assert plan.ranks[0].forward_flops > plan.ranks[1].forward_flops
    text = str(plan)
    assert re.search(r"^head\.weight +15x10 +0  8 \+ 7 +1$", text, re.MULTILINE)
    assert re.search(r"^o_proj\.weight +10x10 +1  6 \+ 4 +1$", text, re.MULTILINE)
    assert plan.problems == ()


def test_what_is_gathered_for_want_of_a_rule_is_shown() -> None:
    declared = ds.DistributedModel(Tokens(), tp_spec=ds.ShardingSpec({"embed.weight": ds.Shard(dim=1)}))
    plan = ds.plan(declared, parallel=ds.ParallelConfig(tensor_parallel=2), batch=tokens())
    assert plan.gathers
    assert f"gathered: {plan.gathers[0]}" in str(plan)


def test_weights_that_cannot_be_cut_so_often_are_refused_with_the_rest() -> None:
    spec = ds.ShardingSpec({"q_proj.weight": ds.Shard(dim=0), "o_proj.weight": ds.Shard(dim=1)})
    declared = ds.DistributedModel(Tokens(), tp_spec=spec)
    with pytest.raises(SeveralProblemsError) as caught:
        ds.plan(declared, parallel=ds.ParallelConfig(tensor_parallel=6), batch=tokens(), mesh=mesh(4))
    said = str(caught.value)
    assert "6 ranks, and the mesh has 4 free workers" in said
    assert "q_proj.weight" in said
    assert "5 units for tensor_parallel=6" in said


def test_the_model_is_left_alone() -> None:
    declared = model(1)
    before = {name: value.clone() for name, value in declared.module.state_dict().items()}
    ds.plan(declared, parallel=ds.ParallelConfig(), batch=batch(), loss=squared)
    after = declared.module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in declared.module.parameters())


def test_too_few_workers_and_too_little_memory_are_both_named() -> None:
    parallel = ds.ParallelConfig(data_parallel=4, pipeline_parallel=2)
    plan = ds.plan(model(2), parallel=parallel, batch=batch(), loss=squared, mesh=mesh(5, 2000, 1000))
    with pytest.raises(SeveralProblemsError) as caught:
        plan.check()
    said = str(caught.value)
    assert all(isinstance(problem, PlacementError) for problem in plan.problems)
    assert "1. dp 4 x tp 1 x pp 2 x cp 1 = 8 ranks, and the mesh has 5 free workers" in said
    assert "(known nodes that are not connected: 1): lower data_parallel to 2, or connect 3 more workers" in said
    assert "rank 0 needs 2.25 KiB for weights, gradients and optimizer; the largest device has 1.95 KiB free" in said
    assert str(plan).count("\ncannot run: ") == 2


@pytest.mark.parametrize(
    ("free", "said"),
    [
        ((8000, 8000), "all ranks together need 18.0 KiB for weights, gradients and optimizer; the mesh has 15.6 KiB"),
        ((8000, Unavailable(reason="no sensor")), ""),
        ((9500, 9500), ""),
    ],
)
def test_memory_is_compared_where_it_is_known(free: tuple[Reading[int], ...], said: str) -> None:
    parallel = ds.ParallelConfig(data_parallel=4, pipeline_parallel=2)
    plan = ds.plan(model(2), parallel=parallel, batch=batch(), loss=squared, mesh=mesh(8, *free))
    assert [said in str(problem) for problem in plan.problems] == [True] * bool(said)


def test_a_replica_that_is_larger_than_the_mesh() -> None:
    parallel = ds.ParallelConfig(data_parallel=2, pipeline_parallel=4)
    plan = ds.plan(model(4), parallel=parallel, batch=batch(), loss=squared, mesh=mesh(3))
    with pytest.raises(ConfigError, match="one replica alone takes 4; lower the other axes to a product of at most 3"):
        plan.check()


def test_what_cannot_be_cut_is_refused_with_everything_else_that_is_wrong() -> None:
    parallel = ds.ParallelConfig(data_parallel=2, pipeline_parallel=3)
    with pytest.raises(SeveralProblemsError) as caught:
        ds.plan(model(4), parallel=parallel, batch=batch(), loss=squared, micro_batches=0, mesh=mesh(2))
    said = str(caught.value)
    assert "6 ranks, and the mesh has 2 free workers" in said
    assert "4 stages cannot be laid over pipeline_parallel=3" in said
    assert "micro_batches=0" in said


def test_the_first_step_of_a_trainer_names_it_all_before_a_job_is_opened() -> None:
    class Choosing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    opened = SimpleNamespace(
        query_mesh=lambda: mesh(1),
        attach=lambda _: None,
        detach=lambda _: None,
        open_job=lambda **_: pytest.fail("a worker was asked"),
    )
    parallel = ds.ParallelConfig(data_parallel=2)
    declared = ds.DistributedModel(Choosing(WIDTH, WIDTH))
    with ds.Trainer(declared, parallel=parallel, loss=squared, session=cast("Any", opened)) as trainer:
        with pytest.raises(SeveralProblemsError) as caught:
            trainer.step(batch())
        assert trainer.job is None
    workers, capture = caught.value.problems
    assert isinstance(workers, PlacementError)
    assert isinstance(capture, CaptureError)


def test_a_module_that_cannot_be_captured_is_refused_alone() -> None:
    class Choosing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    with pytest.raises(CaptureError):
        ds.plan(ds.DistributedModel(Choosing(WIDTH, WIDTH)), parallel=ds.ParallelConfig(), batch=batch(), loss=squared)


class Scaled(nn.Module):
    """A layer whose output is scaled by a weight of some dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH).to(dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.float()) * self.scale.float()  # type: ignore[no-any-return]


class Doubling(nn.Module):
    """float32 in and out, float64 between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x).double()).float()


def refused(module: nn.Module, given: Any, seen: Mesh) -> str:
    """What `ds.plan` says stands in the way."""
    declared = ds.DistributedModel(module)
    try:
        plan = ds.plan(declared, parallel=ds.ParallelConfig(), batch=given, loss=squared, mesh=seen)
    except UserError as error:
        return str(error)
    return "\n".join(map(str, plan.problems))


def test_a_dtype_that_no_worker_can_hold_is_refused_by_name_before_any_is_asked() -> None:
    """DTY-05: which weight or input it is, its dtype, and those that would be right."""
    for dtype in (torch.float8_e4m3fn, torch.uint16):
        said = refused(Scaled(dtype), batch(), mesh(1))
        assert f"'scale' is {dtype}; supported are float64, float32, float16, bfloat16" in said
    given = torch.randn(ROWS, WIDTH).to(torch.float8_e5m2), torch.randn(ROWS, WIDTH)
    said = refused(Scaled(torch.float32), given, mesh(1))
    assert "of the batch is torch.float8_e5m2; supported are float64" in said


def with_metal(**changes: Any) -> Mesh:
    """A mesh whose first device is one of Apple's."""
    seen = mesh(2)
    metal = dataclasses.replace(device(0, 8 << 30), kind=DeviceKind.MPS, name="Apple M3", **changes)
    desk, away = seen.nodes
    return dataclasses.replace(
        seen, nodes=(dataclasses.replace(desk, info=dataclasses.replace(desk.info, devices=(metal,))), away)
    )


def test_a_dtype_that_a_device_lacks_is_refused_where_a_worker_could_come_to_it() -> None:
    """DTY-05: Metal has no double; the same model is fine on a CPU, and on a machine whose Metal is out of use."""
    where = "which 'Apple M3' of node 'desk' (mps) cannot compute with: use float32, or a mesh without such devices"
    double = torch.randn(ROWS, WIDTH).double(), torch.randn(ROWS, WIDTH)
    cases = [
        (Scaled(torch.float64), batch(), "parameter 'scale' is float64"),
        (Scaled(torch.float32), double, "'inputs' of the batch is float64"),
        (Doubling(), batch(), "gives in module '' is float64"),
    ]
    for module, given, what in cases:
        said = refused(module, given, with_metal())
        assert what in said
        assert where in said
        assert refused(module, given, mesh(2)) == ""
    assert refused(Doubling(), batch(), with_metal(unusable="on battery")) == ""
    assert refused(Scaled(torch.float32), batch(), with_metal()) == ""


def test_a_mesh_prints_what_is_known_and_says_what_is_not_measured() -> None:
    seen = mesh(3, 2 << 30, Unavailable(reason="no sensor"))
    assert seen.free_bytes == 2 << 30
    assert isinstance(seen.links, Unavailable)
    assert isinstance(seen.measured_speed, Unavailable)
    assert str(seen).splitlines() == [
        "3 workers can be placed on 1 connected nodes",
        "node  device  kind  slots  memory    free      free workers",
        "desk  cpu 0   cpu       2  16.0 GiB  2.00 GiB  3",
        "desk  cpu 1   cpu       2  16.0 GiB  unknown",
        f"links and speed: {seen.links.reason}",
    ]


def test_a_mesh_shows_what_a_job_has_measured() -> None:
    link = LinkSeconds(latency=0.02, occupied=0.005)
    seen = dataclasses.replace(mesh(3), measures=MeshMeasures(links={("desk", "shed"): link}, speed={"desk": 2.5e9}))
    assert seen.links == {("desk", "shed"): link}
    assert seen.measured_speed == {"desk": 2.5e9}
    assert str(seen).splitlines()[-4:] == [
        "from  to    latency   one message",
        "desk  shed  20.00 ms  25.00 ms",
        "node  measured speed",
        "desk  2.50GFLOP/s",
    ]


def test_a_session_adds_what_its_jobs_have_measured_to_what_the_hub_knows() -> None:
    hub = cast("Any", SimpleNamespace(query_mesh=lambda: mesh(3)))
    session = Session(client=hub, cluster=None, clock=SYSTEM_CLOCK)
    assert session.query_mesh() == mesh(3)
    measures = MeshMeasures(links={}, speed={"desk": 1.0})
    session.note_measures(measures)
    assert session.query_mesh() == dataclasses.replace(mesh(3), measures=measures)


def test_a_session_knows_by_which_way_its_nodes_are_connected() -> None:
    parallel = ParallelConfig(data_parallel=3)
    members = tuple(
        Member(rank=Rank(rank), node_id=NodeId(node), node_name=node, host="h", port=1)
        for rank, node in enumerate(("attic", "attic", "cellar"))
    )
    topology = Topology(job_id=JobId("j"), job_name="j", epoch=Epoch(1), parallel=parallel, members=members)
    told = {
        0: [LinkBytes(peer=1, sent=5, path="here"), LinkBytes(peer=2, sent=5, path="lan", rtt_ms=20.0, rtt_age_s=1.0)],
        1: [
            LinkBytes(peer=2, sent=5, path="relay", rtt_ms=45.0, rtt_age_s=3.0),
            LinkBytes(peer=-1, sent=1, path="lan"),
        ],
        2: [LinkBytes(peer=1, sent=5, path="relay", line_rate=1.25e6), LinkBytes(peer=0, sent=5)],
    }
    session = Session(client=cast("Any", SimpleNamespace(query_mesh=lambda: mesh(3))), cluster=None, clock=SYSTEM_CLOCK)
    assert isinstance(session.query_mesh().ways, Unavailable)
    session.note_links(topology, told)
    seen = session.query_mesh()
    assert seen.ways == {
        ("attic", "cellar"): MeasuredWay(path="relay", rate=1.25e6, rtt=0.045, age=3.0),
        ("cellar", "attic"): MeasuredWay(path="relay"),
    }
    assert isinstance(seen.links, Unavailable)
    words = [line.split() for line in str(seen).splitlines()]
    assert ["attic", "cellar", "relay", "45.0", "ms", "3", "s", "10.0", "Mbit/s"] in words


def test_memory_that_nobody_can_tell() -> None:
    assert isinstance(mesh(1, Unavailable(reason="no sensor")).free_bytes, Unavailable)


def test_tables_and_sizes() -> None:
    assert table(["name", "size"], [["a", 1], ["long", 20]]) == "name  size\na        1\nlong    20"
    assert table(["name"], []) == "name"
    assert [bytes_text(count) for count in (0, 512, 1536, 300 << 30)] == ["0 B", "512 B", "1.50 KiB", "300 GiB"]
    assert [count_text(count) for count in (950, 1_234_567, 7e9, 5e12)] == ["950", "1.23M", "7.00G", "5.00T"]
