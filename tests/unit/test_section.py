"""What is said of a field that is wrong."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError, create_model

from pdserve.section import Name, Section, first_of, in_words

Colour = StrEnum("Colour", ["RED", "BLUE"])


def _fault(kind: Any, given: Any) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        create_model("Made", __base__=Section, it=(kind, ...))(it=given)
    return caught.value


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (int, "many", "must be a whole number, not 'many'"),
        (int, 1.5, "must be a whole number, not 1.5"),
        (int, None, "must be a whole number, not empty"),
        (float, "fast", "must be a number, not 'fast'"),
        (float, [1.0], "must be a number, not a list"),
        (float, float("inf"), "must be a finite number, not inf"),
        (bool, "perhaps", "must be true or false, not 'perhaps'"),
        (bool, 2.5, "must be true or false, not 2.5"),
        (str, True, "must be text, in quotes, not true"),
        (Path, 7, "must be text, in quotes, not 7"),
        (Name, "", "must have a length of 1 or more"),
        (Annotated[str, Field(pattern="^a+$")], "b", "must be like ^a+$"),
        (tuple[int, ...], 5, "must be a list, not 5"),
        (list[int], "5", "must be a list, not '5'"),
        (Annotated[tuple[int, ...], Field(min_length=2)], [1], "a length of 2 or more, not 1"),
        (Annotated[tuple[int, ...], Field(max_length=1)], [1, 2], "a length of 1 or less, not 2"),
        (dict[str, int], [1], "must have fields, `name: value`, and not be a list"),
        (Section, 3, "must have fields, `name: value`, and not be 3"),
        (Section, {"anything": 1}, "no such field here"),
        (Literal["auto", "none"], "any", "must be 'auto' or 'none', not 'any'"),
        (Colour, {}, "must be 'red' or 'blue', not a section"),
        (Annotated[int, Field(gt=0)], 0, "must be more than 0, not 0"),
        (Annotated[int, Field(ge=1)], 0, "must be 1 or more, not 0"),
        (Annotated[int, Field(lt=9)], 9, "must be less than 9, not 9"),
        (Annotated[int, Field(le=9)], 10, "must be 9 or less, not 10"),
        (Name, "a\nb", "must be printable, in one line"),
    ],
)
def test_every_kind_of_fault_is_told_in_words_of_its_writer(
    kind: Any, given: Any, words: str
) -> None:
    assert words in in_words(_fault(kind, given))


def test_the_field_is_named_with_those_that_it_is_in() -> None:
    assert first_of(_fault(list[int], [1, "b"])) == ("it.1", "must be a whole number, not 'b'")


def test_what_is_long_is_cut() -> None:
    assert len(in_words(_fault(int, "x" * 1000))) < 100


def test_a_field_that_is_missing_is_asked_for() -> None:
    with pytest.raises(ValidationError) as caught:
        create_model("Made", __base__=Section, it=(int, ...))()
    assert in_words(caught.value) == "it: must be given"
