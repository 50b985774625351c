"""A function that takes dataclasses is read and called by their fields."""

import inspect
from dataclasses import dataclass

import pytest

from distembed.commands.shared import flattened


@dataclass(frozen=True)
class Size:
    width: int
    height: int = 1


@dataclass(frozen=True)
class Thick(Size):
    depth: int | None = None


@flattened
def draw(title: str, *styles: str, size: Thick, colour: str = "red") -> tuple[str, tuple[str, ...], Thick, str]:
    """Draws."""
    return title, styles, size, colour


def test_it_is_called_by_the_fields_and_given_the_value() -> None:
    assert draw("a", "b", width=3, colour="blue") == ("a", ("b",), Thick(3), "blue")
    assert draw(title="a", depth=2, width=1, height=4) == ("a", (), Thick(1, 4, 2), "red")


def test_its_signature_has_the_fields_with_their_types_and_defaults() -> None:
    shown = inspect.signature(draw)
    assert str(shown).startswith(
        "(title: str, *styles: str, width: int, height: int = 1, depth: int | None = None, colour: str = 'red')"
    )
    assert draw.__annotations__["depth"] == int | None and draw.__doc__ == "Draws."


def test_what_it_does_not_know_or_lacks_is_an_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'length'"):
        draw("a", width=1, length=2)
    with pytest.raises(TypeError, match="'width'"):
        draw("a")
