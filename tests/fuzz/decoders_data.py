"""Decoders of the data plane, of stage programs, of what trainer and workers say to each other, and of checkpoints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from distensor.aggregator.words import Hello, read_hello, read_set, write_set
from distensor.core.distributed import objects
from distensor.node.ipc import parse_assignment, parse_line, parse_reassignment, parse_topology
from distensor.node.notebook import parse_note
from distensor.node.orders import (
    parse_number,
    parse_plan,
    parse_step,
    parse_wanted,
    parse_witness,
    split_batches,
    split_parts,
)
from distensor.node.pacer import Pacer
from distensor.node.recovery import parse_resolve
from distensor.node.sharing import parse_join, parse_share
from distensor.optim import OptimizerSpec
from distensor.optim.distro import codec as sparse_codec
from distensor.optim.distro.layout import make_layout
from distensor.optim.distro.packing import Packing
from distensor.optim.distro.selection import select
from distensor.optim.schedules import LrSchedule
from distensor.optim.sparse_spec import SparseRule, SparseSpec
from distensor.program import Limits, StageProgram, capture, cut
from distensor.program.bundle import load_stage, save_stage
from distensor.program.reading import parse_json
from distensor.program.values import DType
from distensor.testing.clock import FakeClock
from distensor.testing.fuzzing import Decoder
from distensor.training.checkpoint_manifest import FileEntry, Group, Manifest, TensorEntry, TensorSpec
from distensor.training.checkpoint_shards import read_tensors
from distensor.training.data_position import DataPosition
from distensor.training.joining import read_join
from distensor.training.members import read_status
from distensor.training.replies import Reply, read_loss, read_step
from distensor.training.spot_checks import read_sketch
from distensor.training.taking_over import read_handed_over
from distensor.transport import Channel, FrameLimits, Message, Tag
from distensor.transport.frames import FrameKind, decode_prefix, encode_prefix
from distensor.transport.local_lanes import _parse as parse_invitation
from distensor.transport.tensors import decode, decode_named, encode, encode_named
from distensor.transport.wire import WireClosedError, WireReader

EPOCH = 3
LIMITS = Limits(max_bytes=1 << 28, max_work=1e11)
FRAME_LIMITS = FrameLimits(header=1 << 16, body=1 << 20, queued=1 << 20)
PLAN: dict[str, Any] = {
    "schedule": "gpipe", "stages": 2, "optimizer": {"name": "sgd", "lr": 0.1, "options": {"momentum": 0.9}},
    "clip_norm": 1, "norm_type": "2", "seed": 7, "tied": [[[0, "embed"], [1, "head"]]], "sharded": ["embed"],
    "recompute": "layer", "sync": "zero3",
}  # fmt: skip
SUMS = {"loss": 1.5, "weight": 8.0, "norm": 0.5}
SHARE = {"sources": [0, 1], "joiners": [2], "step": 4, "begin": True}
JOIN = {"sources": [0, 1], "offers": [{"joiner": 2, "number": 1, "wanted": ["0/a"]}]}
JOINED = {"left": 3, "number": 1, "wanted": {"0": ["0/a"]}}
RESOLVE = {"step": 4, "sums": SUMS}
STATUS = {"step": 4, "prepared": None, "sums": SUMS, "exchanges": 2, "missing": 0}
STEP: dict[str, Any] = {
    "step": 3, "lr": 0.1, "total_steps": 5, "tokens_per_second": 12.5, "warm_up": [3, 1], "measure": True,
    "micro_batches": 2, "number": 4, "wanted": ["0/weight"],
}  # fmt: skip
ASSIGN: dict[str, Any] = {
    "type": "assign", "job": "j_1", "job_name": "tiny", "epoch": 3, "rank": 1, "parallel": {"data_parallel": 2},
    "device": {"kind": "cpu", "id": "cpu"}, "listen_host": "127.0.0.1", "memory_limit": 1 << 30, "threads": 2,
}  # fmt: skip
TOPOLOGY: dict[str, Any] = {
    "type": "topology", "job": "j_1", "epoch": 3,
    "members": [{"rank": 0, "node": "a", "host": "127.0.0.1", "hosts": ["::1"], "port": 1}], "relay": "h:1",
    "certificate": {"rank": 0, "certificate_pem": "c", "authority_pem": "a"},
}  # fmt: skip
ANSWER: dict[str, Any] = {
    "loss": 2.5, "weight": 64.0, "grad_norm": 1.5, "committed": True, "compute_seconds": 0.1, "sync_seconds": 0.1,
    "wait_seconds": 0.0, "links": [{"peer": 0, "sent": 10, "path": "lan"}],
    "memory": {"weights": 1, "optimizer": 2, "peak": 3},
    "figures": {"forward": 0.1, "backward": 0.2, "before": None, "after": {"latency": 0.1, "occupied": 0.0},
                "most_in_flight": 2},
}  # fmt: skip


def of_json(name: str, read: Callable[[Any], object], *seeds: Any) -> Decoder:
    """A reader of what JSON has become; bytes that are no JSON object are refused before it."""

    def run(data: bytes) -> object:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return read(value) if isinstance(value, dict) else None

    return Decoder(name=name, decode=run, seeds=tuple(json.dumps(seed).encode() for seed in seeds))


def framed(form: Callable[[bytes, bytes], object], *messages: Message) -> tuple[Callable[[bytes], object], Any]:
    """Header and body in one: two bytes with the length of the header before them."""

    def run(data: bytes) -> object:
        size = int.from_bytes(data[:2])
        return form(data[2 : 2 + size], bytearray(data[2 + size :]))

    return run, tuple(len(each.header).to_bytes(2) + each.header + bytes(each.body) for each in messages)


def _message(header: bytes, buffers: Any) -> Message:
    return Message(header, b"".join(bytes(buffer) for buffer in buffers))


class _Recorded:
    """A connection that carries these bytes and then ends."""

    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)

    def read(self, size: int, view: memoryview) -> int:
        count = min(size, len(self._left))
        view[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def _read_frames(data: bytes) -> None:
    reader = WireReader(_Recorded(data), EPOCH, FRAME_LIMITS)  # type: ignore[arg-type]
    with suppress(WireClosedError):
        while True:
            reader.frame()


def frames() -> list[Decoder]:
    prefix = encode_prefix(FrameKind.DATA, EPOCH, Tag(Channel.GRADIENT, 7, 1, 2), 5, 11)
    life = encode_prefix(FrameKind.KEEP_ALIVE, EPOCH, Tag(Channel.META, slot=9), 0, 0)
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bool), "c": torch.zeros(0, 4)}
    plain, plain_seeds = framed(lambda h, b: decode(Message(h, b)), _message(*encode(list(tensors.values()))))
    named, named_seeds = framed(
        lambda h, b: decode_named(Message(h, b)), _message(*encode_named(tensors, {"part": 0, "meta": {"step": 1}}))
    )
    return [
        Decoder(
            name="transport.frames:decode_prefix",
            decode=lambda data: decode_prefix(data, epoch=EPOCH, limits=FRAME_LIMITS),
            seeds=(prefix, life),
        ),
        Decoder(
            name="transport.wire:WireReader.frame",
            decode=_read_frames,
            seeds=(prefix + b"headabodyabodyab" + life, life * 3),
        ),
        Decoder(name="transport.tensors:decode", decode=plain, seeds=plain_seeds),
        Decoder(name="transport.tensors:decode_named", decode=named, seeds=named_seeds),
        Decoder(
            name="transport.local_lanes:_parse",
            decode=parse_invitation,
            seeds=(b"local " + b"a" * 32 + b" " + b"b" * 64 + b" " + b"c" * 64,),
        ),
        Decoder(
            name="core.distributed.objects:decode",
            decode=objects.decode,
            seeds=(objects.encode({"a": [1, (2.5, None)], "b": b"bytes"}), objects.encode([True, "text"])),
        ),
    ]


def _stage() -> tuple[StageProgram, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).train()
    batch = (torch.randn(5, 4), torch.randint(0, 3, (5,)))
    pieces = cut(capture(module, batch, loss=lambda out, given: nn.functional.cross_entropy(out, given[1])))
    return pieces.programs[0], {name: each.detach() for name, each in module.named_parameters()}


def programs(folder: Path) -> list[Decoder]:
    program, weights = _stage()
    text = program.to_json()
    digest = save_stage(folder, program, weights)
    path = folder / f"{digest}.safetensors"

    def stored(data: bytes) -> object:
        path.write_bytes(data)
        return load_stage(folder, digest, LIMITS)

    return [
        Decoder(
            name="program.stage_program:StageProgram.from_json",
            decode=lambda data: StageProgram.from_json(data, LIMITS),
            seeds=(text,),
            cost=20,
        ),
        Decoder(name="program.reading:parse_json", decode=lambda data: parse_json(data, LIMITS), seeds=(text,), cost=4),
        Decoder(name="program.bundle:load_stage", decode=stored, seeds=(path.read_bytes(),), cost=40),
    ]


HANDED = {"note": {"position": {"epoch": 1}, "run": {}}, "unpaid": [[3, [1, 2, 2]]], "load": {"stages": 1}}


def orders() -> list[Decoder]:
    """What a worker hears from the trainer and from its supervisor, and a trainer from its workers."""

    def reply(value: Any) -> Reply:
        return Reply(rank=1, who="rank 1 on node 'a'", meta=value, tensors={})

    def handed(value: Any) -> Reply:
        return dataclasses.replace(reply(value), tensors={"record": torch.ones(2, 4)})

    batches = {"0/x": torch.ones(2), "1/x": torch.ones(2)}
    parts = {"program/0": torch.ones(3, dtype=torch.uint8), "weight/0/w": torch.ones(2)}
    named, seeds = framed(
        lambda h, b: _split(*decode_named(Message(h, b))),
        *(_message(*encode_named(tensors, {"micro_batches": 2})) for tensors in (batches, parts)),
    )
    assignment = parse_assignment(ASSIGN)
    specs = [SparseSpec(rule=rule) for rule in SparseRule]
    optimizers = (PLAN["optimizer"], OptimizerSpec(name="adamw", lr=0.1, options={}, sparse=specs[0]).to_json())
    return [
        of_json("node.orders:parse_plan", parse_plan, PLAN, {**PLAN, "optimizer": optimizers[1]}),
        of_json("node.orders:parse_step", parse_step, STEP),
        of_json(
            "node.orders:parse_witness",
            lambda value: parse_witness(value, {"witness/0/x": torch.ones(2)}),
            {"witness": {"replica": 1, "micro_batches": 2}},
        ),
        of_json("training.spot_checks:read_sketch", read_sketch, {"0/w": [1.5, 2.5], "0/b": [0, 1]}),
        of_json("node.orders:parse_number", lambda value: parse_number(value, "number"), STEP),
        of_json("node.orders:parse_wanted", parse_wanted, STEP),
        Decoder(name="node.orders:split_batches", decode=named, seeds=seeds),
        of_json("node.ipc:parse_assignment", parse_assignment, ASSIGN),
        of_json("node.ipc:parse_topology", parse_topology, TOPOLOGY),
        of_json("node.ipc:parse_reassignment", lambda value: parse_reassignment(value, assignment), ASSIGN),
        of_json("node.sharing:parse_share", lambda value: parse_share(value, 4), SHARE),
        of_json("node.sharing:parse_join", lambda value: parse_join(value, 4), JOIN),
        of_json("training.joining:read_join", lambda value: read_join(reply(value), (0, 1)), JOINED),
        of_json("node.recovery:parse_resolve", parse_resolve, RESOLVE),
        of_json("node.notebook:parse_note", lambda value: parse_note(value, {}), {"note": {"parts": ["a"], "paid": 3}}),
        of_json("training.taking_over:read_handed_over", lambda value: read_handed_over(handed(value)), HANDED),
        of_json("training.members:read_status", lambda value: read_status(reply(value)), STATUS),
        Decoder(
            name="node.ipc:parse_line",
            decode=lambda data: parse_line(data.decode("utf-8", "replace")),
            seeds=(json.dumps(ASSIGN).encode(),),
        ),
        of_json("node.pacer:Pacer.obey", Pacer(FakeClock()).obey, {"duty": 0.5, "send_rate": 1e6, "receive_rate": 2e6}),
        of_json("training.replies:read_loss", lambda value: read_loss(reply(value)), ANSWER),
        of_json("training.replies:read_step", lambda value: read_step(reply(value), range(2)), ANSWER),
        of_json("optim.spec:OptimizerSpec.from_json", OptimizerSpec.from_json, *optimizers),
        of_json("optim.sparse_spec:SparseSpec.from_json", SparseSpec.from_json, *(spec.to_json() for spec in specs)),
        of_json("optim.schedules:LrSchedule.from_json", LrSchedule.from_json, LrSchedule(curve="cosine").to_json()),  # type: ignore[arg-type]
    ]  # fmt: skip


def _split(meta: Any, tensors: Any) -> object:
    return split_parts(tensors) if "program/0" in tensors else split_batches(meta, tensors)


def sparse() -> list[Decoder]:
    layout = make_layout([(70, 30), (5,), (130,)], k=8)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in layout.shapes]
    found = []
    for bits in (1, 2):
        matrices = zip(Packing(layout).pack(values), layout.blocks, strict=True)
        found.append(sparse_codec.encode(layout, [select(m, block.kept, bits).rows for m, block in matrices]))
    group = (0, 2, 4)
    hello = Hello(group=group, site=(0, 2), others=(9,), patience=5.0)
    header, body = write_set(group, {0: b"a", 4: found[0]}, leave_out=0)
    return [
        Decoder(name="aggregator.words:read_hello", decode=lambda data: read_hello(data, 2), seeds=(hello.to_bytes(),)),
        Decoder(
            name="aggregator.words:read_set",
            decode=lambda data: read_set(group, Message(data[:24], data[24:]), own=(0, b"a")),
            seeds=(header + b"".join(map(bytes, body)),),
        ),
        Decoder(
            name="optim.distro.codec:decode",
            decode=lambda data: sparse_codec.decode(layout, data),
            seeds=tuple(found),
            cost=4,
        ),
    ]


def checkpoints(folder: Path) -> list[Decoder]:
    weight = torch.ones(2, 3)
    path = folder / "model-0.safetensors"
    path.write_bytes(save({"w": weight}))
    spec = TensorSpec(dtype=DType.FLOAT32, shape=(2, 3))
    manifest = Manifest(
        step=3,
        serial=1,
        tensors={Group.MODEL: {"w": TensorEntry(spec=spec, file=path.name)}},
        aliases={"v": "w"},
        files={path.name: FileEntry(size=path.stat().st_size, sha256="ab" * 32)},
        run={"lr": 0.1},
        position={"epoch": 0, "batches": 1, "steps": 3, "length": None},
    )
    data = path.read_bytes()

    def shards(damaged: bytes) -> object:
        path.write_bytes(damaged)
        return list(read_tensors(folder, manifest, Group.MODEL))

    return [
        Decoder(
            name="training.checkpoint_manifest:Manifest.from_json",
            decode=lambda text: Manifest.from_json(text, where="manifest.json"),
            seeds=(manifest.to_json(),),
        ),
        Decoder(name="training.checkpoint_shards:read_tensors", decode=shards, seeds=(data,), cost=4),
        of_json("training.data_position:DataPosition.from_json", DataPosition.from_json, dict(manifest.position or {})),
    ]


def decoders(folder: Path) -> list[Decoder]:
    """`folder`: an empty one of its own."""
    return [*frames(), *programs(folder), *orders(), *sparse(), *checkpoints(folder)]
