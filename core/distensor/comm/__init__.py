"""The control plane's two clients, and what both ends of it share. Loads grpc, never torch."""

from __future__ import annotations

import distensor.comm._environment  # noqa: F401  # takes effect only when it comes before grpc
from distensor.comm.client import HubClient
from distensor.comm.identity import data_plane_uri, new_key_and_csr, parse_data_plane_uri
from distensor.comm.link import NodeLink
from distensor.comm.link_status import LinkError, LinkState, LinkStatus, NodeLinkHandler

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
