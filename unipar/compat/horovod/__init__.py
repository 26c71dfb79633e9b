"""Horovod's face: ``import unipar.compat.horovod.torch as hvd``."""

from unipar.compat.horovod import torch
from unipar.compat.horovod_names import PACKAGE

__all__ = ["torch"]

__getattr__ = PACKAGE.refusing(__name__)
