"""The lines that a run of the demonstration prints about events."""

from __future__ import annotations

from torch_ecrec.demo.report import Record
from torch_ecrec.observe import events
from torch_ecrec.observe.events import AnyEvent
from torch_ecrec.observe.words import size
from torch_ecrec.protocol import messages


def news_of(event: AnyEvent, record: Record) -> list[str]:
    """Returns the lines about an event, for people; none if it is not worth one. `record`: has the event already."""
    line = _of_member(event, record) or _of_checkpoint(event)
    return [line] if line else []


def _of_member(event: AnyEvent, record: Record) -> str:
    match event:
        case events.Lost() if event.slots or record.roles.get(event.member) == "trainer":
            held = f", with slots {event.slots}" if event.slots else ""
            return f"  {event.member} is lost ({event.why}){held}"
        case events.Rehosted():
            return f"  slot {event.slot} serves again, on {record.places[event.slot][0]}; rebuild begins"
        case events.SlotRebuilt():
            return f"  slot {event.slot} is rebuilt"
        case messages.Damaged():
            first = ", ".join(f"{table}, row {row}, member {member}" for table, row, member in event.places[:3])
            then = event.reason or "being repaired"
            used = f"; A STEP MAY HAVE USED {event.used}" if event.used else ""
            return f"  slot {event.slot}: damaged {event.what}, {event.count}: {first}: {then}{used}"
        case events.Slow():
            return f"  {event.member} is slow: training waits for it {event.share:.0%} of the time"
        case events.Resumable():
            return f"  servers have gone back to step {event.step}; torchrun starts all trainers again"
        case events.Regathered():
            return f"  a new coordinator: {len(event.members)} members have rejoined"
        case events.Joined() if record.step:
            return f"  {event.member} has joined (pid {event.pid})"
    return ""


def _of_checkpoint(event: AnyEvent) -> str:
    match event:
        case events.Checkpointed():
            of = f", what has changed since {event.base}" if event.base else ""
            return f"  checkpoint of step {event.step}: {size(event.bytes)}{of}"
        case events.Saved():
            return f"  save of step {event.step}: {size(event.bytes)}, on {event.base}"
        case events.CheckpointVoid():
            return f"  no checkpoint: {event.reason}"
        case events.WentBeyond():
            return f"  all go back to the checkpoint of step {event.step}: {event.reason}"
        case messages.NotExact():
            return f"  NOT EXACT from step {event.step} on: {event.what}"
        case events.RecoveredPartly():
            lost = f"{100 * event.lost_samples:.3g} % of the samples are lost"
            return (
                f"  NOT EXACT: slots {event.slots} take their records from the checkpoint of step {event.step}; {lost}"
            )
    return ""
