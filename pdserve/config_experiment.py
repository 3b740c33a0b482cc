"""Configuration of experiments: a model served in several ways, and compared."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pdserve.section import Name, Section
from pdserve.types import Mode


class Arm(Section):
    """One side of an experiment: a mode, or a whole policy; what it does not say is the model's.
    Weights are relative to one another."""

    name: Name
    mode: Mode
    weight: float = Field(default=1.0, ge=0)
    decider: Literal["threshold", "estimate"] | None = None
    min_prefill_tokens: int | None = Field(default=None, ge=1)
    prefill_balance: str | None = None
    decode_balance: str | None = None


class Experiment(Section):
    """Serves a model in two ways or more and compares them; the first arm is what the others
    are compared with."""

    name: Name
    model: Name
    assignment: Literal["sticky", "interleaved", "shadow"] = Field(
        default="sticky",
        description="sticky: by a hash of the key, drawn anew for each slot; interleaved: all "
        "traffic to one arm for a slot, in random order; shadow: all traffic to the first arm, "
        "and copies to the second, whose answers are thrown away",
    )
    key: Literal["request", "session", "tenant"] = Field(
        default="request", description="sticky: what stays in its arm for a slot"
    )
    arms: tuple[Arm, ...] = Field(min_length=2)
    slot_s: float = Field(default=60.0, gt=0, description="length of a time slot")
    washout_s: float = Field(
        default=10.0, ge=0, description="beginning of each slot whose requests do not count"
    )
    guard: float | None = Field(
        default=0.5,
        gt=0,
        le=1,
        description="an arm is stopped when less of its last 100 requests met the model's targets, "
        "and another arm's did; none: never",
    )
    copies: int = Field(default=4, ge=1, description="shadow: copies that are served at once")

    @model_validator(mode="after")
    def _check(self) -> Experiment:
        if len({arm.name for arm in self.arms}) != len(self.arms):
            raise ValueError(f"experiment {self.name}: two arms share a name")
        if not any(arm.weight for arm in self.arms):
            raise ValueError(f"experiment {self.name}: every weight is 0")
        if self.washout_s >= self.slot_s:
            raise ValueError(f"experiment {self.name}: the washout is no shorter than the slot")
        if self.assignment == "shadow" and len(self.arms) != 2:
            raise ValueError(f"experiment {self.name}: a shadow experiment has two arms")
        if self.assignment != "sticky" and len({arm.weight for arm in self.arms}) > 1:
            raise ValueError(f"experiment {self.name}: only sticky arms have weights")
        return self
