"""Makes some inputs of a written program weights of a module, as they were in the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn


class _WithWeights(nn.Module):
    """A module that calls a function with its weights as the arguments at the given positions."""

    def __init__(self, program: Callable[..., Any], args: tuple[Any, ...], weights: Sequence[int]) -> None:
        super().__init__()
        self.program, self.places = program, sorted(weights)
        for place in self.places:
            tensor = args[place]
            if tensor.is_floating_point():
                self.register_parameter(f"weight_{place}", nn.Parameter(tensor.detach(), tensor.requires_grad))
            else:
                self.register_buffer(f"weight_{place}", tensor)

    def forward(self, *rest: Any) -> Any:
        args = list(rest)
        for place in self.places:
            args.insert(place, getattr(self, f"weight_{place}"))
        return self.program(*args)


def with_weights(
    program: Callable[..., Any], args: tuple[Any, ...], weights: Sequence[int]
) -> tuple[nn.Module, tuple[Any, ...]]:
    """A module that calls a written program and has the inputs at the given positions as weights; and the remaining
    inputs."""
    return _WithWeights(program, args, weights), tuple(a for i, a in enumerate(args) if i not in weights)
