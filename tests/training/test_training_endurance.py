"""Many steps: no step costs more than an early one, and nothing piles up."""

from __future__ import annotations

import gc
import os
import statistics
import time

import mesh_models as models
import psutil
import pytest
from thread_mesh import thread_session

from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, StageMapping
from distensor.training import Trainer

STEPS = 200


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_steps_cost_the_same_and_hold_the_same() -> None:
    """CPU time of all ranks together, which other programs on the machine do not change much."""
    process = psutil.Process(os.getpid())
    model = DistributedModel(models.Decoder(), stage_mapping=StageMapping(models.STAGES))
    seconds, memory = [], []
    batches = models.texts(4)
    with (
        thread_session(2) as session,
        Trainer(model, parallel=ParallelConfig(pipeline_parallel=2), session=session, progress=False) as trainer,
    ):
        for step in range(STEPS):
            started = time.process_time()
            trainer.step(batches[step % len(batches)])
            seconds.append(time.process_time() - started)
            if step in (39, STEPS - 1):
                gc.collect()
                memory.append(process.memory_info().rss)
    early, late = statistics.median(seconds[20:40]), statistics.median(seconds[180:200])
    print(f"step 20-40: {early * 1e3:.1f} ms, 180-200: {late * 1e3:.1f} ms; RSS {memory[1] - memory[0]:+,} bytes")
    assert late < 1.1 * early
    assert memory[1] - memory[0] < 2 << 20
