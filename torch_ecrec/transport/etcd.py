"""Keeps in etcd which of several coordinators leads, and which run of the cluster is the newest.

A cluster has a name, and in etcd two keys under it:

    /torch-ecrec/NAME/leader    where the leader listens, and its id; with a lease: it goes when its owner is silent
    /torch-ecrec/NAME/run       the run's word, who has led it last, of which build, what it began with, if it is over

etcd's revision at which `leader` was written tells one leader from the next. Every call is one transaction of etcd, and
asks one address after the other. How long each may take follows from how long it took before: on a busy machine etcd
may need longer for every answer than a short limit allows, and then nobody could ever lead.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl

from torch_ecrec.errors import ClusterError
from torch_ecrec.runtime.addresses import in_url, parse_address
from torch_ecrec.runtime.checks import require

if TYPE_CHECKING:
    from etcd3gw.client import Etcd3Client

T = TypeVar("T")
FORM = "etcd://HOST:PORT[,HOST:PORT...]/NAME, or etcds://...[?ca=FILE&cert=FILE&key=FILE] for TLS"
PORT = 2379
SLOWER = 4.0  # than the last answer may the next one be
FALLS = 0.95  # of what the last answer could have taken may the next one take all the same: etcd is slow now and then
_SHAPE = re.compile(r"(etcds?)://([^/]+)/([A-Za-z0-9._-]+)(?:\?(.*))?")
_TLS = "ca", "cert", "key"
# OSError: also a certificate's file that is not there. The others: it is not what this has written.
_NO_ANSWER = OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError


class EtcdUnavailable(ClusterError):
    """No address of etcd answered, or none that has a majority behind it."""


@dataclass(frozen=True)
class Place:
    """An `etcd://...` address, parsed.

    Args:
        protocol: "http" or "https".
        addresses: host and port of each etcd.
        name: the cluster's.
        tls: files: the authority's certificate, one's own, and its key; None: not given.
    """

    protocol: str
    addresses: tuple[tuple[str, int], ...]
    name: str
    tls: tuple[str | None, ...] = (None, None, None)


def parse_place(text: str) -> Place:
    """Parses an `etcd://...` address. Raises ValueError if it has another form."""
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
        try:
            addresses.append(parse_address(one if ":" in one.rpartition("]")[2] else f"{one}:{PORT}"))
        except ValueError as error:
            raise ValueError(f"{wanted}: {error}") from None
    protocol, tls = "https" if found[1] == "etcds" else "http", tuple(more.get(name) for name in _TLS)
    return Place(protocol, tuple(addresses), found[3], tls)


@dataclass(frozen=True)
class Leader:
    """The coordinator that leads: its address, and the revision of etcd since which it leads.

    Args:
        id: made up by its process.
        lease: what the key has; `ttl_s`: how long that is, in seconds; 0: it was named, and has none.
    """

    address: tuple[str, int]
    revision: int
    id: str = ""
    lease: int = 0
    ttl_s: int = 0


@dataclass(frozen=True)
class Run:
    """A run of a cluster, as etcd has it.

    Args:
        word: the random word that names the run.
        leader: id of who has led it last.
        began_with: the checkpoint that it began with, as the first to lead has found it.
        over: the run has ended. Who leads next begins another.
        build: of who has led it last, as `protocol/build.py:Build.told`; "": it has not said.
        revision: at which etcd has written this; 0: it has not yet.
    """

    word: str
    leader: str
    began_with: str
    over: bool = False
    revision: int = 0
    build: str = ""


@dataclass(frozen=True)
class View:
    """All that etcd has of a cluster at one moment.

    Args:
        leader: the coordinator that leads; None: none does.
        run: the newest run; None: there was none yet.
        cluster: etcd's id of itself; `revision`: of all that it has, which only grows.
    """

    leader: Leader | None = None
    run: Run | None = None
    cluster: int = 0
    revision: int = 0

    @property
    def runs(self) -> bool:
        """Whether there is a run that is not over."""
        return self.run is not None and not self.run.over

    def follows(self, before: View) -> bool:
        """Returns whether etcd can say this after `before`: its data was neither lost nor restored in between."""
        forgot = self.run is None and before.run is not None
        return self.cluster == before.cluster and self.revision >= before.revision and not forgot


class EtcdKeys:
    """Reads and writes a cluster's two keys in etcd: who leads, and the newest run.

    Args:
        place: where.
        timeout_s: for each address, at first.
        patient_s: likewise, at most: twice as long each time that an address has not answered. None: as at first.

    Raises:
        ClusterError: the package for etcd is not installed.

    Every method raises EtcdUnavailable if etcd does not answer. The operation may have been done nevertheless.
    """

    def __init__(self, place: Place, timeout_s: float, patient_s: float | None = None) -> None:
        try:
            from etcd3gw.client import Etcd3Client
        except ImportError as error:
            raise ClusterError("etcd needs a package: pip install 'torch-ecrec[etcd]'") from error
        authority, certificate, key = place.tls
        self._clients = [
            Etcd3Client(in_url(host), port, place.protocol, authority, key, certificate, timeout_s, "/v3/")
            for host, port in place.addresses
        ]
        for client in self._clients:  # else REQUESTS_CA_BUNDLE, where it is set, would count instead of what was named
            client.session.trust_env = authority is None
        self._timeout_s, self._patient_s = timeout_s, max(timeout_s, patient_s or 0.0)
        self._leader, self._run = (_encoded(f"/torch-ecrec/{place.name}/{key}") for key in ("leader", "run"))

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
            except (Etcd3Exception, *_NO_ANSWER) as error:
                if isinstance(error, (ConnectionTimeoutError, requests.Timeout)):
                    self._allow(client, 2 * (client.timeout or self._timeout_s))
                reasons.append(f"{client.host}:{client.port}: {_said(error)}")
                self._clients.append(self._clients.pop(0))  # the next one is asked first from now on
        raise EtcdUnavailable(f"etcd does not answer ({'; '.join(reasons)})")

    def _allow(self, client: Etcd3Client, limit_s: float) -> None:
        client.timeout = allowed_s(limit_s, client.timeout or 0.0, self._timeout_s, self._patient_s)

    def look(self) -> View:
        """Reads both keys, at one revision."""
        return self._ask(self._look)

    def _look(self, client: Etcd3Client) -> View:
        asked = [{"request_range": {"key": key}} for key in (self._leader, self._run)]
        found = client.transaction({"compare": [], "success": asked, "failure": []})
        of_leader, of_run = (one["response_range"].get("kvs", []) for one in found["responses"])
        leader = _leader(of_leader[0]) if of_leader else None
        header = found["header"]
        return View(leader, _run(of_run[0]) if of_run else None, int(header["cluster_id"]), int(header["revision"]))

    def grant(self, ttl_s: int) -> int:
        """Requests a lease of `ttl_s` seconds; returns its id."""
        return int(self._ask(lambda client: client.lease(ttl_s)).id)

    def renew(self, lease: int) -> bool:
        """Renews a lease; returns whether it was still there."""
        from etcd3gw.lease import Lease

        return self._ask(lambda client: Lease(lease, client).refresh()) > 0

    def revoke(self, lease: int) -> None:
        """Revokes a lease: etcd removes the keys that are attached to it."""
        from etcd3gw.lease import Lease

        self._ask(lambda client: Lease(lease, client).revoke())

    def take(self, address: tuple[str, int], lease: int, ttl_s: int, run: Run, seen: int) -> None:
        """Takes the lead if nobody leads, and if `run` is as at revision `seen` (0: there was none). `look` tells.

        A leader without a lease does not count: its key was copied from another etcd, and leases are not copied.
        """
        about = {"id": run.leader, "address": list(address), "ttl_s": ttl_s}
        self._txn(
            [{"key": self._leader, "result": "EQUAL", "target": "LEASE", "lease": 0}, self._is_still(seen)],
            [
                {"request_put": {"key": self._leader, "value": _encoded(json.dumps(about)), "lease": lease}},
                self._writes(run),
            ],
        )

    def end(self, run: Run) -> bool:
        """Marks the run as over and removes its leader, if it is unchanged; returns whether it was."""
        nobody = {"request_delete_range": {"key": self._leader}}
        return self._txn([self._is_still(run.revision)], [nobody, self._writes(dataclasses.replace(run, over=True))])

    def _is_still(self, revision: int) -> dict[str, Any]:
        return {"key": self._run, "result": "EQUAL", "target": "MOD", "mod_revision": revision}

    def _writes(self, run: Run) -> dict[str, Any]:
        said = {name: value for name, value in dataclasses.asdict(run).items() if name != "revision"}
        return {"request_put": {"key": self._run, "value": _encoded(json.dumps(said))}}

    def _txn(self, compare: list[dict[str, Any]], success: list[dict[str, Any]]) -> bool:
        asked = {"compare": compare, "success": success, "failure": []}
        return self._ask(lambda client: bool(client.transaction(asked).get("succeeded", False)))


def allowed_s(limit_s: float, known_s: float, least_s: float, most_s: float) -> float:
    """Returns how long the next answer may take, in seconds.

    Args:
        limit_s: the limit that follows from how long the last answer took.
        known_s: the limit of the last answer. From one to the next the limit falls slowly.
    """
    return min(max(limit_s, FALLS * known_s, least_s), most_s)


def _said(error: Exception) -> str:
    """Returns a short text for an error: urllib3's, of a refused connection, has several lines."""
    from etcd3gw.exceptions import ConnectionFailedError, ConnectionTimeoutError

    if isinstance(error, ConnectionTimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionFailedError) and "onnection" in str(error.detail_text):
        return "no connection"
    if isinstance(error, (KeyError, TypeError, AttributeError, OverflowError)):
        return f"no answer of etcd, or not what torch-ecrec has written: {error!r}"
    return str(getattr(error, "detail_text", None) or error)


def _leader(found: Mapping[str, Any]) -> Leader | None:
    """Parses the leader's key; None if it has no lease: then nobody leads."""
    if not (lease := int(found.get("lease", 0))):
        return None
    said = json.loads(_decoded(found["value"]))
    host, port = said["address"]
    return Leader((host, int(port)), int(found["mod_revision"]), said["id"], lease, int(said["ttl_s"]))


def _run(found: Mapping[str, Any]) -> Run:
    said = json.loads(_decoded(found["value"]))
    revision, build = int(found["mod_revision"]), str(said.get("build", ""))  # one of before does not say which
    return Run(said["word"], said["leader"], said["began_with"], bool(said["over"]), revision, build)


def _encoded(text: str) -> str:
    """Encodes a key or value in base64, as etcd's gateway wants it."""
    return base64.b64encode(text.encode()).decode()


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode()
