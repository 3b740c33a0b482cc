"""The served models as the configuration has them."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.catalog import ServedModel, build, prices
from coordinator.policy.snapshot import ArmPolicy, ModelPolicy
from coordinator.prompts import ByteEncoder
from pdserve.config import Arm, CoordinatorConfig, Experiment, ModelConfig
from pdserve.config_ledger import Prices
from pdserve.types import Fallback, Mode

SPLIT = Experiment(
    name="split",
    model="tiny",
    key="session",
    arms=(Arm(name="a", mode=Mode.COLOCATED), Arm(name="b", mode=Mode.DISAGGREGATED, weight=3)),
)


def served(*experiments: Experiment, **model: Any) -> ServedModel:
    config = CoordinatorConfig(
        models=(ModelConfig(name="tiny", **model), ModelConfig(name="other")),
        experiments=experiments,
    )
    return build(config, {"tiny": ByteEncoder(100), "other": ByteEncoder(200)})["tiny"]


def test_a_model_keeps_its_own_settings_and_its_tokenizers_context() -> None:
    model = served(mode=Mode.AUTO, min_prefill_tokens=7, fallback=Fallback.FAIL)
    assert model.policy == ModelPolicy(Mode.AUTO, 7, Fallback.FAIL)
    assert model.context_length == 100


def test_an_experiment_gives_its_model_arms() -> None:
    policy = served(SPLIT).policy
    assert (policy.experiment, policy.sticky) == ("split", "session")
    assert policy.arms == (
        ArmPolicy("a", Mode.COLOCATED, 1.0),
        ArmPolicy("b", Mode.DISAGGREGATED, 3.0),
    )


def test_an_experiment_is_of_one_model() -> None:
    assert not served(SPLIT.model_copy(update={"model": "other"})).policy.arms


@pytest.mark.parametrize(
    ("model", "experiments", "expected"),
    [
        ({"mode": Mode.COLOCATED, "mode_override": False}, (), False),
        ({"mode": Mode.COLOCATED, "mode_override": True}, (), True),
        ({"mode": Mode.AUTO, "mode_override": False}, (), True),
        ({"mode": Mode.COLOCATED, "mode_override": False}, (SPLIT,), True),
    ],
)
def test_may_disaggregate(
    model: dict[str, Any], experiments: tuple[Experiment, ...], expected: bool
) -> None:
    assert served(*experiments, **model).may_disaggregate is expected


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
