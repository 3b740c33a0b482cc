"""What runs in the processes of a fault fleet: a worker or a coordinator, and who commands it.

Commands come as JSON lines on a Unix socket whose other end is the driver, and each is
answered; where that end closes, the process ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from pdserve.config import CoordinatorConfig, Listen, SimConfig
from pdserve.errors import DecodeError, ErrorReason, PrefillError
from pdserve.types import Role
from tests.support.gated_worker import GatedWorker
from tests.support.sim_fleet import SimCoordinator

Answer = dict[str, Any]
Commands = Mapping[str, Callable[..., Awaitable[Answer | None]]]

CHUNK_TOKENS = 16
SIM = SimConfig(
    prefill_token_s=0.0, decode_step_s=0.0, transfer_token_s=0.0, chunk_tokens=CHUNK_TOKENS
)


@dataclass(frozen=True)
class WorkerSpec:
    """`port` is that of its gRPC server, `kv_port` where its blocks are fetched; `routes` as for
    GatedEngine; `control` is the path of the socket."""

    worker_id: str
    role: Role
    port: int
    kv_port: int
    routes: dict[int, int]
    control: str


class _Worker(GatedWorker):
    def __init__(self, spec: WorkerSpec) -> None:
        sim = SIM.model_copy(update={"side_channel": Listen(port=spec.kv_port)})
        super().__init__(spec.worker_id, spec.role, sim=sim, port=spec.port, routes=spec.routes)
        self._role = spec.role
        self._fail = PrefillError if spec.role is Role.PREFILL else DecodeError
        self._reason = {
            Role.PREFILL: ErrorReason.PREFILL_FAILED,
            Role.DECODE: ErrorReason.DECODE_FAILED,
        }[spec.role]

    @property
    def commands(self) -> Commands:
        return {
            name: getattr(self, name)
            for name in (
                "state",
                "gate",
                "open",
                "occupy",
                "refuse",
                "fail",
                "lose_blocks",
                "reset",
            )
        }

    async def state(self) -> Answer:
        """All that is held and done here, live."""
        engine, workload = self.engine, self.workload
        load, leases = engine.load, workload.leases
        return {
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": load.kv_usage,
            "unfinished": workload.unfinished,
            "reserved": workload.load.reserved_tokens,
            "leases": leases.open,
            "leases_begun": leases.open + sum(leases.ended.values()),
            "requests": {
                request: {"serial": call.serial, "tokens": call.tokens}
                for request, call in engine.calls.now.items()
            },
            "kept": list(engine.kept),
            "steps_waiting": engine.gates.steps.waiting,
            "transfers_waiting": engine.gates.transfers.waiting,
        }

    async def gate(self, steps: int | None = None, transfers: bool | None = None) -> None:
        """Closes the steps' gate but for so many; opens (True) or closes that of transfers."""
        if steps is not None:
            self.stop_after(steps)
        if transfers is not None:
            gate = self.engine.gates.transfers
            (gate.open if transfers else gate.close)()

    async def open(self) -> None:
        self.engine.gates.steps.open()
        self.engine.gates.transfers.open()
        await self.engine.vacate()

    async def occupy(self) -> None:
        self.engine.occupy()

    async def refuse(self) -> None:
        """Takes nothing new: a decode worker by a full cache, as it would be found full."""
        if self._role is Role.PREFILL:
            self.engine.refusal = PrefillError(ErrorReason.NO_ROOM, "no room to read a prompt now")
            return
        room = self.workload.room
        assert room is not None
        room.reserve("refusing", self.engine.info.kv_capacity_tokens - room.charged_tokens)

    async def fail(self, request: str = "", reason: str = "", unknown: bool = False) -> None:
        """Fails a sequence of that request, or the next one that comes."""
        why = ErrorReason[reason] if reason else self._reason
        failure: Exception = self._fail(why, "as the test wants it")
        if unknown:
            failure = RuntimeError("as the test wants it")
        call = self.engine.calls.now.get(request)
        if call is not None:
            call.fail(failure)
        else:
            self.engine.doom = failure

    async def lose_blocks(self, request: str) -> None:
        await self.engine.lose_blocks(request)

    async def reset(self) -> None:
        """Opens every gate and forgets whom to refuse or fail."""
        self.engine.doom = self.engine.refusal = None
        self.engine.kept.clear()
        if (room := self.workload.room) is not None:
            room.release("refusing")
            self.workload.set_reserved_tokens(room.charged_tokens)
        await self.open()


def run_worker(spec: WorkerSpec) -> None:
    """The main function of a worker's process."""
    _quiet()

    async def main() -> None:
        worker = _Worker(spec)
        await worker.start()
        await _obey(spec.control, spec.worker_id, worker.commands, {})

    asyncio.run(main())


def run_coordinator(name: str, control: str, config: CoordinatorConfig) -> None:
    """The main function of a coordinator's process, which tells its addresses once it is ready."""
    _quiet()

    async def main() -> None:
        core = SimCoordinator(config)
        async with core.running():
            await core.until_all_proven()

            async def state() -> Answer:
                queued = sum(a.queued for a in core.gateway.admissions.values())
                running = sum(a.running for a in core.gateway.admissions.values())
                return {"queued": queued, "running": running}

            await _obey(control, name, {"state": state}, core.addresses)

    asyncio.run(main())


async def _obey(control: str, name: str, commands: Commands, hello: Answer) -> None:
    reader, writer = await asyncio.open_unix_connection(control)
    writer.write(json.dumps({"name": name, **hello}).encode() + b"\n")
    while line := await reader.readline():
        command = json.loads(line)
        number = command.pop("number")
        answer = await commands[command.pop("do")](**command)
        writer.write(json.dumps({"number": number, **(answer or {})}).encode() + b"\n")
    os._exit(0)  # the driver is gone, and nobody waits for anything


def _quiet() -> None:
    # Ctrl-C is for the driver, which ends its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)
