"""What `pdserve up` tells its user, as prose or as one JSON object a line."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from cli.child import Ending, Message
from cli.options import DEFAULT_URL

STILL_S = 9.0
"""A step that goes on is mentioned again after that long: with ticks, at least every 10 s."""


@dataclass(frozen=True)
class Endpoints:
    """Where a running system is reached, as host:port; `metrics` has one for each process."""

    http: str
    grpc: str
    metrics: dict[str, str]
    model: str
    needs_key: bool
    log_dir: Path


@dataclass
class Step:
    """Something that the user waits for."""

    text: str
    began: float
    said: float
    detail: str = ""


class Reporter(ABC):
    """Keeps the steps; a subclass shows them. Also the observer of the supervisor."""

    def __init__(
        self, *, verbose: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._verbose = verbose
        self._clock = clock
        self._steps: dict[str, Step] = {}

    def step(self, name: str, text: str) -> None:
        now = self._clock()
        self._steps[name] = Step(text, now, now)
        self.show_step(name, self._steps[name])

    def done(self, name: str, text: str) -> None:
        step = self._steps.pop(name)
        self.show_done(name, text, self._clock() - step.began)

    def tick(self) -> None:
        """To be called every second or so."""
        now = self._clock()
        for name, step in self._steps.items():
            if now - step.said >= STILL_S:
                step.said = now
                self.show_still(name, step, now - step.began)

    def message(self, name: str, message: Message) -> None:
        detail = message.get("detail")
        if isinstance(detail, str) and name in self._steps:
            self._steps[name].detail = detail

    def line(self, name: str, line: str) -> None:
        if self._verbose:
            self.show_line(name, line)

    def clear(self) -> None:
        """Nothing is waited for any more."""
        self._steps.clear()

    @abstractmethod
    def show_step(self, name: str, step: Step) -> None: ...

    @abstractmethod
    def show_still(self, name: str, step: Step, seconds: float) -> None: ...

    @abstractmethod
    def show_done(self, name: str, text: str, seconds: float) -> None: ...

    def show_line(self, name: str, line: str) -> None:
        print(f"{name} | {line}", file=sys.stderr, flush=True)

    @abstractmethod
    def ready(self, endpoints: Endpoints) -> None: ...

    @abstractmethod
    def died(self, ending: Ending, restart_in_s: float) -> None: ...

    @abstractmethod
    def failed(self, ending: Ending) -> None:
        """A child has ended and everything else is stopped because of it."""

    @abstractmethod
    def restarted(self, name: str) -> None: ...

    @abstractmethod
    def killed(self, name: str, after_s: float) -> None: ...

    @abstractmethod
    def stopped(self) -> None: ...


class PlainReporter(Reporter):
    """Prose, a line for each thing that happens."""

    def say(self, text: str) -> None:
        print(text, flush=True)

    def show_step(self, name: str, step: Step) -> None:
        self.say(f"{step.text} ...")

    def show_still(self, name: str, step: Step, seconds: float) -> None:
        self.say(f"{step.text} ... {seconds:.0f} s{f': {step.detail}' if step.detail else ''}")

    def show_done(self, name: str, text: str, seconds: float) -> None:
        self.say(f"{text} ({seconds:.1f} s)")

    def ready(self, endpoints: Endpoints) -> None:
        self.say(welcome(endpoints))

    def died(self, ending: Ending, restart_in_s: float) -> None:
        self.say(f"{ending.name} {ending.how}, and is started again in {restart_in_s:g} s")
        for line in ending.reason:
            self.say(f"  {line}")

    def failed(self, ending: Ending) -> None:
        self.say(f"{ending.name} {ending.how}")

    def restarted(self, name: str) -> None:
        self.say(f"{name} is ready again")

    def killed(self, name: str, after_s: float) -> None:
        self.say(f"{name} did not stop within {after_s:g} s and was killed")

    def stopped(self) -> None:
        """Nothing: the last step says it."""


class JsonReporter(Reporter):
    """Events for programs: step, ready, died, restarted, killed, stopped."""

    def __init__(self, *, verbose: bool = False, out: TextIO | None = None) -> None:
        super().__init__(verbose=verbose)
        self._out = out or sys.stdout

    def _event(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=self._out, flush=True)

    def _step(self, name: str, state: str, detail: str, seconds: float) -> None:
        self._event("step", name=name, state=state, detail=detail, seconds=round(seconds, 3))

    def show_step(self, name: str, step: Step) -> None:
        self._step(name, "started", step.text, 0.0)

    def show_still(self, name: str, step: Step, seconds: float) -> None:
        self._step(name, "running", step.detail or step.text, seconds)

    def show_done(self, name: str, text: str, seconds: float) -> None:
        self._step(name, "done", text, seconds)

    def ready(self, endpoints: Endpoints) -> None:
        self._event("ready", **asdict(endpoints) | {"log_dir": str(endpoints.log_dir)})

    def died(self, ending: Ending, restart_in_s: float) -> None:
        self._died(ending, restart_in_s)

    def failed(self, ending: Ending) -> None:
        self._died(ending, None)

    def _died(self, ending: Ending, restart_in_s: float | None) -> None:
        detail = "\n".join(ending.reason)
        self._event(
            "died", name=ending.name, how=ending.how, detail=detail, restart_in_s=restart_in_s
        )

    def restarted(self, name: str) -> None:
        self._event("restarted", name=name)

    def killed(self, name: str, after_s: float) -> None:
        self._event("killed", name=name, after_s=after_s)

    def stopped(self) -> None:
        self._event("stopped")


def welcome(endpoints: Endpoints) -> str:
    """How to use the running system, to be read by a newcomer and pasted into a shell."""
    http, model, command = f"http://{endpoints.http}", endpoints.model, _command(sys.argv[0])
    url = "" if http == DEFAULT_URL else f" --url {http}"
    question = f'"model": "{model}", "messages": [{{"role": "user", "content": "{_QUESTION}"}}]'
    curl_key = ' -H "authorization: Bearer $PDSERVE_KEY"' if endpoints.needs_key else ""
    sdk_key = 'os.environ["PDSERVE_KEY"]' if endpoints.needs_key else '"none"'
    metrics = "\n".join(
        f"    http://{address}/metrics  ({name})" for name, address in endpoints.metrics.items()
    )
    return f"""
pdserve is ready: {http}/v1 (OpenAI API) and {endpoints.grpc} (gRPC)

  curl:
    curl -i {http}/v1/chat/completions{curl_key} -H 'content-type: application/json' \\
      -H 'x-pdserve-mode: disaggregated' -d '{{{question}, "temperature": 0}}'

  Python:
    {"import os; " if endpoints.needs_key else ""}from openai import OpenAI
    client = OpenAI(base_url="{http}/v1", api_key={sdk_key})
    answer = client.chat.completions.create(
        model="{model}",
        messages=[{{"role": "user", "content": "{_QUESTION}"}}],
        temperature=0,
    )
    print(answer.choices[0].message.content)

  gRPC:
    grpcurl -plaintext{curl_key} -d '{{{question}}}' \\
      {endpoints.grpc} pdserve.v1.InferenceService/Chat

  In another terminal: {command} chat{url}, {command} status{url}
  Dashboard: {http}/dashboard
  Metrics:
{metrics}
  Logs: {endpoints.log_dir}

Ctrl-C stops everything."""


_QUESTION = "How many days are in a week?"


def _command(run_as: str) -> str:
    """The command as it can be typed in this folder: by its name alone where a shell would find
    this very one, else by the way in which it was run."""
    path = Path(run_as)
    found = shutil.which("pdserve")
    if path.name != "pdserve" or (found is not None and Path(found).samefile(path)):
        return "pdserve"
    path = path.absolute()
    with suppress(ValueError):
        path = path.relative_to(Path.cwd())
    return shlex.quote(str(path) if path.parent.name else f"./{path}")
