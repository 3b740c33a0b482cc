"""How each kind of fault is brought about in a simulated cluster, and how it ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from measure.simulation.cluster import Cluster
from measure.simulation.fault_script import Fault, FaultKind
from measure.simulation.network import Host, Path
from measure.simulation.worker import SimWorker

End = Callable[[], Awaitable[None]]
_Effect = Callable[[SimWorker, Host, float], Awaitable[End]]


async def begin(cluster: Cluster, fault: Fault) -> End:
    """Has it happen; what is returned ends it."""
    worker = cluster.workers[fault.worker]
    peer = cluster.network.hosts[fault.peer] if fault.peer else cluster.host
    return await _EFFECTS[fault.kind](worker, peer, fault.amount)


async def _crash(worker: SimWorker, _: Host, __: float) -> End:
    await worker.crash()
    return worker.start


async def _drain(worker: SimWorker, _: Host, __: float) -> End:
    worker.workload.start_drain()

    async def end() -> None:
        await worker.crash()
        await worker.start()

    return end


async def _stop(worker: SimWorker, _: Host, __: float) -> End:
    worker.host.pause()
    return _end(worker.host.resume)


async def _slow(worker: SimWorker, _: Host, speed: float) -> End:
    host = worker.host
    host.speed = speed
    return _end(lambda: setattr(host, "speed", 1.0))


async def _partition(worker: SimWorker, peer: Host, _: float) -> End:
    paths = _paths(worker.host, peer)

    def end() -> None:
        for path in paths:
            path.unblock()

    for path in paths:
        path.block()
    return _end(end)


async def _late(worker: SimWorker, peer: Host, late_s: float) -> End:
    def set_late(seconds: float) -> None:
        for path in _paths(worker.host, peer):
            path.late_s = seconds

    set_late(late_s)
    return _end(lambda: set_late(0.0))


async def _lose(worker: SimWorker, peer: Host, which: float) -> End:
    path, _ = _paths(worker.host, peer)
    connections = list(path.connections)
    if connections:
        connection = connections[int(which * len(connections))]
        for host in (worker.host, peer):
            connection.broken(host)
    return _end(lambda: None)


def _paths(one: Host, other: Host) -> tuple[Path, Path]:
    return one.network.path(one, other), one.network.path(other, one)


def _end(what: Callable[[], None]) -> End:
    async def end() -> None:
        what()

    return end


_EFFECTS: dict[FaultKind, _Effect] = {
    FaultKind.CRASH: _crash,
    FaultKind.DRAIN: _drain,
    FaultKind.STOP: _stop,
    FaultKind.SLOW: _slow,
    FaultKind.PARTITION: _partition,
    FaultKind.LATE: _late,
    FaultKind.LOSS: _lose,
}
