"""Which of several coordinators leads, as etcd has it.

A cluster has a name, and in etcd two keys under it:

    /torch-ecrec/NAME/leader    who leads, or has led last: where it listens, the run's word, what the run began with
    /torch-ecrec/NAME/beat      written again and again by who leads: its revision says that somebody does

The revision at which `leader` was written tells one leader from the next: it only grows. Every call is one transaction,
and asks one address of etcd after the other. How long each may take follows from how long it took before: on a busy
machine etcd may need longer for every answer than a short limit allows, and then nobody could ever lead.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl

from torch_ecrec.errors import ClusterError
from torch_ecrec.runtime.checks import require

if TYPE_CHECKING:
    from etcd3gw.client import Etcd3Client

T = TypeVar("T")
FORM = "etcd://HOST:PORT[,HOST:PORT...]/NAME, or etcds://...[?ca=FILE&cert=FILE&key=FILE] for TLS"
PORT = 2379
SLOWER = 4.0  # than the last answer may the next one be
_SHAPE = re.compile(r"(etcds?)://([^/]+)/([A-Za-z0-9._-]+)(?:\?(.*))?")
_TLS = "ca", "cert", "key"


class EtcdUnavailable(ClusterError):
    """No address of etcd has answered, or none that has a majority behind it."""


@dataclass(frozen=True)
class Place:
    """What `etcd://...` says.

    Args:
        protocol: "http" or "https".
        addresses: of etcd.
        name: of the cluster.
        tls: files: the authority's certificate, one's own, and its key; None: not given.
    """

    protocol: str
    addresses: tuple[tuple[str, int], ...]
    name: str
    tls: tuple[str | None, ...] = (None, None, None)


def parse_place(text: str) -> Place:
    """Raises ValueError where it has not that form."""
    found = _SHAPE.fullmatch(text)
    wanted = f"etcd must be named as {FORM}, got {text!r}"
    require(found is not None, wanted)
    assert found is not None
    try:
        more = dict(parse_qsl(found[4] or "", keep_blank_values=True, strict_parsing=bool(found[4])))
    except ValueError:
        raise ValueError(wanted) from None
    require(not more or (found[1] == "etcds" and more.keys() <= set(_TLS)), wanted)
    addresses = []
    for one in found[2].split(","):
        host, colon, port = one.rpartition(":")
        host, port = (host, port) if colon else (one, str(PORT))
        require(bool(host) and port.isdigit() and 0 < int(port) < 65536, wanted)
        addresses.append((host, int(port)))
    protocol, tls = "https" if found[1] == "etcds" else "http", tuple(more.get(name) for name in _TLS)
    return Place(protocol, tuple(addresses), found[3], tls)


@dataclass(frozen=True)
class Leader:
    """Who leads: its address, and the revision since when."""

    address: tuple[str, int]
    revision: int


@dataclass(frozen=True)
class Term:
    """The time of one leader.

    Args:
        id: of the leader, made up by its process; "": nobody has ever led.
        run: the word of the run; `began_with`: the checkpoint that it began with, as the first to lead has found it.
        address: where the leader listens; None: it has left the lead.
        revision: of etcd, since when; 0: nobody has ever led.
        beat: of etcd, when the leader was there last.
    """

    id: str = ""
    run: str = ""
    began_with: str = ""
    address: tuple[str, int] | None = None
    revision: int = 0
    beat: int = 0


class EtcdKeys:
    """The two keys of a cluster.

    Args:
        place: where.
        timeout_s: for each address, at first.
        patient_s: likewise, at most: twice as long each time that an address has not answered. None: as at first.

    Raises:
        ClusterError: the package for etcd is not installed.

    Every method raises EtcdUnavailable where etcd does not answer; what was asked may have been done all the same.
    """

    def __init__(self, place: Place, timeout_s: float, patient_s: float | None = None) -> None:
        try:
            from etcd3gw.client import Etcd3Client
        except ImportError as error:
            raise ClusterError("etcd needs a package: pip install torch-ecrec[etcd]") from error
        authority, certificate, key = place.tls
        self._clients = [
            Etcd3Client(host, port, place.protocol, authority, key, certificate, timeout_s, "/v3/")
            for host, port in place.addresses
        ]
        self._timeout_s, self._patient_s = timeout_s, max(timeout_s, patient_s or 0.0)
        self._leader, self._beat, self._last = (
            f"/torch-ecrec/{place.name}/{key}" for key in ("leader", "beat", "last")
        )

    def _ask(self, do: Callable[[Etcd3Client], T]) -> T:
        import requests
        from etcd3gw.exceptions import ConnectionTimeoutError, Etcd3Exception

        reasons = []
        for _ in range(len(self._clients)):
            client, asked_s = self._clients[0], time.monotonic()
            try:
                found = do(client)
                self._allow(client, SLOWER * (time.monotonic() - asked_s))
                return found
            except (Etcd3Exception, requests.RequestException, ValueError) as error:
                if isinstance(error, (ConnectionTimeoutError, requests.Timeout)):
                    self._allow(client, 2 * (client.timeout or self._timeout_s))
                reasons.append(f"{client.host}:{client.port}: {_said(error)}")
                self._clients.append(self._clients.pop(0))  # the next one is asked first from now on
        raise EtcdUnavailable(f"etcd does not answer ({'; '.join(reasons)})")

    def _allow(self, client: Etcd3Client, limit_s: float) -> None:
        client.timeout = min(max(limit_s, self._timeout_s), self._patient_s)

    def leader(self) -> Leader | None:
        """Who leads, unless it is silent."""
        term = self.term()
        return None if term.address is None else Leader(term.address, term.revision)

    def term(self) -> Term:
        """Who leads, or has led last.

        Raises:
            ClusterError: an older version of torch-ecrec has written it, or somebody else.
        """
        asked = [{"request_range": {"key": _encoded(key)}} for key in (self._leader, self._beat, self._last)]
        done = self._ask(lambda client: client.transaction({"compare": [], "success": asked, "failure": []}))
        leader, beat, last = (one["response_range"].get("kvs", []) for one in done["responses"])
        if last:
            raise ClusterError(
                f"etcd has {self._last} of an older version of torch-ecrec: end that run with that version, or remove"
                f" it with `etcdctl del {self._last}` if it is over"
            )
        if not leader:
            return Term()
        try:
            return _term_of(leader[0], beat)
        except (KeyError, TypeError, ValueError) as error:
            raise ClusterError(f"etcd has {self._leader}, which torch-ecrec has not written: {error!r}") from error

    def take(self, me: Term, before: Term) -> bool:
        """Leads, if what etcd has is still `before`: nobody else has, and who did was not there since."""
        return self._txn(
            [self._is(self._leader, before.revision), self._is(self._beat, before.beat)],
            [self._puts_leader(me), self._puts_beat(me)],
        )

    def beat(self, mine: Term) -> bool:
        """Says that the leader is there; whether it still is the leader. `mine`: as `term` returned it."""
        return self._txn([self._is(self._leader, mine.revision)], [self._puts_beat(mine)])

    def leave(self, mine: Term) -> None:
        """Another may lead at once; if etcd does not answer, once its lease is over."""
        with contextlib.suppress(EtcdUnavailable):
            left = self._puts_leader(dataclasses.replace(mine, address=None))
            self._txn([self._is(self._leader, mine.revision)], [left])

    def end(self, mine: Term) -> None:
        """The run is over: nobody leads, and nobody has. The next of this name is another run."""
        keys = [{"request_delete_range": {"key": _encoded(key)}} for key in (self._leader, self._beat)]
        self._txn([self._is(self._leader, mine.revision)], keys)

    @staticmethod
    def _is(key: str, revision: int) -> dict[str, Any]:
        return {"key": _encoded(key), "result": "EQUAL", "target": "MOD", "mod_revision": revision}

    def _puts_leader(self, term: Term) -> dict[str, Any]:
        said = {"id": term.id, "address": term.address, "run": term.run, "began_with": term.began_with}
        return {"request_put": {"key": _encoded(self._leader), "value": _encoded(json.dumps(said))}}

    def _puts_beat(self, term: Term) -> dict[str, Any]:
        return {"request_put": {"key": _encoded(self._beat), "value": _encoded(term.id)}}

    def _txn(self, compare: list[dict[str, Any]], success: list[dict[str, Any]]) -> bool:
        asked = {"compare": compare, "success": success, "failure": []}
        return bool(self._ask(lambda client: client.transaction(asked)).get("succeeded", False))


def _term_of(leader: dict[str, Any], beat: list[dict[str, Any]]) -> Term:
    """What the two keys say. Raises KeyError, TypeError or ValueError where that is not their form."""
    said = json.loads(base64.b64decode(leader["value"]))
    address = None
    if said["address"] is not None:
        host, port = said["address"]
        address = str(host), int(port)
    beaten = int(beat[0]["mod_revision"]) if beat else 0
    who, run, began_with = (str(said[word]) for word in ("id", "run", "began_with"))
    return Term(who, run, began_with, address, int(leader["mod_revision"]), beaten)


def _said(error: Exception) -> str:
    """For people: what urllib3 says of a connection that is refused is several lines long."""
    from etcd3gw.exceptions import ConnectionFailedError, ConnectionTimeoutError

    if isinstance(error, ConnectionTimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionFailedError) and "onnection" in str(error.detail_text):
        return "no connection"
    return str(getattr(error, "detail_text", None) or error)


def _encoded(text: str) -> str:
    """As the gateway wants keys and values."""
    return base64.b64encode(text.encode()).decode()
