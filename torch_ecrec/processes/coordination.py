"""The composition root of a coordinator: membership behind a control server."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import msgspec

from torch_ecrec.coordinator.checkpoint_settings import NO_CHECKPOINTS, CheckpointSettings
from torch_ecrec.coordinator.checkpointing import Restorable
from torch_ecrec.coordinator.election import Standing
from torch_ecrec.coordinator.launches import RESTART_S
from torch_ecrec.coordinator.router import Peer, Router
from torch_ecrec.coordinator.settings import ClusterSettings
from torch_ecrec.errors import CheckpointError, ClusterError, DataLoss, OtherCluster, StoreUnavailable
from torch_ecrec.observe.event_log import EventLog
from torch_ecrec.processes.checkpoint_files import FileManifests
from torch_ecrec.processes.leadership import LeaderGate, LeaderLease
from torch_ecrec.processes.restore_source import find as find_checkpoint
from torch_ecrec.processes.restore_source import find_again
from torch_ecrec.processes.supervisor import POLL_S, STAYS
from torch_ecrec.protocol.bounds import TransportName
from torch_ecrec.runtime.addresses import text_of
from torch_ecrec.runtime.lifetime import freeze, on_signals
from torch_ecrec.runtime.threads import Worker
from torch_ecrec.spec.job import CodeSpec
from torch_ecrec.spec.settings import NONE, Settings
from torch_ecrec.storage.catalog import NEWEST
from torch_ecrec.storage.store_probe import LIMIT_S, StoreProbe
from torch_ecrec.transport.control import TOLD_S, ControlServer, raise_descriptors
from torch_ecrec.transport.etcd import View
from torch_ecrec.web.place import Place

if TYPE_CHECKING:  # aiohttp, which only who is watched needs
    from torch_ecrec.web.server import Cluster, WebServer

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 2.0  # before a store that could not be read is read again
EXPECTED_S = 10.0  # members of a coordinator before, by one that cannot begin without them
JOINS_HELD_S = 1.0  # after the coordinator's start: less than what a server's takes
HANGS_S = 5.0  # without a tick
TOLD_END_S = 0.2  # for the last words to those who are connected
LOUD = "recovered_partly", "not_exact", "began_anew", "turned_away", "slow", "stands_still", "goes_on"  # events


class Unrestorable(ClusterError):
    """The checkpoint that a cluster was to begin with cannot be read, and everybody who has asked knows."""

    exit_code = CheckpointError.exit_code


@dataclass(frozen=True)
class Coordination:
    """Holds the arguments that a coordinator is started with.

    Args:
        host, port: where it listens; port 0 takes any that is free.
        code, spares, without_spare, drain_slow, checkpoint: see `ClusterSettings`.
        settings: of the process.
        restore: the checkpoint that the cluster begins with (`restore_source.find`); "": none.
        began_with: the folder that the run has begun with (`settings.NONE`: with none); "": it begins now.
        again: it takes the place of one that died. If everybody else died, too, it begins as `find_again` says.
        alone: nobody but a person, or an init system, starts it again, with the same words: that members of one before
            come back is possible, though `again` is not said.
        elect: `etcd://...`, where it is decided which of several coordinators leads; "": it is the only one.
        leader_lease_s: of the one that leads; see `LeaderLease`.
        http: where metrics, status and a page are served; None: they are not.
        events: the file where events are written; None: none is.
        allow_kill: who watches over HTTP may have servers and trainers killed.
    """

    host: str
    port: int
    code: CodeSpec
    spares: int
    without_spare: str
    settings: Settings
    drain_slow: bool = False
    checkpoint: CheckpointSettings = NO_CHECKPOINTS
    restore: str = ""
    began_with: str = ""
    again: bool = False
    alone: bool = False
    elect: str = ""
    leader_lease_s: int = 2
    http: Place | None = None
    events: Path | None = None
    allow_kill: bool = False


def run_coordinator(told: Coordination, out: IO[str]) -> int:
    """Runs a coordinator until it is told to end; prints its address to `out` as a line of JSON once it listens.

    Of several, one leads and the others stand by. One that has lost its lease of the lead stands by again; one
    that is told to end leaves the lead to another, unless the run is over.

    Raises:
        OSError: the port is in use, or nobody can write the file for events.
        CheckpointError: the checkpoint to begin with is not there, or there is no such place.
        OtherCluster: members of another cluster have found it, and nobody of its own.
        DataLoss: more is lost than can be repaired, everybody who has asked knows, and nobody has for a while. Of one
            with a supervisor: else it stays, since whoever starts it again would begin anew.
        Unrestorable: likewise, the checkpoint to begin with cannot be read.
        EtcdPutBack: etcd has lost what it knew of the cluster, or was put back to an earlier state.
        ClusterError: as `LeaderLease`.
    """
    raise_descriptors()
    known, ends, watchers = None, _Ends(), _Watchers(told)
    try:
        while True:
            one = _Coordinator(told, out, known, ends, watchers)
            if not one.run():
                return 0
            known = one.known
            log.warning("this coordinator leads no more, since its lease has ended: it stands by")
    finally:
        watchers.close()


class _Watchers:
    """Passes on all that happens in this process, whether it leads or stands by, to its pages and to a file."""

    def __init__(self, told: Coordination) -> None:
        self._file = None if told.events is None else EventLog(told.events)
        self._web: WebServer | None = None
        if told.http is not None:
            from torch_ecrec.web.server import WebServer

            self._web = WebServer(told.http, insists=not told.again)
            self._web.start()

    @property
    def said(self) -> dict[str, Any]:
        """The part of this process's ready line about its watchers: the address of its page, if it serves one."""
        return {} if self._web is None else {"http": list(self._web.address)}

    def lead(self, cluster: Cluster | None) -> None:
        """This process leads that cluster from now on; None: it stands by, or ends."""
        if self._web is not None:
            self._web.lead(cluster)

    def happened(self, event: dict[str, Any]) -> None:
        """Takes an event of the cluster, to show or keep it."""
        if self._web is not None:
            self._web.happened(event)
        if self._file is not None:
            self._file.happened(event)

    def close(self) -> None:
        """Lets go of what it has, since this process ends."""
        if self._web is not None:
            self._web.close()
        if self._file is not None:
            self._file.close()


@dataclass
class _Ends:
    """Whether this process was told to end, whatever its coordinator was doing then."""

    told: bool = False


class _Coordinator:
    """One, from its start to its end."""

    def __init__(self, told: Coordination, out: IO[str], known: View | None, ends: _Ends, watchers: _Watchers) -> None:
        self._told, self._out, self._ends, self._watchers = told, out, ends, watchers
        self._fenced = self._over = self._told_to_end = False
        self._turned_away, self._told_s = (
            0,
            -math.inf,
        )  # connections that the log was not told of; when it was told last
        self._server = ControlServer(
            told.host,
            told.port,
            on_message=lambda peer, message: self._gate.do(
                lambda: self._router.on_message(peer, message, time.monotonic()), _said_again(peer, message)
            ),
            on_closed=lambda peer: self._do(lambda: self._router.on_closed(peer, time.monotonic())),
            on_bad_line=lambda peer, reason: self._do(lambda: self._router.refuse(peer, reason, time.monotonic())),
        )
        self._lease: LeaderLease | None = None
        if told.elect:
            begins = self._first_begins_with
            self._lease = LeaderLease(told.elect, self._server.address, told.leader_lease_s, begins, known)
        office = self._lease
        self._gate = LeaderGate(lambda: office is None or office.holds)
        self._router: Router
        self._manifests: FileManifests | None = None
        self._began_with = ""
        self._ticked_s = math.inf  # when it did something last, once it serves
        self._missing: CheckpointError | None = None  # why there is nothing to begin with
        self._ended: ClusterError | None = None  # why it ends by itself
        self._fatal_s = math.inf  # since when the cluster has stopped
        self._over_for_it = threading.Event()  # it has come to its end; its process may stand by again

    def _do(self, action: Callable[[], None]) -> None:
        self._gate.do(action)

    def _do_soon(self, action: Callable[[], None]) -> None:
        """Runs an action on the coordinator's thread. May be called from any thread."""
        self._server.call_soon(lambda: self._do(action))

    @property
    def known(self) -> View | None:
        """The last answer of etcd; None where no election is held."""
        return None if self._lease is None else self._lease.candidate.view

    def run(self) -> bool:
        """Runs until its end; returns whether it has lost its lease of the lead, and is to stand by again."""
        checkpoint, again, began_with = self._told.checkpoint, self._told.again, self._told.began_with
        asked = False  # by whoever has started it, once nobody was left
        if self._lease is not None:
            if not self._stand(self._lease):
                self._server.close()
                return False
            self._lease.keep(lambda: self._server.call_soon(self._give_way), self._hangs)
            checkpoint = dataclasses.replace(checkpoint, run=self._lease.candidate.run)
            asked = not again and not self._lease.candidate.stood_by
            again, began_with = again or self._lease.candidate.again, self._lease.candidate.began_with
        try:
            self._begin(checkpoint, again, began_with, asked)
            self._watchers.lead(self._as_watched(again))
            self._serve()
            if self._missing is not None and self._router.looks:
                raise self._missing
            refuses = isinstance(self._ended, OtherCluster)
            if self._over or (self._lease is None and not self._fenced and not refuses):
                self._tidy()
            if self._ended is not None:
                raise self._ended
        finally:
            self._over_for_it.set()
            self._watchers.lead(None)
            if self._lease is not None:
                self._lease.close(self._over)
        if self._fenced and self._lease is not None and self._lease.candidate.standing is Standing.OVER:
            log.info("the run is over: another coordinator has led, and has said so")
            return False
        return self._fenced and not self._ends.told

    def _stand(self, office: LeaderLease) -> bool:
        """Stands by until this process leads, and returns whether it does."""

        def end() -> None:
            self._ends.told = True

        on_signals(lambda *_: end())
        print(json.dumps({"stands_by": list(self._server.address), **self._watchers.said}), file=self._out, flush=True)
        freeze()  # now: it takes a tenth of a second of a core, and members wait for who leads
        standing = office.stand(self._turn_away, lambda: self._ends.told)
        if standing is Standing.OVER:
            log.info("the run is over")
        leads = standing is Standing.LEADING and not self._ends.told
        if not leads:
            office.close(over=False)
        return leads

    def _turn_away(self) -> None:
        """Who has come before it leads took it for the leader. A word that waited until it is one would be old by then,
        and who had said it may have long gone on without."""
        self._turned_away += self._server.turn_away()
        if self._turned_away and time.monotonic() > self._told_s + TOLD_S:
            log.info("stands by: %d connections were closed, of who takes it for the leader", self._turned_away)
            self._turned_away, self._told_s = 0, time.monotonic()

    def _first_begins_with(self) -> str:
        """Returns the folder of the checkpoint with which a new run begins that this coordinator leads first, or
        `NONE`."""
        told = self._told
        begins = self._find(told.checkpoint.url) if told.restore else None
        return NONE if begins is None else begins[0].folder

    def _find(self, url: str, began_with: str = "") -> Restorable | None:
        """Returns the checkpoint that the arguments name. A store that hangs is an error: nobody listens here
        meanwhile."""
        told = self._told
        where = url if told.restore == NEWEST else told.restore
        look = lambda: find_checkpoint(told.restore, url, began_with)  # noqa: E731
        return StoreProbe(look, where, min(told.checkpoint.timeout_s, LIMIT_S), log.warning).look()

    def _begins(self, url: str, began_with: str) -> Restorable | None:
        """Returns the checkpoint that a new run begins with. Where that is not to be had, it may be no new run: a
        coordinator that is started again by hand has the same words as the one before, which may have removed what it
        began with."""
        told = self._told
        try:
            return self._find(url, began_with) if told.restore else None
        except CheckpointError as error:
            if not told.alone:
                raise
            log.warning("%s. Members of a coordinator before may know better: ends in %g s", error, EXPECTED_S)
            self._missing = error
            return None

    def _begin(self, checkpoint: CheckpointSettings, again: bool, began_with: str, asked: bool) -> None:
        told = self._told
        begins = None if again else self._begins(checkpoint.url, began_with)
        if told.restore and told.alone and not again and begins is None and self._missing is None:
            log.warning("the cluster begins at step 0: there is no checkpoint at %s yet", checkpoint.url)
        self._began_with = began_with or (NONE if begins is None else begins[0].folder)
        if checkpoint.url:
            self._manifests = FileManifests(checkpoint, lambda: self._router.core.job, self._do_soon)
        settings = told.settings
        if settings.experiment:
            log.warning("EXPERIMENT %s", settings.experiment)
        transport = cast(TransportName, settings.transport)
        self._router = Router(
            ClusterSettings(
                told.code,
                told.spares,
                told.without_spare,
                settings.lease_s,
                settings.standstill_s,
                transport,
                checkpoint,
                begins,
                run_is_known=told.again and self._lease is None,
                drain_slow=told.drain_slow,
                experiment=settings.experiment,
            ),
            manifests=self._manifests,
            probe=self._probe,
            announce=self._announce,
            stop=self._stop,
            refuse_to_lead=self._refuse_to_lead,
            stamp=lambda message: {**message, "time_s": time.time()},
            joins_from_s=time.monotonic() + JOINS_HELD_S,
            first_held_s=JOINS_HELD_S,
            looks=again or self._missing is not None,
            led=0 if self._lease is None else self._lease.candidate.led,
        )
        if again:
            Worker(
                lambda: self._look_for(checkpoint, began_with, asked), "look for a checkpoint", self._cannot_look_on
            ).start()

    def _look_for(self, checkpoint: CheckpointSettings, began_with: str, asked: bool) -> None:
        """Finds what the cluster begins with if nobody is left who trains. Runs on a thread of its own, in a
        coordinator that takes the place of another. What cannot be read is tried again: training does not need it. What
        is not there, too, since somebody may bring it back; but who joins is told."""
        since_s, wanted = time.monotonic(), self._told.restore
        looks = StoreProbe(
            lambda: find_again(checkpoint.run, checkpoint.url, checkpoint.beyond, wanted, began_with, asked),
            checkpoint.url or wanted,
            min(checkpoint.timeout_s, LIMIT_S),
            self._say_trouble,
        )
        while True:
            try:
                begins, term = looks.look()
            except CheckpointError as error:
                self._say_trouble(str(error))
                if not isinstance(error, StoreUnavailable) and time.monotonic() > since_s + EXPECTED_S:
                    self._refuse(str(error))
                if self._over_for_it.wait(LOOK_AGAIN_S) or not self._router.looks:
                    return  # it leads no more; or somebody is left
                continue
            break
        self._do_soon(lambda: self._router.begin_with(begins, term, time.monotonic()))

    def _cannot_look_on(self, error: BaseException) -> None:
        """Refuses those who join, as the look for a checkpoint has failed: they would wait for ever."""
        log.error("the look for a checkpoint ended: %r", error, exc_info=error)
        self._refuse(f"the look for a checkpoint to begin with ended: {error!r}")

    def _say_trouble(self, why: str) -> None:
        log.warning("is there a checkpoint to begin with, if nobody is left who trains? %s", why)
        self._do_soon(lambda: self._router.cannot_look(why))

    def _refuse(self, why: str) -> None:
        """Notes that there is nothing to begin with. May be called from any thread."""
        self._do_soon(lambda: self._router.cannot_begin(why, time.monotonic()))

    def _as_watched(self, again: bool) -> Cluster | None:
        """Returns the cluster as watchers may ask it. The status is encoded on this thread, which alone may look at
        it."""
        if self._told.http is None:
            return None
        from torch_ecrec.web.server import Cluster

        def status() -> bytes:
            found = self._router.status(time.monotonic())
            return msgspec.json.encode(msgspec.structs.replace(found, time_s=time.time()))

        def ask_status(done: Callable[[bytes], None]) -> None:
            self._do_soon(lambda: done(status()))

        def drain(what: str, undo: bool, done: Callable[[str], None]) -> None:
            self._do_soon(lambda: done(self._router.drain(what, undo)))

        def checkpoint(done: Callable[[str], None]) -> None:
            self._do_soon(lambda: done(self._router.core.checkpoint(None)))

        def kill(name: str, done: Callable[[str], None]) -> None:
            self._do_soon(lambda: done(self._router.kill(name)))

        join = self._told.elect or text_of(self._server.address)
        return Cluster(ask_status, drain, checkpoint, kill if self._told.allow_kill else None, join, again)

    def _probe(self, name: str, number: int, address: tuple[str, int]) -> None:
        def on_probed(found: str) -> None:
            self._do(lambda: self._router.on_probed(name, number, found, time.monotonic()))

        self._server.probe(address, on_probed)

    def _hangs(self) -> bool:
        """Returns whether the coordinator's thread hangs, which ticks four times in a heartbeat. May be called from any
        thread."""
        return time.monotonic() - self._ticked_s > max(HANGS_S, self._told.settings.heartbeat_s)

    # its end ------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Ends this process a little later, as the cluster was told to end."""
        self._over = True
        self._server.call_later(TOLD_END_S, self._server.close)

    def _refuse_to_lead(self, why: str, code: CodeSpec) -> None:
        """Members of a cluster of this code look for their coordinator here."""
        told = self._told
        words = f"torch-ecrec coordinator --servers {code.slots} -k {code.k} -r {code.r}"
        words += "" if code.protection == "parity" else f" --protection {code.protection}"
        words += f" --elect {told.elect}" if told.elect else ""
        host, port = self._server.address
        self._ended = OtherCluster(
            f"refuses to lead: {why}. So that it trains on, start its coordinator here, with the options that it had:"
            f" {words} --host {host} --port {port} ...; or end its processes first, or take another port"
        )
        self._server.call_later(TOLD_END_S, self._server.close)

    def _announce(self, event: dict[str, Any]) -> None:
        """Tells an event to the log, the watchers, and the supervisor, which starts the next coordinator, whose members
        these are."""
        log_event(event)
        self._watchers.happened(event)
        if event["event"] == "regathered" and not self._told.alone:
            print(json.dumps({"run": self._router.core.run}), file=self._out, flush=True)
        if event["event"] == "regathered" and self._told.restore and not self._told.again and self._missing is None:
            self._server.call_soon(self._say_passed_over)

    def _say_passed_over(self) -> None:
        """Says that members of a coordinator before have more than the checkpoint that this one was to begin with."""
        core = self._router.core
        if core.fatal is None and (core.restored is None or core.restored.folder != self._began_with):
            log.warning(
                "members of a coordinator before are back, and go on with what they have: --restore %s is passed over."
                " To begin with that, end all processes of this cluster first",
                self._told.restore,
            )

    def _end_after_loss(self) -> None:
        """Ends this process after a loss of data, once whoever was started again has been told, as often as it was.
        Likewise where the checkpoint to begin with cannot be read."""
        core, now_s = self._router.core, time.monotonic()
        why = {"data_loss": DataLoss, "checkpoint": Unrestorable}.get(core.fatal_kind)
        lost = core.fatal is not None and why is not None and not core.goes_back
        self._fatal_s = min(self._fatal_s, now_s) if lost else math.inf
        if not self._told.alone and now_s > max(self._fatal_s, self._router.told_fatal_s) + RESTART_S:
            assert why is not None
            self._ended, self._over = why(core.fatal), True
            self._server.close()

    def _give_way(self) -> None:
        """Leads no more: whoever is still connected looks for who does."""
        self._fenced = True
        self._server.close()

    def _end_without(self) -> None:
        """Ends this process if nobody has come back, and there is nothing to begin with."""
        if self._router.looks and not self._router.core.regathering:
            self._refuse(str(self._missing))
            self._server.call_later(TOLD_END_S, self._server.close)

    def _tidy(self) -> None:
        """Removes what the run's manifests need no more: nobody goes on with it."""
        if self._manifests is not None:
            self._manifests.end(self._router.core.run)

    def _end(self, number: int) -> None:
        """This process is told to, by a signal: at once, unless trainers are there, which may have been told, too."""
        first, self._told_to_end = not self._told_to_end, True
        waits_for = ", ".join(self._trainers())
        if first and number == signal.SIGTERM and self._lease is None and waits_for:
            log.info(STAYS, waits_for, self._told.settings.grace_s)
            self._end_alone(time.monotonic() + self._told.settings.grace_s)
        else:
            self._end_now()

    def _trainers(self) -> list[str]:
        """Returns the trainers that are there, and may need the cluster; also where they are not known yet."""
        core = self._router.core
        there = [one.name for one in core.members.values() if one.role == "trainer" and one.present]
        if core.regathering and not there:
            there = ["trainers of the coordinator before"]
        return there if core.fatal is None else []

    def _end_alone(self, until_s: float) -> None:
        """Ends this process once no trainer is there; waits until `until_s` at most."""
        if self._trainers() and time.monotonic() < until_s:
            self._server.call_later(POLL_S, lambda: self._end_alone(until_s))
        else:
            self._end_now()

    def _end_now(self) -> None:
        if self._router.core.fatal is not None:
            self._over = True
        elif self._lease is None:
            self._router.core.stop("the coordinator was told to end", "stopped")  # nobody waits for another then
        self._server.close()

    def _serve(self) -> None:
        server = self._server

        def tick() -> None:
            self._ticked_s = time.monotonic()
            if self._gate.go_on():
                self._router.on_tick(time.monotonic())
                self._end_after_loss()
            server.call_later(self._told.settings.heartbeat_s / 4, tick)

        def end(number: int) -> None:
            self._ends.told = True  # also where the server has closed meanwhile, and does nothing any more
            server.call_soon(lambda: self._end(number))

        on_signals(lambda number, _: end(number))
        if self._ends.told:  # before it listened
            server.call_soon(self._end_now)
        said = {"address": list(server.address), "began_with": self._began_with, **self._watchers.said}
        print(json.dumps(said), file=self._out, flush=True)
        if self._lease is None:
            freeze()
        server.call_later(0.0, tick)
        if self._missing is not None:
            server.call_later(EXPECTED_S, self._end_without)
        # Those who wait are let in.
        server.call_later(JOINS_HELD_S, lambda: self._do(lambda: self._router.on_tick(time.monotonic())))
        server.serve_forever()


def _said_again(peer: Peer, message: dict[str, Any]) -> Hashable:
    """Returns a mark of what a member says again and again, of which the newest word counts: while etcd is away for
    hours, the others would fill the memory. None: each word counts."""
    kind = message.get("type")
    return (peer, kind, bool(message.get("report"))) if kind in ("beat", "progress") else None


def log_event(event: dict[str, Any]) -> None:
    """Logs an event: louder what is not exact, what has lost all that was trained, and what training waits for."""
    log.log(logging.WARNING if event["event"] in LOUD else logging.INFO, "%s", json.dumps(event))
