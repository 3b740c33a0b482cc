"""Suites: questions and what a right answer is, in YAML."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from blake3 import blake3
from jsonschema import Draft202012Validator, SchemaError
from pydantic import Field, ValidationError, field_validator, model_validator

from measure.eval.grade import letter
from pdserve.errors import ConfigError
from pdserve.section import Name, Section, in_words

_PACKAGED = "measure.eval.suites"


class Choice(Section):
    """Options to choose from; `answer` is one of them."""

    options: tuple[Name, ...] = Field(min_length=2, max_length=26)
    answer: Name

    @model_validator(mode="after")
    def _check(self) -> Choice:
        if self.options.count(self.answer) != 1:
            raise ValueError(f"answer {self.answer!r} must be one of the options, once")
        return self


class Case(Section):
    """One question, and one way to tell a right answer."""

    id: Name
    ask: Name
    exact: Name | None = None
    regex: Name | None = None
    json_schema: dict[str, Any] | None = None
    choice: Choice | None = None
    request: dict[str, Any] = Field(default={}, description="further fields of this request's body")

    @field_validator("regex")
    @classmethod
    def _check_regex(cls, regex: str | None) -> str | None:
        if regex is not None:
            try:
                re.compile(regex)
            except re.error as error:
                raise ValueError(f"no regular expression: {error}") from None
        return regex

    @field_validator("json_schema")
    @classmethod
    def _check_schema(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None:
            try:
                Draft202012Validator.check_schema(schema)
            except SchemaError as error:
                raise ValueError(f"no JSON schema: {error.message}") from None
        return schema

    @model_validator(mode="after")
    def _check(self) -> Case:
        ways = (self.exact, self.regex, self.json_schema, self.choice)
        if sum(way is not None for way in ways) != 1:
            raise ValueError(f"case {self.id}: one of exact, regex, json_schema, choice")
        return self

    @property
    def question(self) -> str:
        """As it is asked: of a choice, with its options."""
        if self.choice is None:
            return self.ask
        options = (f"{letter(at)}. {option}" for at, option in enumerate(self.choice.options))
        return "\n".join((self.ask, *options, "Answer with the letter alone."))


class Suite(Section):
    """`request` are fields of every request's body; a case's own go before them."""

    name: Name
    system: str = ""
    request: dict[str, Any] = Field(default={})
    cases: tuple[Case, ...] = Field(min_length=1)

    @field_validator("cases")
    @classmethod
    def _check_ids(cls, cases: tuple[Case, ...]) -> tuple[Case, ...]:
        if len({case.id for case in cases}) != len(cases):
            raise ValueError("two cases share an id")
        return cases

    @property
    def digest(self) -> str:
        """Of all that is asked and expected: results of equal digests may be compared."""
        return blake3(self.model_dump_json().encode()).hexdigest()[:16]

    def body(self, case: Case, model: str) -> dict[str, Any]:
        """The request for a case, as OpenAI's chat completions take it."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": case.question})
        return {"temperature": 0, **self.request, **case.request, "model": model} | {
            "messages": messages
        }


def packaged() -> list[str]:
    """The names of the suites that come with pdserve."""
    found = (Path(file.name) for file in files(_PACKAGED).iterdir())
    return sorted(file.stem for file in found if file.suffix == ".yaml")


def load(name: str) -> Suite:
    """A packaged suite, or that of a file. Raises ConfigError."""
    if name in packaged():
        text = (files(_PACKAGED) / f"{name}.yaml").read_text(encoding="utf-8")
    else:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"suite {name}: {error.strerror}; with pdserve come: {', '.join(packaged())}"
            ) from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"suite {name}: {error}") from None
    try:
        return Suite.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"suite {name}: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        raise ConfigError(f"suite {name}: {in_words(error)}") from None
