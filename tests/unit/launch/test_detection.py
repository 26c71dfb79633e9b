"""What each launcher's variables say about a process, and what is wrong with them."""

from __future__ import annotations

import re

import pytest

from unipar.errors import ConfigError
from unipar.launch import detect

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_NODELIST": "gpu[003-007,9],login",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-1234@1",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


def test_a_plain_process_has_no_launcher():
    assert detect({}) is None
    assert detect({"MASTER_ADDR": "node0", "WORLD_SIZE": "8"}) is None


def test_torchrun():
    placement = detect(TORCHRUN)
    assert placement is not None
    assert (placement.rank, placement.size) == (5, 8)
    assert (placement.local_rank, placement.local_size) == (1, 4)
    assert (placement.node_rank, placement.num_nodes) == (1, 2)
    assert (placement.init_method, placement.restart) == ("env://", 2)


def test_the_least_that_torchrun_must_set_on_one_machine():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    variables = {name: TORCHRUN[name] for name in names} | {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
    }
    placement = detect(variables)
    assert placement is not None
    assert (placement.local_size, placement.num_nodes, placement.node_rank) == (2, 1, 0)


@pytest.mark.parametrize(
    "name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
)
def test_a_variable_of_torchrun_that_is_missing_is_named(name):
    with pytest.raises(ConfigError, match=rf"torchrun .*, but {name} is not set.*unset"):
        detect(without(TORCHRUN, name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "RANK=8, but WORLD_SIZE=8: .* at most 7"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4, but LOCAL_WORLD_SIZE=4"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'.* is not a whole number from 0 on.*unset"),
        ({"RANK": "-1"}, "RANK='-1'.* is not a whole number from 0 on.*unset"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0, but .* at least 1.*unset"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=4 is more than WORLD_SIZE=2"),
    ],
)
def test_contradictions_in_torchruns_variables_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        detect(TORCHRUN | change)


@pytest.mark.parametrize("port", ["abc", "0", "65536", "99999", "-1", "29500 ", "9" * 5000])
@pytest.mark.parametrize("variables", [TORCHRUN, OPENMPI, PMI, SLURM])
def test_what_is_no_port_is_named(variables, port):
    with pytest.raises(ConfigError, match=rf"MASTER_PORT='{port}' .* from 1 to 65535.*free on"):
        detect(variables | {"MASTER_ADDR": "node0", "MASTER_PORT": port})


@pytest.mark.parametrize("host", ["node0:29500", "tcp://node0", "a host", "[::1]"])
@pytest.mark.parametrize("variables", [TORCHRUN, OPENMPI, PMI, SLURM])
def test_what_is_no_host_is_named(variables, host):
    with pytest.raises(ConfigError, match=rf"MASTER_ADDR='{re.escape(host)}' is neither"):
        detect(variables | {"MASTER_ADDR": host, "MASTER_PORT": "29500"})


@pytest.mark.parametrize("host", ["node0", "10.0.0.1", "node_0.a-cluster", "::1", "fe80::1%eth0"])
def test_names_and_addresses_of_hosts_are_taken(host):
    placement = detect(OPENMPI | {"MASTER_ADDR": host, "MASTER_PORT": "65535"})
    assert placement is not None
    shown = f"[{host}]" if ":" in host else host
    assert placement.init_method == f"tcp://{shown}:65535"


def test_srun():
    placement = detect(SLURM)
    assert placement is not None
    assert (placement.rank, placement.size) == (5, 7)
    assert (placement.local_rank, placement.local_size) == (1, 3)
    assert (placement.node_rank, placement.num_nodes) == (1, 2)
    assert placement.init_method is not None
    assert placement.init_method.startswith("tcp://gpu003:")
    port = int(placement.init_method.rpartition(":")[2])
    assert 15000 <= port < 30000


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node7", "node7"),
        ("a1,a2", "a1"),
        ("a[1,4-6],b2", "a1"),
        ("rack[1-2]n[08-12]", "rack1n08"),
        ("gpu[010].cluster", "gpu010.cluster"),
    ],
)
def test_the_first_host_of_a_slurm_list(nodes, host):
    placement = detect(SLURM | {"SLURM_JOB_NODELIST": nodes})
    assert placement is not None
    assert str(placement.init_method).startswith(f"tcp://{host}:")


def test_every_rank_of_a_step_meets_at_one_port_and_two_steps_at_two():
    def meet(**change):
        placement = detect(SLURM | change)
        assert placement is not None
        return placement.init_method

    assert meet() == meet(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")
    assert len({meet(), meet(SLURM_STEP_ID="1"), meet(SLURM_JOB_ID="4712")}) == 3
    assert meet(MASTER_ADDR="h", MASTER_PORT="29500") == "tcp://h:29500"


def test_the_repeats_of_slurms_task_counts_are_expanded():
    placement = detect(
        SLURM
        | {"SLURM_NNODES": "3", "SLURM_NODEID": "2", "SLURM_NTASKS": "11"}
        | {"SLURM_TASKS_PER_NODE": "4(x2),3"}
    )
    assert placement is not None
    assert placement.local_size == 3


@pytest.mark.parametrize(
    "variables",
    [
        SLURM | {"SLURM_NTASKS": "1"},
        without(SLURM, "SLURM_STEP_ID") | {"ENVIRONMENT": "BATCH"},
        SLURM | {"SLURM_PTY_PORT": "1234"},
        without(SLURM, "SLURM_PROCID"),
    ],
    ids=["one task", "batch script", "interactive shell", "allocation only"],
)
def test_slurm_processes_without_peers_are_plain(variables):
    assert detect(variables) is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (without(SLURM, "SLURM_LOCALID"), "srun .* SLURM_LOCALID is not set"),
        (without(SLURM, "SLURM_NODEID"), "srun .* SLURM_NODEID is not set"),
        (without(SLURM, "SLURM_JOB_NODELIST"), "SLURM_STEP_NODELIST or SLURM_JOB_NODELIST"),
        (SLURM | {"SLURM_PROCID": "7"}, "SLURM_PROCID=7, but SLURM_NTASKS=7"),
        (SLURM | {"SLURM_TASKS_PER_NODE": "4,4"}, "gives 8 tasks on 2 nodes, but SLURM_NTASKS=7"),
        (SLURM | {"SLURM_TASKS_PER_NODE": "4+3"}, "'4[+]3' cannot be read"),
    ],
)
def test_what_is_wrong_with_slurms_variables_is_named(variables, message):
    with pytest.raises(ConfigError, match=message):
        detect(variables)


def test_mpirun_on_one_node_meets_in_a_file_of_the_job(tmp_path):
    placement = detect(OPENMPI | {"PMIX_SERVER_TMPDIR": str(tmp_path)})
    assert placement is not None
    assert (placement.rank, placement.size, placement.local_size) == (1, 2, 2)
    assert str(placement.init_method).startswith(f"file://{tmp_path}/unipar-")
    assert str(placement.init_method).endswith("prterun-host-1234@1")


def test_mpirun_on_several_nodes_needs_a_meeting_point():
    several = OPENMPI | {"OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(ConfigError, match=r"mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500"):
        detect(several)
    placement = detect(several | {"MASTER_ADDR": "h", "MASTER_PORT": "29500"})
    assert placement is not None
    assert (placement.init_method, placement.num_nodes) == ("tcp://h:29500", 2)


def test_pmi():
    with pytest.raises(ConfigError, match="mpirun -genv MASTER_ADDR HOST"):
        detect(PMI)
    placement = detect(PMI | {"MASTER_ADDR": "h", "MASTER_PORT": "29500"})
    assert placement is not None
    assert (placement.rank, placement.size, placement.local_rank) == (1, 2, 1)


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        (without(OPENMPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE"),
        (without(OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK"), "OMPI_COMM_WORLD_LOCAL_RANK"),
        (without(PMI, "PMI_SIZE"), "PMI_SIZE"),
        (without(PMI, "MPI_LOCALNRANKS"), "MPI_LOCALNRANKS or PMI_LOCAL_SIZE"),
    ],
)
def test_a_variable_of_mpirun_that_is_missing_is_named(variables, name):
    with pytest.raises(ConfigError, match=rf"mpirun .*, but {name} is not set"):
        detect(variables)


def test_the_innermost_launcher_wins():
    inner = detect(SLURM | PMI | TORCHRUN)
    assert inner is not None
    assert inner.size == 8
    mpi = detect(SLURM | OPENMPI)
    assert mpi is not None
    assert mpi.size == 2
    srun = detect(SLURM | PMI | {"PMI_RANK": "5", "PMI_SIZE": "7"})
    assert srun is not None
    assert (srun.size, srun.local_size) == (7, 3)
