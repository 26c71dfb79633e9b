"""Numbers of configurations; pydantic's own types take true for 1."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field


def _no_truth_value(given: Any) -> Any:
    if isinstance(given, bool):
        raise ValueError(f"a number is needed, and {str(given).lower()} is none")
    return given


_Number = BeforeValidator(_no_truth_value)
PositiveInt = Annotated[int, Field(gt=0), _Number]
NonNegativeInt = Annotated[int, Field(ge=0), _Number]
PositiveFloat = Annotated[float, Field(gt=0), _Number]
