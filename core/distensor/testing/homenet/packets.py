"""What the emulated internet reads of an IP packet: where it goes, and whether it opens a TCP connection."""

from __future__ import annotations

from ipaddress import ip_address

_TCP = 6
_SYN, _ACK = 0x02, 0x10


def destination(packet: bytes) -> bytes:
    """The packed destination address; empty for what is neither IPv4 nor IPv6."""
    match packet[0] >> 4 if packet else 0:
        case 4:
            return packet[16:20]
        case 6:
            return packet[24:40]
        case _:
            return b""


def opens_connection(packet: bytes) -> bool:
    """Whether it is the first packet of a TCP connection, which a home router lets in only where it is told to."""
    version = packet[0] >> 4
    protocol = packet[9] if version == 4 else packet[6]
    start = 4 * (packet[0] & 15) if version == 4 else 40
    if protocol != _TCP or len(packet) < start + 14:
        return False
    return packet[start + 13] & (_SYN | _ACK) == _SYN


def packed(text: str) -> bytes:
    return ip_address(text).packed
