"""What a Sinkhorn loss is asked for, checked once, and the lengths and damping that follow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torchweft.errors import BackendError, ShapeError

__all__ = ["BACKENDS", "Settings", "require_choice"]

BACKENDS = ("auto", "tensorized", "online", "multiscale")


class Settings(NamedTuple):
    """Arguments of `torchweft.reductions.SamplesLoss` that its "sinkhorn" reads."""

    p: int = 2
    blur: float = 0.05
    reach: float | None = None
    diameter: float | None = None
    scaling: float = 0.5
    truncate: float | None = 8.0
    cost: str | Callable[..., Any] | None = None
    cluster_scale: float | None = None
    debias: bool = True
    verbose: bool = False
    backend: str = "auto"

    def checked(self) -> Settings:
        """These settings; raises ShapeError or BackendError where they do not fit."""
        if self.cost is None:
            require_choice("p", self.p, (1, 2))
        require_choice("backend", self.backend, BACKENDS)
        if not (self.p > 0 and self.blur > 0 and 0 < self.scaling < 1):
            raise ShapeError(
                f"p is {self.p}, blur is {self.blur} and scaling {self.scaling}: p and blur must "
                "be positive, scaling between 0 and 1. Pass blur=0.05, scaling=0.5, for example."
            )
        for name in ("reach", "diameter", "truncate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ShapeError(
                    f"{name} is {value}: it must be positive and finite, or None. Pass such a "
                    "number, or leave it out."
                )
        if self.cluster_scale is not None and not 0 <= self.cluster_scale < math.inf:
            raise ShapeError(
                f"cluster_scale is {self.cluster_scale}: it must be a finite length, or None. Pass "
                "the edge of clusters, or leave it out."
            )
        if self.cost is not None and not (isinstance(self.cost, str) or callable(self.cost)):
            raise ShapeError(
                f"cost is a {type(self.cost).__name__}: it must be a formula of X and Y, such as "
                "'SqDist(X, Y) / 2', or a function of x and y. Pass one of these."
            )
        if self.cost is not None and self.backend == "multiscale":
            raise BackendError(
                "multiscale transport is asked for with a cost: its clusters bound the plan of "
                "|x − y|^p / p alone. Pass backend='online', or leave the cost out."
            )
        return self

    @property
    def makes_matrix(self) -> bool:
        """Whether the cost is a function that makes the matrix of all pairs."""
        return callable(self.cost) and self.backend != "online"

    def lengths(self, diameter: float) -> list[float]:
        """The diameter, then from it on lengths that shrink by `scaling`, then the blur.

        The diameter stands twice, as in geomloss, whose numbers these lengths give.
        """
        first, p = max(diameter, self.blur), self.p
        steps = math.ceil(
            (p * math.log(self.blur) - p * math.log(first)) / (p * math.log(self.scaling))
        )
        return [first, *(first * self.scaling**n for n in range(steps)), self.blur]

    def damping(self, length: float) -> float:
        """1 / (1 + ε / ρ), ε = length^p, ρ = reach^p: what an update is multiplied by."""
        return 1.0 if self.reach is None else 1 / (1 + (length / self.reach) ** self.p)


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ShapeError unless the value is one of the choices."""
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ShapeError(f"{name} is {value!r}: it must be one of {listed}. Pass one.")
