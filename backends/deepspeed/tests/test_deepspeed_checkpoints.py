"""DeepSpeed goes on from what others have saved, and others from what it has."""

from __future__ import annotations

from unipar.testing.checkpoints import checkpoint_tests
from unipar.testing.portability import Where

PLACES = [
    *(Where("single", 1), Where("ddp", 4), Where("fsdp", 2)),
    Where("deepspeed:stage=0", 2),
    Where("zero1", 4),
    Where("zero2:round_robin_gradients=true", 2),
    Where("zero2:offload_optimizer=true", 1),
    Where("zero3:persistence_threshold=0", 4),
    Where("zero3:persistence_threshold=50,sub_group_size=300", 2),
]

(
    test_resumes_what_its_neighbor_has_saved,
    test_resumes_what_any_other_has_saved,
) = checkpoint_tests(PLACES)
