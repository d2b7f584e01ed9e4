"""The control plane's two clients, and what both ends of it share. Loads grpc, never torch.

Names are resolved on first use (PEP 562): a supervisor needs the link and not the X.509 code of trainers and workers,
and that code alone is a sixth of its memory.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import distensor.comm._environment  # noqa: F401  # takes effect only when it comes before grpc

if TYPE_CHECKING:
    from distensor.comm.client import HubClient
    from distensor.comm.identity import data_plane_uri, new_key_and_csr, parse_data_plane_uri
    from distensor.comm.link import NodeLink
    from distensor.comm.link_status import LinkError, LinkState, LinkStatus, NodeLinkHandler

_HOME = {
    "HubClient": "distensor.comm.client",
    "LinkError": "distensor.comm.link_status",
    "LinkState": "distensor.comm.link_status",
    "LinkStatus": "distensor.comm.link_status",
    "NodeLink": "distensor.comm.link",
    "NodeLinkHandler": "distensor.comm.link_status",
    "data_plane_uri": "distensor.comm.identity",
    "new_key_and_csr": "distensor.comm.identity",
    "parse_data_plane_uri": "distensor.comm.identity",
}

__all__ = [
    "HubClient",
    "LinkError",
    "LinkState",
    "LinkStatus",
    "NodeLink",
    "NodeLinkHandler",
    "data_plane_uri",
    "new_key_and_csr",
    "parse_data_plane_uri",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'distensor.comm' has no attribute {name!r}; it offers {', '.join(__all__)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
