"""n, lists of prompts, and echo: each choice is answered as if it were asked for alone."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.types import Mode
from tests.support.asking import TEXT, body, decode, events, prefill
from tests.support.sim_fleet import SimCoordinator, sim_fleet

ROUTES = (Mode.COLOCATED, Mode.DISAGGREGATED)
PATH = "/v1/completions"


async def ask(core: SimCoordinator, mode: Mode, **fields: Any) -> Any:
    response = await core.http.post(
        PATH, json=body(TEXT, **fields), headers={"x-pdserve-mode": mode.value}
    )
    assert response.status_code == 200, response.text
    assert response.headers["x-pdserve-mode"] == mode
    return response.json()


async def stream(core: SimCoordinator, mode: Mode, **fields: Any) -> tuple[dict[int, str], Any]:
    """The text of each choice, and the usage."""
    options = {"include_usage": True}
    asked = body(TEXT, stream=True, stream_options=options, **fields)
    response = await core.http.post(PATH, json=asked, headers={"x-pdserve-mode": mode.value})
    *chunks, last, done = events(response.text.split("\n"))
    assert done == "[DONE]"
    assert last["choices"] == []
    texts: dict[int, str] = {}
    ends: list[int] = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert chunk["id"] == chunks[0]["id"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        if choice["finish_reason"] is not None:
            ends.append(choice["index"])
    assert sorted(ends) == sorted(texts)
    return texts, last["usage"]


@pytest.mark.parametrize("mode", ROUTES)
async def test_choices_of_one_prompt_count_it_once_and_have_seeds_of_their_own(mode: Mode) -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        core = fleet.coordinator
        alone = [await ask(core, mode, temperature=1, seed=7 + choice) for choice in range(3)]
        together = await ask(core, mode, temperature=1, seed=7, n=3)
        texts = [one["choices"][0]["text"] for one in alone]
        assert len(set(texts)) == 3
        assert [choice["text"] for choice in together["choices"]] == texts
        assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
        usage = together["usage"]
        assert usage["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
        written = sum(one["usage"]["completion_tokens"] for one in alone)
        assert usage["completion_tokens"] == written
        streamed, used = await stream(core, mode, temperature=1, seed=7, n=3)
        assert [streamed[index] for index in range(3)] == texts
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [used[name] for name in counts] == [usage[name] for name in counts]


@pytest.mark.parametrize("mode", ROUTES)
async def test_each_prompt_of_a_list_is_answered_and_counted(mode: Mode) -> None:
    prompts = [f"{number} {TEXT}" for number in range(4)]
    async with sim_fleet(prefill(), decode()) as fleet:
        core = fleet.coordinator
        alone = [await ask(core, mode, prompt=prompt) for prompt in prompts]
        together = await ask(core, mode, prompt=prompts, n=1)
        texts = [one["choices"][0]["text"] for one in alone]
        assert [choice["text"] for choice in together["choices"]] == texts
        for name in ("prompt_tokens", "completion_tokens"):
            assert together["usage"][name] == sum(one["usage"][name] for one in alone)
        streamed, _ = await stream(core, mode, prompt=prompts)
        assert [streamed[index] for index in range(4)] == texts


async def test_one_bad_prompt_fails_the_request_and_holds_nothing() -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        core = fleet.coordinator
        for streamed in (False, True):
            response = await core.http.post(
                PATH, json=body(TEXT, prompt=[TEXT, ""], stream=streamed)
            )
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "prompt"
        response = await core.http.post(PATH, json=body(TEXT, prompt=["a"] * 129))
        assert response.json()["error"]["param"] == "prompt"
        await fleet.until_idle()


@pytest.mark.parametrize("mode", ROUTES)
async def test_an_echo_is_the_prompt_and_then_the_answer(mode: Mode) -> None:
    async with sim_fleet(prefill(), decode()) as fleet:
        core = fleet.coordinator
        plain = await ask(core, mode)
        text = TEXT + plain["choices"][0]["text"]
        echoed = await ask(core, mode, echo=True)
        assert echoed["choices"][0]["text"] == text
        assert echoed["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
        assert (await stream(core, mode, echo=True))[0] == {0: text}
        both = await ask(core, mode, echo=True, prompt=[TEXT, "Hi"])
        assert [choice["text"][:2] for choice in both["choices"]] == [TEXT[:2], "Hi"]
        ids = [ord(char) + 3 for char in "Hi"]  # those of ByteEncoder
        assert (await ask(core, mode, echo=True, prompt=ids))["choices"][0]["text"][:2] == "Hi"


async def test_an_echo_has_log_probabilities_of_prompt_and_answer_but_of_the_first_token() -> None:
    """As evaluations ask for them: how likely is this text?"""
    async with sim_fleet(prefill(), decode()) as fleet:
        asked = body(TEXT, echo=True, logprobs=1)
        for max_tokens in (0, 3):
            response = await fleet.coordinator.http.post(
                PATH, json={**asked, "max_tokens": max_tokens}
            )
            (choice,) = response.json()["choices"]
            shown = choice["logprobs"]
            assert len(shown["tokens"]) == len(TEXT) + max_tokens
            assert shown["tokens"][0] == TEXT[0]
            for name in ("token_logprobs", "top_logprobs"):
                assert shown[name][0] is None
                assert None not in shown[name][1:]
                assert len(shown[name]) == len(shown["tokens"])
            assert choice["text"].startswith(TEXT)
            assert (choice["text"] == TEXT) is (max_tokens == 0)
