"""Answers whose first tokens are decided already, by vLLM's own interface for logits processors.

vLLM (0.32) samples as ever, only that nothing but the decided token can come of it: so grammars,
penalties, random numbers, stop strings and log probabilities are afterwards what they were when
the tokens were first sampled. A processor for each of vLLM's two model runners; the engine's
processes import this by name.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessorV1
from vllm.v1.sample.logits_processor import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor.interface import (
    LogitsProcessor as LogitsProcessorV2,
)

from pdserve.engine.vllm_sampling import REPLAY


class ReplayV1(LogitsProcessorV1):  # type: ignore[misc]  # vLLM is Any to us
    """For rows of the batch: what is replayed, and the tokens answered so far, which vLLM keeps
    up to date."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._rows, batch_update, _row)
        for row in [
            row for row, (replay, given) in self._rows.items() if len(given) >= len(replay)
        ]:
            del self._rows[row]

    def apply(self, logits: Any) -> Any:
        for row, (replay, given) in self._rows.items():
            _force(logits[row], replay[len(given)])
        return logits


class ReplayV2(LogitsProcessorV2):  # type: ignore[misc]  # vLLM is Any to us
    """For slots of requests, which vLLM gives to others when they end."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._replays: dict[int, list[int]] = {}
        self._prompt_len = req_states.prompt_len

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        replay = _replay(sampling_params)
        if replay is None:
            self._replays.pop(req_idx, None)
            return False
        self._replays[req_idx] = replay
        return True

    def apply(self, logits: Any, ctx: Any) -> Any:
        if not self._replays:
            return logits
        # One row a request, and exact lengths: there is no speculative decoding beside this.
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
            replay = self._replays.get(slot, ())
            given = int(ctx.seq_lens_upper_bound_np[row]) - int(self._prompt_len.np[slot])
            if 0 <= given < len(replay):
                _force(logits[row], replay[given])
        return logits


def _row(
    params: Any, prompt: list[int] | None, given: list[int]
) -> tuple[list[int], list[int]] | None:
    replay = _replay(params)
    return None if replay is None else (replay, given)


def _replay(params: Any) -> list[int] | None:
    replay: list[int] | None = (params.extra_args or {}).get(REPLAY)
    return replay


def _force(row: Any, token: int) -> None:
    row.fill_(float("-inf"))
    row[token] = 0.0


def install(vllm_config: Any) -> bool:
    """Has the engine's processes load the processor; whether they can: vLLM has none beside
    speculative decoding."""
    if vllm_config.speculative_config is not None:
        return False
    processor = ReplayV2 if vllm_config.use_v2_model_runner else ReplayV1
    model = vllm_config.model_config
    name = f"{__name__}:{processor.__name__}"
    model.logits_processors = [*(model.logits_processors or ()), name]
    return True
