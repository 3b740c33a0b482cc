"""LangChain's OpenAI chat model. What is compared between routes is no near tie for the default
model."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

ASKED = json.loads(sys.argv[1])
QUESTION = "How many days are in a week?"


class Person(BaseModel):
    name: str
    age: int


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    raise NotImplementedError


def chat_model(**fields: Any) -> ChatOpenAI:
    defaults = {
        "model": ASKED["model"],
        "base_url": f"{ASKED['base_url']}/v1",
        "api_key": "none",
        "default_headers": {"x-pdserve-mode": ASKED["mode"]},
        "include_response_headers": True,
        "max_retries": 0,
        "max_tokens": 12,
        "temperature": 0,
    }
    return ChatOpenAI(**(defaults | fields))


def invoked(model: ChatOpenAI) -> str:
    told = model.invoke(QUESTION)
    assert told.response_metadata["headers"]["x-pdserve-mode"] == ASKED["mode"]
    usage = told.usage_metadata
    assert usage is not None
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    pieces = list(model.stream(QUESTION, stream_usage=True))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    assert len(pieces) > 2
    assert whole.content == told.content
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == usage["output_tokens"]
    assert whole.response_metadata["finish_reason"] == told.response_metadata["finish_reason"]
    assert isinstance(told.content, str)
    return told.content


async def invoked_async(model: ChatOpenAI) -> str:
    told = await model.ainvoke(QUESTION)
    pieces = [piece.content async for piece in model.astream(QUESTION)]
    assert "".join(pieces) == told.content
    return told.content


def conversation(model: ChatOpenAI) -> str:
    told = model.invoke(
        [
            SystemMessage("Be brief."),
            HumanMessage("What is the capital of Germany?"),
            AIMessage("The capital of Germany is Berlin."),
            HumanMessage("What is the capital of Japan?"),
        ]
    )
    return str(told.content)


def chain(model: ChatOpenAI) -> list[str]:
    prompt = ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")])
    steps = prompt | model | StrOutputParser()
    countries = [{"country": name} for name in ("Greece", "Japan", "Russia")]
    return list(steps.batch(countries, config={"max_concurrency": 1}))


def logprobs(model: ChatOpenAI) -> None:
    told = model.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    positions = told.response_metadata["logprobs"]["content"]
    assert told.usage_metadata is not None
    assert len(positions) == told.usage_metadata["output_tokens"]
    assert all(one["logprob"] <= 0 and len(one["top_logprobs"]) == 2 for one in positions)


def structured() -> None:
    asker = chat_model(max_tokens=60).with_structured_output(Person, method="json_schema")
    person = asker.invoke("Tell me of Ann, who is 30 years old.")
    assert isinstance(person, Person)


def refused(model: ChatOpenAI) -> None:
    for wrong, kind, param in (
        (model.bind_tools([weather]), openai.BadRequestError, "tool_choice"),
        (chat_model(temperature=-1), openai.BadRequestError, "temperature"),
        (chat_model(model="no-such-model"), openai.NotFoundError, "model"),
    ):
        for ask in (wrong.invoke, lambda question, wrong=wrong: list(wrong.stream(question))):
            try:
                ask(QUESTION)
            except openai.APIStatusError as error:
                assert isinstance(error, kind), error
                assert error.param == param, error.param
            else:
                raise AssertionError(f"{param} was not refused")


def main() -> None:
    model = chat_model()
    answers: list[Any] = [invoked(model), conversation(model), chain(model)]
    assert asyncio.run(invoked_async(model)) == answers[0]
    logprobs(model)
    refused(model)
    if ASKED["engine"] == "vllm":  # the simulated engine refuses structures
        structured()
    names = ("langchain-openai", "openai")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    print(json.dumps({"answers": answers, "versions": versions}))


main()
