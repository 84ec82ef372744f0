"""FP8 recipes and their options."""

from __future__ import annotations

from typing import Any

RECIPES = [None, "tensorwise", "blockwise", "delayed"]


def fp8_options(recipe: str | None) -> dict[str, Any]:
    if recipe is None:
        return {}
    return {"fp8": {"recipe": recipe, "format": "e4m3" if recipe == "blockwise" else "hybrid"}}
