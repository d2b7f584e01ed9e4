"""Nodes and devices."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from starlette.responses import Response

from distensor.cloud.answers import NAME, NOT_MODIFIED, USUAL, After, IfNoneMatch, Limit, Page, page_of, shown
from distensor.cloud.context import Caller, account_filter, guard
from distensor.cloud.machines import DeviceShape, NodeShape, device_shape, node_shape
from distensor.cloud.problems import responses
from distensor.core.control import DeviceKind, MeshNode
from distensor.core.ids import NodeId
from distensor.hub.authorization import Operation, Who

router = APIRouter(prefix="/v1", tags=["nodes"])

Reads = Annotated[Caller, Depends(guard(Operation.READ_NODES))]
Connected = Annotated[bool | None, Query(description="only those that are, or are not, connected")]
_LONGEST_DEVICE = 200


@router.get("/nodes", name="list_nodes", response_model=Page[NodeShape], responses=responses(409) | NOT_MODIFIED)
async def list_nodes(
    caller: Reads,
    connected: Connected = None,
    account: Annotated[str | None, Query(description="only this account's", pattern=NAME)] = None,
    after: After = None,
    limit: Limit = USUAL,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Nodes by id. Of those that are gone, an admin and a trainer see the 200 that were heard of last."""
    found = [node for node in _nodes(caller, account) if connected in (None, node.connected)]
    page, more = page_of(found, lambda node: str(node.info.node_id), after, limit)
    return shown(Page[NodeShape](items=[_shape(caller, node) for node in page], next=more), if_none_match)


@router.get("/nodes/{node}", name="show_node", response_model=NodeShape, responses=responses(404) | NOT_MODIFIED)
async def show_node(
    caller: Reads, node: Annotated[str, Path(pattern=NAME, description="its id")], if_none_match: IfNoneMatch = None
) -> Response:
    """One node."""
    context = caller.context
    record = context.inside.machine.node(NodeId(node))
    owner = caller.require(node, None if record is None else record.account, f"the hub knows no node {node}")
    mesh = context.inside.machine.mesh(context.inside.clock.monotonic(), owner)
    found = next((one for one in mesh.nodes if one.info.node_id == node), None)
    caller.require(node, None if found is None else owner, f"the hub knows no node {node}")
    assert found is not None, "required"
    return shown(_shape(caller, found), if_none_match)


@router.get("/devices", name="list_devices", response_model=Page[DeviceShape], responses=responses(409) | NOT_MODIFIED)
async def list_devices(
    caller: Reads,
    kind: Annotated[DeviceKind | None, Query(description="only of this kind")] = None,
    usable: Annotated[bool | None, Query(description="only those that can, or cannot, be used")] = None,
    node: Annotated[str | None, Query(description="only this node's", pattern=NAME)] = None,
    after: Annotated[
        str | None,
        Query(description="the `next` of the page before", pattern=r"^[\x21-\x7e]+$", max_length=_LONGEST_DEVICE),
    ] = None,
    limit: Limit = USUAL,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """The devices of connected nodes, by node and name."""
    found = [
        device_shape(one, device)
        for one in _nodes(caller, None)
        for device in one.info.devices
        if one.connected
        and node in (None, one.info.node_id)
        and kind in (None, device.kind)
        and usable in (None, device.unusable is None)
    ]
    page, more = page_of(found, lambda one: f"{one.node}/{one.device}", after, limit)
    return shown(Page[DeviceShape](items=list(page), next=more), if_none_match)


def _nodes(caller: Caller, account: str | None) -> list[MeshNode]:
    """By id. A trainer sees all nodes, and of none whose it is: so it cannot ask for those of one account either."""
    wanted = account_filter(caller, account)
    if wanted is not None and caller.only is None and caller.who.kind != Who.ADMIN and wanted != caller.who.account:
        return []
    inside = caller.context.inside
    return sorted(inside.machine.mesh(inside.clock.monotonic(), wanted).nodes, key=lambda node: str(node.info.node_id))


def _shape(caller: Caller, node: MeshNode) -> NodeShape:
    record = caller.context.inside.machine.node(NodeId(str(node.info.node_id)))
    assert record is not None, "the mesh has only nodes that the machine knows"
    inside = caller.who.kind == Who.ADMIN or record.account == caller.who.account
    return node_shape(node, record.account, inside=inside)
