"""What the three wheels promise to each other and to their users."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import repo_rules as rules

import distensor
from distensor_tui.table import VERBS

SUPERVISOR = "distributions/distensor-server"
DASHBOARD = "distributions/distensor-tui"

# The public surface. Changing it means editing this list, so that nobody changes it unawares.
SURFACE = {
    "distensor": [
        "DistributedModel",
        "History",
        "ParallelConfig",
        "Plan",
        "Replicate",
        "Shard",
        "ShardingSpec",
        "StageMapping",
        "StepResult",
        "Trainer",
        "__version__",
        "init",
        "plan",
        "query_mesh",
        "session",
        "shutdown",
    ],
    "distensor.core": [
        "DRIVER_RANK",
        "SYSTEM_CLOCK",
        "Axis",
        "Clock",
        "Coordinates",
        "DeviceId",
        "Epoch",
        "Generation",
        "JobId",
        "NodeId",
        "ParallelConfig",
        "Rank",
        "RankLayout",
        "Reading",
        "SystemClock",
        "Unavailable",
        "WorkerId",
        "value_or",
    ],
    "distensor.core.distributed": [
        "DTensorFastEmaModelUpdater",
        "GatherGradient",
        "PPScheduler",
        "broadcast",
        "broadcast_dtensor_model_states",
        "broadcast_split_tensor",
        "cat_outputs_cp",
        "cat_outputs_cp_object_list",
        "cat_outputs_cp_with_grad",
        "destroy_model_parallel",
        "dist_init",
        "find_split",
        "get_cp_group",
        "get_cp_rank",
        "get_cp_world_size",
        "get_dp_group",
        "get_dp_rank",
        "get_dp_world_size",
        "get_embedding_group",
        "get_global_rank",
        "get_local_tensor_if_dtensor",
        "get_model_parallel_group",
        "get_pipeline_model_parallel_first_rank",
        "get_pipeline_model_parallel_last_rank",
        "get_pipeline_model_parallel_next_rank",
        "get_pipeline_model_parallel_prev_rank",
        "get_pp_group",
        "get_pp_rank",
        "get_pp_world_size",
        "get_tensor_and_data_parallel_group",
        "get_tensor_model_parallel_last_rank",
        "get_tensor_model_parallel_ranks",
        "get_tensor_model_parallel_src_rank",
        "get_tp_group",
        "get_tp_rank",
        "get_tp_world_size",
        "get_world_size",
        "init_pp_scheduler",
        "initialize_model_parallel",
        "is_distributed_initialized",
        "is_last_rank",
        "is_last_tp_cp_rank",
        "is_pipeline_first_stage",
        "is_pipeline_last_stage",
        "model_parallel_is_initialized",
        "pp_scheduler",
        "print_per_rank",
        "print_rank_0",
        "split_factors",
        "split_inputs_cp",
        "split_inputs_cp_object_list",
    ],
    "distensor.nn": [
        "DistributedModel",
        "Placement",
        "Replicate",
        "Shard",
        "ShardingSpec",
        "StageMapping",
        "suggest_sharding",
    ],
}


# What training scripts write as keywords.
KEYWORDS = {
    "distensor:Trainer": {
        "model",
        "parallel",
        "optimizer",
        "lr",
        "optimizer_options",
        "lr_schedule",
        "ema",
        "loss",
        "loss_weight",
        "schedule",
        "micro_batches",
        "sync",
        "sync_options",
        "clip_norm",
        "norm_type",
        "precision",
        "recompute",
        "accumulate",
        "context_attention",
        "context_shares",
        "checkpoint",
        "checkpoint_every",
        "checkpoint_keep",
        "elastic",
        "spot_checks",
        "wait",
        "priority",
        "backend",
        "seed",
        "name",
        "progress",
        "session",
    },
    "distensor:ParallelConfig": {
        "data_parallel",
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
        "order",
    },
    "distensor.core.distributed:initialize_model_parallel": {
        "tp_size",
        "pp_size",
        "cp_size",
        "nccl_communicator_config_path",
        "distributed_timeout_minutes",
        "order",
    },
    "distensor.core.distributed:destroy_model_parallel": {"destroy_process_groups"},
    "distensor:plan": {
        "model",
        "parallel",
        "batch",
        "loss",
        "loss_weight",
        "schedule",
        "micro_batches",
        "precision",
        "recompute",
        "sync",
        "context_attention",
        "context_shares",
        "mesh",
    },
    "distensor.nn:suggest_sharding": {"module"},
    "distensor:init": {"mode", "workers", "nodes", "node_names", "token", "api_key", "address", "clock"},
    "distensor:DistributedModel": {"module", "stage_mapping", "tp_spec"},
}


def definition(folder: str) -> dict[str, Any]:
    return tomllib.loads((rules.ROOT / folder / "pyproject.toml").read_text())


def project(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = definition(folder)["project"]
    return found


def requirement_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", requirement)[0].lower() for requirement in requirements}


def test_the_three_versions_are_equal() -> None:
    versions = {project(folder)["version"] for folder in (".", SUPERVISOR, DASHBOARD)}
    assert versions == {distensor.__version__}


def test_the_supervisor_needs_the_worker_of_its_own_version() -> None:
    assert f"distensor[worker]=={distensor.__version__}" in project(SUPERVISOR)["dependencies"]


def test_the_dashboard_needs_only_textual_and_platformdirs() -> None:
    assert requirement_names(project(DASHBOARD)["dependencies"]) == {"textual", "platformdirs"}


def test_the_library_without_extras_needs_no_torch() -> None:
    assert not {"torch", "numpy", "mlx", "transformers"} & requirement_names(project(".")["dependencies"])


def test_the_console_scripts_have_one_owner_each() -> None:
    assert "scripts" not in project(".")
    assert project(SUPERVISOR)["scripts"] == {"distensor-server": "distensor_server.cli:main"}
    assert project(DASHBOARD)["scripts"] == {"distensor": "distensor_tui.cli:main"}


def entry_points(folder: str) -> dict[str, str]:
    found: dict[str, str] = project(folder).get("entry-points", {}).get("distensor.verbs", {})
    return found


@pytest.mark.parametrize(
    ("verb", "target"), [pair for folder in (".", SUPERVISOR) for pair in sorted(entry_points(folder).items())]
)
def test_every_verb_is_there(verb: str, target: str) -> None:
    module, _, function = target.partition(":")
    assert verb.isalpha()
    assert callable(getattr(importlib.import_module(module), function))


IN_PART = {"jobs"}
"""Commands of the dashboard's that ask the library for a part of their work, through an entry point."""


def test_the_table_of_commands_names_what_the_wheels_have() -> None:
    """A command without an entry point is marked as planned, and none is forgotten."""
    table = {verb.name: verb.wheel.partition("[")[0] for verb in VERBS if verb.wheel and not verb.planned}
    assert {verb.name for verb in VERBS if verb.module} >= IN_PART
    assert table == {
        **dict.fromkeys(entry_points(".").keys() - IN_PART, "distensor"),
        **dict.fromkeys(entry_points(SUPERVISOR), "distensor-server"),
    }


def test_every_requirement_has_its_exact_version() -> None:
    pins = (rules.ROOT / "constraints.txt").read_text().splitlines()
    pinned = {pin.partition("==")[0].lower() for pin in pins if "==" in pin}
    library = project(".")
    wanted = requirement_names(library["dependencies"])
    wanted |= requirement_names(library["optional-dependencies"]["worker"])
    wanted |= requirement_names(library["optional-dependencies"]["dev"])
    wanted |= requirement_names(project(SUPERVISOR)["dependencies"])
    wanted |= requirement_names(project(DASHBOARD)["dependencies"])
    assert wanted - pinned - {"distensor"} == set()
    assert next(pin for pin in pins if not pin.startswith("#")).startswith("torch==")


def test_both_distributions_share_one_build_hook() -> None:
    hooks = {(rules.ROOT / folder / "hatch_build.py").read_text() for folder in (SUPERVISOR, DASHBOARD)}
    assert len(hooks) == 1


@pytest.mark.parametrize("package", ["core/distensor", "distensor_server", "distensor_tui"])
def test_every_package_says_that_it_is_typed(package: str) -> None:
    assert (rules.ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize("module", SURFACE)
def test_the_public_surface_is_the_frozen_list(module: str) -> None:
    assert sorted(importlib.import_module(module).__all__) == sorted(SURFACE[module])


@pytest.mark.parametrize("module", SURFACE)
def test_every_public_name_resolves(module: str) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in SURFACE[module] if not hasattr(loaded, name)] == []


@pytest.mark.parametrize("target", KEYWORDS)
def test_the_keywords_are_the_frozen_list(target: str) -> None:
    module, _, name = target.partition(":")
    signature = inspect.signature(getattr(importlib.import_module(module), name))
    assert set(signature.parameters) == KEYWORDS[target]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"'distensor' has no attribute 'Trianer'.*Trainer"):
        _ = distensor.Trianer


def test_dir_lists_the_public_surface() -> None:
    assert dir(distensor) == sorted(SURFACE["distensor"])


def test_nothing_in_the_tree_knows_the_machine_it_was_written_on() -> None:
    """Settings of a registry, an index or a proxy belong to the machine, not to the project."""
    private = re.compile(r"(extra-)?index-url\s*=|--index-url|--find-links|--proxy|--trusted-host")
    folders = [rules.ROOT, *(path for path in rules.ROOT.glob("distributions/*")), rules.ROOT / ".ci"]
    files: list[Path] = [path for folder in folders for path in folder.iterdir() if path.is_file()]
    assert [str(path) for path in files if private.search(path.read_text())] == []
