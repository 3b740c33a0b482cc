"""What vLLM's two model runners are made to sample; logits of four tokens, worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.engine.vllm_replay import ReplayV1, ReplayV2, install
from pdserve.engine.vllm_sampling import REPLAY

NOBODY = SimpleNamespace(extra_args=None)


def asked(*replay: int) -> Any:
    return SimpleNamespace(extra_args={REPLAY: list(replay)})


def update(**changes: Any) -> Any:
    return SimpleNamespace(**{"added": (), "removed": (), "moved": (), **changes})


def best(processor: Any, rows: int, *ctx: Any) -> list[int]:
    """The likeliest token of each row; left alone, that is 0."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]]).repeat(rows, 1)
    return [int(token) for token in processor.apply(logits, *ctx).argmax(dim=1)]


def test_v1_replays_by_row_as_far_as_it_goes() -> None:
    processor = ReplayV1(None, None, False)
    given: list[int] = []
    processor.update_state(update(added=[(0, NOBODY, [9], []), (1, asked(2, 3), [9], given)]))
    assert best(processor, 2) == [0, 2]
    given.append(2)
    processor.update_state(None)
    assert best(processor, 2) == [0, 3]
    given.append(3)
    processor.update_state(None)
    assert best(processor, 2) == [0, 0]


def test_v1_follows_a_row_that_moves_and_forgets_one_that_leaves() -> None:
    processor = ReplayV1(None, None, False)
    processor.update_state(update(added=[(1, asked(2, 3), [9], [2])]))
    processor.update_state(update(moved=[(1, 0, SimpleNamespace())]))
    assert best(processor, 2) == [3, 0]
    processor.update_state(update(removed=[0]))
    assert best(processor, 2) == [0, 0]


def test_v1_goes_on_where_a_preempted_request_comes_back() -> None:
    processor = ReplayV1(None, None, False)
    processor.update_state(update(added=[(0, asked(2, 3), [9], [2])]))
    assert best(processor, 1) == [3]


def test_v2_replays_by_slot_and_length() -> None:
    processor = ReplayV2(None, SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([5, 7]))))
    assert processor.add_request(1, asked(2, 3))
    assert not processor.add_request(0, NOBODY)

    def step(*lengths: int) -> list[int]:
        ctx = SimpleNamespace(
            idx_mapping_np=np.array([1, 0]), seq_lens_upper_bound_np=np.array(lengths)
        )
        return best(processor, 2, ctx)

    assert step(4, 5) == [0, 0], "the prompt is not read yet"
    assert step(7, 5) == [2, 0]
    assert step(8, 6) == [3, 0]
    assert step(9, 7) == [0, 0]


def test_v2_forgets_who_had_a_slot_before() -> None:
    processor = ReplayV2(None, SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([1]))))
    processor.add_request(0, asked(2))
    processor.add_request(0, NOBODY)
    ctx = SimpleNamespace(idx_mapping_np=np.array([0]), seq_lens_upper_bound_np=np.array([1]))
    assert best(processor, 1, ctx) == [0]


@pytest.mark.parametrize(("v2", "name"), [(True, "ReplayV2"), (False, "ReplayV1")])
def test_each_model_runner_gets_its_own_beside_those_that_are_there(v2: bool, name: str) -> None:
    model = SimpleNamespace(logits_processors=["their.own:One"])
    config = SimpleNamespace(speculative_config=None, use_v2_model_runner=v2, model_config=model)
    assert install(config)
    assert model.logits_processors == ["their.own:One", f"pdserve.engine.vllm_replay:{name}"]


def test_beside_speculative_decoding_nothing_can_be_replayed() -> None:
    model = SimpleNamespace(logits_processors=None)
    assert not install(SimpleNamespace(speculative_config=object(), model_config=model))
    assert model.logits_processors is None
