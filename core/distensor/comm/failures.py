"""gRPC's errors, mapped once, and the status codes that stand for ours."""

from __future__ import annotations

import grpc

from distensor.comm.address import HubAddress, proxy_in_the_way
from distensor.core.errors import (
    AuthenticationError,
    ControlError,
    DistensorError,
    HubProtocolError,
    HubUnreachableError,
    JobHeldError,
    NotAllowedError,
    PlacementError,
    StaleEpochError,
    StoreError,
    ThrottledError,
)

UNREACHABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})

THROTTLED = "too many refused attempts"
"""How the message of a ThrottledError begins."""

READ_ONLY = "the hub can read its books but not write them at present"
"""How the message of a ReadOnlyError begins: a hub that says so is there, and worth asking again."""

_FROM_STATUS: dict[grpc.StatusCode, type[ControlError]] = {
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowedError,
    grpc.StatusCode.FAILED_PRECONDITION: PlacementError,
    grpc.StatusCode.ABORTED: StaleEpochError,
    grpc.StatusCode.ALREADY_EXISTS: JobHeldError,
    grpc.StatusCode.NOT_FOUND: ControlError,
}

_TO_STATUS: list[tuple[type[DistensorError], grpc.StatusCode]] = [
    (NotAllowedError, grpc.StatusCode.PERMISSION_DENIED),
    (ThrottledError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (AuthenticationError, grpc.StatusCode.UNAUTHENTICATED),
    (PlacementError, grpc.StatusCode.FAILED_PRECONDITION),
    (StaleEpochError, grpc.StatusCode.ABORTED),
    (JobHeldError, grpc.StatusCode.ALREADY_EXISTS),
    (HubProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (ControlError, grpc.StatusCode.NOT_FOUND),
    (StoreError, grpc.StatusCode.UNAVAILABLE),  # for now: the disk is full, the database is away
]


def error_of_status(code: grpc.StatusCode, details: str, address: HubAddress) -> ControlError:
    """What a failed call means to the caller."""
    if code is grpc.StatusCode.UNAVAILABLE and details.startswith(READ_ONLY):
        return HubUnreachableError(f"{address}: {details}")
    if code in UNREACHABLE:
        proxy = proxy_in_the_way(address.host)
        blame = f" (the environment sets {proxy})" if proxy else ""
        return HubUnreachableError(f"no hub answers at {address}: {details or code.name}{blame}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and details.startswith(THROTTLED):
        return ThrottledError(details)  # gRPC itself uses the code for messages that are too large
    kind = _FROM_STATUS.get(code)
    if kind is not None:
        return kind(details)
    return HubProtocolError(f"the hub at {address} answered {code.name}: {details}")


def status_of_error(error: DistensorError) -> grpc.StatusCode:
    """The status code with which a hub reports one of our errors."""
    for kind, code in _TO_STATUS:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL
