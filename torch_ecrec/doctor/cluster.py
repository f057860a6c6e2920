"""Checks of a running cluster's coordinator: the way to it, whether it is ours, its version, its secret, its clock.

They go on from one to the next as far as they get: a name that leads nowhere is not connected with. What is asked is
what `torch-ecrec status` asks, so that the coordinator does nothing that it would not do anyhow.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import torch_ecrec
from torch_ecrec.doctor.findings import Finding, duration
from torch_ecrec.errors import ClusterError, ClusterUnavailable
from torch_ecrec.runtime.addresses import parse_address, text_of

CONNECT_S = 3.0
ANSWER_S = 5.0
ETCD_S = 1.0  # of each of its addresses
LIMIT_S = 30.0  # of all of it: several addresses of etcd, a name server that is silent
FAR_S = 0.02  # a step waits for two round trips at least
CLOCK_S = 1.0
TIMES = 3
IS_IT_UP = "torch-ecrec up --host HOST --port PORT, or torch-ecrec coordinator, starts one"


def coordinator(join: str) -> list[Finding]:
    """Examines the coordinator that `join` names; "": none is to be."""
    if not join:
        return []
    if join.startswith(("etcd://", "etcds://")):
        return _elected(join)
    try:
        address = parse_address(join)
    except ValueError as error:
        return [_bad("ERROR", str(error), "HOST:PORT, or etcd://HOST:PORT/NAME", "--join 10.0.0.1:29400, say")]
    return at(address)


def _bad(level: str, found: str, wanted: str, remedy: str, **figures: float) -> Finding:
    return Finding("coordinator", "ERROR" if level == "ERROR" else "WARN", found, wanted, remedy, figures)


def _elected(join: str) -> list[Finding]:
    """Examines etcd, and the coordinator that leads."""
    from torch_ecrec.transport.etcd import EtcdKeys, EtcdUnavailable, parse_place

    try:
        place = parse_place(join)
    except ValueError as error:
        return [_bad("ERROR", str(error), "a place in etcd", "--join etcd://10.0.0.1:2379/NAME, say")]
    findings = []
    for address in place.addresses:
        if (away := connect(address)[1]) is not None and len(place.addresses) > 1:
            wanted = "all addresses of etcd: a majority of them must live"
            findings.append(_bad("WARN", f"etcd: {away.found}", wanted, f"start etcd there, or {away.remedy}"))
    try:
        leader = EtcdKeys(place, ETCD_S, ETCD_S * 2).look().leader
    except EtcdUnavailable as error:
        first = text_of(place.addresses[0])
        step = f"start etcd, or name the address where it is: `etcdctl --endpoints {first} endpoint health` asks it"
        return [_bad("ERROR", str(error), f"an etcd at {', '.join(map(text_of, place.addresses))}", step)]
    except ClusterError as error:  # its package is not installed
        return [_bad("ERROR", str(error), "the package etcd3gw", "python -m pip install 'torch-ecrec[etcd]'")]
    except OSError as error:  # a certificate's file
        return [_bad("ERROR", f"etcd: {error}", "certificates that can be read", "look at ca, cert and key in --join")]
    if leader is None:
        step = f"torch-ecrec coordinator --elect {join} --host HOST, on each host that may lead"
        return [
            *findings,
            _bad("ERROR", f"etcd answers, and nobody leads {place.name}", "a coordinator that leads", step),
        ]
    findings.append(Finding("coordinator", "OK", f"etcd answers: {text_of(leader.address)} leads {place.name}"))
    return [*findings, *at(leader.address)]


def connect(address: tuple[str, int], times: int = 1) -> tuple[float, Finding | None]:
    """Connects and hangs up, so many times; returns the least time that it took, in seconds, or why it cannot be."""
    host, port = address
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        step = f"name its address in place of {host}, or put `ADDRESS {host}` into /etc/hosts of this host"
        return 0.0, _bad("ERROR", f"{host} does not resolve: {error.strerror or error}", "a name that resolves", step)
    took_s = []
    for _ in range(times):
        began_s = time.monotonic()
        try:
            socket.create_connection((str(places[0][4][0]), port), CONNECT_S).close()
        except TimeoutError:
            found = (
                f"{text_of(address)} does not answer within {CONNECT_S:g} s: packets are dropped, or the host is down"
            )
            step = "let firewalls (iptables -L, security groups) pass TCP between all hosts, on all ports"
            return 0.0, _bad("ERROR", found, "a host that answers", step)
        except OSError as error:
            found = f"nobody listens at {text_of(address)}: {error.strerror or error}"
            return 0.0, _bad("ERROR", found, "a coordinator", f"{IS_IT_UP}; or name the right port")
        took_s.append(time.monotonic() - began_s)
    return min(took_s), None


def at(address: tuple[str, int]) -> list[Finding]:
    """Examines the coordinator at an address."""
    from torch_ecrec.transport.control import request
    from torch_ecrec.transport.secret import NotProved

    where = text_of(address)
    connect_s, away = connect(address, TIMES)
    if away is not None:
        return [away]
    asked_s, began_s = time.time(), time.monotonic()
    try:
        answer = request(*address, {"type": "status"}, ANSWER_S)
    except NotProved as error:
        step = (
            "set TORCH_ECREC_SECRET, or TORCH_ECREC_SECRET_FILE, to what the coordinator has (`sha256sum FILE` on both"
            " hosts compares), or to nothing where it has none"
        )
        return [_bad("ERROR", str(error), "the same secret here and there", step)]
    except ClusterUnavailable as error:
        return [_stranger(where, str(error))]
    except ValueError as error:  # of our own secret; the settings' finding says how to mend it
        return [_bad("ERROR", f"cannot be asked: {error}", "a secret", "mend TORCH_ECREC_SECRET")]
    took_s = time.monotonic() - began_s
    if answer.get("type") != "status" or not isinstance(answer.get("version"), str):
        return [_stranger(where, f"it says {str(answer)[:120]}")]
    version = str(answer["version"])
    if why := _other_build(address, version):
        found = f"{where} is a coordinator of version {version[:40]}, here is {torch_ecrec.__version__}: {why}"
        step = f"python -m pip install torch-ecrec=={version[:40]} here, or the version of here on all other hosts"
        return [_bad("ERROR", found, "builds that may serve one cluster", step)]
    return [_reached(where, answer, connect_s, took_s), *_clock(where, answer.get("time_s"), asked_s, took_s)]


def _other_build(address: tuple[str, int], version: str) -> str:
    """Why this build may not be there; "": it may. One of the same version says so itself when it joins."""
    if version == torch_ecrec.__version__:
        return ""
    from torch_ecrec.protocol.messages import whole_build
    from torch_ecrec.transport.control import request

    build = whole_build()
    told = {"type": "compare", "version": build.version, "messages": dict(build.messages)}
    answer = request(*address, told, ANSWER_S)
    return str(answer.get("reason", "")) if answer.get("type") == "refused" else ""


def _stranger(where: str, why: str) -> Finding:
    found = f"somebody listens at {where}, who does not answer as a coordinator does: {why}"
    return _bad("ERROR", found, "a coordinator of torch-ecrec", f"name its address and port; {IS_IT_UP}")


def _reached(where: str, answer: dict[str, Any], connect_s: float, took_s: float) -> Finding:
    from torch_ecrec.protocol.status import of_message

    figures = {"connect_s": connect_s, "answer_s": took_s}
    try:
        status = of_message(answer)
    except ValueError as error:
        step = "install the same build on all hosts"
        return _bad("ERROR", f"{where} answers otherwise than this build: {error}", "the same build", step, **figures)
    if status.fatal:
        step = "start another cluster (torch-ecrec up), from a checkpoint where there is one (--restore)"
        return _bad(
            "ERROR", f"the cluster at {where} has ended: {status.fatal}", "a cluster that lives", step, **figures
        )
    times = f"connects in {duration(connect_s)}, answers in {duration(took_s)}"
    present = sum(member.present for member in status.members)
    found = f"{where}: version {status.version}, {present} members; {times}"
    if connect_s > FAR_S:
        wanted = f"a way there and back of at most {duration(FAR_S)}: a step waits for several"
        step = "take hosts of one network; `torch-ecrec doctor --listen` there and `--to` here measure the link"
        return _bad("WARN", found, wanted, step, **figures)
    return Finding("coordinator", "OK", found, figures=figures)


def _clock(where: str, time_s: object, asked_s: float, took_s: float) -> list[Finding]:
    """Compares clocks. The coordinator has read its own at some moment between question and answer."""
    if not isinstance(time_s, int | float) or isinstance(time_s, bool) or not time_s:
        return []
    off_s, unsure_s = time_s - (asked_s + took_s / 2), took_s / 2
    figures = {"off_s": off_s, "unsure_s": unsure_s}
    if abs(off_s) <= CLOCK_S + unsure_s:
        close = f"within {duration(abs(off_s) + unsure_s)} of the coordinator's"
        return [Finding("clock", "OK", close, figures=figures)]
    ahead = "ahead of" if off_s > 0 else "behind"
    found = f"the coordinator's, at {where}, is {abs(off_s):.1f} s {ahead} the clock of this host"
    step = "let NTP set both: timedatectl set-ntp true, or chronyc makestep (no step depends on it; logs and events do)"
    return [Finding("clock", "WARN", found, f"clocks within {CLOCK_S:g} s of each other", step, figures)]
