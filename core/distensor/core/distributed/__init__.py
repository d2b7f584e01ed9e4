"""Process-group helpers for training scripts of their own, over torch.distributed and any of its backends.

The mesh (`initialize_model_parallel` and the accessors), splitting and gathering along the sequence, broadcasts that
check before they send, the pipeline scheduler, averaged weights. Needs torch, so `distensor.core` does not import it.

Where a helper takes a group, None means 'axis disabled': the same object comes back. Before data moves, the ranks tell
each other what they were called with; where they disagree, every one of them raises `GroupMismatchError`.
"""

from __future__ import annotations

from distensor.core.distributed.accessors import (
    get_cp_group,
    get_cp_rank,
    get_cp_world_size,
    get_dp_group,
    get_dp_rank,
    get_dp_world_size,
    get_embedding_group,
    get_global_rank,
    get_model_parallel_group,
    get_pipeline_model_parallel_first_rank,
    get_pipeline_model_parallel_last_rank,
    get_pipeline_model_parallel_next_rank,
    get_pipeline_model_parallel_prev_rank,
    get_pp_group,
    get_pp_rank,
    get_pp_world_size,
    get_tensor_and_data_parallel_group,
    get_tensor_model_parallel_last_rank,
    get_tensor_model_parallel_ranks,
    get_tensor_model_parallel_src_rank,
    get_tp_group,
    get_tp_rank,
    get_tp_world_size,
    get_world_size,
    is_distributed_initialized,
    is_last_rank,
    is_last_tp_cp_rank,
    is_pipeline_first_stage,
    is_pipeline_last_stage,
)
from distensor.core.distributed.broadcasting import (
    broadcast,
    broadcast_dtensor_model_states,
    broadcast_split_tensor,
    get_local_tensor_if_dtensor,
)
from distensor.core.distributed.ema import DTensorFastEmaModelUpdater
from distensor.core.distributed.gather import (
    GatherGradient,
    cat_outputs_cp,
    cat_outputs_cp_object_list,
    cat_outputs_cp_with_grad,
)
from distensor.core.distributed.launch import dist_init
from distensor.core.distributed.pipeline import PPScheduler, init_pp_scheduler, pp_scheduler
from distensor.core.distributed.printing import print_per_rank, print_rank_0
from distensor.core.distributed.split import find_split, split_factors, split_inputs_cp, split_inputs_cp_object_list
from distensor.core.distributed.state import (
    destroy_model_parallel,
    initialize_model_parallel,
    model_parallel_is_initialized,
)

__all__ = [
    # launch and mesh
    "dist_init",
    "initialize_model_parallel",
    "destroy_model_parallel",
    "model_parallel_is_initialized",
    "is_distributed_initialized",
    # groups, ranks, sizes
    "get_world_size",
    "get_global_rank",
    "is_last_rank",
    "is_last_tp_cp_rank",
    "get_tp_group",
    "get_tp_rank",
    "get_tp_world_size",
    "get_cp_group",
    "get_cp_rank",
    "get_cp_world_size",
    "get_pp_group",
    "get_pp_rank",
    "get_pp_world_size",
    "get_dp_group",
    "get_dp_rank",
    "get_dp_world_size",
    "get_model_parallel_group",
    "get_tensor_and_data_parallel_group",
    "get_embedding_group",
    "get_tensor_model_parallel_ranks",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_last_rank",
    "get_pipeline_model_parallel_first_rank",
    "get_pipeline_model_parallel_last_rank",
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    # context parallel
    "split_inputs_cp",
    "split_inputs_cp_object_list",
    "cat_outputs_cp",
    "cat_outputs_cp_with_grad",
    "cat_outputs_cp_object_list",
    "GatherGradient",
    "find_split",
    "split_factors",
    # broadcasts
    "broadcast",
    "broadcast_split_tensor",
    "broadcast_dtensor_model_states",
    "get_local_tensor_if_dtensor",
    # pipeline
    "PPScheduler",
    "init_pp_scheduler",
    "pp_scheduler",
    # averaged weights
    "DTensorFastEmaModelUpdater",
    # output
    "print_rank_0",
    "print_per_rank",
]
