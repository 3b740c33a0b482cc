"""What the numbers in a KV block are and how they are ordered, as far as engines differ."""

from __future__ import annotations

from typing import Any


def required_layout(vllm_config: Any) -> str | None:
    """The order of dimensions that our connectors ask vLLM for, as its NIXL connector does:
    blocks of a layer lie one after the other, keys and values together."""
    return None if vllm_config.model_config.use_mla else "LBHNC"


def kv_dtype(vllm_config: Any) -> str:
    """The element type of the KV cache."""
    name: str = vllm_config.cache_config.cache_dtype
    if name == "auto":
        return str(vllm_config.model_config.dtype).removeprefix("torch.")
    return name


def block_layout(vllm_config: Any, required: str | None) -> str:
    """Names the layout: two engines may exchange blocks only if theirs is the same.

    `required` is the order of dimensions that the transport asks vLLM for. On CPU the order
    inside a block depends, besides, on the instructions that vLLM's attention uses: with AMX it
    packs the keys in pairs. vLLM 0.32 itself does not compare that.
    """
    from vllm.platforms import current_platform

    order = required or "default"
    if not current_platform.is_cpu():
        return order
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model = vllm_config.model_config
    cache = vllm_config.cache_config
    isa = _get_attn_isa(model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)
    return f"{order}/{isa}"
