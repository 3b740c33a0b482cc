"""What operators ask of a coordinator: is it ready, how is the fleet, what do the metrics say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import structlog
from prometheus_client import generate_latest
from pydantic import ValidationError

from coordinator.catalog import ServedModel
from coordinator.experiments import Experiments
from coordinator.fleet import Fleet
from coordinator.gateway import usage
from coordinator.gateway.admission import Admission
from coordinator.gateway.gateway import Gateway
from coordinator.gateway.ledger import RETRY_S, Ledger
from coordinator.gateway.ledger_store import GROUPS, LedgerError, TooManyEntriesError
from coordinator.metrics import CoordinatorMetrics
from coordinator.policy.estimate import Estimates
from coordinator.policy.health import WorkerState
from coordinator.policy.pairs import Pair, PairState
from coordinator.policy.ticket import Priority
from coordinator.timelines import RECENT, SLOWEST, Timelines
from coordinator.traffic import traffic
from coordinator.verdicts import Verdicts
from pdserve.config_experiment import Experiment
from pdserve.errors import ConfigError, ErrorReason, RejectedError
from pdserve.section import first_of, in_words
from pdserve.types import Fallback, Mode, Role

log = structlog.get_logger("ops")

EACH = "request"

MOVED_WITHIN_S = 2.0
"""How long a worker is given to drop what goes on elsewhere."""


SHOWN = 50
"""Recent requests that are told at once."""


@dataclass(frozen=True, slots=True)
class RouteStatus:
    ready: bool
    detail: str


class Ops:
    """Reads the fleet's state, has workers drain, and starts and stops experiments."""

    def __init__(  # noqa: PLR0913  (a part each)
        self,
        models: Mapping[str, ServedModel],
        fleet: Fleet,
        gateway: Gateway,
        metrics: CoordinatorMetrics,
        timelines: Timelines,
        experiments: Experiments,
        *,
        ledger: Ledger | None = None,
    ) -> None:
        self._models = models
        self._fleet = fleet
        self._gateway = gateway
        self._metrics = metrics
        self._timelines = timelines
        self._ledger = ledger
        self._experiments = experiments
        self._verdicts = Verdicts()
        self._seen: set[tuple[str, Mode]] = set()
        self._all_tried = False
        self._stopping = False

    def routes(self, model: str) -> dict[Mode, RouteStatus]:
        """The routes that are configured for the model: both, unless no known worker prefills
        for it and its requests could do without one."""
        served = self._models[model]
        snapshot = self._fleet.snapshot(model)
        has_prefill = any(
            worker.hosts(Role.PREFILL) and worker.info and worker.info.model == model
            for worker in self._fleet.workers()
        )
        routes = {
            Mode.COLOCATED: RouteStatus(
                bool(snapshot.decode), "" if snapshot.decode else "no proven decode worker"
            )
        }
        policy = served.policy
        needed = policy.mode is not Mode.COLOCATED and policy.fallback is Fallback.FAIL
        if needed or (has_prefill and served.may_disaggregate):
            decodes = {view.worker_id for view in snapshot.decode}
            prefills = {view.worker_id for view in snapshot.prefill}
            usable = any(p in prefills and d in decodes for p, d in snapshot.pairs)
            routes[Mode.DISAGGREGATED] = RouteStatus(
                usable, "" if usable else "no proven pair of workers"
            )
        self._seen |= {(model, mode) for mode, status in routes.items() if status.ready}
        return routes

    def ready(self) -> tuple[bool, dict[str, Any]]:
        """Whether traffic may come, and each route's state.

        At first every worker must have been tried, and every configured route must have carried
        a probe. From then on a route that requests may fall back from may be away: a coordinator
        that can serve stays ready.
        """
        routes = {model: self.routes(model) for model in self._models}
        # Only at the start: workers that are found later must not make it unready.
        tried = [worker.tried for worker in self._fleet.workers()]
        self._all_tried = self._all_tried or (bool(tried) and all(tried))
        ready = (
            self._all_tried
            and not self._stopping
            and all(
                status.ready or self._may_be_away(model, mode)
                for model, statuses in routes.items()
                for mode, status in statuses.items()
            )
        )
        return ready, {
            model: {
                mode.value: {"ready": status.ready, "detail": status.detail}
                for mode, status in statuses.items()
            }
            for model, statuses in routes.items()
        }

    def experiments(self) -> list[dict[str, Any]]:
        """The running and the last one of each model."""
        return self._experiments.told()

    def experiment(self, model: str) -> dict[str, Any]:
        """The model's running or last one, slot by slot. Raises RejectedError NOT_FOUND."""
        found = self._experiments.report(model)
        if found is None:
            raise RejectedError(
                ErrorReason.NOT_FOUND, f"the model {model!r} has had no experiment here"
            )
        return found

    def start_experiment(self, model: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """`asked` are the fields of its configuration but for the model. Raises RejectedError."""
        try:
            self._experiments.start(Experiment.model_validate({**asked, "model": model}))
        except ValidationError as error:
            field, _ = first_of(error)
            raise RejectedError(
                ErrorReason.INVALID_ARGUMENT, in_words(error), param=field or None
            ) from None
        except ConfigError as error:
            raise RejectedError(ErrorReason.INVALID_ARGUMENT, str(error)) from None
        return self.experiment(model)

    def stop_experiment(self, model: str) -> dict[str, Any]:
        """Raises RejectedError NOT_FOUND where none runs."""
        if not self._experiments.stop(model):
            raise RejectedError(
                ErrorReason.NOT_FOUND, f"no experiment of the model {model!r} is running"
            )
        return self.experiment(model)

    async def drain(self, worker_id: str, deadline_s: float) -> dict[str, Any]:
        """Has a worker take nothing new, from anybody, and waits for what runs there. What this
        coordinator has there at the deadline goes on elsewhere, if there is anybody to go on.

        Raises RejectedError NOT_FOUND for one that is not connected, and PdserveError when it
        is lost meanwhile.
        """
        worker = self._fleet.by_id(worker_id)
        if worker is None:
            raise RejectedError(ErrorReason.NOT_FOUND, f"no worker {worker_id!r} is connected")
        worker.told_to_drain = True
        try:
            unfinished = await worker.client.drain(deadline_s)
            if unfinished and self._fleet.move(worker):
                unfinished = await worker.client.drain(MOVED_WITHIN_S)
        except BaseException:
            worker.told_to_drain = False  # if it drains, it says so itself
            raise
        return {"worker": worker_id, "unfinished": unfinished}

    async def usage(self, by: str, since_s: float, until_s: float) -> dict[str, Any]:
        """What was charged in that time, seconds since the Unix epoch: by one of GROUPS, or each
        request by itself.

        Raises RejectedError without a ledger or such a group, or when the ledger cannot be read.
        """
        if self._ledger is None:
            raise RejectedError(
                ErrorReason.NOT_FOUND,
                "no ledger is kept here: coordinator.ledger.folder says where",
            )
        if by not in (*GROUPS, EACH):
            raise RejectedError(
                ErrorReason.INVALID_ARGUMENT,
                f"by must be one of {', '.join((*GROUPS, EACH))}",
                param="by",
            )
        since_us, until_us = round(since_s * 1e6), round(until_s * 1e6)
        try:
            if by == EACH:
                columns = usage.columns_of_requests()
                rows = usage.of_requests(await self._ledger.entries(since_us, until_us))
            else:
                columns = usage.columns_of_groups(by)
                rows = usage.of_groups(by, await self._ledger.sums(by, since_us, until_us))
        except TooManyEntriesError as error:
            raise RejectedError(ErrorReason.INVALID_ARGUMENT, str(error), param="since") from None
        except (LedgerError, OSError) as error:  # of the database, and of the journal
            log.error("ledger cannot be read", cause=str(error))
            raise RejectedError(
                ErrorReason.LEDGER_UNAVAILABLE,
                "the ledger cannot be read now: the coordinator's log says why",
                retry_after_s=RETRY_S[1],
            ) from None
        return {"currency": self._ledger.currency, "by": by, "columns": columns, "rows": rows}

    def stop(self) -> None:
        """Not ready any more: this coordinator is to end."""
        self._stopping = True

    def _may_be_away(self, model: str, mode: Mode) -> bool:
        policy = self._models[model].policy
        needed = policy.mode is Mode.DISAGGREGATED and policy.fallback is Fallback.FAIL
        return mode is Mode.DISAGGREGATED and not needed and (model, mode) in self._seen

    def fleet(self) -> dict[str, Any]:
        """What `pdserve status` shows; names workers, but never their addresses."""
        ready, routes = self.ready()
        return {
            "ready": ready,
            "routes": routes,
            "workers": [
                {
                    "id": worker.info.worker_id if worker.info else "",
                    "roles": sorted(role.value for role in worker.info.roles)
                    if worker.info
                    else [],
                    "duty": worker.duty.value if worker.info else "",
                    "state": worker.state.value,
                    "detail": worker.detail,
                    "epoch": worker.info.epoch if worker.info else "",
                    "model": worker.info.model if worker.info else "",
                    "engine": worker.info.engine if worker.info else "",
                    "weights": worker.info.weights if worker.info else "",
                    "running": worker.load.running,
                    "waiting": worker.load.waiting,
                    "kv_usage": worker.load.kv_usage,
                    "open_leases": worker.load.open_leases,
                    "lease_tokens": worker.load.lease_tokens,
                    "oldest_lease_s": worker.load.oldest_lease_s,
                    "reserved_tokens": worker.load.reserved_tokens,
                }
                for worker in self._fleet.workers()
            ],
            "estimates": {
                model: _estimates(estimator.estimates)
                for model, estimator in self._fleet.estimators.items()
            },
            "pairs": [self._pair(pair) for pair in self._fleet.pairs],
            "requests": {
                model: _requests(admission) for model, admission in self._gateway.admissions.items()
            },
        }

    def requests(self) -> dict[str, Any]:
        """The timelines of requests that ended: the latest, and those that waited longest."""
        return {
            "recent": [asdict(it) for it in self._timelines.recent(SHOWN)],
            "slowest": [asdict(it) for it in self._timelines.slowest()],
        }

    async def dashboard(self) -> dict[str, Any]:
        """All that the dashboard shows."""
        trials = []
        for told in self.experiments():
            verdicts = await self._verdicts.of(self.experiment(told["model"]))
            trials.append({**told, "comparisons": verdicts})
        return {
            "fleet": self.fleet(),
            "requests": self.requests(),
            "experiments": trials,
            "traffic": traffic(self._metrics.registry),
        }

    def request(self, asked: str) -> dict[str, Any]:
        """The timeline of one request that ended, by its id, its trace's, or how one of them
        begins. Raises RejectedError NOT_FOUND, and INVALID_ARGUMENT where several are meant."""
        found = self._timelines.find(asked)
        if not found:
            raise RejectedError(
                ErrorReason.NOT_FOUND,
                f"no request {asked!r} is remembered here: the last {RECENT} that ended "
                f"are, and the slowest {SLOWEST} of the last hour",
            )
        if len(found) > 1:
            raise RejectedError(
                ErrorReason.INVALID_ARGUMENT,
                f"{asked!r} may be any of {len(found)} requests: give a whole request id, such as "
                f"{found[0].request_id}",
            )
        return asdict(found[0])

    def _pair(self, pair: Pair) -> dict[str, Any]:
        standing = self._fleet.pairs[pair]
        wait_s = standing.probe_at - self._fleet.clock.now()
        waits = standing.state is PairState.QUARANTINED or wait_s > 0
        return {
            "prefill": pair.prefill[0],
            "decode": pair.decode[0],
            "transport": pair.transport,
            "state": standing.state.value,
            "detail": standing.detail,
            "failures": standing.failures,
            "next_probe_s": round(max(0.0, wait_s), 1) if waits else None,
        }

    def metrics(self) -> bytes:
        """The Prometheus text; gauges of state are read now."""
        for model, admission in self._gateway.admissions.items():
            self._metrics.running.labels(model).set(admission.running)
            for priority in Priority:
                queued, tokens = admission.waiting(priority)
                self._metrics.queued.labels(model, priority.value).set(queued)
                self._metrics.queued_tokens.labels(model, priority.value).set(tokens)
            for mode, status in self.routes(model).items():
                self._metrics.route_ready.labels(model, mode.value).set(status.ready)
        for role in Role:
            for state in WorkerState:
                count = sum(w.hosts(role) and w.state is state for w in self._fleet.workers())
                self._metrics.workers.labels(role.value, state.value).set(count)
        self._metrics.cached_blocks.clear()
        for worker in self._fleet.workers():
            if worker.connected and worker.info is not None and worker.cache is not None:
                blocks = len(worker.cache)
                self._metrics.cached_blocks.labels(worker.info.worker_id).set(blocks)
        standings = Counter(
            (self._fleet.pairs[pair].state, pair.transport or "none") for pair in self._fleet.pairs
        )
        self._metrics.pairs.clear()
        for (pair_state, transport), count in standings.items():
            self._metrics.pairs.labels(pair_state.value, transport).set(count)
        return generate_latest(self._metrics.registry)


def _requests(admission: Admission) -> dict[str, Any]:
    waiting = {priority: admission.waiting(priority) for priority in Priority}
    return {
        "running": admission.running,
        "queued": admission.queued,
        "queued_tokens": sum(tokens for _, tokens in waiting.values()),
        "queued_by_priority": {priority.value: items for priority, (items, _) in waiting.items()},
        "unread_tokens": admission.window_tokens,
        "wait_s": round(admission.wait_s, 3),
    }


def _estimates(estimates: Estimates) -> dict[str, Any]:
    """Seconds; of each pool by the roles of its workers."""
    return {
        "pools": {name: asdict(timings) for name, timings in estimates.pools.items()},
        "hand_over": asdict(estimates.hand_over),
        "answer_tokens": round(estimates.answer_tokens, 1),
    }
