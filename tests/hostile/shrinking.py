"""Minimization of failing inputs."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrunk(inputs: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> Sequence[T]:
    """A smaller input that still fails, and from which no half or quarter can be removed."""
    parts = 2
    while len(inputs) > 1:
        size = -(-len(inputs) // parts)
        for at in range(0, len(inputs), size):
            less = [*inputs[:at], *inputs[at + size :]]
            if less and fails(less):
                inputs, parts = less, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(inputs))
    return inputs
