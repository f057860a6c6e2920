"""Network addresses: their text form (`HOST:PORT`, `[HOST]:PORT` for IPv6), this host's own, and interfaces.

An address that is told to others is one that they can reach. `0.0.0.0` and `::` mean all of a host's own addresses to
who listens there, and to who connects there himself: they are refused where they are given.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable

from torch_ecrec.runtime.checks import require

SIOCGIFADDR = 0x8915  # the request for an interface's IPv4 address; Linux


def parse_host(text: str) -> str:
    """Returns a host name or address that others can reach, without the brackets that IPv6 may have.

    Raises ValueError for any other.
    """
    bracketed = text.startswith("[") and text.endswith("]")
    host = text[1:-1] if bracketed else text
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        plain = bool(host) and not bracketed and ":" not in host
        require(plain and _is_name(host), f"a host must be a name or an address, got {text!r}")
        try:
            nobody = not any(socket.inet_aton(host))  # "0", say
        except OSError:
            nobody = False
    else:
        require(found.version == 6 or not bracketed, f"brackets are for addresses of IPv6, got {text!r}")
        mapped = getattr(found, "ipv4_mapped", None)
        nobody = found.is_unspecified or (mapped is not None and mapped.is_unspecified)
    require(
        not nobody,
        f"{text!r} is no address that others can reach: who connects there reaches itself. Name one of this host's"
        " (`ip address` lists them), or its name",
    )
    return host


def _is_name(host: str) -> bool:
    """Returns whether name servers can be asked for it: no part of it is empty ("10.0.0..1") or too long."""
    try:
        return bool(host.encode("idna")) and host.isprintable() and not any(map(str.isspace, host))
    except UnicodeError:
        return False


def parse_address(text: str) -> tuple[str, int]:
    """Parses "HOST:PORT" -> (HOST, PORT). Raises ValueError if it is malformed, or nobody could be reached there."""
    host, colon, port = text.rpartition(":")
    said = f"an address must be HOST:PORT, or [HOST]:PORT of IPv6, got {text!r}"
    require(bool(colon and host) and port.isascii() and port.isdigit() and 0 < int(port) < 65536, said)
    require(":" not in host or host.startswith("["), said)
    return parse_host(host), int(port)


def text_of(address: tuple[str, int]) -> str:
    """Returns the text of an address: the inverse of `parse_address`."""
    return f"{in_url(address[0])}:{address[1]}"


def in_url(host: str) -> str:
    """Returns a host as URLs have it: an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host else host


def family_of(host: str) -> socket.AddressFamily:
    """Returns the socket family of an IP address: AF_INET or AF_INET6."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Returns whether an address, or every address of a name, can be reached from this host alone."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        pass
    try:
        found = {str(place[0]) for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:  # nobody can listen there
        return False
    return all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found)


def own_host(place: tuple[str, int]) -> str:
    """Returns the address from which this host reaches another one. Nothing is sent. Raises OSError."""
    family, kind, protocol, _, where = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)
        host: str = probe.getsockname()[0]
    return host


def interface_of(address: str) -> str:
    """Returns the name of the interface that has an address. Raises OSError if none has."""
    found = {own: name for name, own in interfaces()}
    if address not in found:
        known = ", ".join(f"{own} ({name})" for own, name in found.items())
        raise OSError(f"this host has no address {address}; it has {known or 'none'}")
    return found[address]


def interfaces() -> Iterable[tuple[str, str]]:
    """Returns name and IPv4 address of each interface that has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                said = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            yield name, socket.inet_ntoa(said[20:24])
