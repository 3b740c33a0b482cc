"""LoRA adapters of a vLLM engine: each in a folder of its own, as PEFT writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.errors import ConfigError

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM has room made for."""


def lora_args(adapters: Mapping[str, Path]) -> dict[str, Any]:
    """What vLLM's engine is told of them: all may be in one step. Raises ConfigError for a folder
    that is none."""
    if not adapters:
        return {}
    rank = max(_rank(name, folder) for name, folder in adapters.items())
    if rank > _RANKS[-1]:
        raise ConfigError(f"adapters of rank {rank}: vLLM has room for {_RANKS[-1]}")
    room = min(size for size in _RANKS if size >= rank)
    return {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": room}


class Adapters:
    """By their names, as requests to vLLM."""

    def __init__(self, adapters: Mapping[str, Path]) -> None:
        """Needs vLLM to have been imported where there are any."""
        self._requests: dict[str, Any] = {}
        if adapters:
            from vllm.lora.request import LoRARequest

            for number, (name, folder) in enumerate(adapters.items(), start=1):
                self._requests[name] = LoRARequest(name, number, str(folder))

    def request(self, name: str) -> Any:
        """None for no name."""
        return self._requests[name] if name else None

    async def load(self, llm: Any) -> None:
        """Has vLLM read all of them. Raises ConfigError for one that does not fit the model."""
        for name, request in self._requests.items():
            try:
                await llm.add_lora(request)
            except Exception as error:  # of whatever kind it is in the engine's own process
                words = " ".join(str(error).split())
                raise ConfigError(f"adapter {name}: vLLM cannot load it: {words}") from None


def _rank(name: str, folder: Path) -> int:
    config = folder / "adapter_config.json"
    try:
        return int(json.loads(config.read_bytes())["r"])
    except OSError as error:
        raise ConfigError(f"adapter {name}: {config}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"adapter {name}: {config} names no rank `r`") from None
