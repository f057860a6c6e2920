"""Who may ask over HTTP, and whether a browser asks for a page of ours or for somebody else's. Pure.

Two places are served:

    loopback   Only this host gets there, and so do pages of any site in a browser of this host. A site whose name
               resolves to 127.0.0.1 (DNS rebinding) is told from us by `Host`, which must name loopback.
    any other  Takes the cluster's secret.

Where there is a secret, on loopback too, each request proves that it knows it: by `Authorization: Bearer SECRET`, or by
the cookie that `POST /login` gives for it. The cookie holds no secret but an expiry and its HMAC, so that it is good at
the next coordinator, too; a browser sends it from our own pages only (`SameSite=Strict`), and no script sees it.

Invariants.
- What changes something is a POST with the header `X-Torch-Ecrec`, which a page of another site cannot send without
  being allowed to first, and nobody is.
- No other site's page gets an answer, even where it could not read it (`Sec-Fetch-Site`, `Origin`).
- A secret is compared in constant time, and is never in a URL, nor in a log.

What is sent is not encrypted: who reads the network reads the secret. Put a proxy with TLS before it, or a tunnel.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

OURS = "X-Torch-Ecrec"  # the header of a POST
SESSION_S = 12 * 3600
COOKIE = "torch_ecrec_"  # and the port: cookies are of a host, with all its ports
SECRET_MOST = 4096  # characters
SITES = ("same-origin", "none")  # of `Sec-Fetch-Site`: the latter is a person's own doing
OPEN = {("GET", "/"), ("HEAD", "/"), ("POST", "/login")}  # without proof: a page with a form, and nothing of a cluster


@dataclass(frozen=True)
class Objection:
    """Why a request is not answered: the status of HTTP, and a text for people."""

    status: int
    why: str


class Guard:
    """Judges requests to one server.

    Args:
        secret: that who asks must know; b"": none.
        loopback: only this host reaches the server.
        port: it listens there.
    """

    def __init__(self, secret: bytes, loopback: bool, port: int) -> None:
        if not secret and not loopback:
            raise ValueError("other hosts get there, and there is no secret")
        self._secret, self._loopback, self.cookie = secret, loopback, f"{COOKIE}{port}"

    @property
    def asks_proof(self) -> bool:
        """Whether there is a secret to know."""
        return bool(self._secret)

    def objection(
        self, method: str, path: str, headers: Mapping[str, str], cookies: Mapping[str, str], now_s: float
    ) -> Objection | None:
        """Returns why a request is not answered; None: it is.

        Args:
            method, path: the path without a query.
            headers: by name, in any case.
            cookies: that came with it.
            now_s: seconds since the epoch.
        """
        host = headers.get("Host", "")
        if self._loopback and not _is_own_name(host):
            return Objection(421, f"this server is asked as localhost or 127.0.0.1, not as {host[:100]!r}")
        if headers.get("Sec-Fetch-Site", "none") not in SITES and not _is_navigation(method, path, headers):
            return Objection(403, "asked by a page of another site")
        origin = headers.get("Origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return Objection(403, "asked by a page of another site")
        if method == "POST" and OURS not in headers:
            return Objection(403, f"a POST needs the header `{OURS}: 1`")
        if not self._secret or (method, path) in OPEN or self._is_proved(headers, cookies, now_s):
            return None
        return Objection(401, "say the cluster's secret: `Authorization: Bearer SECRET`, or at / in a browser")

    def _is_proved(self, headers: Mapping[str, str], cookies: Mapping[str, str], now_s: float) -> bool:
        scheme, _, said = headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self.knows(said.strip())
        return self._is_session(cookies.get(self.cookie, ""), now_s)

    def knows(self, said: str) -> bool:
        """Returns whether that is the secret."""
        return bool(self._secret) and hmac.compare_digest(self._tag(_bytes(said)), self._tag(self._secret))

    def session(self, now_s: float) -> str:
        """Returns the value of a cookie that proves for `SESSION_S` that its owner has known the secret."""
        until = str(int(now_s) + SESSION_S)
        return f"{until}.{self._tag(b'session ' + until.encode()).hex()}"

    def _is_session(self, said: str, now_s: float) -> bool:
        until, _, tag = said.partition(".")
        wanted = self._tag(b"session " + _bytes(until)).hex()
        genuine = hmac.compare_digest(_bytes(tag), wanted.encode())
        return genuine and until.isascii() and until.isdecimal() and now_s < int(until)

    def _tag(self, said: bytes) -> bytes:
        return hmac.digest(self._secret, b"torch_ecrec http " + said, "sha256")


def _bytes(text: str) -> bytes:
    return text[:SECRET_MOST].encode("utf-8", "surrogateescape")


def _is_own_name(host: str) -> bool:
    """Returns whether a `Host` header names loopback. The port may be another: of a tunnel's end, say."""
    name = host.rpartition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_navigation(method: str, path: str, headers: Mapping[str, str]) -> bool:
    """Returns whether a person follows a link to the page: from any site."""
    return (method, path) == ("GET", "/") and headers.get("Sec-Fetch-Mode") == "navigate"
