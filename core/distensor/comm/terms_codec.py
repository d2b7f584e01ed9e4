"""The terms of a hub: protobuf <-> `distensor.core.control.Terms`, checked like everything that arrives."""

from __future__ import annotations

from distensor.core.control import Terms
from distensor.core.errors import HubProtocolError
from distensor.proto import control_pb2 as pb

LARGEST_PRICE = 10**9


def write_terms(terms: Terms | None) -> pb.TermsMessage | None:
    if terms is None:
        return None
    return pb.TermsMessage(price_micro=terms.price, fee_per_mille=terms.fee_per_mille, deposits=terms.deposits)


def read_terms(message: pb.MeshReply) -> Terms | None:
    if not message.HasField("terms"):
        return None
    terms = message.terms
    if not 1 <= terms.price_micro <= LARGEST_PRICE or terms.fee_per_mille >= 1000:
        raise HubProtocolError(
            f"price_micro={terms.price_micro}, fee_per_mille={terms.fee_per_mille}: expected 1 to {LARGEST_PRICE}, "
            "and less than 1000"
        )
    return Terms(price=terms.price_micro, fee_per_mille=terms.fee_per_mille, deposits=terms.deposits)
