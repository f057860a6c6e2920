"""What must hold between two processes in any state of a cluster: of what each has said of itself (`view_of`)."""

from __future__ import annotations

from typing import Any


def check_slots(sources: dict[str, Any], holders: dict[str, Any]) -> None:
    """What a source counts as folded by a holder, that one has folded, and nothing that was not applied."""
    if sources["history"] != holders["history"] or sources["history"][1]:
        return
    for i, source in sources["slots"].items():
        for h, holder in holders["slots"].items():
            if h not in source["confirmed"] or not source["ready"] or not holder["ready"]:
                continue
            knows = source["incarnations"].get(h) == holder["incarnation"]
            if knows and holder["incarnations"].get(i) == source["incarnation"] and i in holder["folded"]:
                confirmed, folded = source["confirmed"][h], holder["folded"][i]
                assert folded <= source["applied"], (
                    f"slot {h} has folded step {folded} of {i}, which it has not applied"
                )
                assert confirmed <= folded, f"slot {i} counts step {confirmed} as folded by {h}, which folded {folded}"
                assert source["acknowledged"] <= folded or not holder["reported"], (
                    f"slot {i} acknowledged {source['acknowledged']}, but {h}, which is whole, has folded {folded}"
                )


def check_client(server: dict[str, Any], trainer: dict[str, Any]) -> None:
    """What a trainer counts as complete, slots that it knows have acknowledged; whole holders have its snapshot."""
    if server["history"] != (trainer["era"], False):
        return
    for index, slot in server["slots"].items():
        if not slot["ready"] or index >= len(trainer["placed"]) or trainer["placed"][index] != slot["incarnation"]:
            continue
        assert trainer["complete"] <= slot["acknowledged"], (
            f"trainer {trainer['rank']} counts step {trainer['complete']} as complete, slot {index} acknowledged"
            f" {slot['acknowledged']}"
        )
        step = trainer["snapshot"]
        if step and slot["reported"] and index in server["snapshot slots"]:
            later = any(key[0] > step and key[1] == trainer["rank"] for key in slot["snapshots"])
            assert later or (step, trainer["rank"]) in slot["snapshots"], (
                f"slot {index} lacks the snapshot of trainer {trainer['rank']} of step {step}, which is complete"
            )
