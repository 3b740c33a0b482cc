"""The experiments that run: who takes part, what came of it, and which arm must stop."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from random import SystemRandom
from typing import Any

import structlog

from coordinator import catalog, histogram
from coordinator.catalog import ServedModel
from coordinator.fleet import Fleet
from coordinator.metrics import CoordinatorMetrics
from coordinator.policy.experiment import place
from coordinator.policy.snapshot import ModelPolicy
from coordinator.record import RequestRecord
from coordinator.tally import Tally
from pdserve.config_experiment import Experiment
from pdserve.errors import ConfigError, ErrorReason, PdserveError, RejectedError
from pdserve.types import GenerateSpec, Mode, Role

log = structlog.get_logger("experiments")

GUARDED = 100
"""Latest requests of an arm that its guard rail looks at."""

_CLIENTS_OWN = frozenset(
    {
        ErrorReason.INVALID_ARGUMENT,
        ErrorReason.CONTEXT_LENGTH_EXCEEDED,
        ErrorReason.RATE_LIMITED,
    }
)
"""What no arm can help."""


@dataclass(slots=True)
class _Run:
    """One experiment from its start. `tallies` are those that are not whole yet, by block and
    arm, `done` the others; `recent` whether an arm's latest requests were good, `capacity` the
    most that it could use so far: GPUs, and their price for an hour."""

    experiment: Experiment
    policies: dict[str, ModelPolicy]
    seed: int
    began: float
    ended: float | None = None
    stopped: dict[str, str] = field(default_factory=dict)
    tallies: dict[tuple[int, str], Tally] = field(default_factory=dict)
    done: list[dict[str, Any]] = field(default_factory=list)
    recent: dict[str, deque[bool]] = field(default_factory=dict)
    capacity: dict[str, tuple[int, float]] = field(default_factory=dict)

    def close(self, now: float) -> None:
        """Puts whole slots away."""
        for key, tally in list(self.tallies.items()):
            if tally.ends_at <= now and not tally.open:
                self.done.append(self.tallies.pop(key).told())

    def tally(self, block: int, slot: int, arm: str) -> Tally:
        key = block, arm
        if key not in self.tallies:
            config = self.experiment
            self.close(time.monotonic())
            self.tallies[key] = Tally(
                config.model,
                block,
                arm,
                ends_at=self.began + (slot + 1) * config.slot_s,
                seconds=config.slot_s - config.washout_s,
            )
        return self.tallies[key]


class Experiments:
    """At most one a model. Listens to how requests end."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        fleet: Fleet,
        metrics: CoordinatorMetrics,
        configured: Iterable[Experiment] = (),
    ) -> None:
        """Starts those that are `configured`. Raises ConfigError."""
        self._models = models
        self._fleet = fleet
        self._metrics = metrics
        self._runs: dict[str, _Run] = {}
        self._copies: Counter[str] = Counter()
        for experiment in configured:
            self.start(experiment)

    def start(self, experiment: Experiment) -> None:
        """From now on requests for its model take part. Raises ConfigError."""
        model = self._models.get(experiment.model)
        if model is None:
            raise ConfigError(f"experiment {experiment.name}: no model {experiment.model!r}")
        running = self._runs.get(experiment.model)
        if running is not None and running.ended is None:
            raise ConfigError(
                f"experiment {running.experiment.name} of {experiment.model} is running: stop it "
                "before another one"
            )
        policies = catalog.arms_of(model, experiment)
        seed = SystemRandom().getrandbits(32)
        self._runs[experiment.model] = _Run(experiment, policies, seed, time.monotonic())
        model.arms[:] = policies.values()
        log.info("experiment started", **experiment.model_dump(mode="json"), seed=seed)

    def stop(self, model: str) -> bool:
        """Ends the model's experiment, whose slots are still told. False where none runs."""
        run = self._runs.get(model)
        if run is None or run.ended is not None:
            return False
        run.ended = time.monotonic()
        run.close(run.ended)
        run.tallies = {key: it for key, it in run.tallies.items() if it.ends_at <= run.ended}
        self._models[model].arms.clear()
        log.info("experiment stopped", experiment=run.experiment.name, model=model)
        return True

    def join(self, model: ServedModel, spec: GenerateSpec, record: RequestRecord) -> ServedModel:
        """The model with the policy of the request's arm, for which it will be counted; as it is,
        where no experiment runs."""
        run = self._runs.get(spec.model)
        if run is None or run.ended is not None:
            return model
        # By the time of joining: a body that came slowly must not fall into a slot that is told.
        elapsed_s = time.monotonic() - run.began
        keys = {"request": spec.request_id, "session": spec.session, "tenant": spec.tenant}
        # A request without a session or a tenant falls into an arm by itself.
        key = keys[run.experiment.key] or spec.request_id
        found = place(run.experiment, run.seed, elapsed_s, key, run.stopped)
        if found.counts:
            self._enter(record, run, found.block, found.slot, found.arm)
        return replace(model, policy=run.policies[found.arm])

    def asked(self, model: ServedModel, spec: GenerateSpec) -> ServedModel:
        """The model with the policy of the arm that the request asks for. It counts for none: a
        request that chose its arm says nothing of what chance would have given it.

        Raises RejectedError INVALID_ARGUMENT where no such arm runs.
        """
        run = self._runs.get(spec.model)
        if run is None or run.ended is not None or spec.arm not in run.policies:
            raise RejectedError(
                ErrorReason.INVALID_ARGUMENT,
                f"no experiment of {spec.model} that runs has an arm {spec.arm!r}",
                param="arm",
            )
        return replace(model, policy=run.policies[spec.arm])

    def copy(self, model: ServedModel, record: RequestRecord) -> ServedModel | None:
        """The model for a copy of a request that is served now, and whose record this is; None
        where none is to be made. What is made ends by `copy_ended`."""
        name = model.config.name
        run = self._runs.get(name)
        takes_part = run is not None and run.ended is None and model.policy.arm
        if run is None or not takes_part or run.experiment.assignment != "shadow":
            return None
        _, other = run.experiment.arms
        if other.name in run.stopped or self._copies[name] >= run.experiment.copies:
            return None
        self._copies[name] += 1
        found = place(run.experiment, run.seed, record.received - run.began, "", run.stopped)
        if found.counts:
            self._enter(record, run, found.block, found.slot, other.name)
        return replace(model, policy=run.policies[other.name])

    def copy_ended(self, model: str) -> None:
        self._copies[model] -= 1

    def ended(self, record: RequestRecord, error: PdserveError | None, at: float) -> None:
        """As an EndListener."""
        tally = record.tally
        run = None if tally is None else self._runs.get(tally.model)
        if tally is None or run is None or run.tallies.get((tally.block, tally.arm)) is not tally:
            return
        tally.open -= 1
        good = _good(self._models[tally.model].policy, record, error, at)
        if good is None:
            return
        first, usage = record.first_token, record.usage
        tokens = 0
        if usage is not None:
            tokens = usage.prompt_tokens * record.counts_prompt + usage.completion_tokens
        gaps = histogram.empty() if record.gaps is None else record.gaps[0]
        tally.count(good, tokens, None if first is None else first - record.received, gaps)
        self._guard(run, tally.arm, good)

    def told(self) -> list[dict[str, Any]]:
        """All, the running and the last ones, as JSON, without their slots."""
        return [self._told(run) for run in self._runs.values()]

    def report(self, model: str) -> dict[str, Any] | None:
        """The model's running or last one with its whole slots, as JSON; None without one."""
        run = self._runs.get(model)
        if run is None:
            return None
        run.close(time.monotonic())
        return {**self._told(run), "slots": list(run.done)}

    def _enter(self, record: RequestRecord, run: _Run, block: int, slot: int, arm: str) -> None:
        if (block, arm) not in run.tallies:
            self._note_capacity(run)
        record.tally = run.tally(block, slot, arm)
        record.tally.open += 1
        record.gaps = (histogram.empty(), [0.0])

    def _told(self, run: _Run) -> dict[str, Any]:
        config = run.experiment
        policy = self._models[config.model].policy
        until = time.monotonic() if run.ended is None else run.ended
        self._note_capacity(run)
        return {
            "name": config.name,
            "model": config.model,
            "assignment": config.assignment,
            "running": run.ended is None,
            "elapsed_s": round(until - run.began, 1),
            "slot_s": config.slot_s,
            "washout_s": config.washout_s,
            "seed": run.seed,
            "targets": {
                "ttft_s": policy.ttft_target_s,
                "ttft_token_s": policy.ttft_target_token_s,
                "itl_s": policy.itl_target_s,
            },
            "arms": [
                {
                    "name": arm.name,
                    "mode": arm.mode.value,
                    "weight": arm.weight,
                    "gpus": run.capacity[arm.name][0],
                    "hour": run.capacity[arm.name][1],
                    "stopped": run.stopped.get(arm.name, ""),
                }
                for arm in config.arms
            ],
        }

    def _note_capacity(self, run: _Run) -> None:
        """The most counts: a worker that is away for a while makes no arm cheaper."""
        if run.ended is not None and run.capacity:
            return
        for arm in run.experiment.arms:
            now = self._capacity(run.experiment.model, arm.mode)
            run.capacity[arm.name] = max(run.capacity.get(arm.name, now), now)

    def _capacity(self, model: str, mode: Mode) -> tuple[int, float]:
        """GPUs of the connected workers that requests in this mode can use, on CPU their ranks,
        and what these cost an hour, as configured."""
        prices = self._models[model].config.prices
        gpus, hour = 0, 0.0
        for worker in self._fleet.workers():
            info = worker.info
            if not worker.connected or info is None or info.model != model:
                continue
            writes = Role.DECODE in info.roles
            if writes or mode is not Mode.COLOCATED:
                ranks = info.fingerprint.tensor_parallel * info.fingerprint.pipeline_parallel
                gpus += ranks
                hour += ranks * (prices.decode if writes else prices.prefill)
        return gpus, hour

    def _guard(self, run: _Run, arm: str, good: bool) -> None:
        """Stops the arm where most of its latest requests missed their targets, and as many of
        another one do not: else it is the load. Never one that serves all."""
        recent = run.recent.setdefault(arm, deque(maxlen=GUARDED))
        recent.append(good)
        least = run.experiment.guard
        if least is None or arm in run.stopped or len(recent) < GUARDED or _share(recent) >= least:
            return
        if run.experiment.assignment == "shadow" and arm == run.experiment.arms[0].name:
            return
        others = [it for name, it in run.recent.items() if name not in (arm, *run.stopped)]
        if not any(len(it) == GUARDED and _share(it) >= least for it in others):
            return
        why = f"{arm} met its targets in {sum(recent)} of its last {GUARDED} requests"
        run.stopped[arm] = why
        config = run.experiment
        self._metrics.arm_stopped(config.model, arm)
        log.warning("arm stopped", experiment=config.name, model=config.model, arm=arm, cause=why)


def _share(recent: deque[bool]) -> float:
    return sum(recent) / len(recent)


def _good(
    policy: ModelPolicy, record: RequestRecord, error: PdserveError | None, at: float
) -> bool | None:
    """Whether the request met its targets; None where it does not count."""
    longest_s = policy.ttft_target_s + policy.ttft_target_token_s * record.prompt_tokens
    began = at if record.first_token is None else record.first_token
    late = began - record.received > longest_s
    if error is None:
        assert record.usage is not None
        pace_s = (record.last_token - began) / max(1, record.usage.completion_tokens - 1)
        return not late and pace_s <= policy.itl_target_s
    if error.reason is ErrorReason.CANCELLED:
        return False if late else None
    return None if error.reason in _CLIENTS_OWN else False
