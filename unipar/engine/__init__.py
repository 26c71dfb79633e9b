"""What backends share: an engine over an ``nn.Module``, its canonical state, and its transforms.

A backend whose framework takes over the whole step implements :class:`unipar.strategy.Engine`
itself; one that only reduces gradients extends :class:`ModuleEngine`.
"""

from unipar.engine.flat import flat_state
from unipar.engine.module import COMPUTE_DTYPES, ModuleEngine
from unipar.engine.state import (
    export_scheduler,
    export_state,
    group_names,
    group_states,
    import_scheduler,
    import_state,
    restore_groups,
)
from unipar.engine.transforms import (
    Undo,
    checkpoint_activations,
    compile_modules,
    has_forward,
    modules_of_classes,
    refuse_copies,
    repeated_blocks,
)

__all__ = [
    "COMPUTE_DTYPES",
    "ModuleEngine",
    "Undo",
    "checkpoint_activations",
    "compile_modules",
    "export_scheduler",
    "export_state",
    "flat_state",
    "group_names",
    "group_states",
    "has_forward",
    "import_scheduler",
    "import_state",
    "modules_of_classes",
    "refuse_copies",
    "repeated_blocks",
    "restore_groups",
]
