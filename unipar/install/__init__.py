"""Installing frameworks that pip alone cannot, by a backend's recipe; facts about the machine."""

from unipar.install.recipe import (
    Build,
    Edit,
    Extra,
    Installable,
    Pip,
    Program,
    Python,
    Recipe,
    Step,
)

__all__ = ["Build", "Edit", "Extra", "Installable", "Pip", "Program", "Python", "Recipe", "Step"]
