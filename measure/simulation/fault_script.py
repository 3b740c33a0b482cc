"""What happens in one simulated run of faults, all of it drawn from a seed. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random

from measure.simulation.worker import MODEL, WorkerSpec
from pdserve.config import GatewayConfig, ModelConfig, SimConfig
from pdserve.types import Fallback, Mode, Role, SamplingParams

TRAFFIC_S = 15.0
"""Requests arrive and faults begin within it."""
LONGEST_FAULT_S = 15.0

CONTEXT = 1024
_WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


class FaultKind(StrEnum):
    """CRASH: the process dies, and another one is started at the same address later. STOP: it
    stands still, as by SIGSTOP. SLOW: its engine takes longer. PARTITION and LATE: nothing, or
    what is sent only late, gets from one host to another. LOSS: a message is lost for good, and
    its connection with it. DRAIN: it takes no new work, and is started anew."""

    CRASH = "crash"
    STOP = "stop"
    SLOW = "slow"
    PARTITION = "partition"
    LATE = "late"
    LOSS = "loss"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class Fault:
    """Begins at `at_s` and ends at `until_s`. `peer` is the other host of a path, empty for the
    coordinator; `amount` is a speed, or seconds of lateness, or picks a connection."""

    kind: FaultKind
    at_s: float
    until_s: float
    worker: str
    peer: str = ""
    amount: float = 0.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Its client leaves `leaves_s` after it has come; None stays to the end."""

    at_s: float
    prompt: str
    sampling: SamplingParams
    mode: Mode | None
    cache_salt: str
    deadline_s: float | None
    leaves_s: float | None


@dataclass(frozen=True, slots=True)
class Script:
    """One run: the fleet, its configuration, what is asked of it and what befalls it."""

    seed: int
    workers: dict[str, WorkerSpec]
    model: ModelConfig
    gateway: GatewayConfig
    latency_s: float
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]

    @property
    def is_faultless(self) -> bool:
        """Whether nothing breaks. A wall clock that is wrong is a fault, too."""
        return not self.faults and not any(spec.skew_s for spec in self.workers.values())


def script(seed: int) -> Script:
    random = Random(seed)
    workers = _workers(random)
    return Script(
        seed=seed,
        workers=workers,
        model=ModelConfig(
            name=MODEL,
            mode=random.choice(list(Mode)),
            min_prefill_tokens=random.choice((1, 100, 200)),
            fallback=random.choice((Fallback.COLOCATE, Fallback.COLOCATE, Fallback.FAIL)),
            transport=random.choice(("auto", "auto", "nixl", "grpc")),
        ),
        gateway=GatewayConfig(
            max_running=random.choice((3, 100)), max_queued=random.choice((2, 100))
        ),
        latency_s=random.choice((0.0, 0.0005, 0.01)),
        asks=tuple(_ask(random) for _ in range(random.randint(5, 25))),
        faults=tuple(_fault(random, list(workers)) for _ in range(random.choice((0, 1, 1, 2, 4)))),
    )


def _workers(random: Random) -> dict[str, WorkerSpec]:
    engine = SimConfig(
        prefill_token_s=random.choice((0.0002, 0.002)),
        decode_step_s=random.choice((0.01, 0.03)),
        transfer_token_s=random.choice((0.00001, 0.001)),
        # A cache of 1,024 tokens has room for few requests at once.
        kv_capacity_tokens=random.choice((CONTEXT, 4096, 100_000)),
        context_length=CONTEXT,
        chunk_tokens=random.choice((64, 256)),
    )
    pools = (
        ("p", frozenset({Role.PREFILL}), random.randint(0, 2)),
        ("d", frozenset({Role.DECODE}), random.randint(1, 2)),
        ("b", frozenset(Role), random.choice((0, 0, 1, 2))),
    )
    return {
        f"{name}{number}": WorkerSpec(
            roles, engine, skew_s=random.choice((0.0, 0.0, 0.0, -5.0, 5.0, 100.0, -100.0))
        )
        for name, roles, count in pools
        for number in range(count)
    }


def _ask(random: Random) -> Ask:
    words = " ".join(random.choice(_WORDS) for _ in range(random.choice((2, 10, 60, 100))))
    stop = (f" {random.choice(('the', 'of', 'be', 'at'))}",) if random.random() < 0.2 else ()
    return Ask(
        at_s=random.uniform(0, TRAFFIC_S),
        # Some share a beginning, and with it cached blocks.
        prompt=random.choice(("", "once upon a time " * 10)) + words,
        sampling=SamplingParams(
            max_tokens=random.choice((1, 5, 30, 120)),
            temperature=random.choice((0.0, 1.0)),
            seed=random.choice((None, 7)),
            stop=stop,
            ignore_eos=random.random() < 0.5,
            logprobs=random.choice((None, None, 2)),
        ),
        mode=random.choice((None, None, *Mode)),
        cache_salt=random.choice(("", "salt")),
        deadline_s=random.choice((None, None, None, random.uniform(0.1, 20))),
        leaves_s=random.uniform(0, 6) if random.random() < 0.3 else None,
    )


def _fault(random: Random, workers: list[str]) -> Fault:
    kind = random.choice(list(FaultKind))
    at_s = random.uniform(0, TRAFFIC_S)
    worker = random.choice(workers)
    amount = {
        FaultKind.SLOW: random.choice((0.02, 0.2)),
        FaultKind.LATE: random.choice((0.05, 1.0, 3.0)),
    }.get(kind, random.random())
    return Fault(
        kind,
        at_s,
        at_s + random.choice((0.2, 1.5, 4.0, LONGEST_FAULT_S)),
        worker,
        random.choice(["", "", *(name for name in workers if name != worker)]),
        amount,
    )
