"""Resuming the data: the samples that are left, each once, in the order of the uninterrupted run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, RandomSampler

from distensor.core.errors import CheckpointError, ConfigError
from distensor.training.data_position import DataPosition, TrackedData
from distensor.training.rng import capture_rng, generators, restore_rng

SAMPLES = 64
BATCH = 4


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """Draws while it loads, as augmentation does."""

    def __getitem__(self, index: int) -> int:
        return index + 1000 * int(torch.randint(9, ())) + 10_000 * random.randrange(9)


def global_order(seed: int, data: Dataset[int] | None = None, workers: int = 0) -> Callable[[], Any]:
    """A loader whose order comes from torch's global generator."""

    def build() -> Any:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        return DataLoader(data or Numbers(), batch_size=BATCH, shuffle=True, num_workers=workers)

    return build


def own_generator(seed: int) -> Callable[[], Any]:
    def build() -> Any:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(Numbers(), batch_size=BATCH, shuffle=True, generator=generator)

    return build


def own_sampler(seed: int) -> Callable[[], Any]:
    def build() -> Any:
        sampler = RandomSampler(Numbers(), generator=torch.Generator().manual_seed(seed))
        return DataLoader(Numbers(), batch_size=BATCH, sampler=sampler)

    return build


def take(data: TrackedData, epochs: int, most: int | None = None) -> list[list[int]]:
    """Batches as `fit` takes them, which draws nothing between them."""
    taken: list[list[int]] = []
    while data.epoch < epochs:
        for batch in data:
            taken.append(batch.tolist())
            if len(taken) == most:
                return taken
    return taken


def save(data: TrackedData) -> tuple[DataPosition, dict[str, torch.Tensor]]:
    data.mark()
    position = DataPosition.from_json(data.position(steps=0).to_json())
    return position, {name: state.clone() for name, state in data.states().items()}


def resumed(build: Callable[[], Any], saved: tuple[DataPosition, dict[str, torch.Tensor]]) -> TrackedData:
    """In a process that has drawn other numbers before."""
    data = TrackedData(build())
    torch.rand(17)
    random.random()
    data.resume_at(*saved)
    return data


def test_dat_03_the_44_samples_left_come_once_and_in_order() -> None:
    build = global_order(3)
    whole = take(TrackedData(build()), 1)
    data = TrackedData(build())
    before = take(data, 1, most=5)
    after = take(resumed(global_order(99), save(data)), 1)
    assert before + after == whole
    left = [sample for batch in after for sample in batch]
    assert len(left) == len(set(left)) == 44


def test_dat_03_also_with_two_loader_processes() -> None:
    build = global_order(3, Noisy(), workers=2)
    whole = take(TrackedData(build()), 1)
    data = TrackedData(build())
    before = take(data, 1, most=5)
    after = take(resumed(global_order(4, Noisy(), workers=2), save(data)), 1)
    assert before + after == whole, "augmentation in the loader's processes goes on too"


@pytest.mark.parametrize("build", [global_order, own_generator, own_sampler])
def test_ckp_09_three_epochs_restarted_at_each_border_shuffle_on(build: Callable[[int], Callable[[], Any]]) -> None:
    whole = take(TrackedData(build(3)()), 3)
    data = TrackedData(build(3)())
    found = take(data, 1)
    for epoch in (2, 3):
        data = resumed(build(99), save(data))
        found += take(data, epoch)
    assert found == whole
    epochs = [found[index : index + 16] for index in (0, 16, 32)]
    assert epochs[0] != epochs[1] != epochs[2], "each epoch has an order of its own"


@settings(max_examples=15, deadline=None)
@given(stops=st.lists(st.integers(1, 20), max_size=3), kind=st.sampled_from([global_order, own_generator, own_sampler]))
def test_wherever_a_run_stops_the_samples_are_those_of_the_uninterrupted_one(stops: list[int], kind: Any) -> None:
    whole = take(TrackedData(kind(7)()), 3)
    data, found = TrackedData(kind(7)()), []
    for stop in stops:
        found += take(data, 3, most=stop)
        data = resumed(kind(1), save(data))
    assert found + take(data, 3) == whole


def test_a_dataset_that_draws_in_this_process_goes_on_as_well() -> None:
    build = global_order(5, Noisy())
    whole = take(TrackedData(build()), 2)
    data = TrackedData(build())
    before = take(data, 2, most=21)
    assert before + take(resumed(global_order(6, Noisy()), save(data)), 2) == whole


def test_numbers_drawn_between_batches_are_those_of_the_moment_of_saving() -> None:
    data = TrackedData(global_order(5)())
    take(data, 1, most=2)
    torch.rand(3)
    saved = save(data)
    expected = (torch.rand(2).tolist(), random.random(), numpy.random.rand())
    resumed(global_order(6), saved)
    assert (torch.rand(2).tolist(), random.random(), numpy.random.rand()) == expected


def test_a_save_after_the_last_batch_of_a_pass_begins_the_next_one() -> None:
    data = TrackedData(global_order(5)())
    assert len(take(data, 1, most=16)) == 16
    saved = save(data)
    assert (saved[0].epoch, saved[0].batches) == (0, 16), "the pass could not know that this was its last"
    assert resumed(global_order(6), saved).epoch == 1


def test_a_batch_that_was_given_and_never_trained_is_given_again() -> None:
    data = TrackedData([torch.tensor(value) for value in range(5)])
    batches = iter(data)
    assert next(batches) == 0
    data.mark()
    assert next(batches) == 1, "the step on it fails"
    position = data.position(steps=1)
    again = TrackedData([torch.tensor(value) for value in range(5)])
    again.resume_at(position, data.states())
    assert take(again, 1) == [1, 2, 3, 4]


def test_plain_lists_and_generators_resume_by_counting() -> None:
    data = TrackedData([torch.tensor(value) for value in range(5)])
    assert take(data, 1, most=2) == [0, 1]
    saved = save(data)
    assert take(resumed(lambda: [torch.tensor(value) for value in range(5)], saved), 2) == [2, 3, 4, 0, 1, 2, 3, 4]

    def stream() -> Iterator[torch.Tensor]:
        yield from map(torch.tensor, range(4))

    data = TrackedData(stream())
    assert take(data, 1, most=3) == [0, 1, 2]
    assert take(resumed(stream, save(data)), 1) == [3]


def test_another_number_of_batches_is_refused() -> None:
    data = TrackedData([torch.tensor(value) for value in range(5)])
    take(data, 1, most=2)
    with pytest.raises(ConfigError, match=r"gives 3 batches a pass, the checkpoint's gave 5.*batch size"):
        resumed(lambda: [torch.tensor(1)] * 3, save(data))


def test_data_that_ends_before_the_position_is_refused() -> None:
    position = DataPosition(epoch=0, batches=4, steps=4, length=None)
    data = TrackedData(iter([1, 2]))
    take_states = TrackedData(iter([1]))
    next(iter(take_states))
    take_states.mark()
    with pytest.raises(ConfigError, match="ended after 2 batches; the checkpoint was made after 4"):
        data.resume_at(position, take_states.states())


def test_a_loader_with_other_generators_is_refused() -> None:
    data = TrackedData(own_generator(1)())
    take(data, 1, most=2)
    with pytest.raises(CheckpointError, match="has 0 generators of its own, the checkpoint was made with 1"):
        resumed(global_order(1), save(data))


def test_a_generator_that_loader_and_sampler_share_counts_once() -> None:
    loader = own_generator(1)()
    assert generators(loader) == [loader.generator]
    assert generators([1, 2]) == []


@pytest.mark.parametrize("broken", ["torch", "python", "numpy"])
def test_a_state_that_is_none_is_refused(broken: str) -> None:
    states = capture_rng([])
    states[broken] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="random number states cannot be restored"):
        restore_rng(states, [])


@pytest.mark.parametrize("content", [{}, {"epoch": 1}, {"epoch": -1, "batches": 0, "steps": 0, "length": None}])
def test_what_is_no_position_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="data position"):
        DataPosition.from_json(content)
