"""Checks of option values."""

from __future__ import annotations

import math

from agentropy.errors import UserError


def require(name: str, value: object, holds: bool, range_: str) -> None:
    """Raise UserError unless the value lies in its range."""
    if not holds:
        raise UserError(f"option {name}={value} is out of range: it must be {range_}")


def positive(value: float, or_zero: bool = False) -> bool:
    """True for a finite number above 0 (or at least 0)."""
    return math.isfinite(value) and (value > 0 or (or_zero and value == 0))


def share(value: float) -> bool:
    """True for a number in (0, 1]."""
    return 0 < value <= 1
