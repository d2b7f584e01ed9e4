"""Mistakes that users make, each answered by a message that names the thing. None of them needs a worker."""

from __future__ import annotations

import socket

import e2e_models as models
import pytest
import torch
from torch import nn

import distensor as ds
from distensor.core import ParallelConfig
from distensor.core.errors import (
    AuthenticationError,
    BatchError,
    CaptureError,
    ConfigError,
    DistensorError,
    HubUnreachableError,
    SessionError,
    StageMappingError,
    UnsupportedOptionError,
)
from distensor.nn import DistributedModel, StageMapping
from distensor.training import Session, Trainer, current_session
from distensor.training.sessions import open_session


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ([["first", "layers.[0-9]"], ["last"]], r"layers\.\[0-9\]"),
        ([["frist", "layers.*"], ["last"]], "frist.*first"),
        ([["first", "layers.*"]], "last"),
        ([["first", "layers.*"], ["layers.3", "last"]], r"layers\.3"),
    ],
    ids=["range too long", "typing error", "parameter in no stage", "parameter in two stages"],
)
def test_a_stage_mapping_that_does_not_fit_names_pattern_or_parameter(stages: list[list[str]], says: str) -> None:
    with pytest.raises(StageMappingError, match=says):
        DistributedModel(models.MLP(), stage_mapping=StageMapping(stages))


def test_sizes_that_do_not_divide_name_both(mesh: Session) -> None:
    model = DistributedModel(models.MLP(), stage_mapping=StageMapping(models.MLP_TWO))
    with pytest.raises(ConfigError, match=r"2 stages.*pipeline_parallel=4"):
        Trainer(model, parallel=ParallelConfig(pipeline_parallel=4), session=mesh)


def test_a_module_without_a_loss_is_named(mesh: Session) -> None:
    trainer = Trainer(DistributedModel(models.MLP()), parallel=ParallelConfig(), session=mesh)
    with pytest.raises(BatchError, match="loss"):
        trainer.step(models.points(1)[0][0])


def test_a_batch_that_changes_its_dtype_or_form_is_refused(mesh: Session) -> None:
    module = models.MLP()
    with Trainer(DistributedModel(module), parallel=ParallelConfig(), loss=models.classify, session=mesh) as trainer:
        trainer.step(models.points(1)[0])
        inputs, targets = models.points(1)[0]
        with pytest.raises(BatchError, match=r"inputs.*float64"):
            trainer.step((inputs.double(), targets))
        with pytest.raises(BatchError, match=r"targets|keys|item"):
            trainer.step((inputs, targets, targets))


class Switching(nn.Module):
    """Its control flow depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, models.CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(inputs)
        return out * 2 if bool((out.sum() > 0).item()) else out


def test_control_flow_over_values_is_named(mesh: Session) -> None:
    trainer = Trainer(DistributedModel(Switching()), parallel=ParallelConfig(), loss=models.classify, session=mesh)
    with pytest.raises(CaptureError, match="depends on the values"):
        trainer.step(models.points(1)[0])


def test_a_second_session_is_refused(mesh: Session) -> None:
    assert current_session() is mesh
    with pytest.raises(SessionError, match="shutdown"):
        ds.init(mode="local", workers=1)


def test_a_trainer_token_joins_from_another_process(mesh: Session) -> None:
    """`mode="hub"` is what a trainer on another machine uses; here the hub is the local session's."""
    assert mesh.cluster is not None
    other = open_session("hub", token=mesh.cluster.trainer_token, address=mesh.cluster.address)
    try:
        assert other.query_mesh().available_workers == mesh.query_mesh().available_workers
    finally:
        other.close()


class TestModes:
    """No session is needed to be told that the words are wrong."""

    @pytest.fixture(autouse=True)
    def _fresh(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("distensor.training.sessions._current", None)
        monkeypatch.delenv("DISTENSOR_TOKEN", raising=False)

    def test_no_session(self) -> None:
        with pytest.raises(SessionError, match=r"distensor\.init"):
            ds.query_mesh()

    def test_an_unknown_mode(self) -> None:
        with pytest.raises(ConfigError, match="mode='lokal'"):
            ds.init(mode="lokal")

    def test_cloud_is_not_built(self) -> None:
        with pytest.raises(UnsupportedOptionError, match="cloud"):
            ds.init(mode="cloud", api_key="dt_u_x")

    def test_hub_without_a_token(self) -> None:
        with pytest.raises(ConfigError, match="DISTENSOR_TOKEN"):
            ds.init(mode="hub")

    @pytest.mark.parametrize("token", ["", "dtj_", "dtj_abcdef", "hello", "dtj_" + "A" * 200])
    def test_a_token_that_is_none(self, token: str) -> None:
        with pytest.raises(DistensorError) as caught:
            ds.init(mode="hub", token=token)
        assert token == "" or token not in str(caught.value), "no secret in an error"

    def test_a_wrong_number_of_workers(self) -> None:
        with pytest.raises(ConfigError, match="workers=0"):
            ds.init(mode="local", workers=0)

    def test_a_hub_that_is_not_there_is_named(self, mesh: Session) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            address = "{}:{}".format(*closed.getsockname())
        with pytest.raises(HubUnreachableError, match=address):
            ds.init(mode="hub", token=token_for(mesh, address=address))

    def test_a_wrong_secret_is_refused(self, mesh: Session) -> None:
        with pytest.raises(AuthenticationError):
            ds.init(mode="hub", token=token_for(mesh, secret="x" * 43))


def token_for(mesh: Session, **changes: str) -> str:
    """The session's trainer token with another address or secret."""
    import dataclasses

    from distensor.comm.address import parse_address
    from distensor.comm.tokens import decode_token

    assert mesh.cluster is not None
    token = decode_token(mesh.cluster.trainer_token)
    if "address" in changes:
        token = dataclasses.replace(token, address=parse_address(changes["address"]))
    if "secret" in changes:
        token = dataclasses.replace(token, secret=changes["secret"])
    return token.encode()
