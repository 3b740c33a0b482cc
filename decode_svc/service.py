"""DecodeService on an engine: one session for each coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from decode_svc.session import Session, Shared
from decode_svc.verify import HandleVerifier
from pdserve.engine.base import Engine
from pdserve.room import Room
from pdserve.rpc_errors import Context
from pdserve.v1 import decode_pb2
from pdserve.v1.decode_pb2_grpc import DecodeServiceServicer
from pdserve.workload import Workload


class DecodeService(DecodeServiceServicer):
    """Needs the engine to have started by the first call.

    `wall_clock` gives seconds since the Unix epoch, to hold against leases; `key` is
    that of the fleet's seals.
    """

    def __init__(
        self, engine: Engine, workload: Workload, wall_clock: Callable[[], float], key: bytes
    ) -> None:
        self._engine = engine
        self._workload = workload
        self._room = workload.room = Room(lambda: engine.info.kv_capacity_tokens)
        self._wall_clock = wall_clock
        self._key = key
        self._shared: Shared | None = None
        self._sessions: set[Session] = set()

    async def Session(
        self,
        request_iterator: AsyncIterator[decode_pb2.SessionRequest],
        context: Context,
    ) -> AsyncIterator[decode_pb2.SessionResponse]:
        session = Session(self._share())
        self._sessions.add(session)
        obeying = asyncio.create_task(session.obey(request_iterator))
        try:
            while (message := await session.outgoing.next_message()) is not None:
                yield message
            if obeying.done():
                obeying.result()
        finally:
            # Awaits nothing: a stopping server cancels a call that is being cancelled again.
            obeying.cancel()
            session.close()
            self._sessions.discard(session)

    def finish(self) -> None:
        """Ends every session in good order as soon as nothing runs on it."""
        for session in self._sessions:
            session.finish()

    def _share(self) -> Shared:
        # Made late, for only a started engine knows what it is.
        if self._shared is None:
            info = self._engine.info
            self._shared = Shared(
                self._engine,
                self._workload,
                self._room,
                HandleVerifier(info, self._key),
                self._wall_clock,
            )
        return self._shared
