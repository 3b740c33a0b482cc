"""What a façade needs of the rest of the coordinator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

from coordinator.catalog import ServedModel
from coordinator.gateway.keys import Caller
from coordinator.record import RequestRecord
from pdserve.errors import PdserveError
from pdserve.types import Delta, GenerateSpec, Route


class TokenStream(Protocol):
    """One answer. Iteration raises PdserveError, or ends after the delta with a finish reason."""

    @property
    def route(self) -> Route: ...

    @property
    def prompt_token_ids(self) -> tuple[int, ...]: ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def forward(self, write: Callable[[str], bool]) -> None:
        """From now on text may be rendered and written at once, instead of waking the reader.

        Both get what comes in order. `write` returns False to have the reader woken after all.
        """

    async def aclose(self) -> None:
        """Gives back all that the request holds and reports its end. Idempotent."""


class Dispatch(Protocol):
    """Carries requests out."""

    @property
    def models(self) -> Mapping[str, ServedModel]: ...

    async def open(self, spec: GenerateSpec, caller: Caller, record: RequestRecord) -> TokenStream:
        """Returns with the first delta there; whoever gets the stream closes it.

        Raises PdserveError, having reported the end itself.
        """


class EndObserver(Protocol):
    """Is told how requests ended."""

    def done(self, record: RequestRecord, error: PdserveError | None) -> None:
        """Only the first call for a record counts."""


class Ops(Protocol):
    """What operators ask."""

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """Whether requests can be served, and the state of each route, as JSON."""

    def fleet(self) -> dict[str, Any]:
        """Workers, routes and queues, as JSON."""

    def requests(self) -> dict[str, Any]:
        """The timelines of requests that ended, as JSON: the latest, and the slowest."""

    def request(self, request_id: str) -> dict[str, Any]:
        """The timeline of one request that ended, as JSON. Raises RejectedError NOT_FOUND."""

    def experiments(self) -> list[dict[str, Any]]:
        """Each model's running or last experiment, as JSON."""

    def experiment(self, model: str) -> dict[str, Any]:
        """With its slots. Raises RejectedError."""

    def start_experiment(self, model: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """From the fields of its configuration. Raises RejectedError."""

    def stop_experiment(self, model: str) -> dict[str, Any]:
        """Raises RejectedError."""

    async def dashboard(self) -> dict[str, Any]:
        """The fleet, the requests that ended, experiments, and what went through since the start,
        as JSON."""

    async def drain(self, worker_id: str, deadline_s: float) -> dict[str, Any]:
        """Has a worker take nothing new, and answers, as JSON, when it has ended its work or the
        deadline passed. Raises PdserveError."""

    async def usage(self, by: str, since_s: float, until_s: float) -> dict[str, Any]:
        """What was charged between two moments, seconds since the Unix epoch, as JSON. Raises
        PdserveError."""

    def metrics(self) -> bytes:
        """In Prometheus' text format."""
