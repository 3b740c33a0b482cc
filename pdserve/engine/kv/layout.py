"""The order of the numbers in a KV block, as far as it differs between engines."""

from __future__ import annotations

from typing import Any


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
