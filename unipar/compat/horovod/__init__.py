"""Horovod's face: ``import unipar.compat.horovod.torch as hvd``."""

from unipar.compat.horovod import torch
from unipar.compat.horovod_names import PACKAGE

__version__ = "0.28.1"
"""Horovod's, whose names and rules these are."""

__all__ = ["torch"]

__getattr__ = PACKAGE.refusing(__name__)
