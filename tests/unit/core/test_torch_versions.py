"""What is known of versions of torch is so of the one installed, and known in one place."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard, distribute_tensor

from unipar.errors import ConfigError
from unipar.utils import torch_versions

ROOT = Path(torch_versions.__file__).parents[2]
FILES = [
    path
    for part in ("unipar", "backends/torch/unipar_torch")
    for path in sorted((ROOT / part).rglob("*.py"))
    if path != Path(torch_versions.__file__)
]
# A comparison of numbers, what makes one, or a look for parts that some versions lack.
COMPARED = re.compile(
    r"__version__\s*(?:[<>]|[=!]=)|(?:[<>]=?|[=!]=)\s*torch\.__version__|TorchVersion"
    r"|\b(?:import|from) packaging|\bhasattr\((?:torch|nn|dist|optim)\b"
)
HERE = tuple(int(number) for number in torch.__version__.split(".")[:2])


class OldRoot:
    """The root of a sharded model, after an error in its forward pass."""

    def __init__(self, *, called: bool = True) -> None:
        self.state = SimpleNamespace(
            _is_root=True if called else None,
            _state_ctx=SimpleNamespace(iter_forward_root=self if called else None),
        )

    def _get_fsdp_state(self) -> SimpleNamespace:
        return self.state


class Root(OldRoot):
    """The same of a torch that can go on after it."""

    resets = 0

    def reset_iter_state(self) -> None:
        self.resets += 1


def test_what_recovers_from_a_failed_forward_pass() -> None:
    root = Root()
    with pytest.raises(MemoryError), torch_versions.recovering(root, "fsdp"):
        raise MemoryError
    assert root.resets == 1
    with (
        pytest.raises(ConfigError, match=r"'fsdp' torch .* Give numbers, or use torch 2\.13"),
        torch_versions.recovering(OldRoot(), "fsdp"),
    ):
        pass


def test_passes_that_failed_are_forgotten_or_end_the_run() -> None:
    root, uncalled = Root(), Root(called=False)
    torch_versions.reset_passes(root, "fsdp")
    torch_versions.reset_passes(uncalled, "fsdp")
    assert (root.resets, uncalled.resets) == (1, 0)
    torch_versions.reset_passes(OldRoot(called=False), "fsdp")
    with pytest.raises(ConfigError, match=r"'fsdp' torch .* or use torch 2\.13"):
        torch_versions.reset_passes(OldRoot(), "fsdp")


def test_the_version_that_is_named_has_it() -> None:
    if HERE >= (2, 13):
        assert hasattr(FSDPModule, "reset_iter_state")
    if HERE <= (2, 11):
        assert not hasattr(FSDPModule, "reset_iter_state")


def test_float8_is_refused_where_torchao_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if HERE >= (2, 11):
        torch_versions.check_torchao()
    monkeypatch.delattr(torch.nn.functional, "ScalingType", raising=False)
    with pytest.raises(ConfigError, match=r"imported under torch .* Use torch 2\.11"):
        torch_versions.check_torchao()


def test_pipelines_that_split_backward_passes_are_refused_where_gradients_are_others() -> None:
    if HERE >= (2, 13):
        torch_versions.check_split_passes("zero-bubble")
    if HERE <= (2, 11):
        with pytest.raises(ConfigError, match=r"'zero-bubble' .*'1f1b' .*use torch 2\.13"):
            torch_versions.check_split_passes("zero-bubble")


def test_dtensors_keep_arguments_apart() -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        if HERE >= (2, 11):
            torch_versions.check_arguments_kept(tensor)
        if HERE <= (2, 8):
            with pytest.raises(RuntimeError, match=r"take arguments .* torch 2\.11 do not"):
                torch_versions.check_arguments_kept(tensor)
    finally:
        dist.destroy_process_group()


@pytest.mark.extra
@pytest.mark.skipif(HERE >= (2, 11), reason="torch 2.11 and newer need nothing done")
def test_model_functions_may_import_torchs_compiler_on_the_meta_device() -> None:
    script = """
        import sys
        from unipar.utils.torch_versions import meta_device
        assert "torch._dynamo" not in sys.modules
        with meta_device():
            import torch._dynamo
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)


def test_no_other_file_compares_versions_of_torch() -> None:
    assert len(FILES) > 100
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in FILES
        for line in path.read_text().splitlines()
        if COMPARED.search(line)
    ]
    assert not found
