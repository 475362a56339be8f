"""Complete runs as named functions."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from penstock_pipelines.recipe import Recipe
from penstock_pipelines.recipes.tiny import tiny_fsdp, tiny_zero2

RECIPES: Mapping[str, Callable[[], Recipe]] = {"tiny-zero2": tiny_zero2, "tiny-fsdp": tiny_fsdp}
DEFAULT = "tiny-zero2"


class UnknownRecipeError(ValueError):
    """No recipe has that name."""


def find_recipe(name: str) -> Recipe:
    """The recipe of a name. Raises UnknownRecipeError, which names the nearest."""
    if name not in RECIPES:
        nearest = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise UnknownRecipeError(f"there is no recipe {name!r}.{hint} Recipes: {', '.join(sorted(RECIPES))}.")
    return RECIPES[name]()
