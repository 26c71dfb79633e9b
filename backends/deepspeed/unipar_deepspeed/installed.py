"""How DeepSpeed gets into an environment that has torch, and what can be compiled for it."""

from __future__ import annotations

from unipar.install import Extra, Pip, Program, Python, Recipe

_COMPILER = (Program(("c++", "g++"), "g++"),)


def recipe() -> Recipe:
    """DeepSpeed from the package index; its operators only for those who ask."""
    nvme = Python(
        ("-m", "unipar_deepspeed.ops", "async_io"),
        "compile DeepSpeed's async_io (about 3 minutes and 2.5 GB of memory on two cores)",
    )
    return Recipe(
        "deepspeed",
        "DeepSpeed 0.19.8",
        (Pip(("deepspeed==0.19.8",)),),
        extras=(Extra("nvme", "state and parameters on local drives", (nvme,), _COMPILER),),
    )
