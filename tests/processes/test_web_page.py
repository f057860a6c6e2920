"""The live page in a real browser: what it shows, that text stays text, keyboard, screen readers, 360 px, reconnecting.

Needs Debian's chromium, and for the audits axe-core. With `TORCH_ECREC_TEST_SHOTS=FOLDER`, pictures of the page are
left there.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import browser
import pytest
from browser import Page
from coordinator_words import member
from msgspec.structs import replace
from watched import SECRET, MadeUp, rebuilding, reports, watched, whole

from torch_ecrec.protocol.status import Inexactness, Status
from torch_ecrec.web.place import Place

pytestmark = pytest.mark.skipif(
    browser.found() is None, reason="chromium is not installed (Debian: apt install chromium)"
)
EVIL = "<img src=x onerror=\"document.body.dataset.evil='1'\"><b>bold</b>"
STATE = "document.querySelector('#word').textContent"
FOCUS = "document.activeElement"
SAY = "document.querySelector('#secret').value = '%s'; document.querySelector('#login-form').requestSubmit()"
PAINTED = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
SHOTS = os.environ.get("TORCH_ECREC_TEST_SHOTS")


def trains(status: Status) -> Status:
    """The same a moment later: ten steps a second, and bytes with each."""
    now_s = time.time()
    steps = 10 * int(now_s % 1_000_000)
    members = [
        replace(
            one, report=replace(one.report, bytes_sent={k: 1000 * steps + i for i, k in enumerate(("lookup", "fold"))})
        )
        for one in status.members
    ]
    return replace(status, step=steps, time_s=now_s, members=members)


def shown(folder: Path, made_up: MadeUp, look: Callable[[Page, Any], Awaitable[None]], *complaints: str) -> None:
    """Opens the page of such a cluster, and looks. The browser may have these complaints, and no others."""
    made_up.step = trains

    async def open_and_look(web: Any) -> None:
        async with browser.page(folder) as page:
            await page.look(1180, 1000)
            await page.open(web.url)
            await look(page, web)
            strange = [one for one in page.errors if not any(known in one for known in complaints)]
            assert strange == [], "neither the script nor the policy complains"

    with watched(made_up) as web:
        asyncio.run(open_and_look(web))


async def shoot(page: Page, name: str) -> None:
    if SHOTS:
        await page.shoot(Path(SHOTS) / f"{name}.png")


def test_what_an_operator_sees(tmp_path: Path) -> None:
    made_up = MadeUp()

    async def look(page: Page, web: Any) -> None:
        await page.until(f"{STATE} === 'OK'", "all is well")
        await page.until("/^[0-9.]+$/.test(document.querySelector('#rate').textContent)", "a rate")
        await page.until("document.querySelector('#bytes tr td:nth-child(3)').textContent !== '0 B/s'", "bytes flow")
        assert await page.ask("document.querySelectorAll('#slots tr').length") == 3
        assert await page.ask("document.querySelector('svg .rate').getAttribute('d').length") > 10
        state = await page.ask("getComputedStyle(document.querySelector('#state')).borderLeftColor")
        made_up.status = rebuilding(made_up.status, 0.43)
        web.happened({"event": "lost", "member": "server-1", "why": "its process is gone", "slots": [1]})
        await page.until(f"{STATE} === 'WARN'", "a word")
        assert await page.ask("getComputedStyle(document.querySelector('#state')).borderLeftColor") != state, (
            "and a colour"
        )
        assert "Slot 1 is" in await page.ask("document.querySelector('#sentence').textContent")
        assert "What to do: " in await page.ask("document.querySelector('#wrong').textContent")
        assert await page.ask("document.querySelector('#slots progress:not([hidden])').value") == 0.43
        await page.until(
            "document.querySelector('#events').textContent.includes('its process is gone; it hosted slots 1')",
            "event",
        )
        await page.until("document.querySelector('svg .mark[data-tone=ERROR]')", "a mark on the throughput")
        await page.until("document.querySelector('#live').textContent.startsWith('WARN')", "a screen reader is told")
        for width, height, scheme in (
            (1180, 1000, "light"),
            (1180, 1000, "dark"),
            (360, 1900, "light"),
            (360, 1900, "dark"),
        ):
            await page.look(width, height, scheme)
            await page.until(f"innerWidth === {width}", "it has that size")
            assert await page.ask("document.documentElement.scrollWidth <= innerWidth"), (
                f"nothing is cut off at {width}"
            )
            over = (
                "[...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > innerWidth)"
            )
            assert await page.ask(f"{over}.map((e) => e.outerHTML.slice(0, 80))") == []
            low = await page.ask(browser.CONTRAST)
            assert not low, f"{scheme}: text that is hard to read: {low}"
            await shoot(page, f"page-{width}-{scheme}")
        made_up.status = replace(made_up.status, fatal="slots 0, 1 are lost together")
        await page.until(f"{STATE} === 'ERROR' && document.title.startsWith('ERROR')", "the worst, in the title too")

    shown(tmp_path, made_up, look)


# Rules that must have had something to look at: an audit that loads nothing finds nothing either.
RULES = {
    *("color-contrast", "target-size", "button-name", "link-name", "svg-img-alt", "label-content-name-mismatch"),
    *("html-has-lang", "html-lang-valid", "document-title", "meta-viewport", "meta-viewport-large", "skip-link"),
    *("heading-order", "page-has-heading-one", "landmark-one-main", "landmark-unique", "region", "td-has-header"),
    *("aria-roles", "aria-valid-attr-value", "aria-required-attr", "nested-interactive", "tabindex", "list"),
}


@pytest.mark.skipif(browser.axe() is None, reason="axe-core is not installed: make setup brings it")
@pytest.mark.parametrize("may_kill", [False, True], ids=["may-look", "may-kill"])
def test_an_audit_finds_nothing_before_during_and_after_a_kill(may_kill: bool, tmp_path: Path) -> None:
    """axe-core, which Lighthouse asks, too, in light and dark, on a phone and on a desk; each dialog, too."""
    made_up = MadeUp()
    made_up.may_kill = may_kill

    async def look(page: Page, web: Any) -> None:
        found: list[str] = []

        async def audit(when: str) -> None:
            for width in (360, 1280):
                for scheme in ("light", "dark"):
                    await page.look(width, 1000, scheme)
                    await page.until(f"innerWidth === {width}", "it has that size")
                    await page.ask(PAINTED)
                    wrong, rules = await page.audit()
                    assert rules >= RULES or when.startswith("asked"), RULES - rules
                    found.extend(f"{when}, {width}, {scheme}: {one}" for one in wrong)

        await page.until(f"{STATE} === 'OK'", "all is well")
        await page.until(f"document.querySelectorAll('.kill:not([hidden])').length === {6 * may_kill}", "as allowed")
        await audit("before")
        made_up.status = rebuilding(made_up.status, 0.43)
        web.happened({"event": "lost", "member": "server-1", "why": "its process is gone", "slots": [1]})
        await page.until(f"{STATE} === 'WARN' && document.querySelector('svg .mark')", "a kill")
        await page.until("document.querySelector('#slots progress:not([hidden])')", "a rebuild")
        await audit("during")
        slots = [replace(one, healthy=True, filling=None) for one in made_up.status.slots]
        made_up.status = replace(made_up.status, slots=slots)
        web.happened({"event": "healthy", "slot": 1})
        await page.until("!document.querySelector('#slots progress:not([hidden])')", "all is there again")
        await audit("after")
        drained = [replace(one, draining=one.name == "server-0") for one in made_up.status.members]
        made_up.status = replace(made_up.status, members=drained)
        await page.until("document.querySelector('.drain[data-undo=\"1\"]')", "a drain")
        await audit("a drain")
        asks = ["askCheckpoint()", "askDrain('server-2', false)", *["askKill('server-2', 'server')"] * may_kill]
        for ask in asks:
            await page.ask(ask)
            await page.until("document.querySelector('dialog').open", "it asks")
            await audit(f"asked, {ask}")
            await page.ask("document.querySelector('#ask').close()")
        assert found == [], "\n".join(found)

    shown(tmp_path, made_up, look)


@pytest.mark.skipif(browser.axe() is None, reason="axe-core is not installed: make setup brings it")
def test_an_audit_finds_nothing_where_a_secret_is_asked_for_or_nobody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ECREC_SECRET", SECRET)

    async def look(page: Page, web: Any) -> None:
        await page.until("document.activeElement.id === 'secret'", "it asks for the secret")
        for scheme in ("light", "dark"):
            await page.look(360, 1000, scheme)
            wrong, rules = await page.audit()
            assert wrong == [] and {"label", "button-name", "color-contrast"} <= rules
        await page.ask(SAY % SECRET)
        await page.until(f"{STATE} === 'OK'", "it shows the cluster")
        web.close()
        await page.until(f"{STATE} === 'NO CONTACT'", "it says that nobody answers")
        assert (await page.audit())[0] == []

    shown(tmp_path, MadeUp(), look, "ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_INCOMPLETE_CHUNKED",
          "status of 401")  # fmt: skip


def test_text_of_the_cluster_is_text(tmp_path: Path) -> None:
    status = whole(inexact=[Inexactness(3, EVIL)], run=EVIL, version=EVIL)
    odd = member("server-7", report=replace(reports(0), bytes_sent={EVIL: 5}))
    made_up = MadeUp(replace(status, members=[*status.members, replace(odd, name=EVIL)]))

    async def look(page: Page, web: Any) -> None:
        for event in (
            {"event": "lost", "member": EVIL, "why": EVIL, "slots": []},
            {"event": EVIL, EVIL: EVIL},
            {"event": "lost"},
        ):
            web.happened(event)
        await page.until("document.querySelectorAll('#events li').length === 3", "three events, of any kind")
        await page.until("document.querySelector('#members').textContent.includes('<b>bold</b>')", "as it was said")
        assert await page.ask("document.querySelectorAll('img, b').length") == 0
        assert await page.ask("document.body.dataset.evil === undefined")
        made = "(() => { try { document.body.innerHTML = '<b>x</b>'; return 'made' } catch (e) { return e.name } })()"
        assert await page.ask(made) == "TypeError", "not even the page itself could"

    shown(tmp_path, made_up, look, "requires 'TrustedHTML'")


def test_by_keyboard_and_for_screen_readers(tmp_path: Path) -> None:
    made_up = MadeUp()

    async def look(page: Page, web: Any) -> None:
        await page.until(f"{STATE} === 'OK'", "all is well")
        nodes = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        found = [(one["role"]["value"], one.get("name", {}).get("value", "")) for one in nodes if not one["ignored"]]
        roles = [role for role, _ in found]
        assert {"banner", "main", "contentinfo"} <= set(roles) and roles.count("main") == 1
        assert {"Steps per second", "Slots", "Members", "Bytes sent, by what for", "Events"} <= {
            n for r, n in found if r == "region"
        }
        assert all(name for role, name in found if role in ("button", "link", "region", "image", "progressbar")), found
        assert ("button", "Drain server-0") in found and roles.count("heading") >= 6
        assert await page.ask("document.querySelector('#live').getAttribute('aria-live')") == "polite"
        stops = []
        for _ in range(40):
            await page.press("Tab", windowsVirtualKeyCode=9)
            stops.append(await page.ask(f"({FOCUS}.getAttribute('aria-label') || {FOCUS}.textContent).slice(0, 40)"))
            outline = await page.ask("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", f"where the focus is, is seen: {stops[-1]}"
            if stops[-1] == "Drain server-1":
                break
        assert stops[0] == "Skip to the cluster" and stops[-1] == "Drain server-1", stops
        line = await page.ask("document.querySelector('#sentence').textContent")
        await page.ask(
            "window.told = 0; new MutationObserver(() => told++)"
            ".observe(document.querySelector('#live'), {childList: true, characterData: true, subtree: true})"
        )
        for _ in range(2):  # statuses come meanwhile
            await page.until(f"document.querySelector('#sentence').textContent !== {json.dumps(line)}", "another step")
            line = await page.ask("document.querySelector('#sentence').textContent")
        assert await page.ask("told") == 0, "figures that change are not read out"
        assert await page.ask("document.activeElement.getAttribute('aria-label')") == "Drain server-1", "it stays there"
        await page.press("Enter", windowsVirtualKeyCode=13, text="\r")
        await page.until("document.querySelector('dialog').open", "it asks first")
        await page.press("Escape", windowsVirtualKeyCode=27)
        await page.until("!document.querySelector('dialog').open", "no")
        assert made_up.drains == []
        await page.press("Enter", windowsVirtualKeyCode=13, text="\r")
        await page.until("document.querySelector('dialog').open", "it asks again")
        await page.ask("document.querySelector('#ask-yes').click()")
        await page.until("document.querySelector('#note').textContent === 'server-1 is being drained'", "it says so")
        assert made_up.drains == [("server-1", False)]
        made_up.why = "no spare is there"
        await page.ask("askDrain('server-1', false); document.querySelector('#ask-yes').click()")
        await page.until("document.querySelector('#note').textContent === 'Refused: no spare is there'", "or why not")

    shown(tmp_path, made_up, look, "status of 409")


def test_a_checkpoint_and_a_kill_are_confirmed_done_and_said(tmp_path: Path) -> None:
    made_up = MadeUp()
    made_up.may_kill = True
    confirm = "document.querySelector('#ask-yes').click()"
    live = "document.querySelector('#live').textContent"

    async def look(page: Page, web: Any) -> None:
        await page.until(f"{STATE} === 'OK'", "all is well")
        nodes = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        buttons = {one["name"]["value"] for one in nodes if not one["ignored"] and one["role"]["value"] == "button"}
        assert {"Checkpoint now", "Kill server-0", "Kill trainer-1"} <= buttons
        await page.ask("document.querySelector('#checkpoint-now').focus()")
        await page.press("Enter", windowsVirtualKeyCode=13, text="\r")
        await page.until("document.querySelector('dialog').open", "it asks first")
        assert "s3://bucket/run" in await page.ask("document.querySelector('#ask-text').textContent")
        assert await page.ask(f"{FOCUS}.id") == "ask-no", "who presses Enter without reading does nothing"
        await page.press("Enter", windowsVirtualKeyCode=13, text="\r")
        await page.until("!document.querySelector('dialog').open", "no")
        assert made_up.checkpoints == 0
        await page.ask(f"askCheckpoint(); {confirm}")
        await page.until(f"{live} === 'a checkpoint is being written'", "a screen reader is told")
        assert made_up.checkpoints == 1
        web.happened({"event": "checkpointed", "name": "c", "step": 7, "base": "", "bytes": 5, "seconds": 1.0})
        await page.until(f"{live} === 'a checkpoint of step 7 was written, in 1.0 s'", "and when it is done")

        await page.ask("[...document.querySelectorAll('.kill')].find((b) => b.ariaLabel === 'Kill server-1').click()")
        await page.until("document.querySelector('dialog').open", "it asks first")
        assert "rebuilt elsewhere" in await page.ask("document.querySelector('#ask-text').textContent")
        await shoot(page, "page-kill")
        await page.press("Escape", windowsVirtualKeyCode=27)
        await page.until("!document.querySelector('dialog').open", "no")
        assert made_up.kills == []
        await page.ask(f"askKill('server-1', 'server'); {confirm}")
        await page.until(f"{live} === 'server-1 was killed'", "a screen reader is told")
        assert made_up.kills == ["server-1"]
        safe = made_up.status.redundancy
        assert safe is not None
        made_up.status = replace(made_up.status, redundancy=replace(safe, losses=0))
        await page.until("status.redundancy.losses === 0", "it knows")
        await page.ask("askKill('server-2', 'server')")
        assert "NO SERVER MAY BE LOST" in await page.ask("document.querySelector('#ask-text').textContent")
        made_up.why = "no member is called 'server-2'"
        await page.ask(confirm)
        await page.until(f"{live}.startsWith('Refused: no member')", "or why not")
        made_up.status = replace(made_up.status, checkpoints=None)
        await page.until("document.querySelector('#checkpoint-now').hidden", "there is nowhere to write one")

    shown(tmp_path, made_up, look, "status of 409")


def test_who_may_not_kill_is_shown_no_way_to(tmp_path: Path) -> None:
    async def look(page: Page, web: Any) -> None:
        await page.until(f"{STATE} === 'OK'", "all is well")
        assert await page.ask("[...document.querySelectorAll('.kill')].every((one) => one.hidden)")
        await page.ask("askKill('server-1', 'server'); document.querySelector('#ask-yes').click()")
        await page.until("document.querySelector('#note').textContent.includes('--allow-kill')", "refused by name")

    shown(tmp_path, MadeUp(), look, "status of 403")


def test_when_the_coordinator_is_started_again_the_page_reconnects_and_says_so(tmp_path: Path) -> None:
    made_up = MadeUp()

    async def look(page: Page, web: Any) -> None:
        web.happened({"event": "left", "member": "server-8"})
        await page.until("document.querySelector('#events').textContent.includes('server-8')", "an event")
        web.close()
        await page.until(f"{STATE} === 'NO CONTACT'", "it says that nobody answers")
        assert "as of" in await page.ask("document.querySelector('#sentence').textContent")
        with watched(made_up, Place(*web.address)) as again:
            again.happened({"event": "regathered", "epoch": 1, "members": ["server-0"]})
            await page.until(f"{STATE} === 'OK'", "it has reconnected by itself")
            await page.until("!document.querySelector('#note').hidden", "and says so")
            assert "reconnected" in await page.ask("document.querySelector('#note').textContent")
            events = "document.querySelector('#events').textContent"
            await page.until(
                f"{events}.includes('server-8') && {events}.includes('go on with this coordinator: server-0')",
                "old and new",
            )

    shown(tmp_path, made_up, look, "ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_INCOMPLETE_CHUNKED")


def test_a_secret_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ECREC_SECRET", SECRET)
    made_up = MadeUp()

    async def look(page: Page, web: Any) -> None:
        await page.until("document.activeElement.id === 'secret'", "it asks for the secret")
        assert await page.ask(
            "document.querySelector('#figures').hidden && !document.body.innerText.includes('server-0')"
        )
        await shoot(page, "page-secret")
        await page.ask(SAY % "wrong")
        await page.until(
            "document.querySelector('#login-note').textContent.includes('not the cluster')", "not this one"
        )
        await page.ask(SAY % SECRET)
        await page.until(f"{STATE} === 'OK' && document.querySelector('#login').hidden", "it shows the cluster")
        assert SECRET not in await page.ask("document.cookie + location.href + document.documentElement.outerHTML")

    shown(tmp_path, made_up, look, "status of 401")
