"""Sampling parameters and what comes of them: the same on every route, façade and way to ask."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import ErrorReason
from pdserve.types import Mode
from pdserve.v1 import inference_pb2 as pb
from tests.support.asking import TEXT, body, decode, events, message, prefill
from tests.support.grpc_facade import refused
from tests.support.sim_fleet import SimCoordinator, sim_fleet

ROUTES = (Mode.COLOCATED, Mode.DISAGGREGATED)
TRANSPORTS = ("nixl", "grpc")
MESSAGES = [{"role": "user", "content": TEXT}]


def header(mode: Mode) -> dict[str, str]:
    return {"x-pdserve-mode": mode.value}


async def completion(core: SimCoordinator, mode: Mode, **fields: Any) -> Any:
    response = await core.http.post(
        "/v1/completions", json=body(TEXT, **fields), headers=header(mode)
    )
    assert response.status_code == 200, response.text
    assert response.headers["x-pdserve-mode"] == mode
    (choice,) = response.json()["choices"]
    return choice


async def streamed(core: SimCoordinator, path: str, asked: dict[str, Any], mode: Mode) -> list[Any]:
    """The choices of the chunks."""
    response = await core.http.post(path, json={**asked, "stream": True}, headers=header(mode))
    *chunks, done = events(response.text.split("\n"))
    assert done == "[DONE]"
    return [chunk["choices"][0] for chunk in chunks]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_logprobs_of_completions(transport: str) -> None:
    async with sim_fleet(prefill(), decode(), transport=transport) as fleet:
        core = fleet.coordinator
        expected = await completion(core, Mode.COLOCATED, logprobs=2)
        shown = expected["logprobs"]
        assert "".join(shown["tokens"]) == expected["text"]
        assert len(shown["tokens"]) == 12
        assert shown["text_offset"][1] == len(shown["tokens"][0])
        assert [len(top) for top in shown["top_logprobs"]] == [2] * 12
        assert await completion(core, Mode.DISAGGREGATED, logprobs=2) == expected
        for mode in ROUTES:
            chunks = await streamed(core, "/v1/completions", body(TEXT, logprobs=2), mode)
            assert "".join(chunk["text"] for chunk in chunks) == expected["text"]
            for name, values in shown.items():
                pieces = [chunk["logprobs"][name] for chunk in chunks]
                assert [value for piece in pieces for value in piece] == values


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_logprobs_of_chats(transport: str) -> None:
    asked = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 5,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    async with sim_fleet(prefill(), decode(), transport=transport) as fleet:
        core = fleet.coordinator
        answers = []
        for mode in ROUTES:
            response = await core.http.post(
                "/v1/chat/completions", json=asked, headers=header(mode)
            )
            (choice,) = response.json()["choices"]
            content = choice["logprobs"]["content"]
            assert "".join(one["token"] for one in content) == choice["message"]["content"]
            assert all(one["top_logprobs"][0]["token"] == one["token"] for one in content)
            answers.append(choice)
            first, *chunks = await streamed(core, "/v1/chat/completions", asked, mode)
            assert first["delta"] == {"role": "assistant", "content": ""}
            pieces = [chunk["logprobs"]["content"] for chunk in chunks]
            assert [one for piece in pieces for one in piece] == content
        assert answers[0] == answers[1]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_logprobs_over_grpc(transport: str) -> None:
    async with sim_fleet(prefill(), decode(), transport=transport) as fleet:
        core = fleet.coordinator
        shown = []
        for mode in ROUTES:
            asked = message(TEXT, mode)
            asked.sampling.logprobs = 2
            whole = await core.grpc.Generate(asked)
            assert "".join(at.candidates[0].token for at in whole.logprobs) == whole.text
            assert [len(at.candidates) for at in whole.logprobs] == [2] * 12
            pieces: list[Any] = []
            async for part in core.grpc.GenerateStream(pb.GenerateStreamRequest(request=asked)):
                pieces += part.logprobs
            assert pieces == list(whole.logprobs)
            shown.append(pieces)
        assert shown[0] == shown[1]


async def test_a_bias_steers_every_route() -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        for mode in ROUTES:
            choice = await completion(fleet.coordinator, mode, logit_bias={"2": 100}, max_tokens=3)
            assert choice["text"] == " of of of"


async def test_what_the_engine_refuses_is_the_clients_fault_and_named_as_it_named_it() -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        core = fleet.coordinator
        for mode in ROUTES:
            for param, value in (
                ("response_format", {"type": "json_object"}),
                ("structured_outputs", {"regex": "a+"}),
            ):
                response = await core.http.post(
                    "/v1/completions", json=body(TEXT, **{param: value}), headers=header(mode)
                )
                assert response.status_code == 400
                error = response.json()["error"]
                assert (error["code"], error["param"]) == ("invalid_argument", param)
            asked = message(TEXT, mode)
            asked.sampling.structured_outputs.regex = "a+"
            _, told = await refused(core.grpc.Generate(asked))
            assert told.reason is ErrorReason.INVALID_ARGUMENT
            assert told.param == "sampling.structured_outputs"


async def test_log_probabilities_of_a_prompt_are_read_colocated_whatever_was_asked_for() -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        core = fleet.coordinator
        for mode in ROUTES:
            response = await core.http.post(
                "/v1/completions", json=body(TEXT, prompt_logprobs=1), headers=header(mode)
            )
            assert response.headers["x-pdserve-mode"] == "colocated"
            assert response.headers["x-pdserve-reason"] == (
                "colocated: log probabilities of a prompt are read where it is answered"
            )
            answer = response.json()
            first, *others = answer["choices"][0]["prompt_logprobs"]
            assert first is None
            assert len(others) == answer["usage"]["prompt_tokens"] - 1 == len(TEXT) - 1
            asked = message(TEXT, mode)
            asked.sampling.prompt_logprobs = 1
            assert len((await core.grpc.Generate(asked)).prompt_logprobs) == len(TEXT) - 1


async def test_the_stop_string_is_told_and_given_where_asked_for() -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        core = fleet.coordinator
        words = (await completion(core, Mode.COLOCATED))["text"].split(" ")
        stop = f" {words[4]}"
        for mode in ROUTES:
            without = await completion(core, mode, stop=[stop])
            assert (without["finish_reason"], without["stop_reason"]) == ("stop", stop)
            whole = await completion(core, mode, stop=[stop], include_stop_str_in_output=True)
            assert whole["text"] == without["text"] + stop
            for asked in ({"stop": [stop]}, {"stop": [stop], "include_stop_str_in_output": True}):
                chunks = await streamed(core, "/v1/completions", body(TEXT, **asked), mode)
                text = "".join(chunk["text"] for chunk in chunks)
                assert text == (whole if len(asked) == 2 else without)["text"]
                assert chunks[-1]["stop_reason"] == stop


async def test_the_tokens_of_prompt_and_answer_are_told_on_every_route() -> None:
    """And a prompt is cut to those that are to be kept."""
    fields = {"truncate_prompt_tokens": 60, "return_token_ids": True}
    async with sim_fleet(prefill(), decode()) as fleet:
        core = fleet.coordinator
        kept = [byte + 3 for byte in TEXT.encode()[-60:]]
        answers = []
        for mode in ROUTES:
            whole = await completion(core, mode, **fields)
            assert whole["prompt_token_ids"] == kept
            first, *chunks = await streamed(core, "/v1/completions", body(TEXT, **fields), mode)
            assert first["prompt_token_ids"] == kept
            assert not any("prompt_token_ids" in chunk for chunk in chunks)
            ids = [one for chunk in (first, *chunks) for one in chunk["token_ids"]]
            assert ids == whole["token_ids"]
            asked = message(TEXT, mode)
            asked.prompt_options.truncate_prompt_tokens = 60
            asked.prompt_options.return_prompt_token_ids = True
            told = await core.grpc.Generate(asked)
            assert (list(told.prompt_token_ids), list(told.token_ids)) == (kept, ids)
            stream = core.grpc.GenerateStream(pb.GenerateStreamRequest(request=asked))
            parts = [part async for part in stream]
            assert [list(part.prompt_token_ids) for part in parts if part.prompt_token_ids] == [
                kept
            ]
            assert told.usage.prompt_tokens == 60
            answers.append((whole["text"], told.text))
        assert len({text for pair in answers for text in pair}) == 1


async def test_a_conversation_is_gone_on_with_on_every_route() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "The fox is"}]
    asked = {
        "model": "tiny",
        "messages": messages,
        "max_tokens": 3,
        "return_token_ids": True,
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    prompt = f"user: {TEXT}\nassistant: The fox is"
    chat = pb.ChatRequest(
        model="tiny",
        messages=[pb.ChatMessage(**one) for one in messages],
        sampling=message("", None, 3).sampling,
        template=pb.ChatTemplate(add_generation_prompt=False, continue_final_message=True),
        prompt_options=pb.PromptOptions(return_prompt_token_ids=True),
    )
    async with sim_fleet(prefill(), decode()) as fleet:
        core = fleet.coordinator
        for mode in ROUTES:
            response = await core.http.post(
                "/v1/chat/completions", json=asked, headers=header(mode)
            )
            ids = response.json()["prompt_token_ids"]
            assert bytes(one - 3 for one in ids).decode() == prompt
            chat.options.CopyFrom(message("", mode).options)
            assert list((await core.grpc.Chat(chat)).prompt_token_ids) == ids
