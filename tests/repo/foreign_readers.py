"""Readers of what other processes wrote: which are tried by the fuzzer (tests/fuzz), and which need not be."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
READERS = re.compile(r"(decode|parse|read|load)(_[a-z0-9_]+)?|from_(json|answer)|.*_from_json")
_MAYBE = re.compile(r"def (decode|parse|read|load|from_|\w+_from_json)")
SOURCES = {"distensor": ROOT / "core/distensor", "distensor_server": ROOT / "distensor_server",
           "distensor_tui": ROOT / "distensor_tui"}  # fmt: skip

TRIED = (
    "aggregator.words:read_hello",
    "aggregator.words:read_set",
    "comm.address:parse_address",
    "comm.codec:read_job_state",
    "comm.codec:read_mesh",
    "comm.codec:read_reconfiguration",
    "comm.codec:read_take_over",
    "comm.codec:read_spec",
    "comm.codec:read_update",
    "comm.credential:load_credential",
    "comm.job_codec:read_page",
    "comm.job_codec:read_query",
    "comm.job_codec:read_report",
    "comm.keys:decode_key",
    "comm.progress_codec:read_progress",
    "comm.relay_words:read_line",
    "comm.relay_words:read_nonce",
    "comm.relay_words:read_wish",
    "comm.server:read_bearer",
    "comm.statement_codec:read_query",
    "comm.statement_codec:read_statement",
    "comm.statement_codec:read_units",
    "comm.statement_codec:read_units_query",
    "comm.stream_codec:read_hub_message",
    "comm.stream_codec:read_node_message",
    "comm.tokens:_from_fields",
    "comm.tokens:decode_node_token",
    "comm.tokens:decode_token",
    "core.distributed.objects:decode",
    "core.ids:parse_data_plane_uri",
    "distensor_server.breakers:_parse",
    "distensor_server.config:read_settings_file",
    "distensor_server.devices.detect:read_answer",
    "distensor_server.devices.measured:from_answer",
    "distensor_server.devices.measured:from_json",
    "distensor_server.gates.traffic:Traffic.load",
    "distensor_server.holds:load_hold",
    "distensor_server.holds:parse_drain",
    "distensor_server.holds:parse_pause",
    "distensor_server.keys.files:read_text",
    "distensor_server.keys.login:read_key",
    "distensor_server.localserver:_parse_request",
    "distensor_server.messages:parse_worker_line",
    "distensor_server.ownersfile:read_owners_file",
    "distensor_server.policy.table:Key.parse",
    "distensor_server.policy.windows:parse_windows",
    "distensor_server.receipts:_parse",
    "distensor_server.receipts:load_totals",
    "distensor_server.service.launchd:parse_print",
    "distensor_server.statedir:read_json",
    "distensor_server.updates:_parse_checked",
    "distensor_server.updates:parse_index",
    "distensor_tui.income:read_income",
    "distensor_tui.lastseen:load",
    "distensor_tui.recording:load",
    "distensor_tui.sections:apply",
    "distensor_tui.settings:read_limits",
    "distensor_tui.wire:decode",
    "hub.payouts.http_api:read_answer",
    "hub.payouts.stripe:read_transfer",
    "hub.payouts.webhooks:Webhooks.read_event",
    "hub.pki:Authority.sign",
    "hub.pki:Authority.sign_anew",
    "node.ipc:parse_assignment",
    "node.ipc:parse_line",
    "node.ipc:parse_reassignment",
    "node.ipc:parse_topology",
    "node.notebook:parse_note",
    "node.orders:parse_number",
    "node.orders:parse_plan",
    "node.orders:parse_step",
    "node.orders:parse_wanted",
    "node.orders:split_batches",
    "node.orders:parse_witness",
    "node.pacer:Pacer.obey",
    "node.recovery:parse_resolve",
    "node.sharing:parse_join",
    "node.sharing:parse_share",
    "optim.distro.codec:decode",
    "optim.schedules:LrSchedule.from_json",
    "optim.sparse_spec:SparseSpec.from_json",
    "optim.spec:OptimizerSpec.from_json",
    "program.bundle:load_stage",
    "program.reading:parse_json",
    "program.stage_program:StageProgram.from_json",
    "training.checkpoint_manifest:Manifest.from_json",
    "training.checkpoint_shards:read_tensors",
    "training.data_position:DataPosition.from_json",
    "training.joining:read_join",
    "training.members:read_status",
    "training.spot_checks:read_sketch",
    "training.taking_over:read_handed_over",
    "training.replies:read_loss",
    "training.replies:read_step",
    "transport.frames:decode_prefix",
    "transport.identity:peer_identity",
    "transport.local_lanes:_parse",
    "transport.tensors:decode",
    "transport.tensors:decode_named",
    "transport.wire:WireReader.frame",
)

WORDS = "words of the user's own script or command line, checked with an error that the user reads"
INNER = "a part of another reader that is tried: "
OUTSIDE = {
    "comm.codec:read_name": INNER + "all of comm.codec",
    "comm.codec:read_text": INNER + "all of comm.codec",
    "comm.codec:read_parallel": INNER + "read_spec",
    "comm.codec:read_node": INNER + "read_node_message",
    "comm.terms_codec:read_terms": INNER + "read_mesh",
    "comm.codec:read_ref": INNER + "read_node_message",
    "comm.codec:read_unit": INNER + "read_node_message",
    "comm.codec:read_change": INNER + "read_node_message",
    "comm.codec:read_topology": INNER + "read_hub_message",
    "comm.codec:read_certificate": INNER + "read_hub_message",
    "comm.codec:read_earnings": INNER + "read_hub_message",
    "comm.codec:read_word": INNER + "all of comm.codec",
    "comm.link_stream:LinkStream.read": INNER + "read_hub_message; this waits for one",
    "comm.reach:Stream.read": "no code: what a link needs of its stream",
    "program.encoding:decode": INNER + "StageProgram.from_json",
    "program.encoding:decode_argument": INNER + "StageProgram.from_json",
    "program.sizes:SizeReader.read": INNER + "StageProgram.from_json",
    "distensor_tui.income:read_group": INNER + "read_income",
    "distensor_tui.income:read_money": INNER + "read_income",
    "distensor_tui.income:read_sum": INNER + "read_income",
    "distensor_tui.income:read_ledger": INNER + "read_income",
    "core.money:parse_credits": WORDS,
    "core.compute:parse_precision": WORDS,
    "core.compute:parse_recompute": WORDS,
    "core.compute:parse_context_attention": WORDS,
    "core.schedules:parse_schedule": WORDS,
    "nn.patterns:parse": WORDS,
    "optim.clipping:parse_norm_type": WORDS,
    "optim.schedules:parse_lr_schedule": WORDS,
    "optim.sparse_spec:parse_sync_options": WORDS,
    "training.step_results:load_words": "no reader: it writes the words of a command",
    "training.optimizer_words:read_optimizer": WORDS,
    "training.job_holder:JobHolder.load": "a file that the user names, read by safetensors",
    "training.files:load_weights": "a file that the user names, read by safetensors",
    "training.checkpointing:Checkpointing.load": INNER + "Manifest.from_json and read_tensors",
    "training.snapshot_reading:SnapshotReader.read": INNER + "decode_named, and check_tensors on what came",
    "demo.data:load_tokens": "reads the files of Python itself",
    "hub.pay_cli:read_settings": WORDS,
    "hub.pki:Authority.load_or_create": "the hub's own key and certificate; what cannot be read ends the start",
    "hub.record_json:info_from_json": "columns that the hub wrote itself",
    "hub.record_json:parallel_from_json": "columns that the hub wrote itself",
    "hub.record_json:placement_from_json": "columns that the hub wrote itself",
    "hub.record_json:wish_from_json": "columns that the hub wrote itself",
    "hub.stores.address:parse_database": WORDS,
    "hub.writer:Writer.read": "no decoder: a question to the books",
    "hub.writer:Writes.read": "no decoder: a question to the books",
    "node.engine:ShardEngine.load": INNER + "parse_plan, split_parts and StageProgram.from_json",
    "node.held_state:HeldState.load_optimizer_state": "tensors by name, from decode_named; checked in optim.updater",
    "node.lifeline:read": INNER + "node.ipc:parse_line",
    "optim.updater:Updater.load_state": "tensors by name, from decode_named",
    "optim.distro.sparse:SparseOptimizer.load_state_dict": "tensors by name, as torch gives and takes them",
    "optim.distro.local:DiLoCo.load_fields": "tensors by name, as torch gives and takes them",
    "optim.distro.local:SparseLoCo.load_fields": "tensors by name, as torch gives and takes them",
    "optim.distro.local:DiLoCo.load_state_dict": "tensors by name, as torch gives and takes them",
    "optim.distro.local:SparseLoCo.load_state_dict": "tensors by name, as torch gives and takes them",
    "program.builder:GraphBuilder.read": "no bytes: names of values while a program is built",
    "program.guards:parse_guards": "what torch.export says of the user's own model",
    "program.signatures:parse": "lines of our own table of operations",
    "transport.local_lanes:LocalSocket.read": "no decoder: bytes off a socket",
    "transport.tls_sockets:TlsSocket.read": "no decoder: OpenSSL takes records apart",
    "distensor_server.cli:read": "no decoder: a thread that waits for the end of standard input",
    "distensor_server.addresses:read_interfaces": "the kernel's own answer about the interfaces of this machine",
    "distensor_server.devices.cgroup:read_limits": "files of the kernel",
    "distensor_server.devices.processor:CpuSensors.read": "files of the kernel",
    "distensor_server.surroundings.power:read_power": "files of the kernel",
    "distensor_server.doctor.world:_Identity.read": "an environment and a directory, by readers that are tried",
    "distensor_server.keys.files:read_private": INNER + "read_text; the rest is about the file's owner and mode",
    "distensor_tui.once:Conversation.read": INNER + "wire:decode",
}


def readers() -> Iterator[str]:
    """Every function and method whose name says that it reads what somebody wrote, as "module:qualified name"."""
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if parts[0] in ("proto", "testing"):  # generated; fakes
                continue
            module = ".".join(parts if package == "distensor" else (package, *parts))
            text = path.read_text()
            if _MAYBE.search(text):  # to parse is what takes the time
                yield from (f"{module}:{name}" for name in names_in(ast.parse(text).body))


def names_in(body: list[ast.stmt], inside: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from names_in(node.body, f"{inside}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if READERS.fullmatch(node.name):
                yield f"{inside}{node.name}"
            yield from names_in(node.body, inside)
