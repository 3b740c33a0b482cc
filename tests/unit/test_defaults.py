"""What a model's generation_config.json makes of requests that leave parameters out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.defaults import FILE, Defaults, read_defaults
from coordinator.facade.openai_schema import ChatCompletionRequest, CompletionRequest, parse
from coordinator.facade.validate import Limits
from pdserve.convert_sampling import sampling_from_proto
from pdserve.errors import ConfigError
from pdserve.types import SamplingParams
from pdserve.v1 import generation_pb2 as pb

LIMITS = Limits(context_length=1000, vocab_size=300)


def read(folder: Path, **fields: Any) -> Defaults:
    (folder / FILE).write_text(json.dumps(fields))
    return read_defaults(folder, LIMITS)


def test_what_the_file_says(tmp_path: Path) -> None:
    given = read(
        tmp_path,
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        min_p=0,
        repetition_penalty=1.05,
        max_new_tokens=2048,
        do_sample=True,
        eos_token_id=[1, 2],
        presence_penalty=None,
    )
    sampling = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
    assert given == Defaults(sampling, 2048)
    assert read(tmp_path, top_k=-1) == Defaults()


def test_a_model_without_the_file_has_openais_defaults(tmp_path: Path) -> None:
    assert read_defaults(tmp_path, LIMITS) == Defaults(SamplingParams(), None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1}, "temperature must be"),
        ({"top_p": "much"}, "top_p"),
        ({"max_new_tokens": 0}, "max_tokens must be"),
    ],
)
def test_values_that_no_request_may_have_are_told_at_the_start(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"generation_config.*{words}"):
        read(tmp_path, **fields)


def test_a_request_takes_them_for_what_it_leaves_out() -> None:
    defaults = SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.05)
    chat = b'{"model":"m","messages":[{"role":"user","content":"Hi"}],"top_k":0,"temperature":1}'
    completion = b'{"model":"m","prompt":"Hi","seed":1}'
    over_grpc = sampling_from_proto(pb.SamplingParams(temperature=0, max_tokens=3), defaults)
    assert parse(ChatCompletionRequest, chat).to_sampling(defaults) == SamplingParams(
        repetition_penalty=1.05
    )
    assert parse(CompletionRequest, completion).to_sampling(defaults) == SamplingParams(
        max_tokens=16, temperature=0.7, top_k=20, repetition_penalty=1.05, seed=1
    )
    assert over_grpc == SamplingParams(
        max_tokens=3, temperature=0, top_k=20, repetition_penalty=1.05
    )
