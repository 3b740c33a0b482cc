"""The models that are served: configuration, tokenizer and routing policy, looked up once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from coordinator.defaults import Defaults
from coordinator.policy.balance import POLICIES
from coordinator.policy.snapshot import ModelPolicy
from coordinator.prompts import Encoder
from pdserve.config import CoordinatorConfig, ModelConfig
from pdserve.config_experiment import Arm, Experiment
from pdserve.config_ledger import Prices
from pdserve.errors import ConfigError
from pdserve.parsing import ChatParser
from pdserve.types import Mode


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`context_length` in tokens, prompt and answer together; workers may serve less.

    `defaults` are for requests that do not say. `adapter` names the LoRA adapter that it was asked
    for by, empty where that was by its own name. `arms` are the policies of the experiment that
    runs, which changes them.
    """

    config: ModelConfig
    policy: ModelPolicy
    encoder: Encoder
    context_length: int
    defaults: Defaults
    chat_parser: ChatParser | None = None
    adapter: str = ""
    arms: list[ModelPolicy] = field(default_factory=list)

    @property
    def may_disaggregate(self) -> bool:
        """Whether the configuration lets any request take the disaggregated route."""
        modes = {policy.mode for policy in (self.policy, *self.arms)}
        return self.config.mode_override or modes != {Mode.COLOCATED}


def build(
    config: CoordinatorConfig,
    encoders: Mapping[str, Encoder],
    defaults: Mapping[str, Defaults] = MappingProxyType({}),
    parsers: Mapping[str, ChatParser] = MappingProxyType({}),
) -> dict[str, ServedModel]:
    """All by model name; `parsers` where there are any. Raises ConfigError for a balance policy
    that is unknown."""
    return {
        model.name: ServedModel(
            config=model,
            policy=_policy(model),
            encoder=encoders[model.name],
            context_length=encoders[model.name].context_length,
            defaults=defaults.get(model.name, Defaults()),
            chat_parser=parsers.get(model.name),
        )
        for model in config.models
    }


def prices(config: CoordinatorConfig) -> dict[str, Prices]:
    """By the names that requests are charged under: of models, and of their adapters."""
    return {name: model.prices for model in config.models for name in (model.name, *model.lora)}


def _policy(model: ModelConfig) -> ModelPolicy:
    for name in (model.prefill_balance, model.decode_balance):
        _check_balance(f"model {model.name}", name)
    return ModelPolicy(
        mode=model.mode,
        min_prefill_tokens=model.min_prefill_tokens,
        fallback=model.fallback,
        transport=None if model.transport == "auto" else model.transport,
        prefill_balance=model.prefill_balance,
        decode_balance=model.decode_balance,
        decider=model.decider,
        ttft_target_s=model.ttft_target_s,
        ttft_target_token_s=model.ttft_target_token_s,
        itl_target_s=model.itl_target_s,
    )


def arms_of(model: ServedModel, experiment: Experiment) -> dict[str, ModelPolicy]:
    """The policy of each arm, by its name: the model's, but for what the arm says. Raises
    ConfigError for a balance policy that is unknown."""
    return {arm.name: _arm_policy(model, experiment, arm) for arm in experiment.arms}


def _arm_policy(model: ServedModel, experiment: Experiment, arm: Arm) -> ModelPolicy:
    own = arm.model_dump(exclude={"name", "weight"}, exclude_none=True)
    for field_name in ("prefill_balance", "decode_balance"):
        if (name := own.get(field_name)) is not None:
            _check_balance(f"experiment {experiment.name}", name)
    return replace(model.policy, experiment=experiment.name, arm=arm.name, **own)


def _check_balance(whose: str, name: str) -> None:
    if name not in POLICIES:
        raise ConfigError(f"{whose}: no balance policy {name!r}: use {', '.join(POLICIES)}")
