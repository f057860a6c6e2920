"""The HTTP server over real sockets, with a cluster that is made up: routes, secrets, limits, strangers."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import wait_until
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from watched import SECRET, MadeUp, rebuilding, watched, whole

from torch_ecrec.observe.verdict import json_of
from torch_ecrec.web import server
from torch_ecrec.web.guard import OURS
from torch_ecrec.web.place import Place
from torch_ecrec.web.server import WebServer

WAIT_S = 300.0  # for anything at all: only a hang reaches it
POST = {OURS: "1"}
BEARER = {"Authorization": f"Bearer {SECRET}"}


@pytest.fixture
def made_up() -> MadeUp:
    return MadeUp()


@pytest.fixture
def web(made_up: MadeUp) -> Iterator[WebServer]:
    with watched(made_up) as found:
        yield found


def ask(
    web: WebServer, path: str, method: str = "GET", body: str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], str]:
    """Status, headers and text of an answer."""
    connection = http.client.HTTPConnection(*web.address, timeout=WAIT_S)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def connect(web: WebServer) -> socket.socket:
    return socket.create_connection(web.address, timeout=WAIT_S)


class Stream:
    """An open page: what it is sent, event after event."""

    def __init__(self, web: WebServer, last: str = "", **headers: str) -> None:
        self._socket = connect(web)
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        more += f"Last-Event-ID: {last}\r\n" if last else ""
        self._socket.sendall(f"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n{more}\r\n".encode())
        self._file = self._socket.makefile("rb")
        self.status = int(self._file.readline().split()[1])
        while self._file.readline().strip():
            pass
        self.last_id = last
        self._all = self._events()

    def _events(self) -> Iterator[tuple[str, Any]]:
        rest = ""
        while True:
            while "\n\n" in rest:
                block, _, rest = rest.partition("\n\n")
                fields = dict(line.split(": ", 1) for line in block.splitlines())
                if "event" in fields:
                    self.last_id = fields.get("id", self.last_id)
                    yield fields["event"], json.loads(fields["data"])
            size = self._file.readline().strip()
            if not size or size == b"0":
                return
            rest += self._file.read(int(size, 16)).decode()
            self._file.readline()

    def first(self, kind: str, number: int = 1) -> list[Any]:
        """The next `number` events of that kind."""
        found = []
        for one, data in self._all:
            if one == kind:
                found.append(data)
                if len(found) == number:
                    break
        return found

    def close(self) -> None:
        self._file.close()
        self._socket.close()


# --- what is there ----------------------------------------------------------------------------------------------------


def test_what_is_served(web: WebServer, made_up: MadeUp) -> None:
    code, headers, text = ask(web, "/")
    assert (
        code == 200 and headers["Content-Type"] == "text/html; charset=utf-8" and "<title>torch_ecrec</title>" in text
    )
    assert "script-src 'sha256-" in headers["Content-Security-Policy"]
    code, headers, text = ask(web, "/status.json")
    assert code == 200 and json.loads(text) == json.loads(json.dumps(json_of(made_up.status, "10.0.0.1:29400")))
    code, headers, text = ask(web, "/metrics")
    assert code == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert any(one.name == "torch_ecrec_slots" for one in text_string_to_metric_families(text))
    assert ask(web, "/healthz")[::2] == (200, "leads\n")
    assert ask(web, "/healthz", "HEAD")[::2] == (200, "")
    with connect(web) as one:
        one.sendall(b"HEAD /events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        said = b""
        while b"\r\n\r\n" not in said and (part := one.recv(1 << 16)):
            said += part
        assert b"text/event-stream" in said and said.endswith(b"\r\n\r\n") and one.recv(1) == b"", "and no body"
    code, headers, _ = ask(web, "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    for path in ("/", "/metrics", "/status.json", "/healthz", "/none"):
        headers = ask(web, path)[1]
        wanted = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "X-Frame-Options": "DENY"}
        assert wanted.items() <= headers.items() and "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/none", 404),
        ("GET", "/../etc/passwd", 404),
        ("POST", "/metrics", 405),
        ("GET", "/drain", 405),
        ("PUT", "/", 405),
    ],
)
def test_what_is_not(method: str, path: str, code: int, web: WebServer) -> None:
    assert ask(web, path, method, headers=POST)[0] == code


def test_a_cluster_that_has_stopped_or_does_not_answer_is_not_well(web: WebServer, made_up: MadeUp) -> None:
    made_up.status = replace(made_up.status, fatal="slots 0, 1 are lost")
    wait_until(lambda: ask(web, "/healthz")[0] == 503, WAIT_S, "it has heard that")
    assert "slots 0, 1 are lost" in ask(web, "/healthz")[2]
    made_up.silent = True
    wait_until(lambda: "does not answer" in ask(web, "/healthz")[2], WAIT_S, "the status is no older than it says")
    assert ask(web, "/metrics")[0] == ask(web, "/status.json")[0] == 503, "Prometheus sees that it is down"
    made_up.silent, made_up.status = False, whole()
    wait_until(lambda: ask(web, "/healthz")[0] == 200, WAIT_S, "it answers again")


def test_who_stands_by_says_so_until_it_leads(made_up: MadeUp) -> None:
    with watched() as web:
        assert ask(web, "/healthz")[0] == ask(web, "/status.json")[0] == 503 and "stands by" in ask(web, "/healthz")[2]
        assert "torch_ecrec_leading 0.0" in ask(web, "/metrics")[2]
        assert ask(web, "/drain", "POST", '{"member": "server-1"}', POST)[0] == 503
        web.lead(made_up.cluster())
        assert ask(web, "/healthz")[0] == 200 and "torch_ecrec_leading 1.0" in ask(web, "/metrics")[2]
        web.lead(None)
        assert ask(web, "/healthz")[0] == 503


def test_a_drain_is_asked_for(web: WebServer, made_up: MadeUp) -> None:
    assert ask(web, "/drain", "POST", '{"member": "server-1"}', POST)[::2] == (200, "server-1 is being drained\n")
    assert ask(web, "/drain", "POST", '{"member": "server-1", "undo": true}', POST)[0] == 200
    assert made_up.drains == [("server-1", False), ("server-1", True)]
    made_up.why = "there is no server of that name"
    assert ask(web, "/drain", "POST", '{"member": "x"}', POST)[::2] == (409, "there is no server of that name\n")
    for body in (
        "",
        "{",
        "[]",
        '{"member": 1}',
        '{"member": "a", "other": 1}',
        '{"undo": true}',
        "\0",
        '{"member": "\\ud800"}',
    ):
        assert ask(web, "/drain", "POST", body, POST)[0] == 400, body
    assert len(made_up.drains) == 3


def test_a_checkpoint_is_asked_for(web: WebServer, made_up: MadeUp) -> None:
    assert ask(web, "/checkpoint", "POST", "{}", POST)[::2] == (200, "a checkpoint is being written\n")
    assert made_up.checkpoints == 1
    made_up.why = "no checkpoints are kept"
    assert ask(web, "/checkpoint", "POST", "{}", POST)[::2] == (409, "no checkpoints are kept\n")
    for body in ("", "{", "[]", '{"member": "server-1"}', "\0"):
        assert ask(web, "/checkpoint", "POST", body, POST)[0] == 400, body
    assert ask(web, "/checkpoint", "POST", "{}")[0] == 403 and ask(web, "/checkpoint")[0] == 405
    assert made_up.checkpoints == 2


def test_a_kill_is_done_only_where_it_is_allowed(made_up: MadeUp) -> None:
    kill = '{"member": "server-1"}'
    with watched(made_up) as web:
        code, _, why = ask(web, "/kill", "POST", kill, POST)
        assert code == 403 and "without --allow-kill" in why
        assert Stream(web).first("hello")[0]["kill"] is False
    assert made_up.kills == []
    made_up.may_kill = True
    with watched(made_up) as web:
        assert Stream(web).first("hello")[0]["kill"] is True
        assert ask(web, "/kill", "POST", kill, POST)[::2] == (200, "server-1 was killed\n")
        made_up.why = "no member is called 'x'"
        assert ask(web, "/kill", "POST", '{"member": "x"}', POST)[::2] == (409, "no member is called 'x'\n")
        for body in ("", "{}", "[]", '{"member": 1}', '{"member": "a", "undo": true}'):
            assert ask(web, "/kill", "POST", body, POST)[0] == 400, body
        assert ask(web, "/kill", "POST", kill)[0] == 403 and ask(web, "/kill")[0] == 405
        web.lead(None)
        assert ask(web, "/kill", "POST", kill, POST)[0] == ask(web, "/checkpoint", "POST", "{}", POST)[0] == 503
    assert made_up.kills == ["server-1", "x"]


@pytest.mark.parametrize("path", ["/drain", "/checkpoint", "/kill"])
def test_whoever_acts_proves_that_they_know_the_secret(path: str, guarded: WebServer, made_up: MadeUp) -> None:
    made_up.may_kill = True
    guarded.lead(made_up.cluster())
    body = "{}" if path == "/checkpoint" else '{"member": "server-1"}'
    assert ask(guarded, path, "POST", body, POST)[0] == 401
    assert ask(guarded, path, "POST", body, {**POST, "Authorization": "Bearer wrong"})[0] == 401
    assert (made_up.drains, made_up.checkpoints, made_up.kills) == ([], 0, [])
    assert ask(guarded, path, "POST", body, {**POST, **BEARER})[0] == 200


def test_members_of_a_coordinator_before_are_not_counted_again(web: WebServer, made_up: MadeUp) -> None:
    """Nobody has told this one that it takes the place of another, but members come that were there."""
    at, made_up.status = whole(step=500), whole(slots=0, step=0, members=[])
    assert "torch_ecrec_steps_total 0.0" in ask(web, "/metrics")[2]
    web.happened({"event": "regathering"})
    made_up.status = replace(at, slots=[])
    wait_until(lambda: 'members_alive{role="server"} 4.0' in ask(web, "/metrics")[2], WAIT_S, "they are there")
    made_up.status = at
    wait_until(lambda: 'slots{state="healthy"} 3.0' in ask(web, "/metrics")[2], WAIT_S, "they have said all")
    text = ask(web, "/metrics")[2]
    assert "torch_ecrec_steps_total 0.0" in text and 'sent_bytes_total{kind="lookup",role="server"} 0.0' in text


# --- who may ask ------------------------------------------------------------------------------------------------------


def test_a_page_of_another_site_can_do_nothing(web: WebServer, made_up: MadeUp) -> None:
    drain = ("/drain", "POST", '{"member": "server-1"}')
    assert ask(web, *drain)[0] == 403
    assert ask(web, *drain, {**POST, "Host": f"evil.example:{web.address[1]}"})[0] == 421
    assert ask(web, *drain, {**POST, "Origin": "http://evil.example"})[0] == 403
    assert ask(web, "/drain", "OPTIONS", headers={"Origin": "http://evil.example"})[0] == 403, "nobody is allowed to"
    assert ask(web, "/status.json", headers={"Host": "evil.example"})[0] == 421
    assert made_up.drains == []


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch, made_up: MadeUp) -> Iterator[WebServer]:
    monkeypatch.setenv("TORCH_ECREC_SECRET", SECRET)
    with watched(made_up, Place("0.0.0.0", 0)) as found:
        yield found


def test_a_secret_is_asked_for_and_never_told(guarded: WebServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert ask(guarded, "/")[0] == 200
    for path in ("/metrics", "/status.json", "/events", "/healthz"):
        code, headers, text = ask(guarded, path)
        assert code == 401 and headers["WWW-Authenticate"].startswith("Bearer") and "server-" not in text
        assert ask(guarded, f"{path}?secret={SECRET}")[0] == 401, "not in a URL"
    assert ask(guarded, "/metrics", headers={"Authorization": "Bearer wrong"})[0] == 401
    assert "does not know the secret" in caplog.text
    assert ask(guarded, "/metrics", headers=BEARER)[0] == 200
    assert ask(guarded, "/drain", "POST", '{"member": "server-1"}', {**POST, **BEARER})[0] == 200
    assert ask(guarded, "/drain", "POST", '{"member": "server-1"}', POST)[0] == 401
    assert SECRET not in caplog.text and "wrong" not in caplog.text


def test_a_browser_says_the_secret_once(guarded: WebServer) -> None:
    assert ask(guarded, "/login", "POST", "wrong", POST)[0] == 401
    assert ask(guarded, "/login", "POST", SECRET)[0] == 403, "a form of another site"
    code, headers, text = ask(guarded, "/login", "POST", SECRET, POST)
    cookie = headers["Set-Cookie"]
    assert code == 200 and SECRET not in cookie + text
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Path=/" in cookie and "Max-Age=43200" in cookie
    known = {"Cookie": cookie.partition(";")[0]}
    assert ask(guarded, "/status.json", headers=known)[0] == 200
    assert ask(guarded, "/drain", "POST", '{"member": "a"}', known)[0] == 403, "by another site's form, even so"


def test_without_a_secret_it_does_not_listen_where_others_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ECREC_SECRET", raising=False)
    with pytest.raises(ValueError, match="other hosts take a secret"):
        WebServer(Place("0.0.0.0", 0))


# --- events -----------------------------------------------------------------------------------------------------------


def test_a_page_that_reconnects_gets_what_it_has_missed(web: WebServer) -> None:
    web.happened({"event": "left", "member": "server-1"})
    first = Stream(web)
    assert first.first("hello")[0]["missed"] is False
    assert first.first("happened")[0]["member"] == "server-1"
    assert first.first("status")[0]["type"] == "status"
    web.happened({"event": "left", "member": "server-2"})
    assert first.first("happened")[0]["member"] == "server-2"
    first.close()
    for number in (3, 4):
        web.happened({"event": "left", "member": f"server-{number}"})
    again = Stream(web, first.last_id)
    assert again.first("hello")[0]["missed"] is True
    assert [one["member"] for one in again.first("happened", 2)] == ["server-3", "server-4"], "and nothing twice"
    again.close()
    other = Stream(web, "ffffffff-1")
    assert len(other.first("happened", 4)) == 4, "of another life: all that is there"
    other.close()


def test_a_status_comes_by_itself_and_soon_after_an_event(web: WebServer, made_up: MadeUp) -> None:
    with contextlib.closing(Stream(web)) as page:
        page.first("status", 3)
        made_up.status = rebuilding(whole(step=200), 0.5)
        web.happened({"event": "lost", "member": "server-1", "why": "x", "slots": [1]})
        assert page.first("happened")[0]["slots"] == [1]
        while page.first("status")[0]["step"] != 200:
            pass
        made_up.silent = True
        assert "does not answer" in page.first("silent")[0]["why"]


def test_however_many_pages_are_open_the_coordinator_is_asked_twice_a_second(web: WebServer, made_up: MadeUp) -> None:
    pages = [Stream(web) for _ in range(server.STREAMS_MOST)]
    try:
        assert Stream(web).status == 503, "no more"
        begun_s, asked = time.monotonic(), made_up.asked
        for _ in range(3):
            web.happened({"event": "goes_on"})
            for page in pages:
                page.first("status")
            assert ask(web, "/metrics")[0] == 200
        passed_s = time.monotonic() - begun_s
        assert 1 <= made_up.asked - asked <= passed_s / server.FRESH_S + 2
    finally:
        for page in pages:
            page.close()
    wait_until(lambda: Stream(web).status == 200, WAIT_S, "there is room once they are gone")


# --- strangers --------------------------------------------------------------------------------------------------------


def read_all(one: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := one.recv(1 << 16):
            found += part
    return found


HEAD = b"POST /drain HTTP/1.1\r\nHost: localhost\r\nX-Torch-Ecrec: 1\r\n"
BAD = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n",
    "zeros": bytes(5000),
    "a long line": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    "a long header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\nHost: localhost\r\n"
    + b"".join(b"X%d: 1\r\n" % i for i in range(5000))
    + b"\r\n",
    "two lengths": b"POST /drain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcd",
    "smuggled": HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a bad chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a negative length": b"POST /drain HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    "a bad version": b"GET / HTTP/9.9\r\n\r\n",
    "a proxy's": b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n",
    "an upgrade": b"GET /events HTTP/1.1\r\nHost: evil\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "a header of bytes": b"GET / HTTP/1.1\r\nHost: localhost\r\nCookie: \xff\xfe=\x80\r\n\r\n",
    "no UTF-8": HEAD + b'Content-Length: 14\r\n\r\n{"member":"\xff"}',
    "no host": b"GET /status.json HTTP/1.0\r\n\r\n",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_end_their_connection_only(case: str, web: WebServer) -> None:
    with connect(web) as one:
        with contextlib.suppress(ConnectionError):
            one.sendall(BAD[case])
            one.shutdown(socket.SHUT_WR)
        said = read_all(one)
        assert b"server-0" not in said
        assert not said or said.split()[1][:1] in b"24", said[:200]
    assert ask(web, "/healthz")[0] == 200


def test_noise_of_any_kind_is_survived(web: WebServer) -> None:
    rng = random.Random(5)
    whole_ones = [b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n", *BAD.values()]
    for _ in range(300):
        data = bytearray(rng.choice(whole_ones)[: rng.randrange(1, 600)])
        for _ in range(rng.randrange(8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with connect(web) as one, contextlib.suppress(ConnectionError):
            one.sendall(data)
    assert ask(web, "/metrics")[0] == 200 and web._thread.is_alive()


def test_a_body_that_is_too_long_is_refused(web: WebServer, made_up: MadeUp) -> None:
    assert ask(web, "/drain", "POST", "x" * 100_000, POST)[0] == 413
    with connect(web) as one:
        one.sendall(
            b"POST /drain HTTP/1.1\r\nHost: localhost\r\nX-Torch-Ecrec: 1\r\nContent-Length: 1000000000000\r\n\r\n"
        )
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                one.sendall(bytes(1 << 16))
        read_all(one)  # its end: it may be cut off before it has read why
    assert made_up.drains == [] and ask(web, "/healthz")[0] == 200


def test_slow_clients_hold_up_nobody_and_have_an_end(made_up: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty that say half a request, twenty that do not take their answers: a scrape is answered all the same."""
    monkeypatch.setattr(server, "IDLE_S", 2 * WAIT_S)  # nobody has to go while the scrapes are made
    monkeypatch.setattr(server, "ANSWER_S", 2 * WAIT_S)
    with watched(made_up) as web, contextlib.ExitStack() as stack:
        half = [stack.enter_context(connect(web)) for _ in range(20)]
        for one in half:
            one.sendall(b"GET /metrics HTTP/1.1\r\nHost: local")
        for _ in range(20):
            deaf = stack.enter_context(socket.socket())
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(web.address)
            deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
        for _ in range(20):
            assert ask(web, "/metrics")[0] == 200
        wait_until(lambda: len(web._doors._peers) == 40, WAIT_S, "they are all still there, and nobody else")
        monkeypatch.setattr(server, "ANSWER_S", 0.1)
        wait_until(lambda: len(web._doors._peers) == 0, WAIT_S, "their time is over")
        assert read_all(half[0]) == b""
        monkeypatch.setattr(server, "ANSWER_S", 2 * WAIT_S)
        assert ask(web, "/metrics")[0] == 200


def test_who_says_half_a_request_has_its_time(made_up: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.5)
    with watched(made_up) as web, connect(web) as half, connect(web) as none:
        half.sendall(b"GET /metrics HTTP/1.1\r\nHost: local")
        assert read_all(half) == b"" == read_all(none)


def test_of_too_many_connections_the_oldest_goes(web: WebServer) -> None:
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(connect(web)) for _ in range(server.CONNECTIONS_MOST)]
        page = stack.enter_context(contextlib.closing(Stream(web)))
        page.first("status")
        more = [stack.enter_context(connect(web)) for _ in range(50)]
        assert ask(web, "/metrics")[0] == 200
        assert read_all(many[0]) == b"" and read_all(many[1]) == b""
        assert page.first("status"), "a page that is open stays"
        assert len(web._doors._peers) <= server.CONNECTIONS_MOST and more


def test_a_page_that_does_not_read_is_cut_off(web: WebServer, made_up: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WRITE_S", 0.5)
    made_up.status = whole(slots=400)  # a large one each time
    made_up.step = lambda status: replace(status, step=status.step + 1)
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.connect(web.address)
    one.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    wait_until(lambda: web._streams == 1, WAIT_S, "it is a page")
    wait_until(lambda: web._streams == 0, WAIT_S, "it is one no more")
    one.close()


def test_requests_in_a_row_on_one_connection(web: WebServer) -> None:
    connection = http.client.HTTPConnection(*web.address, timeout=WAIT_S)
    for path in ("/metrics", "/none", "/status.json", "/healthz"):
        connection.request("GET", path)
        connection.getresponse().read()
    assert len(web._doors._peers) == 1
    connection.close()


# --- its end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", range(5))
def test_its_end_is_prompt_and_frees_the_port(turn: int, made_up: MadeUp) -> None:
    """Also for who has come at that moment."""
    with watched(made_up) as web:
        pages = [Stream(web) for _ in range(3)]
        half = connect(web)
        half.sendall(b"GET /")
    assert not web._thread.is_alive()
    for page in pages:
        with contextlib.suppress(ConnectionError):
            assert page.first("none") == []
    assert read_all(half) == b""
    with socket.create_server(web.address):
        pass
    web.close()
    web.happened({"event": "goes_on"})  # nobody hears it
    web.lead(None)


def test_a_port_that_is_in_use_is_refused_or_waited_for(made_up: MadeUp) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = Place("127.0.0.1", other.getsockname()[1])
        with pytest.raises(OSError, match=f"--http: port {place.port} on 127.0.0.1 is in use"):
            WebServer(place)
        late = WebServer(place, insists=False)
        late.start()
        late.lead(made_up.cluster(again=True))
    wait_until(lambda: can_ask(late), WAIT_S, "it has the port once it is free")
    late.close()


def can_ask(web: WebServer) -> bool:
    with contextlib.suppress(OSError):
        return ask(web, "/healthz")[0] == 200
    return False


def test_one_that_never_began_ends() -> None:
    web = WebServer(Place("127.0.0.1", 0))
    web.close()
    with socket.create_server(web.address):
        pass


def test_events_from_many_threads_all_arrive(web: WebServer) -> None:
    threads = [
        threading.Thread(target=lambda: [web.happened({"event": "goes_on"}) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    with contextlib.closing(Stream(web)) as page:
        assert len(page.first("happened", 200)) == 200
