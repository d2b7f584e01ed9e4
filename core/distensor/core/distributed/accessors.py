"""Groups, ranks and sizes of this process in the mesh.

Without torch.distributed a process is alone: every size is 1, every rank 0. With it, but before
`initialize_model_parallel`, all of these raise ConfigError: nobody should take a mesh for granted that is not there.
"""

from __future__ import annotations

import torch.distributed as dist

from distensor.core.distributed.state import CP, DP, NAMES, PP, TP, Axes, ModelParallel, current
from distensor.core.errors import ConfigError


def is_distributed_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_world_size() -> int:
    return dist.get_world_size() if is_distributed_initialized() else 1


def get_global_rank() -> int:
    return dist.get_rank() if is_distributed_initialized() else 0


def is_last_rank() -> bool:
    return get_global_rank() == get_world_size() - 1


def is_last_tp_cp_rank() -> bool:
    return get_tp_rank(with_context_parallel=True) == get_tp_world_size(with_context_parallel=True) - 1


def get_tp_group(check_initialized: bool = True, with_context_parallel: bool = False) -> dist.ProcessGroup | None:
    """The tensor-parallel group, or the one of tensor and context parallel together.

    None without a mesh, if `check_initialized` is False.
    """
    return _group(TP | CP if with_context_parallel else TP, check_initialized)


def get_cp_group(check_initialized: bool = True) -> dist.ProcessGroup | None:
    """The context-parallel group. None without a mesh, if `check_initialized` is False."""
    return _group(CP, check_initialized)


def get_pp_group() -> dist.ProcessGroup:
    """The pipeline's group."""
    return _state(PP).groups[PP]


def get_dp_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """The data-parallel group, or the one of data and context parallel together, over which gradients are summed."""
    axes = _dp(with_context_parallel)
    return _state(axes).groups[axes]


def get_model_parallel_group() -> dist.ProcessGroup:
    """The group of tensor and pipeline parallel together: all ranks that hold parts of one replica's weights."""
    return _state(TP | PP).groups[TP | PP]


def get_tensor_and_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    axes = TP | CP | DP if with_context_parallel else TP | DP
    return _state(axes).groups[axes]


def get_embedding_group() -> dist.ProcessGroup | None:
    """First and last rank of the pipeline, which hold tied embeddings: a group of 1 where the pipeline has one stage.
    None on the ranks between them."""
    return _state(PP).first_and_last


def get_tp_world_size(with_context_parallel: bool = False) -> int:
    return len(_ranks(_tp(with_context_parallel)))


def get_tp_rank(with_context_parallel: bool = False) -> int:
    return _index(_tp(with_context_parallel))


def get_cp_world_size() -> int:
    return len(_ranks(CP))


def get_cp_rank() -> int:
    return _index(CP)


def get_pp_world_size() -> int:
    return len(_ranks(PP))


def get_pp_rank() -> int:
    return _index(PP)


def get_dp_world_size(with_context_parallel: bool = False) -> int:
    return len(_ranks(_dp(with_context_parallel)))


def get_dp_rank(with_context_parallel: bool = False) -> int:
    return _index(_dp(with_context_parallel))


def is_pipeline_first_stage() -> bool:
    return get_pp_rank() == 0


def is_pipeline_last_stage() -> bool:
    return get_pp_rank() == get_pp_world_size() - 1


def get_tensor_model_parallel_ranks(with_context_parallel: bool = False) -> list[int]:
    """World ranks of the tensor-parallel group."""
    return _ranks(_tp(with_context_parallel))


def get_tensor_model_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """World rank of the first member of the tensor-parallel group."""
    return _ranks(_tp(with_context_parallel))[0]


def get_tensor_model_parallel_last_rank(with_context_parallel: bool = False) -> int:
    """World rank of the last member of the tensor-parallel group."""
    return _ranks(_tp(with_context_parallel))[-1]


def get_pipeline_model_parallel_first_rank() -> int:
    """World rank of the first stage of this process's pipeline."""
    return _ranks(PP)[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """World rank of the last stage of this process's pipeline."""
    return _ranks(PP)[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """World rank of the stage after this one; the first follows the last."""
    return _neighbour(1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """World rank of the stage before this one; the last precedes the first."""
    return _neighbour(-1)


def _neighbour(step: int) -> int:
    ranks = _ranks(PP)
    return ranks[(_index(PP) + step) % len(ranks)]


def _tp(with_context_parallel: bool) -> Axes:
    return TP | CP if with_context_parallel else TP


def _dp(with_context_parallel: bool) -> Axes:
    return DP | CP if with_context_parallel else DP


def _state(axes: Axes) -> ModelParallel:
    state = current()
    if state is None:
        raise ConfigError(f"{NAMES[axes]} group is not initialized; call initialize_model_parallel() first")
    return state


def _group(axes: Axes, check_initialized: bool) -> dist.ProcessGroup | None:
    if not check_initialized and current() is None:
        return None
    return _state(axes).groups[axes]


def _ranks(axes: Axes) -> list[int]:
    if current() is None and not is_distributed_initialized():
        return [0]
    return _state(axes).ranks(axes)


def _index(axes: Axes) -> int:
    return _ranks(axes).index(get_global_rank())
