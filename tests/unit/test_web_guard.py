"""Who may ask over HTTP, and what of a page's events is kept: rules without a socket."""

from __future__ import annotations

from typing import Any

import pytest

from torch_ecrec.cli.arguments import http_place
from torch_ecrec.web import place
from torch_ecrec.web.feed import EVENTS_MOST, EVENTS_MOST_BYTES, POINTS_MOST, Feed
from torch_ecrec.web.guard import OURS, SESSION_S, Guard
from torch_ecrec.web.page import page, policy
from torch_ecrec.web.place import Place, parse_place, require_packages

SECRET = b"correct horse battery staple"
NOW_S = 1.8e9
HERE = {"Host": "127.0.0.1:9464"}
OPENED = Guard(b"", loopback=True, port=9464)
GUARDED = Guard(SECRET, loopback=False, port=9464)
THERE = {"Host": "10.0.0.1:9464"}


def status(guard: Guard, method: str, path: str, headers: dict[str, str], cookies: dict[str, str] | None = None) -> int:
    found = guard.objection(method, path, headers, cookies or {}, NOW_S)
    return 200 if found is None else found.status


def test_other_hosts_take_a_secret() -> None:
    with pytest.raises(ValueError, match="no secret"):
        Guard(b"", loopback=False, port=1)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:9464", "localhost", "LocalHost:80", "[::1]:9464", "127.0.0.1:8080", "[::1]"]
)
def test_loopback_is_asked_by_its_names(host: str) -> None:
    assert status(OPENED, "GET", "/metrics", {"Host": host}) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example:9464", "", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "[::2]:1", "[", "0"],
)
def test_a_name_that_somebody_points_here_is_refused(host: str) -> None:
    assert status(OPENED, "GET", "/status.json", {"Host": host}) == 421
    assert status(OPENED, "POST", "/drain", {"Host": host, OURS: "1"}) == 421


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, 403),
        ({OURS: "1"}, 200),
        ({OURS: "1", "Origin": "http://127.0.0.1:9464"}, 200),
        ({OURS: "1", "Origin": "http://evil.example"}, 403),
        ({OURS: "1", "Origin": "http://localhost:1"}, 403),
        ({OURS: "1", "Origin": "null"}, 403),
        ({OURS: "1", "Sec-Fetch-Site": "cross-site"}, 403),
        ({OURS: "1", "Sec-Fetch-Site": "same-site"}, 403),
        ({OURS: "1", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Content-Type": "text/plain"}, 403),
    ],
)
def test_a_post_is_of_our_page_or_of_nobodys(more: dict[str, str], wanted: int) -> None:
    assert status(OPENED, "POST", "/drain", {**HERE, **more}) == wanted
    authorized = {"Authorization": f"Bearer {SECRET.decode()}"}
    origin = {"Origin": more["Origin"].replace("127.0.0.1", "10.0.0.1")} if "Origin" in more else {}
    assert status(GUARDED, "POST", "/drain", {**THERE, **authorized, **more, **origin}) == wanted, "secret or not"


@pytest.mark.parametrize("path", ["/status.json", "/events", "/metrics"])
def test_other_sites_get_nothing_that_they_could_hold_open(path: str) -> None:
    assert status(OPENED, "GET", path, {**HERE, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}) == 403
    link = {**HERE, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert status(OPENED, "GET", path, link) == 403 and status(OPENED, "GET", "/", link) == 200, "a link to the page"


@pytest.mark.parametrize("path", ["/metrics", "/status.json", "/events", "/healthz", "/none"])
def test_where_there_is_a_secret_each_request_proves_it(path: str) -> None:
    assert status(GUARDED, "GET", path, THERE) == 401
    for said in (
        "",
        "Bearer",
        "Bearer wrong",
        f"Basic {SECRET.decode()}",
        f"Bearer {SECRET.decode()}x",
        "Bearer \udcff",
    ):
        assert status(GUARDED, "GET", path, {**THERE, "Authorization": said}) == 401, said
    assert status(GUARDED, "GET", path, {**THERE, "Authorization": f"bearer {SECRET.decode()} "}) == 200
    assert status(GUARDED, "GET", "/", THERE) == 200 and status(GUARDED, "POST", "/login", {**THERE, OURS: "1"}) == 200


def test_a_secret_is_asked_for_on_loopback_too_and_names_are_still_looked_at() -> None:
    guard = Guard(SECRET, loopback=True, port=1)
    said = {"Authorization": f"Bearer {SECRET.decode()}"}
    assert status(guard, "GET", "/metrics", HERE) == 401 and status(guard, "GET", "/metrics", {**HERE, **said}) == 200
    assert status(guard, "GET", "/metrics", {"Host": "evil.example", **said}) == 421


def test_a_session_is_good_for_its_time_at_any_coordinator_of_the_secret() -> None:
    value = GUARDED.session(NOW_S)
    assert SECRET.decode() not in value
    later = Guard(SECRET, loopback=False, port=9464)  # a coordinator that was started again
    assert status(later, "GET", "/metrics", THERE, {later.cookie: value}) == 200
    assert later.objection("GET", "/metrics", THERE, {later.cookie: value}, NOW_S + SESSION_S) is not None
    other = Guard(b"another secret of others", loopback=False, port=9464)
    assert status(other, "GET", "/metrics", THERE, {other.cookie: value}) == 401
    until, _, tag = value.partition(".")
    for forged in (
        "",
        ".",
        f"{int(until) + 1}.{tag}",
        f"{until}.",
        f"{until}.{tag[:-1]}",
        f"x.{tag}",
        tag,
        f"{until}.é",
    ):
        assert status(GUARDED, "GET", "/metrics", THERE, {GUARDED.cookie: forged}) == 401, forged


def test_a_secret_that_is_none_is_known_to_nobody() -> None:
    assert not OPENED.knows("") and not OPENED.asks_proof and GUARDED.knows(SECRET.decode())


# --- where ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0", Place("127.0.0.1", 0)),
        ("9464", Place("127.0.0.1", 9464)),
        ("10.0.0.1:80", Place("10.0.0.1", 80)),
        ("localhost:0", Place("localhost", 0)),
        ("[::1]:9464", Place("::1", 9464)),
        ("0.0.0.0:9464", Place("0.0.0.0", 9464)),
        ("[::]:9464", Place("::", 9464)),
    ],
)
def test_a_place_is_parsed(text: str, wanted: Place) -> None:
    assert parse_place(text) == wanted == http_place(text) and parse_place(str(wanted)) == wanted
    assert wanted.loopback == (wanted.host in ("127.0.0.1", "localhost", "::1"))


@pytest.mark.parametrize(
    "text", ["", ":", ":80", "host:", "70000", "-1", "http://x:1", "a:b", "::1:80", "1.2.3.4", "[::1]", "²"]
)
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--http takes|host must be|brackets"):
        parse_place(text)


def test_a_library_that_is_lacking_is_named_with_the_line_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(place.NEEDED, "no_such_module", "no-such-package")
    with pytest.raises(ValueError, match=r"needs no-such-package: pip install 'torch-ecrec\[http\]'"):
        require_packages()


# --- what is kept for pages -------------------------------------------------------------------------------------------


def event(number: int, **more: Any) -> dict[str, Any]:
    return {"event": "left", "member": f"server-{number}", **more}


def test_who_comes_back_gets_what_it_has_missed() -> None:
    feed = Feed("abc")
    for number in range(1, 6):
        feed.happened(event(number), 100.0 + number)
    assert [one.number for one in feed.since(feed.number_of("abc-3"))] == [4, 5]
    assert feed.since(5) == [] and feed.id_of(5) == "abc-5"
    for strange in ("", "abc", "abc-", "abd-3", "abc-x", "abc--1", "abc-²", "abc-" + "9" * 5000):
        assert feed.number_of(strange) == 0, strange
    assert feed.number_of("abc-77") == 5, "of the future: nothing was missed"


def test_what_is_kept_is_bounded() -> None:
    feed = Feed("abc")
    for number in range(2 * EVENTS_MOST):
        feed.happened(event(number), 0.0)
    assert len(feed.since(0)) == EVENTS_MOST and feed.since(0)[-1].number == 2 * EVENTS_MOST
    for number in range(50):
        feed.happened(event(number, why="x" * 100_000), 0.0)
    assert sum(len(one.said) for one in feed.since(0)) <= EVENTS_MOST_BYTES
    feed.happened(event(1, why="x" * (EVENTS_MOST_BYTES + 1)), 0.0)
    assert len(feed.since(0)) == 1, "the last one is there, however long"
    for second in range(2 * POINTS_MOST):
        feed.reached(float(second), second)
        feed.reached(float(second), second + 5)
    assert feed.history().count(b"[") == POINTS_MOST + 1


def test_progress_goes_on_after_the_clock_was_set_back() -> None:
    """It would stand for as long as the clock was ahead."""
    feed = Feed("abc")
    for time_s in (100.0, 101.0, 102.0, 100.5, 101.5):
        feed.reached(time_s, int(time_s))
    assert feed.history() == b"[[100.0,100],[100.5,100],[101.5,101]]"
    script = page().decode().partition("function reached(t, step) {")[2].partition("}")[0]
    assert "points.pop()" in script and "return" not in script, "the page does likewise"


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_needs_nothing_and_lets_nothing_in() -> None:
    text = page().decode()
    assert len(text) < 300_000 and "<script>" in text and "unsafe" not in policy()
    assert policy().count("'sha256-") == 2 and "default-src 'none'" in policy()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert way not in text, "text of the cluster is text"
    outside = text.replace("http://www.w3.org/2000/svg", "").replace("https://www.w3.org", "")
    assert "http://" not in outside and "https://" not in outside and " style=" not in text and "onclick=" not in text
