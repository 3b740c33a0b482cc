"""The served models as the configuration has them."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.catalog import ServedModel, arms_of, build, prices
from coordinator.policy.snapshot import ModelPolicy
from coordinator.prompts import ByteEncoder
from pdserve.config import CoordinatorConfig, ModelConfig
from pdserve.config_experiment import Arm, Experiment
from pdserve.config_ledger import Prices
from pdserve.errors import ConfigError
from pdserve.types import Fallback, Mode

SPLIT = Experiment(
    name="split",
    model="tiny",
    arms=(
        Arm(name="a", mode=Mode.COLOCATED),
        Arm(
            name="b", mode=Mode.AUTO, decider="estimate", min_prefill_tokens=9,
            decode_balance="round-robin",
        ),
    ),
)  # fmt: skip


def served(**model: Any) -> ServedModel:
    config = CoordinatorConfig(
        models=(ModelConfig(name="tiny", **model), ModelConfig(name="other"))
    )
    return build(config, {"tiny": ByteEncoder(100), "other": ByteEncoder(200)})["tiny"]


def test_a_model_keeps_its_own_settings_and_its_tokenizers_context() -> None:
    model = served(mode=Mode.AUTO, min_prefill_tokens=7, fallback=Fallback.FAIL)
    assert model.policy == ModelPolicy(Mode.AUTO, 7, Fallback.FAIL)
    assert model.context_length == 100


def test_an_arm_is_the_models_policy_but_for_what_it_says() -> None:
    model = served(mode=Mode.AUTO, min_prefill_tokens=7)
    arms = arms_of(model, SPLIT)
    assert arms == {
        "a": ModelPolicy(Mode.COLOCATED, 7, experiment="split", arm="a"),
        "b": ModelPolicy(
            Mode.AUTO, 9, experiment="split", arm="b", decider="estimate",
            decode_balance="round-robin",
        ),
    }  # fmt: skip


def test_an_arms_balance_policy_is_known() -> None:
    arms = (SPLIT.arms[0], Arm(name="b", mode=Mode.AUTO, prefill_balance="by-magic"))
    with pytest.raises(ConfigError, match="no balance policy 'by-magic'"):
        arms_of(served(), SPLIT.model_copy(update={"arms": arms}))


@pytest.mark.parametrize(
    ("model", "arms", "expected"),
    [
        ({"mode": Mode.COLOCATED, "mode_override": False}, [], False),
        ({"mode": Mode.COLOCATED, "mode_override": True}, [], True),
        ({"mode": Mode.AUTO, "mode_override": False}, [], True),
        ({"mode": Mode.COLOCATED, "mode_override": False}, [ModelPolicy(Mode.AUTO)], True),
    ],
)
def test_may_disaggregate(model: dict[str, Any], arms: list[ModelPolicy], expected: bool) -> None:
    tiny = served(**model)
    tiny.arms.extend(arms)
    assert tiny.may_disaggregate is expected


def test_an_adapter_costs_what_its_model_does() -> None:
    own = Prices(prefill=3, decode=2)
    model = ModelConfig(name="m", lora={"french": "/french"}, prices=own)
    config = CoordinatorConfig(models=(model, ModelConfig(name="n")))
    assert prices(config) == {"m": own, "french": own, "n": Prices()}


@pytest.mark.parametrize("lora", [{"n": "/n"}, {"m": "/m"}, {"french": "/other"}])
def test_names_are_of_one_model_or_adapter(lora: dict[str, str]) -> None:
    other = ModelConfig(name="n", lora={"french": "/french"})
    with pytest.raises(ValueError, match="share a name"):
        CoordinatorConfig(models=(ModelConfig(name="m", lora=lora), other))
