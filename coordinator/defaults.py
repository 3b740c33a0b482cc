"""How a model is sampled where a request does not say, from its generation_config.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from coordinator.facade.validate import Limits, validate_sampling
from pdserve.errors import ConfigError, RejectedError
from pdserve.types import SamplingParams

FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class Defaults:
    """`max_tokens` is the longest answer of a chat that names no length; None for any."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None


class _File(msgspec.Struct):
    """What vLLM's own server takes from the file."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_new_tokens: int | None = None


def read_defaults(model_path: Path, limits: Limits) -> Defaults:
    """Those of no file are OpenAI's. Raises ConfigError for values that no request may have."""
    try:
        data = (model_path / FILE).read_bytes()
    except FileNotFoundError:
        return Defaults()
    try:
        given = msgspec.structs.asdict(msgspec.json.decode(data, type=_File))
        max_tokens = given.pop("max_new_tokens")
        values = {name: value for name, value in given.items() if value is not None}
        if values.get("top_k") == -1:
            values["top_k"] = 0
        sampling = SamplingParams(**values)
        longest = None if max_tokens is None else min(max_tokens, limits.context_length)
        validate_sampling(SamplingParams(**values, max_tokens=longest), limits)
    except (msgspec.MsgspecError, RejectedError) as error:
        raise ConfigError(f"model folder {model_path}: {FILE}: {error}") from None
    return Defaults(sampling, max_tokens)
