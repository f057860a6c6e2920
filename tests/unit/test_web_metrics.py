"""A status as metrics: names that follow Prometheus' guide, every figure of alerts, counters that never fall."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from coordinator_harness import Harness
from coordinator_words import member
from msgspec.structs import replace
from places import ROOT
from prometheus_client.parser import text_string_to_metric_families
from watched import rebuilding, reports, whole

from torch_ecrec.protocol.status import (
    CheckpointsStatus,
    Complaint,
    DomainAtRisk,
    Filling,
    HostStatus,
    Inexactness,
    Late,
    PartialStatus,
    ProcessReport,
    Rate,
    Redundancy,
    Report,
    RestoredStatus,
    Standstill,
    Status,
    Unresolved,
)
from torch_ecrec.web.metrics import KINDS, PREFIX, Totals, metrics_of, not_leading, text_of

UNITS = re.compile(r"_(ms|milliseconds|minutes|kb|mb|percent|kib|mib)(_|$)")
DEPLOY = ROOT / "deploy"
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def values(status: Status, totals: Totals | None = None) -> Values:
    """What a scrape has: (name, labels) -> value."""
    body, kind = text_of(metrics_of(status, totals), "")
    assert kind.startswith("text/plain; version=0.0.4")
    found: Values = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def value(found: Values, name: str, **labels: str) -> float:
    return found[PREFIX + name, tuple(sorted(labels.items()))]


def names() -> set[str]:
    """Every metric there is, samples or not."""
    return {f"{one.name}_total" if one.type == "counter" else one.name for one in metrics_of(whole())}


def test_names_units_and_help_are_as_prometheus_wants_them() -> None:
    for family in metrics_of(whole()):
        assert re.fullmatch(PREFIX + r"[a-z][a-z0-9]*(_[a-z0-9]+)*", family.name), family.name
        assert not UNITS.search(family.name), f"{family.name}: base units"
        assert family.documentation.endswith(".") and len(family.documentation) > 15, family.name
        assert not family.name.endswith("_total"), "that is of counters, and added"
        if family.type == "gauge":
            assert "_count" not in family.name
    body, kind = text_of(metrics_of(whole()), "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text") and body.endswith(b"# EOF\n")


def test_figures_of_a_cluster_that_is_well() -> None:
    found = values(whole(step=100))
    assert value(found, "leading") == 1 and value(found, "step") == 100 and value(found, "steps_total") == 100
    assert value(found, "acknowledged_step") == 99 and value(found, "watermark_step") == 98
    assert [value(found, "slots", state=state) for state in ("healthy", "rebuilding", "starting", "waiting")] == [
        3,
        0,
        0,
        0,
    ]
    assert value(found, "members_alive", role="server") == 4 and value(found, "members_alive", role="trainer") == 2
    assert value(found, "members", state="spare") == 1 and value(found, "members", state="training") == 2
    assert value(found, "member_silent_seconds", member="server-0", role="server") == 0
    assert value(found, "sent_bytes_total", role="server", kind="lookup") == 150_000_003
    assert value(found, "sent_bytes_total", role="trainer", kind="push") == 14_000_000
    assert value(found, "slot_memory_bytes", slot="1", kind="parities") == 20_000_000
    assert value(found, "slot_info", slot="1", member="server-1") == 1
    assert value(found, "checkpoint_age_seconds") == 42 and value(found, "checkpoint_step") == 90
    quiet = ("fatal", "standstill", "cut_pairs", "inexact", "checkpoint_failing", "at_risk_domains", "unresolved_pairs")
    assert [value(found, name) for name in quiet] == [0] * len(quiet)


def test_figures_of_a_rebuild() -> None:
    found = values(rebuilding(whole(), 0.25))
    assert value(found, "slots", state="healthy") == 2 and value(found, "slots", state="rebuilding") == 1
    assert value(found, "slot_rebuilt_ratio", slot="1") == 0.25 and value(found, "slot_healthy", slot="1") == 0
    assert value(found, "slot_rebuilt_ratio", slot="0") == 1 and value(found, "slot_incarnation", slot="1") == 1
    assert value(found, "members", state="lost") == 1 and value(found, "members_alive", role="server") == 3
    assert not any(
        dict(labels).get("member") == "server-1" for name, labels in found if name.endswith("silent_seconds")
    )


def test_figures_of_hosts_and_of_what_may_be_lost() -> None:
    process = ProcessReport("host-a", 5_000, 10_000, 2_500)
    safe = Redundancy(1, 1, 1, True, [HostStatus("a", ["server-0"], [0], True, "")])
    status = rebuilding(whole(redundancy=safe, wanted_trainers=3, still_s=0.5, rate=Rate(10.0, 2.0, 512.0)), 0.5)
    members = [replace(one, report=replace(one.report, process=process)) for one in status.members]
    slots = [replace(one, filling=Filling(0.5, 1e6, 20.0)) if not one.healthy else one for one in status.slots]
    found = values(replace(status, members=members, slots=slots))
    assert value(found, "member_info", member="server-0", role="server", host="host-a") == 1
    assert value(found, "member_resident_memory_bytes", member="server-0") == 5000
    assert value(found, "member_memory_used_ratio", member="server-0") == 0.25
    assert value(found, "losses_tolerated") == 1 and value(found, "hosts") == 1
    assert value(found, "missing_members", role="trainer") == 1 and value(found, "samples_per_second") == 512
    assert value(found, "slot_filling_left_seconds", slot="1") == 20 and value(found, "step_age_seconds") == 0.5
    assert value(found, "verdict") == 1 and any(name == PREFIX + "finding" for name, _ in found)
    assert value(values(replace(status, fatal="data is lost")), "verdict") == 2


TROUBLES: list[tuple[dict[str, Any], str, float]] = [
    ({"fatal": "slots 0, 1 are lost"}, "fatal", 1),
    ({"stands_still": Standstill({"server-0": "x", "server-1": "x"}, 30.0)}, "standstill_members", 2),
    ({"stands_still": Standstill({"server-0": "x"}, 30.0)}, "standstill_left_seconds", 30),
    ({"unreachable": [Complaint("server-0", "server-1", 2.5)]}, "cut_seconds", 2.5),
    ({"unresolved": Unresolved([("a", "b"), ("b", "a")], "why")}, "unresolved_pairs", 2),
    ({"at_risk": [DomainAtRisk("rack1", [0, 1], "why")]}, "at_risk_domains", 1),
    ({"inexact": [Inexactness(3, "a"), Inexactness(4, "b")]}, "inexact", 2),
    ({"going_back": True}, "going_back", 1),
    ({"looks": True}, "looking_for_checkpoint", 1),
    ({"cannot_begin": "why"}, "cannot_begin", 1),
    ({"finished": True}, "finished", 1),
    ({"checkpoints": None}, "checkpoints_wanted", 0),
    ({"checkpoints": CheckpointsStatus("u", "", 0, None, "x", "full", 12.0, None)}, "checkpoint_failing", 1),
    ({"checkpoints": CheckpointsStatus("u", "", 0, None, "x", "full", 12.0, None)}, "checkpoint_failing_seconds", 12),
    ({"checkpoints": CheckpointsStatus("u", "", 0, None, "x", "full", 12.0, None)}, "checkpoint_running", 1),
]


@pytest.mark.parametrize(("more", "name", "wanted"), TROUBLES, ids=[name for _, name, _ in TROUBLES])
def test_figures_of_what_goes_wrong(more: dict[str, Any], name: str, wanted: float) -> None:
    assert value(values(whole(**more)), name) == wanted


def test_what_there_is_not_is_absent() -> None:
    found = values(whole(checkpoints=None))
    gone = ("checkpoint_age_seconds", "checkpoint_step", "standstill_left_seconds", "saves")
    assert not any(name == PREFIX + one for one in gone for name, _ in found)


def test_a_coordinator_that_has_just_begun_has_figures() -> None:
    empty = Harness().core.status(0.0)
    assert value(values(empty), "step") == 0 and value(values(empty), "slots", state="healthy") == 0
    said = Harness().start()
    assert value(values(said.core.status(said.now_s)), "slots", state="healthy") == 3
    assert [one.name for one in not_leading()] == [PREFIX + "build_info", PREFIX + "leading"]


def counters(found: Values) -> Values:
    return {key: count for key, count in found.items() if key[0].endswith("_total")}


def test_counters_never_fall_whatever_becomes_of_members() -> None:
    """A server dies, and is forgotten; its slot gets another life; a trainer takes the place of one of its name."""
    first = whole(step=100)
    members = {one.name: one for one in first.members}
    members["server-1"] = replace(members["server-1"], report=reports(1, damaged=3, mended=2, scrubbed_bytes=900))
    first = replace(first, members=list(members.values()))
    grown = Report(bytes_sent={"push": 9_000_000, "lookup": 9}, refused_messages=2)
    members["trainer-0"] = replace(members["trainer-0"], report=grown)
    second = replace(first, members=list(members.values()), step=110)
    third = rebuilding(second, 0.5)
    anew = Report(bytes_sent={"push": 1_000_000}, refused_messages=1)
    members = {one.name: one for one in third.members}
    members["trainer-0"] = replace(members["trainer-0"], pid=99, report=anew)
    del members["server-1"]
    fourth = replace(third, members=list(members.values()), step=90)  # all went back, too
    fifth = replace(fourth, step=95, refused_messages=7)
    totals, before = Totals(), dict[Any, float]()
    for status in (first, second, third, fourth, fourth, fifth):
        totals.follow(status)
        now = counters(values(status, totals))
        fallen = {key: (count, now.get(key)) for key, count in before.items() if now.get(key, -1.0) < count}
        assert not fallen
        before = now
    assert value(before, "sent_bytes_total", role="trainer", kind="push") == 14_000_000 + 2_000_000 + 1_000_000
    assert value(before, "sent_bytes_total", role="server", kind="lookup") == 150_000_003 + 50_000_001
    assert value(before, "refused_messages_total", role="trainer") == 3
    assert value(before, "refused_messages_total", role="coordinator") == 7
    assert (
        value(before, "damaged_records_total", slot="1") == 3 and value(before, "mended_records_total", slot="1") == 2
    )
    assert value(before, "steps_total") == 110 + 5


def test_what_a_coordinator_before_has_counted_is_not_counted_again() -> None:
    """Else a rate would show all that was ever sent, at once, whenever a coordinator is started again."""
    at = whole(step=5000)
    empty = replace(at, slots=[], members=[], step=0)
    silent = replace(empty, members=[replace(one, report=Report()) for one in at.members])
    totals = Totals(again=True)
    for status in (empty, silent, replace(silent, slots=at.slots), at):
        totals.follow(status)
    found = counters(values(at, totals))
    assert set(found.values()) == {0}
    late = member("trainer-2", report=Report(bytes_sent={"push": 5}))
    later = replace(at, step=5003, members=[*at.members, late])
    totals.follow(later)
    found = values(later, totals)
    assert value(found, "steps_total") == 3, "and what comes from now on is"
    assert value(found, "sent_bytes_total", role="trainer", kind="push") == 5
    totals = Totals(again=False)
    totals.follow(at)
    assert value(values(at, totals), "sent_bytes_total", role="trainer", kind="push") == 14_000_000


def test_steps_before_the_checkpoint_that_a_run_began_with_are_not_counted() -> None:
    totals = Totals()
    for step in (0, 0, 703, 705):
        totals.follow(whole(step=step, restored=RestoredStatus("f", 700)))
    assert totals.of("steps") == {(): 2}


def test_partial_recoveries_are_counted() -> None:
    fields: dict[str, Any] = {"exact": False, "lost_samples": 0.25, "of_steps": 9, "lost_steps": [1, 0, 0]}
    fields |= {"last": "c", "last_step": 8, "last_saves": 0, "last_slots": [0]}
    found = values(whole(partial=PartialStatus(times=2, **fields)))
    assert value(found, "partial_recoveries_total") == 2 and value(found, "lost_samples_ratio") == 0.25


def test_labels_are_bounded_by_the_cluster() -> None:
    """Kinds that a member makes up are one; who is gone has no series of its own."""
    status = whole()
    odd = Report(bytes_sent={f"kind {i}": 1 for i in range(30)})
    gone = [member(f"server-{i}", alive=False) for i in range(50, 150)]
    status = replace(status, members=[*status.members, member("server-9", report=odd, slow=Late(0.5, 1, 1)), *gone])
    found = values(status)
    kinds = {dict(labels).get("kind") for name, labels in found if name == PREFIX + "sent_bytes_total"}
    assert kinds == set(KINDS) and value(found, "sent_bytes_total", role="server", kind="other") == 30
    members = {dict(labels)["member"] for _, labels in found if "member" in dict(labels)}
    assert members == {one.name for one in status.members if one.present}
    assert value(found, "member_late_ratio", member="server-9") == 0.5


def test_totals_keep_nothing_of_who_is_forgotten() -> None:
    totals = Totals()
    for life in range(200):
        one = member(f"trainer-{life}", report=Report(bytes_sent={"push": 5}))
        totals.follow(whole(members=[one]))
    assert len(totals._last) < 40 and totals.of("sent_bytes")["trainer", "push"] == 1000


# --- what is deployed ------------------------------------------------------------------------------------------------


def named(text: str) -> set[str]:
    return set(re.findall(rf"\b{PREFIX}[a-z0-9_]+\b", text))


def expressions(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return [target["expr"] for panel in json.loads(text)["panels"] for target in panel.get("targets", ())]
    return [rule["expr"] for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("name", ["grafana-dashboard.json", "prometheus-alerts.yml"])
def test_what_is_deployed_names_metrics_that_there_are(name: str) -> None:
    found = expressions(DEPLOY / name)
    assert found and not set().union(*map(named, found)) - names()
    assert all(named(one) or "up{" in one for one in found), "each is of ours"
    assert not named((DEPLOY / name).read_text(encoding="utf-8")) - names(), "in texts, too"


GRAFANA = range(37, 43)  # schema versions that Grafana 13 reads, and migrates by itself to the last of these
SUFFIXES = {"_seconds": "s", "_bytes": "bytes", "_bytes_total": "Bps", "_ratio": "percentunit"}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana-dashboard.json").read_text(encoding="utf-8"))
    return found


def labels() -> set[str]:
    """Those of our samples, and those that Prometheus and its configuration here add."""
    families = [*metrics_of(whole()), *metrics_of(rebuilding(whole(), 0.5))]
    return {"job", "cluster", "instance"} | {
        name for one in families for sample in one.samples for name in sample.labels
    }


def test_the_dashboard_is_one_that_grafana_reads() -> None:
    """Without Grafana: its form, that nothing overlaps, and that each name in braces is there."""
    board = dashboard()
    assert board["schemaVersion"] in GRAFANA and board["uid"] and board["title"]
    variables = {one["name"] for one in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(board))) - {"__all"} <= variables
    panels, cells = board["panels"], set[tuple[int, int]]()
    assert len({panel["id"] for panel in panels}) == len(panels) == len({panel["title"] for panel in panels})
    for panel in panels:
        at = panel["gridPos"]
        taken = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not taken & cells and at["x"] + at["w"] <= 24, panel["title"]
        cells |= taken
        assert panel["type"] in ("stat", "timeseries") and panel["targets"], panel["title"]
        assert len({one["refId"] for one in panel["targets"]}) == len(panel["targets"])
        for one in (panel, *panel["targets"]):
            assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            expr, legend = target["expr"], target.get("legendFormat", "")
            inside = ",".join(re.findall(r"\{([^}]*)\}", expr))
            said = {*re.findall(r"(\w+)[!=]", inside), *re.findall(r"\{\{(\w+)\}\}", legend)}
            said |= set(",".join(re.findall(r"by \(([^)]*)\)", expr)).replace(" ", "").split(",")) - {""}
            assert said <= labels(), f"{panel['title']}: {said - labels()}"
            assert expr.count('job=~"$job", cluster=~"$cluster"') == len(re.findall(PREFIX, expr)), panel["title"]


def test_units_and_thresholds_of_the_dashboard_are_those_of_its_metrics() -> None:
    age = yaml.safe_load((DEPLOY / "prometheus-alerts.yml").read_text(encoding="utf-8"))["groups"]
    (old,) = (one["expr"] for group in age for one in group["rules"] if one["alert"] == "TorchEcrecCheckpointOld")
    for panel in dashboard()["panels"]:
        shown = panel["fieldConfig"]["defaults"]
        wanted = {unit for name in named(json.dumps(panel)) for end, unit in SUFFIXES.items() if name.endswith(end)}
        if len(panel["targets"]) == 1 or len(wanted) > 1 or "s" in wanted:
            assert {shown["unit"]} == (wanted or {"short"}), panel["title"]
        assert shown["min"] == 0 and shown.get("max") == (1 if shown["unit"] == "percentunit" else None)
        steps = [one["value"] for one in shown.get("thresholds", {"steps": [{"value": None}]})["steps"]]
        assert steps[0] is None and steps[1:] == sorted(steps[1:]), panel["title"]
        if panel["title"] == "Last checkpoint":
            assert f"> {steps[-1]} " in old, "red where the alert is"


def test_every_alert_says_how_bad_and_what_to_do() -> None:
    groups = yaml.safe_load((DEPLOY / "prometheus-alerts.yml").read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 8
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}, rule["alert"]
        anchor = rule["annotations"]["runbook"].rpartition("#")[2]
        assert (
            f"#### {rule['alert']}" in (ROOT / "docs/watching.md").read_text("utf-8")
            and anchor == rule["alert"].lower()
        )
    assert {rule["alert"] for rule in rules} >= {
        *("TorchEcrecDataLost", "TorchEcrecNobodyLeads", "TorchEcrecSlotsNotWhole", "TorchEcrecCheckpointFailing"),
        *("TorchEcrecCheckpointOld", "TorchEcrecStandstill", "TorchEcrecDamageFound"),
    }


PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian's package prometheus)")
def test_prometheus_itself_reads_what_is_deployed(tmp_path: Path) -> None:
    rules = [
        {"alert": f"panel {i}", "expr": one} for i, one in enumerate(expressions(DEPLOY / "grafana-dashboard.json"))
    ]
    panels = tmp_path / "panels.yml"
    panels.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    metrics = text_of(metrics_of(rebuilding(whole(), 0.5)), "")[0]
    alerts, tests, scrape = (DEPLOY / f"prometheus-{name}.yml" for name in ("alerts", "alerts-test", "scrape"))
    for words, given in (
        (["check", "rules", str(alerts), str(panels)], b""),
        (["test", "rules", str(tests)], b""),
        (["check", "config", "--syntax-only", str(scrape)], b""),
        (["check", "metrics"], metrics),
    ):
        done = subprocess.run([str(PROMTOOL), *words], input=given, capture_output=True, timeout=300)
        assert done.returncode == 0, (words, done.stdout, done.stderr)


def test_a_name_that_is_no_metric_is_found() -> None:
    assert named("rate(torch_ecrec_nothing_total[5m])") - names() == {"torch_ecrec_nothing_total"}
