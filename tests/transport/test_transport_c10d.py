"""torch.distributed over the data plane, in four real processes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from worker_pool import Here, WorkerPool, worker_pool

from distensor.core.errors import ConfigError, TransportError, TransportTimeoutError, UnsupportedOptionError
from distensor.transport import Channel, Tag
from distensor.transport.exchange import group_slot

RANKS = 4
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
OPS = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "min": (dist.ReduceOp.MIN, torch.minimum),
    "product": (dist.ReduceOp.PRODUCT, torch.mul),
    "avg": (dist.ReduceOp.AVG, torch.add),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with worker_pool(RANKS) as workers:
        yield workers


def contribution(rank: int, shape: Any, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if dtype.is_floating_point or dtype.is_complex:
        return values.to(dtype)
    return (values * 3).to(torch.int64).abs().to(dtype)


def reference(name: str, shape: Any, dtype: torch.dtype, ranks: int = RANKS) -> Tensor:
    """What every rank must get, to the bit: rank order, low precision added up in float32."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = contribution(0, shape, dtype).to(wide)
    for rank in range(1, ranks):
        total = OPS[name][1](total, contribution(rank, shape, dtype).to(wide))
    return (total / ranks if name == "avg" else total).to(dtype)


def catch(run: Callable[[], Any]) -> tuple[str, str]:
    """The kind and words of the error that `run` raises."""
    try:
        run()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__, str(error)
    return "none", ""


# -- all-reduce ------------------------------------------------------------------------------------------------------


def all_reduce_cases(here: Here, cases: list[tuple[str, Any, torch.dtype]]) -> None:
    for name, shape, dtype in cases:
        data = contribution(here.rank, shape, dtype)
        dist.all_reduce(data, OPS[name][0])
        assert torch.equal(data, reference(name, shape, dtype)), (name, shape, dtype)


def test_all_reduce_gives_the_same_bits_everywhere(pool: WorkerPool) -> None:
    shapes = [(), (0,), (1,), (3, 5), (4096,), (4097,), (70_001,), (33, 1, 257)]
    cases = [(name, shape, torch.float32) for name in OPS for shape in shapes]
    cases += [(name, (1025,), dtype) for name in OPS for dtype in FLOATS]
    cases += [(name, (37,), dtype) for name in ("sum", "max", "min", "product") for dtype in INTEGERS]
    pool.run(all_reduce_cases, cases)


def test_all_reduce_of_many_segments(pool: WorkerPool) -> None:
    pool.run(all_reduce_cases, [("sum", (2_500_003,), torch.float32), ("avg", (1_300_001,), torch.bfloat16)])


def all_reduce_special(here: Here) -> None:
    wide = contribution(here.rank, (50, 60), torch.float32)
    whole = wide.clone()
    dist.all_reduce(wide[3:40, 5:20])
    expected = reference("sum", (50, 60), torch.float32)
    assert torch.equal(wide[3:40, 5:20], expected[3:40, 5:20])
    wide[3:40, 5:20] = whole[3:40, 5:20]
    assert torch.equal(wide, whole), "only the slice may change"
    complex_ = contribution(here.rank, (9,), torch.complex64)
    dist.all_reduce(complex_)
    torch.testing.assert_close(complex_.real, sum(contribution(r, (9,), torch.complex64).real for r in range(RANKS)))
    flags = torch.tensor([here.rank == 2, False, True])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    assert flags.tolist() == [True, False, True]
    bits = torch.tensor([1 << here.rank])
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert bits.item() == 0b1111


def test_all_reduce_of_slices_complex_bool_and_bits(pool: WorkerPool) -> None:
    pool.run(all_reduce_special)


def traffic_of_all_reduce(here: Here, elements: int, stride: int) -> tuple[int, int]:
    before = sum(link.bytes_sent for link in here.plane.stats().values())
    data = torch.ones(elements * stride)[::stride]
    dist.all_reduce(data)
    return sum(link.bytes_sent for link in here.plane.stats().values()) - before, elements * 4


@pytest.mark.parametrize("stride", [1, 7])
def test_all_reduce_sends_the_least_possible(pool: WorkerPool, stride: int) -> None:
    """2(n-1)/n of the bytes of the slice, whatever storage is behind it; framing under one percent."""
    for sent, size in pool.run(traffic_of_all_reduce, 600_000, stride):
        assert sent <= 1.01 * 2 * (RANKS - 1) / RANKS * size


def coalesced(here: Here) -> None:
    tensors = [contribution(here.rank, shape, torch.float32) for shape in [(3,), (2, 2), (), (0,)]]
    before = sum(link.messages_sent for link in here.plane.stats().values())
    dist.all_reduce_coalesced(tensors)
    assert sum(link.messages_sent for link in here.plane.stats().values()) - before == RANKS - 1
    for tensor in tensors:
        assert torch.equal(tensor, reference("sum", tensor.shape, torch.float32))


@pytest.mark.filterwarnings("ignore")
def test_small_tensors_travel_together(pool: WorkerPool) -> None:
    pool.run(coalesced)


# -- the other collectives -------------------------------------------------------------------------------------------


def move_things(here: Here, elements: int) -> None:
    rank, size = here.rank, here.size
    own = contribution(rank, (elements,), torch.float32)
    everybody = [contribution(each, (elements,), torch.float32) for each in range(size)]
    for root in range(size):
        data = own.clone()
        dist.broadcast(data, root)
        assert torch.equal(data, everybody[root])
        gathered = [torch.empty(elements) for _ in range(size)] if rank == root else None
        dist.gather(own, gathered, dst=root)
        assert gathered is None or all(map(torch.equal, gathered, everybody))
        out = torch.empty(elements)
        dist.scatter(out, [piece + root for piece in everybody] if rank == root else None, src=root)
        assert torch.equal(out, own + root)
        total = own.clone()
        dist.reduce(total, root)
        assert torch.equal(total, reference("sum", (elements,), torch.float32) if rank == root else own)
    gathered = [torch.empty(elements) for _ in range(size)]
    dist.all_gather(gathered, own)
    assert all(map(torch.equal, gathered, everybody))
    flat = torch.empty(size * elements)
    dist.all_gather_into_tensor(flat, own)
    assert torch.equal(flat, torch.cat(everybody))


@pytest.mark.parametrize("elements", [0, 1, 1000, 600_001])
def test_broadcast_gather_scatter_reduce(pool: WorkerPool, elements: int) -> None:
    pool.run(move_things, elements)


def exchange_pieces(here: Here) -> None:
    rank, size = here.rank, here.size
    inputs = [contribution(each, (size, 50), torch.float32) for each in range(size)]
    total = reference("sum", (size, 50), torch.float32)
    out = torch.empty(50)
    dist.reduce_scatter(out, list(inputs[rank].unbind()))
    assert torch.equal(out, total[rank])
    dist.reduce_scatter_tensor(out, inputs[rank], op=dist.ReduceOp.AVG)
    assert torch.equal(out, total[rank] / size)
    swapped = torch.empty(size, 50)
    dist.all_to_all_single(swapped, inputs[rank])
    assert torch.equal(swapped, torch.stack([each[rank] for each in inputs]))
    outs = [torch.empty(50) for _ in range(size)]
    dist.all_to_all(outs, list(inputs[rank].unbind()))
    assert torch.equal(torch.stack(outs), swapped)
    # Rank r gives each rank s a block of r + s rows of value 10 r + s.
    give = [torch.full((rank + each, 2), 10.0 * rank + each) for each in range(size)]
    take = torch.empty(sum(rank + each for each in range(size)), 2)
    dist.all_to_all_single(take, torch.cat(give), [rank + each for each in range(size)], [len(piece) for piece in give])
    assert torch.equal(take, torch.cat([torch.full((rank + each, 2), 10.0 * each + rank) for each in range(size)]))
    uneven = [torch.empty(each + 1) for each in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert [piece.tolist() for piece in uneven] == [[float(each)] * (each + 1) for each in range(size)]


def test_reduce_scatter_all_to_all_and_uneven_pieces(pool: WorkerPool) -> None:
    pool.run(exchange_pieces)


def asynchronous(here: Here) -> None:
    tensors = [contribution(here.rank, (size,), torch.float32) for size in (10, 100_000, 3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    done: list[bool] = []
    future = works[1].get_future().then(lambda value: done.append(bool(value.value())))
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
    future.wait()
    assert done == [True]
    for tensor in tensors:
        assert torch.equal(tensor, reference("sum", tensor.shape, torch.float32))
    assert torch.equal(works[0].get_future().wait()[0], tensors[0])
    dist.barrier()


def test_works_and_futures(pool: WorkerPool) -> None:
    pool.run(asynchronous)


# -- single messages -------------------------------------------------------------------------------------------------


def pass_messages(here: Here) -> None:
    rank, size = here.rank, here.size
    after, before = (rank + 1) % size, (rank - 1) % size
    tags = (0, 5, 7, 5)
    for index, tag in enumerate(tags):
        dist.isend(torch.full((2,), 10 * rank + index), after, tag=tag)
    rooms = [torch.empty(2, dtype=torch.int64) for _ in tags]
    works = [dist.irecv(room, before, tag=tag) for room, tag in zip(rooms, tags, strict=True)]
    for work in reversed(works):
        work.wait()
    assert [room[0].item() for room in rooms] == [10 * before + index for index in range(len(tags))]
    send, receive = torch.full((300_000,), float(rank)), torch.empty(300_000)
    operations = [dist.P2POp(dist.isend, send, after), dist.P2POp(dist.irecv, receive, before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert receive[-1].item() == before
    wide = torch.zeros(4, 4)
    if rank == 0:
        dist.send(torch.ones(4), 1)
    if rank == 1:
        dist.recv(wide[:, 2], 0)
        assert torch.equal(wide.sum(0), torch.tensor([0.0, 0.0, 4.0, 0.0]))


def test_send_and_recv_with_tags_in_any_order(pool: WorkerPool) -> None:
    pool.run(pass_messages)


def mistaken_recv(here: Here) -> tuple[str, str]:
    if here.rank == 0:
        dist.send(torch.ones(3), 1, tag=9)
    if here.rank == 1:
        return catch(lambda: dist.recv(torch.ones(3, dtype=torch.int32), 0, tag=9))
    return catch(lambda: dist.recv(torch.ones(3))) if here.rank == 2 else ("", "")


def test_recv_into_the_wrong_tensor_or_from_nobody_is_an_error(pool: WorkerPool) -> None:
    _, wrong, nobody, _ = pool.run(mistaken_recv)
    assert wrong[0] == TransportError.__name__
    assert "'torch.float32 3'" in wrong[1]
    assert nobody[0] == UnsupportedOptionError.__name__


# -- groups and meshes -----------------------------------------------------------------------------------------------


def split_groups(here: Here) -> None:
    halves = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    mine = halves[here.rank % 2]
    data = torch.tensor([10.0**here.rank])
    dist.all_reduce(data, group=mine)
    assert data.item() == (101.0 if here.rank % 2 == 0 else 1010.0)
    data = torch.tensor([float(here.rank)])
    dist.broadcast(data, src=3 if here.rank % 2 else 0, group=mine)
    assert data.item() == (3.0 if here.rank % 2 else 0.0)
    dist.destroy_process_group(mine)
    kind, words = catch(lambda: mine.allreduce([data]).wait())
    assert (kind, "destroyed" in words) == ("TransportError", True)
    everybody = torch.ones(1)
    dist.all_reduce(everybody)
    assert everybody.item() == here.size


def test_new_groups_and_their_end(pool: WorkerPool) -> None:
    pool.run(split_groups)


def device_mesh(here: Here) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data = torch.tensor([float(here.rank)])
    dist.all_reduce(data, group=mesh["tp"].get_group())
    assert data.item() == (1.0 if here.rank < 2 else 5.0)
    data = torch.tensor([float(here.rank)])
    dist.all_reduce(data, group=mesh.get_group("dp"))
    assert data.item() == (2.0 if here.rank % 2 == 0 else 4.0)


def test_device_mesh(pool: WorkerPool) -> None:
    pool.run(device_mesh)


def functional_with_autograd(here: Here) -> None:
    import torch.distributed._functional_collectives as functional

    group, size, rank = dist.group.WORLD, here.size, here.rank
    own = torch.full((2, 3), float(rank + 1), requires_grad=True)
    gathered = functional.all_gather_single_autograd(own, 0, group)
    assert gathered.shape == (2 * size, 3)
    (gathered * (rank + 1)).sum().backward()
    assert torch.equal(own.grad, torch.full((2, 3), 10.0)), "the sum over ranks of their weights"
    wide = torch.full((size, 3), float(rank), requires_grad=True)
    scattered = functional.reduce_scatter_single_autograd(wide, "sum", 0, group)
    assert torch.equal(scattered, torch.full((1, 3), 6.0))
    (scattered * (rank + 1)).sum().backward()
    assert wide.grad[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    swapped = functional.all_to_all_single_autograd(wide, [1] * size, [1] * size, group)
    assert swapped[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    total = functional.all_reduce(torch.ones(2) * rank, "sum", group)
    assert total.tolist() == [6.0, 6.0]
    assert functional.broadcast(torch.ones(1) * rank, 2, group).item() == 2.0


def differentiable(here: Here) -> None:
    import torch.distributed.nn.functional as functional

    own = torch.tensor([float(here.rank + 1)], requires_grad=True)
    (functional.all_reduce(own) * (here.rank + 1)).sum().backward()
    assert own.grad.item() == 10.0


def test_functional_collectives_carry_gradients(pool: WorkerPool) -> None:
    pool.run(functional_with_autograd)


@pytest.mark.filterwarnings("ignore")
def test_differentiable_collectives(pool: WorkerPool) -> None:
    pool.run(differentiable)


# -- FSDP2 and DDP ---------------------------------------------------------------------------------------------------


def small_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(10, 33), nn.GELU(), nn.Linear(33, 17), nn.GELU(), nn.Linear(17, 4))


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(6, 10, generator=torch.Generator().manual_seed(10 * step + rank))


def one_process_training(steps: int) -> list[Tensor]:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(RANKS):
            (model(batch_of(rank, step)).square().mean() / RANKS).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def fully_sharded_training(here: Here, steps: int) -> list[Any]:
    from torch.distributed.fsdp import fully_shard

    model = small_model()
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch_of(here.rank, step)).square().mean().backward()
        optimizer.step()
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert held < 0.5 * sum(parameter.numel() for parameter in model.parameters())
    return [parameter.full_tensor().detach().numpy() for parameter in model.parameters()]


def replicated_training(here: Here, steps: int) -> list[Any]:
    model = small_model()
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        replica(batch_of(here.rank, step)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


@pytest.mark.parametrize("train", [fully_sharded_training, replicated_training])
def test_sharded_and_replicated_training_equal_one_process(pool: WorkerPool, train: Any) -> None:
    results = pool.run(train, 3)
    for index, expected in enumerate(one_process_training(3)):
        for result in results:
            torch.testing.assert_close(torch.from_numpy(result[index]), expected, rtol=1e-5, atol=1e-6)
            assert (result[index] == results[0][index]).all(), "replicas are bit-equal"


# -- mistakes --------------------------------------------------------------------------------------------------------


def different_tensors(here: Here, odd: Any) -> tuple[str, str]:
    group = dist.new_group(list(range(here.size)))
    shape, dtype = odd if here.rank == 2 else ((10,), torch.float32)
    return catch(lambda: dist.all_reduce(torch.ones(shape, dtype=dtype), group=group))


@pytest.mark.parametrize("odd", [((10,), torch.float64), ((11,), torch.float32), ((10,), torch.int32)])
def test_different_tensors_are_an_error_on_every_rank(pool: WorkerPool, odd: Any) -> None:
    for kind, words in pool.run(different_tensors, odd):
        assert kind == "TransportError", words
        assert "every rank must pass the same" in words


def refused_at_once(here: Here) -> list[tuple[str, str]]:
    ones = torch.ones(3)
    return [
        catch(lambda: dist.all_reduce(torch.ones(3, dtype=torch.int64), dist.ReduceOp.AVG)),
        catch(lambda: dist.all_gather_into_tensor(torch.ones(here.size * 3 + 1), ones)),
        catch(lambda: dist.all_gather([torch.ones(3)] * (here.size - 1), ones)),
        catch(lambda: dist.all_reduce(ones, dist.ReduceOp.BAND)),
    ]


def test_what_cannot_work_is_refused_before_any_traffic(pool: WorkerPool) -> None:
    for errors in pool.run(refused_at_once):
        assert {kind for kind, _ in errors} == {ConfigError.__name__}, errors
    pool.run(all_reduce_cases, [("sum", (5,), torch.float32)])


def late_partner(here: Here) -> tuple[str, str]:
    group = dist.new_group(list(range(here.size)), timeout=timedelta(seconds=0.5))
    if here.rank == 1:
        return "stayed away", ""
    return catch(lambda: dist.all_reduce(torch.ones(3), group=group))


def test_who_stays_away_is_named_after_the_timeout(pool: WorkerPool) -> None:
    results = pool.run(late_partner, timeout=20)
    for kind, words in itertools.chain(results[:1], results[2:]):
        assert kind in (TransportTimeoutError.__name__, TransportError.__name__)
        assert "rank 1 did not take part within 0.5 s" in words


def slow_but_steady(here: Here) -> None:
    """Segments trickle in for longer than the timeout of a group, which is for silence."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2.0))
    if here.rank == 0:
        slot = group_slot(group.group_name, (0, 1))
        header = b"broadcast from 0 torch.uint8 6291456"
        for index in range(6):
            threading.Event().wait(0.4)
            here.plane.send(1, Tag(Channel.COLLECTIVE, 1, index, slot), header, [bytes([index]) * (1 << 20)])
    if here.rank == 1:
        data = torch.empty(6 << 20, dtype=torch.uint8)
        dist.broadcast(data, 0, group=group)
        assert data[:: 1 << 20].tolist() == [0, 1, 2, 3, 4, 5]


def test_the_timeout_is_for_silence_not_for_size(pool: WorkerPool) -> None:
    pool.run(slow_but_steady)


def initialised_twice(here: Here) -> tuple[str, str]:
    from distensor.transport.c10d import init_process_group

    return catch(lambda: init_process_group(here.plane, here.rank, here.size))


def test_a_second_initialisation_is_refused(pool: WorkerPool) -> None:
    assert {kind for kind, _ in pool.run(initialised_twice)} == {ConfigError.__name__}
