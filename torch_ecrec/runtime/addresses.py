"""Addresses of this host, and its interfaces."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterable

SIOCGIFADDR = 0x8915  # the request for an interface's IPv4 address; Linux


def family_of(host: str) -> socket.AddressFamily:
    """Of an IP address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def own_host(place: tuple[str, int]) -> str:
    """The address from which this host reaches another one; host and port. Nothing is sent. Raises OSError."""
    family, kind, protocol, _, where = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)
        host: str = probe.getsockname()[0]
    return host


def interface_of(address: str) -> str:
    """The interface that has an address. Raises OSError if none has."""
    found = {own: name for name, own in interfaces()}
    if address not in found:
        known = ", ".join(f"{own} ({name})" for own, name in found.items())
        raise OSError(f"this host has no address {address}; it has {known or 'none'}")
    return found[address]


def interfaces() -> Iterable[tuple[str, str]]:
    """Name and IPv4 address of each interface that has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                said = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            yield name, socket.inet_ntoa(said[20:24])
