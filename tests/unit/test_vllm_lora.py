"""What vLLM is told of LoRA adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.vllm_lora import Adapters, lora_args
from pdserve.errors import ConfigError
from pdserve.models import adapters_revision


def adapter(folder: Path, rank: Any = 8, weights: bytes = b"\2\0\0\0\0\0\0\0{}") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def test_there_is_room_for_the_largest_of_them(tmp_path: Path) -> None:
    adapters = {"a": adapter(tmp_path / "a", 4), "b": adapter(tmp_path / "b", 24)}
    assert lora_args(adapters) == {"enable_lora": True, "max_loras": 2, "max_lora_rank": 32}
    assert lora_args({"a": tmp_path / "a"})["max_lora_rank"] == 8
    assert lora_args({}) == {}


@pytest.mark.parametrize("rank", ["many", None, [8], 513])
def test_ranks_that_cannot_be(tmp_path: Path, rank: Any) -> None:
    with pytest.raises(ConfigError, match="rank"):
        lora_args({"a": adapter(tmp_path / "a", rank)})


def test_a_folder_without_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter a: .*adapter_config\.json: No such file"):
        lora_args({"a": tmp_path})


async def test_an_adapter_that_vllm_cannot_load(tmp_path: Path) -> None:
    class Llm:
        async def add_lora(self, request: Any) -> None:
            raise ValueError(f"{request.lora_name}\nof another model")

    adapters = Adapters({"a": adapter(tmp_path / "a")})
    with pytest.raises(ConfigError, match="adapter a: vLLM cannot load it: a of another model"):
        await adapters.load(Llm())
    assert adapters.request("") is None
    assert adapters.request("a").lora_path == str(tmp_path / "a")


def test_the_revision_is_of_names_and_files(tmp_path: Path) -> None:
    one, two = adapter(tmp_path / "a"), adapter(tmp_path / "b", weights=b"\3\0\0\0\0\0\0\0{ }")
    revisions = {
        adapters_revision(adapters)
        for adapters in ({}, {"x": one}, {"y": one}, {"x": two}, {"x": one, "y": two})
    }
    assert len(revisions) == 5
    assert adapters_revision({}) == ""
    moved = adapter(tmp_path / "c")
    assert adapters_revision({"x": moved}) == adapters_revision({"x": one})
