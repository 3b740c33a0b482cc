"""What can happen to a request and when, and how it must then end: pure data, written by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Moment(StrEnum):
    """Where the request stands when something happens."""

    QUEUED = "queued"
    """In the coordinator, with every place taken."""
    PREFILL_QUEUED = "prefill-queued"
    """In the prefill engine, which is busy with somebody else's step."""
    PREFILLING = "prefilling"
    """Between two chunks."""
    PREFILLED = "prefilled"
    """The blocks are held; the decode engine has not begun with the sequence."""
    TRANSFER = "transfer"
    """The blocks are on their way."""
    FETCHED = "fetched"
    """The decode engine has the blocks, and no token is out."""
    STREAMING = "streaming"
    """Two tokens are out, and many to come."""


class Event(StrEnum):
    CLIENT_LEAVES = "client-leaves"
    DEADLINE = "deadline"
    COORDINATOR_KILLED = "coordinator-killed"
    PREFILL_REFUSES = "prefill-refuses"
    DECODE_REFUSES = "decode-refuses"
    PREFILL_FAILS = "prefill-fails"
    DECODE_FAILS = "decode-fails"
    PREFILL_KILLED = "prefill-killed"
    DECODE_KILLED = "decode-killed"
    PREFILL_STOPPED = "prefill-stopped"
    DECODE_STOPPED = "decode-stopped"
    PREFILL_CUT_OFF = "prefill-cut-off"
    DECODE_CUT_OFF = "decode-cut-off"
    LINK_CUT = "link-cut"
    """Between the two workers alone."""

    @property
    def side(self) -> str:
        """The worker that is hit by itself: "p", "d", or empty."""
        name = self.name.partition("_")[0]
        return {"PREFILL": "p", "DECODE": "d"}.get(name, "")

    @property
    def hits_whole_worker(self) -> bool:
        """Whether all that a worker serves is hit, and not the one request."""
        return self in _WHOLE_WORKER

    @property
    def is_silent(self) -> bool:
        """Whether nothing but silence tells of it."""
        return self in _SILENT


_SILENT = frozenset(
    {
        Event.PREFILL_STOPPED,
        Event.DECODE_STOPPED,
        Event.PREFILL_CUT_OFF,
        Event.DECODE_CUT_OFF,
        Event.LINK_CUT,
    }
)
_WHOLE_WORKER = _SILENT - {Event.LINK_CUT} | {Event.PREFILL_KILLED, Event.DECODE_KILLED}


class Outcome(StrEnum):
    """How a request ends for its client."""

    LEFT = "L"
    """Nobody is there to be told."""
    DEADLINE = "D"
    BROKEN = "K"
    """The connection breaks: nobody is there to tell it."""
    UNNOTICED = "O"
    """Answered, on the way that was planned."""
    DETOUR = "R"
    """Answered, after another attempt, which the answer's reason names."""
    EITHER = "A"
    """Answered: whether the worker that was hit is asked at all is a matter of turns."""
    CONTINUED = "C"
    """Answered: another worker goes on with what is out."""

    @property
    def is_answer(self) -> bool:
        return self not in (Outcome.LEFT, Outcome.DEADLINE, Outcome.BROKEN)


_ROWS = {
    # in the order of Moment:   queued, prefill-queued, prefilling, prefilled, transfer,
    #                           fetched, streaming
    Event.CLIENT_LEAVES:      "L L L L L L L",
    Event.DEADLINE:           "D D D D D D D",
    Event.COORDINATOR_KILLED: "K K K K K K K",
    # A worker refuses what it has not taken yet, and keeps what it has promised.
    Event.PREFILL_REFUSES:    "A R O O O O O",
    Event.DECODE_REFUSES:     "A O O O O O O",
    # The prefill side matters until the blocks are fetched, the decode side until the end.
    Event.PREFILL_FAILS:      "A R R R R O O",
    Event.PREFILL_KILLED:     "A R R R R O O",
    Event.PREFILL_STOPPED:    "A R R R R O O",
    Event.PREFILL_CUT_OFF:    "A R R R R O O",
    Event.LINK_CUT:           "A R R R R O O",
    Event.DECODE_FAILS:       "A R R R R R C",
    Event.DECODE_KILLED:      "A R R R R R C",
    Event.DECODE_STOPPED:     "A R R R R R C",
    Event.DECODE_CUT_OFF:     "A R R R R R C",
}  # fmt: skip

EXPECTED = {
    (event, moment): Outcome(code)
    for event, row in _ROWS.items()
    for moment, code in zip(Moment, row.split(), strict=True)
}

TRANSPORTS = ("nixl", "grpc")
SURFACES = ("http", "http-stream", "grpc", "grpc-stream")


@dataclass(frozen=True)
class Case:
    """`seed` decides what the cell leaves open."""

    event: Event
    moment: Moment
    transport: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.event}/{self.moment}/{self.transport}/{self.seed}"

    @classmethod
    def from_name(cls, name: str) -> Case:
        event, moment, transport, seed = name.split("/")
        return cls(Event(event), Moment(moment), transport, int(seed))

    @property
    def expected(self) -> Outcome:
        return EXPECTED[self.event, self.moment]

    @property
    def variation(self) -> Variation:
        dice = random.Random(self.name)
        surface = dice.choice(SURFACES)
        if self.event is Event.DEADLINE:  # HTTP has none
            surface = dice.choice(SURFACES[2:])
        return Variation(surface, dice.random() < 0.5, dice.random() < 0.5, dice.randrange(2))


@dataclass(frozen=True)
class Variation:
    """`early_fetch`: the decode side asks for the blocks before they are read, where the
    transport can; `unknown_fault`: a sequence fails with an error that is none of pdserve's;
    `target`: which of the two workers is hit before the request has a plan."""

    surface: str
    early_fetch: bool
    unknown_fault: bool
    target: int


def sweep(seed: int) -> list[Case]:
    """Every cell over each transport, once, in an order from the seed."""
    cases = [
        Case(event, moment, transport, seed)
        for event in Event
        for moment in Moment
        for transport in TRANSPORTS
    ]
    random.Random(seed).shuffle(cases)
    return cases


def short_form(seed: int) -> list[Case]:
    """Every cell once, over the one transport or the other."""
    dice = random.Random(seed)
    cases = [
        Case(event, moment, dice.choice(TRANSPORTS), seed) for event in Event for moment in Moment
    ]
    dice.shuffle(cases)
    return cases


def sweeps(seed: int) -> Iterator[Case]:
    """Sweep after sweep, without an end."""
    while True:
        yield from sweep(seed)
        seed += 1
