"""What a message is made of, in the order in which it is written. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; its arguments follow until the next piece of another kind."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the last call's arguments: JSON text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The last call never became whole.

    Attributes:
        text: all of it as it was written, tags included: what it is, if it is no call.
        rest: what of it was not passed on as arguments: what a stream still has to show.
    """

    text: str
    rest: str


Piece = Reasoning | Content | CallStart | CallArguments | CallBroken
