"""Numbers of configurations; pydantic's own types take true for 1."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field


def _no_truth_value(given: Any) -> Any:
    if isinstance(given, bool):
        raise ValueError(f"a number is needed, and {str(given).lower()} is none")
    return given


NUMBER = BeforeValidator(_no_truth_value)
"""Of a number, with or without bounds."""
PositiveInt = Annotated[int, Field(gt=0), NUMBER]
NonNegativeInt = Annotated[int, Field(ge=0), NUMBER]
PositiveFloat = Annotated[float, Field(gt=0), NUMBER]
