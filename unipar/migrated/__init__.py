"""The runtime of migrated scripts; nothing in it reads or rewrites a script.

:mod:`~unipar.migrated.script` is what each of them calls; beside it, one module for each framework
whose rules training depends on: :mod:`~unipar.migrated.fabricated` (Lightning Fabric) and
:mod:`~unipar.migrated.stepped` (DeepSpeed). A loop that was folded into ``unipar.fit`` calls
:mod:`~unipar.migrated.folded`; a script of Accelerate's or Colossal-AI's imports its face,
:mod:`unipar.compat.accelerate` or :mod:`unipar.compat.colossalai`.
"""
