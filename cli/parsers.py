"""Gives the coordinator, which knows no engine, an engine's parsers."""

from __future__ import annotations

from pathlib import Path

from pdserve.config import ModelConfig
from pdserve.parsing import ChatParser


def chat_parser(model: ModelConfig, folder: Path) -> ChatParser:
    """Raises ConfigError. Imports vLLM: seconds, and half a GiB."""
    from pdserve.engine.vllm_chat import VllmChatParser

    return VllmChatParser(model, folder)
