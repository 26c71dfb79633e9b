"""How Horovod gets into an environment: built from its sources against the installed torch."""

from __future__ import annotations

import os

from unipar.install import Build, Edit, Pip, Program, Recipe
from unipar.install.cache import torch_version
from unipar_horovod.installed import VERSION, local_version

_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

_EDITS = (
    Edit(
        "horovod/common/gloo/gloo_controller.cc",
        "global_ranks_.reserve(size_);",
        "global_ranks_.resize(size_);",
        "Horovod 0.28.1 leaves this list empty, so that it never tells a hang under Gloo",
    ),
    Edit(
        "horovod/common/parameter_manager.cc",
        "    Eigen::VectorXd v = TunableParameter::BestValue();\n    v[index_[variable]] = value;",
        "    if (fixed_values_.count(variable) > 0) {\n"
        "      fixed_values_[variable] = value;\n"
        "      return;\n"
        "    }\n"
        "    Eigen::VectorXd v = TunableParameter::BestValue();\n    v[index_[variable]] = value;",
        "Horovod 0.28.1 writes past this vector when it starts again after a cycle time was set",
    ),
    Edit(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 20)",
        "torch's headers need C++20",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD 20)",
        "torch's headers need C++20",
    ),
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        "import torch; from torch.utils.cpp_extension import CUDA_HOME; print(True if (",
        "import os, torch; from torch.utils.cpp_extension import CUDA_HOME; "
        "print(True if ('HOROVOD_GPU_OPERATIONS' in os.environ and ",
        "beside a CUDA build of torch it wants the CUDA toolkit, which nothing on a CPU uses",
    ),
    Edit(
        "setup.py",
        "else 'RelWithDebInfo'",
        "else 'Release'",
        "debug symbols make the wheel many times as large",
    ),
)


def recipe() -> Recipe:
    """The recipe for this environment.

    With ``HOROVOD_WITH_MPI=1`` set, MPI is built in beside Gloo.
    """
    with_mpi = os.environ.get("HOROVOD_WITH_MPI") == "1"
    mpi = Program(("mpicxx",), "libopenmpi-dev openmpi-bin")
    return Recipe(
        name="horovod",
        framework=f"Horovod {VERSION}",
        programs=(
            Program(("c++", "g++", "clang++"), "g++"),
            Program(("make",), "make"),
            *((mpi,) if with_mpi else ()),
        ),
        steps=(
            Pip(("cloudpickle", "psutil", "pyyaml", "packaging", "cffi")),
            Build(
                distribution="horovod",
                version=VERSION,
                sha256=_SHA256,
                edits=_EDITS,
                tools=("setuptools", "wheel", "packaging", "cmake>=3.18", "cffi", "pyyaml"),
                environment={
                    "HOROVOD_WITH_PYTORCH": "1",
                    "HOROVOD_WITHOUT_TENSORFLOW": "1",
                    "HOROVOD_WITHOUT_MXNET": "1",
                    "HOROVOD_WITH_GLOO": "1",
                    ("HOROVOD_WITH_MPI" if with_mpi else "HOROVOD_WITHOUT_MPI"): "1",
                    "HOROVOD_LOCAL_VERSION": local_version(torch_version()),
                    # CMake 4 refuses the minimum that Horovod's own file asks for.
                    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
                },
                sensitive=("HOROVOD_", "CMAKE_"),
                minutes=4,
            ),
        ),
    )
