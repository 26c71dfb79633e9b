"""Horovod's face: ``import unipar.compat.horovod.torch as hvd``."""
