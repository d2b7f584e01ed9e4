"""What a hub's errors become on the way to a caller."""

from __future__ import annotations

import grpc

from distensor.comm.address import HubAddress
from distensor.comm.failures import READ_ONLY, error_of_status, status_of_error
from distensor.core.errors import HubUnreachableError, ReadOnlyError

ADDRESS = HubAddress(host="hub.example.org", port=50051)


def test_a_hub_that_cannot_write_is_not_called_absent() -> None:
    trouble = ReadOnlyError(f"{READ_ONLY} (no space left on device); try again later")
    error = error_of_status(status_of_error(trouble), str(trouble), ADDRESS)
    assert type(error) is HubUnreachableError  # callers that wait for a hub wait for this one too
    assert str(error) == f"hub.example.org:50051: {trouble}"


def test_one_that_does_not_answer_is() -> None:
    error = error_of_status(grpc.StatusCode.UNAVAILABLE, "connection refused", ADDRESS)
    assert type(error) is HubUnreachableError
    assert str(error).startswith("no hub answers at hub.example.org:50051: connection refused")
