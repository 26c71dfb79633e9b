"""The engine over an ``nn.Module`` that backends share, its parts, state and transforms.

A backend gives a :class:`StepEngine` its own parts, where a framework does things otherwise than a
plain loop: a :class:`Reducer`, a :class:`PrecisionPolicy`, a :class:`Stepper`, a
:class:`ModelState`, a :class:`Schedule`. Or it implements :class:`unipar.strategy.Engine` itself.
"""

from unipar.engine.absent import asked_for
from unipar.engine.absent_tensor import AbsentTensor
from unipar.engine.average import LossAverage
from unipar.engine.broadcast import broadcast_tensors, share_buffers
from unipar.engine.chosen import with_same_choice
from unipar.engine.ddp import DDPReducer, disarm
from unipar.engine.divisible import check_divisible, with_divisible_optimizer
from unipar.engine.divisions import (
    AsDTensors,
    ByTensor,
    Division,
    Flat,
    Sliced,
    constructor_arguments,
    share_hooks,
)
from unipar.engine.flat import flat_state
from unipar.engine.float8 import check_float8, compute_in_float8, float8_layers
from unipar.engine.forwards import compile_modules, replace_forward
from unipar.engine.inner import backward_pass, refuse_inner_gradients
from unipar.engine.offload import offload_activations
from unipar.engine.optimizer import build_optimizer
from unipar.engine.outputs import refuse_hidden_outputs
from unipar.engine.parts import WholeLosses, layers_of, mark_part, mark_whole
from unipar.engine.precision import (
    COMPUTE_DTYPES,
    PrecisionPolicy,
    has_overflowed,
    keep_scale_on_host,
    note_overflow,
    share_scale,
)
from unipar.engine.recompute import checkpoint_activations
from unipar.engine.reducer import Reducer
from unipar.engine.schedule import PassClock, Schedule, StageCall, TimedSchedule, bubble_of
from unipar.engine.seen_as_module import SeenAsModule, SeenReplica
from unipar.engine.sharded_calls import see_calls
from unipar.engine.sparse import sparse_parameters
from unipar.engine.stages import Stages
from unipar.engine.state import (
    ModelState,
    ModuleState,
    group_names,
    group_states,
    restore_groups,
)
from unipar.engine.step import StepEngine
from unipar.engine.stepper import OptimizerStepper, Stepper, Update, scale_gradients
from unipar.engine.summing import sum_shards
from unipar.engine.trail import USE_THE_SAME, Trail
from unipar.engine.transforms import (
    Undo,
    has_forward,
    has_hooks,
    modules_of_classes,
    parallelize,
    refuse_copies,
    refuse_parameter_hooks,
    refuse_shared_memory,
    repeated_blocks,
)
from unipar.engine.weights import (
    keep_weights_in_place,
    refuse_changed_weights,
    refuse_other_weights,
)

__all__ = [
    "COMPUTE_DTYPES",
    "USE_THE_SAME",
    "AbsentTensor",
    "AsDTensors",
    "ByTensor",
    "DDPReducer",
    "Division",
    "Flat",
    "LossAverage",
    "ModelState",
    "ModuleState",
    "OptimizerStepper",
    "PassClock",
    "PrecisionPolicy",
    "Reducer",
    "Schedule",
    "SeenAsModule",
    "SeenReplica",
    "Sliced",
    "StageCall",
    "Stages",
    "StepEngine",
    "Stepper",
    "TimedSchedule",
    "Trail",
    "Undo",
    "Update",
    "WholeLosses",
    "asked_for",
    "backward_pass",
    "broadcast_tensors",
    "bubble_of",
    "build_optimizer",
    "check_divisible",
    "check_float8",
    "checkpoint_activations",
    "compile_modules",
    "compute_in_float8",
    "constructor_arguments",
    "disarm",
    "flat_state",
    "float8_layers",
    "group_names",
    "group_states",
    "has_forward",
    "has_hooks",
    "has_overflowed",
    "keep_scale_on_host",
    "keep_weights_in_place",
    "layers_of",
    "mark_part",
    "mark_whole",
    "modules_of_classes",
    "note_overflow",
    "offload_activations",
    "parallelize",
    "refuse_changed_weights",
    "refuse_copies",
    "refuse_hidden_outputs",
    "refuse_inner_gradients",
    "refuse_other_weights",
    "refuse_parameter_hooks",
    "refuse_shared_memory",
    "repeated_blocks",
    "replace_forward",
    "restore_groups",
    "scale_gradients",
    "see_calls",
    "share_buffers",
    "share_hooks",
    "share_scale",
    "sparse_parameters",
    "sum_shards",
    "with_divisible_optimizer",
    "with_same_choice",
]
