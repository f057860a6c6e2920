"""Which of several coordinators leads, as etcd has it.

A cluster has a name, and in etcd two keys under it:

    /torch-ecrec/NAME/leader    where the leader listens, and its id; with a lease: it goes when its owner is silent
    /torch-ecrec/NAME/last      who has led last, the word of the run, what it began with, whether it is over; or a mark

The revision at which `leader` was made, with what is added to it (`Last.counts_from`), tells one leader from the next:
it only grows. Every call is one transaction of etcd, and asks one address after the other. How long each may take
follows from how long it took before: on a busy machine etcd may need longer for every answer than a short limit allows,
and then nobody could ever lead.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
COUNTS_MOST = 1 << 62  # revisions: members read 63 bits
SLOWER = 4.0  # than the last answer may the next one be
FALLS = 0.95  # of what the last answer could have taken may the next one take all the same: etcd is slow now and then
_SHAPE = re.compile(r"(etcds?)://([^/]+)/([A-Za-z0-9._-]+)(?:\?(.*))?")
_TLS = "ca", "cert", "key"
# OSError: also a certificate's file that is not there. The others: it is not what this has written.
_NO_ANSWER = OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError


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
        try:
            addresses.append(parse_address(one if ":" in one.rpartition("]")[2] else f"{one}:{PORT}"))
        except ValueError as error:
            raise ValueError(f"{wanted}: {error}") from None
    protocol, tls = "https" if found[1] == "etcds" else "http", tuple(more.get(name) for name in _TLS)
    return Place(protocol, tuple(addresses), found[3], tls)


GOES_ON, BEGINS = "goes on", "begins"  # marks


@dataclass(frozen=True)
class Leader:
    """Who leads: its address, and the revision since when.

    Args:
        id: made up by its process.
        lease: what the key has; `ttl_s`: how long that is, 0 if it has not said so.
    """

    address: tuple[str, int]
    revision: int
    id: str = ""
    lease: int = 0
    ttl_s: int = 0


@dataclass(frozen=True)
class Last:
    """Who has led last; or a mark, by which somebody says what etcd did not know (`coordinator/election.py`).

    Args:
        id: made up by its process; of a mark: for the mark.
        run: the word of the run; `began_with`: the checkpoint that it began with, as the first to lead has found it.
            Of a mark that one begins: "".
        revision: of what etcd has of it, 0 if nothing.
        counts_from: what is added to etcd's revisions; of a mark: the newest revision that its writer has seen.
        over: the run has ended. Who leads next begins another.
        mark: `GOES_ON`: nobody leads the run for now. `BEGINS`: it begins, unless somebody knows of another. Else "".
        deposed: of a mark, or an end: somebody else led, as etcd said, and may act until its lease is over.
        ttl_s: of its lease, in seconds; 0 if it has not said so.
        written: as etcd has it.
    """

    id: str = ""
    run: str = ""
    revision: int = 0
    began_with: str = ""
    counts_from: int = 0
    over: bool = False
    mark: str = ""
    deposed: bool = False
    ttl_s: int = 0
    written: str = field(default="", compare=False, repr=False)

    @property
    def since(self) -> int:
        """The revision of its leader, as members know it; of a mark: of any leader that is known."""
        return self.counts_from + (0 if self.mark else self.revision)

    @property
    def runs(self) -> bool:
        """There is a run, and somebody has led it."""
        return bool(self.id) and not self.over and self.mark != BEGINS


NOBODY = Last()


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
            Etcd3Client(in_url(host), port, place.protocol, authority, key, certificate, timeout_s, "/v3/")
            for host, port in place.addresses
        ]
        for client in self._clients:  # else REQUESTS_CA_BUNDLE, where it is set, would count instead of what was named
            client.session.trust_env = authority is None
        self._timeout_s, self._patient_s = timeout_s, max(timeout_s, patient_s or 0.0)
        self._leader, self._last = (f"/torch-ecrec/{place.name}/{key}" for key in ("leader", "last"))

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

    def leader(self) -> Leader | None:
        """Who leads."""

        def ask(client: Etcd3Client) -> Leader | None:
            found = client.get(self._leader, metadata=True)
            if not found:
                return None
            value, about = found[0]
            return _leader(value.decode(), about)

        return self._ask(ask)

    def look(self) -> tuple[Leader | None, Last]:
        """Who leads, and who has led last, at one moment."""
        asked = [{"request_range": {"key": _encoded(key)}} for key in (self._leader, self._last)]

        def ask(client: Etcd3Client) -> tuple[Leader | None, Last]:
            found = client.transaction({"compare": [], "success": asked, "failure": []})["responses"]
            of_leader, of_last = (one["response_range"].get("kvs", []) for one in found)
            leader = _leader(_decoded(of_leader[0]["value"]), of_leader[0]) if of_leader else None
            if of_leader and leader is None:
                self._remove(client, of_leader[0]["value"])
            return leader, _last(_decoded(of_last[0]["value"]), of_last[0]) if of_last else NOBODY

        return self._ask(ask)

    def grant(self, ttl_s: int) -> int:
        """A lease of so many seconds."""
        return int(self._ask(lambda client: client.lease(ttl_s)).id)

    def renew(self, lease: int) -> bool:
        """Whether the lease was still there."""
        from etcd3gw.lease import Lease

        return self._ask(lambda client: Lease(lease, client).refresh()) > 0

    def revoke(self, lease: int) -> None:
        """Gives a lease back, with what hangs on it; if etcd does not answer, it ends by itself."""
        from etcd3gw.lease import Lease

        with contextlib.suppress(EtcdUnavailable):
            self._ask(lambda client: Lease(lease, client).revoke())

    def take(self, me: Last, address: tuple[str, int], lease: int, last: Last) -> bool:
        """Leads, if nobody does and `last` is what it was. `me`: what it is from then on."""
        key, of_last = _encoded(self._leader), _encoded(self._last)
        about = {
            "id": me.id,
            "address": list(address),
            "lease": lease,
            "ttl_s": me.ttl_s,
            "counts_from": me.counts_from,
        }
        return self._txn(
            [{"key": key, "result": "EQUAL", "target": "CREATE", "create_revision": 0}, self._is_still(last)],
            [
                {"request_put": {"key": key, "value": _encoded(json.dumps(about)), "lease": lease}},
                {"request_put": {"key": of_last, "value": _written(me)}},
            ],
        )

    def write(self, said: Last, last: Last) -> bool:
        """Nobody leads, and `said` takes the place of `last`, if that is what it was: a mark, or the end of a run."""
        put = {"key": _encoded(self._last), "value": _written(said)}
        return self._txn([self._is_still(last)], [self._nobody, {"request_put": put}])

    def _is_still(self, last: Last) -> dict[str, Any]:
        """By its value: an etcd that has forgotten everything counts its revisions anew."""
        key = {"key": _encoded(self._last), "result": "EQUAL"}
        if not last.id:
            return {**key, "target": "CREATE", "create_revision": 0}
        return {**key, "target": "VALUE", "value": _encoded(last.written)}

    @property
    def _nobody(self) -> dict[str, Any]:
        return {"request_delete_range": {"key": _encoded(self._leader)}}

    def _remove(self, client: Etcd3Client, value: str) -> None:
        """That leader, who has no lease, and would lead for ever: the keys were copied, which does not copy leases."""
        key: dict[str, Any] = {"key": _encoded(self._leader), "result": "EQUAL"}
        is_still = [{**key, "target": "VALUE", "value": value}, {**key, "target": "LEASE", "lease": 0}]
        _transact(client, is_still, [self._nobody])

    def _txn(self, compare: list[dict[str, Any]], success: list[dict[str, Any]]) -> bool:
        return self._ask(lambda client: _transact(client, compare, success))


def _transact(client: Etcd3Client, compare: list[dict[str, Any]], success: list[dict[str, Any]]) -> bool:
    asked = {"compare": compare, "success": success, "failure": []}
    return bool(client.transaction(asked).get("succeeded", False))


def allowed_s(limit_s: float, known_s: float, least_s: float, most_s: float) -> float:
    """How long the next answer may take.

    Args:
        limit_s: by how long the last one took.
        known_s: how long that might have taken; from one to the next, it falls slowly.
    """
    return min(max(limit_s, FALLS * known_s, least_s), most_s)


def _said(error: Exception) -> str:
    """For people: what urllib3 says of a connection that is refused is several lines long."""
    from etcd3gw.exceptions import ConnectionFailedError, ConnectionTimeoutError

    if isinstance(error, ConnectionTimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionFailedError) and "onnection" in str(error.detail_text):
        return "no connection"
    if isinstance(error, (KeyError, TypeError, AttributeError, OverflowError)):
        return f"no answer of etcd, or not what torch-ecrec has written: {error!r}"
    return str(getattr(error, "detail_text", None) or error)


def _leader(text: str, about: Mapping[str, Any]) -> Leader | None:
    """None: the key has no lease, and is nobody's."""
    if not int(about.get("lease", 0)):
        return None
    said = json.loads(text)
    host, port = said["address"]
    since = _counts_from(said) + int(about["create_revision"])
    return Leader((host, int(port)), since, said["id"], said["lease"], int(said.get("ttl_s", 0)))


def _last(text: str, about: Mapping[str, Any]) -> Last:
    said = json.loads(text)
    require(bool(said["id"]), "an id is missing")
    # An older build has not written what the run began with: which counts only where nobody is left.
    return Last(
        id=said["id"],
        run=said["run"],
        revision=int(about["mod_revision"]),
        began_with=str(said.get("began_with", "")),
        counts_from=_counts_from(said),
        over=bool(said.get("over", False)),
        mark=str(said.get("mark", "")),
        deposed=bool(said.get("deposed", False)),
        ttl_s=int(said.get("ttl_s", 0)),
        written=text,
    )


def _counts_from(said: dict[str, Any]) -> int:
    found = int(said.get("counts_from", 0))
    require(0 <= found < COUNTS_MOST, f"revisions count from {found}")
    return found


def _written(last: Last) -> str:
    """As etcd has it, but for its revision."""
    said = {name: value for name, value in dataclasses.asdict(last).items() if name not in ("revision", "written")}
    return _encoded(json.dumps(said))


def _encoded(text: str) -> str:
    """As the gateway wants keys and values."""
    return base64.b64encode(text.encode()).decode()


def _decoded(text: str) -> str:
    return base64.b64decode(text).decode()
