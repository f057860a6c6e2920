"""How much, how long and of which form what a control message holds may be (`messages.py`): types that say so."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from torch_ecrec.spec.job import SLOTS_MOST as SLOTS_MOST

COUNT_MOST = 1 << 53
TABLES_MOST = 100_000
MEMBERS_MOST = 100_000
MESSAGES_MOST = 1000
PARTIAL_RESTORES_MOST = 10_000
SAVES_MOST = 10_000  # of portions of rows, since the last checkpoint
INEXACT_MOST = 100  # reasons that are kept
FIGURES_MOST = 40  # in a progress report
TEXT_MOST = 200
REASON_MOST = 1000  # names a file, by its URL, and ends with what to do
PLACES_MOST = 100  # that are named of what is damaged
SHOWN_MOST = 200  # characters of a reason
NO_SECRET = "no_secret"  # the kind of a refusal that a connection says by itself: here, where nothing loads torch

Count = Annotated[int, Meta(ge=0, le=COUNT_MOST)]
Version = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # what a coordinator says: above what members have told it
Rank = Annotated[int, Meta(ge=-1, lt=MEMBERS_MOST)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,100}\Z")]
Host = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,100}\Z")]  # "" (`NO_HOST`): the slot waits for one
Text = Annotated[str, Meta(max_length=TEXT_MOST)]
Reason = Annotated[str, Meta(max_length=REASON_MOST)]
Inexact = Annotated[list[tuple[Count, Text]], Meta(max_length=INEXACT_MOST)]  # (steps of training until then, why)
Folder = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,100}\Z")]  # of one checkpoint, which is its name
FolderOrNone = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,100}\Z")]
Run = Annotated[str, Meta(pattern=r"^[A-Za-z0-9]{1,40}\Z")]  # all that was trained from one start of a cluster
Url = Annotated[str, Meta(min_length=1, max_length=4096)]
SessionId = Annotated[str, Meta(min_length=1, max_length=64)]
Role = Literal["server", "trainer"]
TransportName = Literal["sockets", "rpc"]
WireName = Literal["float32", "bfloat16"]
PoolingName = Literal["parts", "whole", "rows"]
Scalar = bool | Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)] | float | Text | None
Portion = Annotated[float, Meta(gt=0, le=1)]
Names = Annotated[list[Name], Meta(max_length=MEMBERS_MOST)]
Ranks = Annotated[list[Annotated[int, Meta(ge=0, lt=MEMBERS_MOST)]], Meta(max_length=MEMBERS_MOST)]
Snapshots = Annotated[  # (step, steps of training, trainers whose parts of the dense model are kept)
    list[tuple[Count, Count, Annotated[list[Count], Meta(max_length=MEMBERS_MOST)]]], Meta(max_length=1_000_000)
]
Address = tuple[Annotated[str, Meta(max_length=64)], Annotated[int, Meta(ge=1, lt=1 << 16)]]
Addresses = Annotated[dict[Name, Address], Meta(max_length=MEMBERS_MOST)]
Endpoint = Annotated[str, Meta(min_length=1, max_length=400)]  # where a member takes calls, as its transport says it
Endpoints = Annotated[dict[Name, Endpoint], Meta(min_length=1, max_length=MEMBERS_MOST)]
