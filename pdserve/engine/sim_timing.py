"""How long a simulated engine takes: a function of what a step computes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pdserve.config import SimConfig


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one engine step computes.

    `read_tokens` are prompt tokens, and `read_pairs` adds up how many tokens each of them comes
    after; `writing` sequences get a token each, and `write_context` are the tokens that they
    attend to, in all.
    """

    read_tokens: int = 0
    read_pairs: int = 0
    writing: int = 0
    write_context: int = 0

    def after(self, steps: int) -> StepWork:
        """The last of so many steps in which the same sequences write, this being the first."""
        grown = self.write_context + self.writing * (steps - 1)
        return StepWork(writing=self.writing, write_context=grown)


class Timing(Protocol):
    """Seconds."""

    def step_s(self, work: StepWork) -> float:
        """Of one engine step that computes so much."""
        ...

    def transfer_s(self, num_tokens: int) -> float:
        """From the start of a KV transfer of so many tokens to its end."""
        ...


class LinearTiming:
    """The constants of SimConfig: each token read and each sequence that writes costs the same."""

    def __init__(self, config: SimConfig) -> None:
        self._config = config

    def step_s(self, work: StepWork) -> float:
        config = self._config
        seconds = config.prefill_token_s * work.read_tokens
        if work.writing:
            seconds += config.decode_step_s + config.decode_sequence_s * work.writing
        return seconds

    def transfer_s(self, num_tokens: int) -> float:
        return self._config.transfer_token_s * num_tokens
