"""What backends share: an engine over an ``nn.Module``, its canonical state, and its transforms.

A backend whose framework takes over the whole step implements :class:`unipar.strategy.Engine`
itself; one that only reduces gradients extends :class:`ModuleEngine`.
"""

from unipar.engine.ddp import DDPModuleEngine, DDPReducer, sparse_parameters
from unipar.engine.divisible import check_divisible, with_divisible_optimizer
from unipar.engine.divisions import (
    AsDTensors,
    ByTensor,
    Division,
    Flat,
    Sliced,
    constructor_arguments,
)
from unipar.engine.flat import flat_state
from unipar.engine.inner import backward_pass, refuse_inner_gradients
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
from unipar.engine.summing import sum_shards
from unipar.engine.transforms import (
    Undo,
    checkpoint_activations,
    compile_modules,
    has_forward,
    modules_of_classes,
    refuse_copies,
    repeated_blocks,
)
from unipar.engine.weights import refuse_changed_weights

__all__ = [
    "COMPUTE_DTYPES",
    "AsDTensors",
    "ByTensor",
    "DDPModuleEngine",
    "DDPReducer",
    "Division",
    "Flat",
    "ModuleEngine",
    "Sliced",
    "Undo",
    "backward_pass",
    "check_divisible",
    "checkpoint_activations",
    "compile_modules",
    "constructor_arguments",
    "export_scheduler",
    "export_state",
    "flat_state",
    "group_names",
    "group_states",
    "has_forward",
    "import_scheduler",
    "import_state",
    "modules_of_classes",
    "refuse_changed_weights",
    "refuse_copies",
    "refuse_inner_gradients",
    "repeated_blocks",
    "restore_groups",
    "sparse_parameters",
    "sum_shards",
    "with_divisible_optimizer",
]
