"""Where the HTTP server listens: `--http [HOST:]PORT`. Loads nothing slow."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from torch_ecrec.runtime.addresses import in_url, is_loopback, parse_host
from torch_ecrec.runtime.checks import require

NEEDED = {"aiohttp": "aiohttp", "prometheus_client": "prometheus_client"}  # modules, and what they are called
LOOPBACK = "127.0.0.1"
ALL = ("0.0.0.0", "::")  # all addresses of this host: told to nobody, so that it may listen there


@dataclass(frozen=True)
class Place:
    """Where to listen. `port`: 0 takes any that is free."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Only this host gets there."""
        return is_loopback(self.host)

    @property
    def url(self) -> str:
        """Where a browser finds what is served there."""
        return f"http://{self}/"

    def __str__(self) -> str:
        return f"{in_url(self.host)}:{self.port}"


def parse_place(text: str) -> Place:
    """Parses "9464", "10.0.0.1:9464" or "[::1]:0". Raises ValueError."""
    host, colon, port = text.rpartition(":")
    said = f"--http takes PORT, HOST:PORT, or [HOST]:PORT of IPv6, got {text!r}"
    require(port.isascii() and port.isdecimal() and int(port) < 65536, said)
    require(bool(host) or not colon, said)
    require(":" not in host or host.startswith("["), said)
    bare = host.removeprefix("[").removesuffix("]")
    return Place(LOOPBACK if not host else bare if bare in ALL else parse_host(host), int(port))


def why_open(place: Place) -> str:
    """Returns an error message: why nobody may listen there without a secret, and what to do."""
    return (
        f"--http {place}: whoever reaches it could drain servers, and see all of the cluster: other hosts take a"
        " secret. Set TORCH_ECREC_SECRET, or TORCH_ECREC_SECRET_FILE (`openssl rand -hex 32` makes one), or listen on"
        f" 127.0.0.1, and come by a tunnel (ssh -L {place.port or 9464}:127.0.0.1:{place.port or 9464})"
    )


def require_packages() -> None:
    """Raises ValueError, with the command that installs what is missing, unless it is there."""
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ValueError(f"--http needs {' and '.join(missing)}: pip install 'torch-ecrec[http]'")
