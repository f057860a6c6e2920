"""How long etcd may take to answer: what follows from how long it took before. etcd is a stand-in with a clock."""

from __future__ import annotations

import base64
import re
from typing import Any

import pytest
from etcd3gw.exceptions import ConnectionFailedError, ConnectionTimeoutError

from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.transport import etcd
from torch_ecrec.transport.etcd import EtcdKeys, EtcdUnavailable, Leader, Run, View, parse_place
from torch_ecrec.transport.whereabouts import PATIENT_S, Elected


class Address:
    """One of etcd's: answers after so many seconds, or not at all."""

    def __init__(self, name: str, clock: list[float], timeout_s: float) -> None:
        self.host, self.port, self.timeout = name, 2379, timeout_s
        self.clock, self.takes_s, self.refuses = clock, 0.0, False
        self.fails: Exception | None = None
        self.leader: dict[str, str] | None = None
        self.run: dict[str, str] | None = None
        self.asked = 0

    def transaction(self, _: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        if self.refuses:
            raise ConnectionFailedError("Connection refused")
        self.clock[0] += min(self.takes_s, self.timeout)
        if self.takes_s > self.timeout:
            raise ConnectionTimeoutError("late")
        if self.fails is not None:
            raise self.fails
        responses = [{"response_range": {} if one is None else {"kvs": [one]}} for one in (self.leader, self.run)]
        return {"header": {"cluster_id": "3", "revision": "9"}, "responses": responses}


def kept(value: bytes) -> dict[str, str]:
    """A key, as etcd has it."""
    return {"value": base64.b64encode(value).decode(), "mod_revision": "7", "create_revision": "5", "lease": "1"}


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[Address]:
    clock = [100.0]
    monkeypatch.setattr(etcd.time, "monotonic", lambda: clock[0])
    return [Address(name, clock, 0.2) for name in "abc"]


def keys(addresses: list[Address], patient_s: float | None = 1.0) -> EtcdKeys:
    found = EtcdKeys(parse_place("etcd://a,b,c/ads"), 0.2, patient_s)
    found._clients = list(addresses)  # type: ignore[arg-type]
    return found


def test_an_etcd_that_is_slow_all_the_time_is_waited_for(addresses: list[Address]) -> None:
    """On a busy machine every answer took 0.2 to 0.8 s, nobody waited so long, and nobody led for minutes."""
    for one in addresses:
        one.takes_s = 0.7
    asks = keys(addresses)
    failed = 0
    while True:
        try:
            assert asks.look().leader is None
            break
        except EtcdUnavailable as error:
            assert str(error).count("no answer in time") == 3
            failed += 1
    assert failed == 2, "0.2, then 0.4, then 0.8"
    for _ in range(5):
        assert asks.look().leader is None, "from then on each time"


def test_patience_has_an_end_and_shrinks_with_the_answers(addresses: list[Address]) -> None:
    asks = keys(addresses)
    for one in addresses:
        one.takes_s = 5.0
    for _ in range(10):
        with pytest.raises(EtcdUnavailable):
            asks.look()
    assert [one.timeout for one in addresses] == [1.0, 1.0, 1.0]
    addresses[0].takes_s = 0.001
    asks.look()
    assert 0.9 < addresses[0].timeout < 1.0, "it may be slow again"
    for _ in range(100):
        asks.look()
    assert addresses[0].timeout == 0.2 and addresses[1].timeout == 1.0
    addresses[0].takes_s = 0.1
    asks.look()
    assert addresses[0].timeout == pytest.approx(0.4), "some times what it took"


def test_one_address_that_hangs_costs_little_and_one_that_refuses_nothing(addresses: list[Address]) -> None:
    asks, clock = keys(addresses), addresses[0].clock
    addresses[0].takes_s, addresses[1].refuses = 60.0, True
    begin_s = clock[0]
    for _ in range(20):
        asks.look()
    assert clock[0] - begin_s == pytest.approx(0.2), "it is not asked first any more"
    assert [one.asked for one in addresses] == [1, 1, 20] and addresses[1].timeout == 0.2


def test_who_has_no_patience_waits_as_long_each_time(addresses: list[Address]) -> None:
    asks = keys(addresses, None)
    for one in addresses:
        one.takes_s = 0.3
    for _ in range(5):
        with pytest.raises(EtcdUnavailable):
            asks.look()
    assert {one.timeout for one in addresses} == {0.2}


def test_what_etcd_has_is_read(addresses: list[Address]) -> None:
    first = addresses[0]
    assert keys(addresses).look() == View(None, None, 3, 9)
    first.leader = kept(b'{"id": "x", "address": ["here", 1], "ttl_s": 2}')
    first.run = kept(b'{"word": "its word", "leader": "x", "began_with": "none", "over": false}')
    leader, run = Leader(("here", 1), 7, "x", 1, 2), Run("its word", "x", "none", False, 7)
    assert keys(addresses).look() == View(leader, run, 3, 9)
    first.leader["lease"] = "0"
    assert keys(addresses).look() == View(None, run, 3, 9), "a key that hangs on no lease is nobody's"


@pytest.mark.parametrize(
    "fails",
    [OSError("no file for TLS: /etc/ca.pem"), KeyError("responses"), TypeError("no dict"), RecursionError("nested")],
)
def test_whatever_an_address_fails_by_the_next_one_is_asked(addresses: list[Address], fails: Exception) -> None:
    """Where it ended the thread that keeps the lead, that process led for ever, and never acted."""
    addresses[0].fails = fails
    assert keys(addresses).look().leader is None and [one.asked for one in addresses] == [1, 1, 0]
    for one in addresses:
        one.fails = fails
    with pytest.raises(EtcdUnavailable, match=re.escape(str(fails.args[0]))):
        keys(addresses).look()


@pytest.mark.parametrize("value", [b"", b"[]", b"\xff", b"7", b'{"id": "x"}', b'{"id": "x", "address": 7, "lease": 1}'])
def test_what_somebody_else_has_written_is_nobody_s_end(value: bytes, addresses: list[Address]) -> None:
    for one in addresses:
        one.leader = kept(value)
    with pytest.raises(EtcdUnavailable):
        keys(addresses).look()
    with pytest.raises(ClusterUnavailable, match="no coordinator of etcd://a/ads"):
        Elected("etcd://a/ads", keys(addresses)).find(0.0)


def test_members_wait_for_a_slow_etcd_as_coordinators_do(addresses: list[Address]) -> None:
    """They gave each answer a second, and nobody was found where each took more."""
    where, (slow, *_) = Elected("etcd://a/ads"), addresses
    where._keys._clients = [slow]  # type: ignore[attr-defined]
    slow.timeout, slow.takes_s = 1.0, 1.3
    slow.leader = kept(b'{"id": "x", "address": ["here", 1], "ttl_s": 2}')
    found = [where.look() for _ in range(3)]
    assert found[0] is None and found[1] == found[2] == Leader(("here", 1), 7, "x", 1, 2)
    slow.takes_s = 60.0
    for _ in range(5):
        begin_s = slow.clock[0]
        assert where.look() is None and slow.clock[0] - begin_s <= PATIENT_S
    assert Elected("etcd://a,b,c/ads")._keys._patient_s == pytest.approx(PATIENT_S / 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("text", "trusts"), [("etcds://a/ads?ca=FILE", False), ("etcds://a/ads", True)])
def test_the_environment_counts_where_no_certificate_is_named(text: str, trusts: bool) -> None:
    """REQUESTS_CA_BUNDLE, where it was set, counted instead of what was named."""
    assert [client.session.trust_env for client in EtcdKeys(parse_place(text), 0.2)._clients] == [trusts]
