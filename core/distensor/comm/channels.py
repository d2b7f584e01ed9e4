"""gRPC channels and the options on which both ends agree."""

from __future__ import annotations

import grpc
import grpc.aio

from distensor.comm.address import HubAddress
from distensor.comm.bootstrap import HUB_NAME

EOF: object = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs

MAX_MESSAGE_BYTES = 1 << 20
"""No message of the control plane is larger; model bytes travel peer to peer."""
MAX_UNITS_PER_MESSAGE = 2000
KEEPALIVE_SECONDS = 10

_SIZES = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]

SERVER_OPTIONS: list[tuple[str, int | str]] = [
    *_SIZES,
    ("grpc.so_reuseport", 0),  # two hubs on one port would share its connections without a word
    # The defaults end a connection with `too_many_pings` when a client pings more often than every 5 minutes.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


def _client_options() -> list[tuple[str, int | str]]:
    return [
        *_SIZES,
        ("grpc.ssl_target_name_override", HUB_NAME),
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.use_local_subchannel_pool", 1),  # a new channel does not inherit an old one's backoff
        ("grpc.enable_retries", 0),
        # No proxy of the environment: the first contact (bootstrap.py) is direct, so the hub is reached directly or not
        # at all, and a proxy is never offered connections to this machine or its network, whatever they are called.
        ("grpc.enable_http_proxy", 0),
    ]


def _credentials(authority_pem: str) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(root_certificates=authority_pem.encode())


def open_channel(address: HubAddress, authority_pem: str) -> grpc.Channel:
    return grpc.secure_channel(str(address), _credentials(authority_pem), _client_options())


def open_aio_channel(address: HubAddress, authority_pem: str) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(str(address), _credentials(authority_pem), _client_options())


def bearer(*parts: str) -> tuple[tuple[str, str], ...]:
    """The metadata that carries a secret: `Bearer kind.part...`."""
    return (("authorization", "Bearer " + ".".join(parts)),)
