"""Installing frameworks that plain pip cannot: a backend describes how, the core carries it out."""

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
