"""Horovod's face: ``import unipar.compat.horovod.torch as hvd``."""

from unipar.compat.horovod import torch

__all__ = ["torch"]
