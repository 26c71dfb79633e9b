"""``kubernetes``: a TrainJob of Kubeflow Trainer, by its SDK."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import psutil

from unipar.errors import ConfigError, UniparError
from unipar.launchers.base import LauncherOptions, SubmittingLauncher
from unipar.launchers.command import held
from unipar.launchers.handle import Handle, Status
from unipar.launchers.shared import LAST_LINES, SharedHandle, SharedRun
from unipar.launchers.task import Task
from unipar.strategy import Availability

_MODULE = "unipar.launch.worker"
_VOLUME = "unipar"
# What a cluster takes to end pods that were asked to; its own default is thirty seconds.
_DELETED = 60.0
# Without an answer of the cluster.
_PATIENCE = 300.0
# Kubernetes, RFC 1123 labels: at most 63 characters, of which pods and services need some.
_LONGEST_NAME = 40


class KubernetesOptions(LauncherOptions, frozen=True):
    """Options of ``kubernetes``."""

    launcher: ClassVar[str] = "kubernetes"

    backend: Literal["cluster", "local"] = "cluster"
    """A cluster, or the SDK's processes on this machine, by which a script is tried out."""
    image: str | None = None
    """The container image, with unipar, torch and the strategy's framework in the versions of this
    environment; left out: the runtime's."""
    claim: str | None = None
    """A PersistentVolumeClaim that all pods can write to; a cluster needs one."""
    mount: Path | None = None
    """Where pods mount it; the same path has to lead there on this machine, and output_dir has to
    be below it."""
    namespace: str | None = None
    """Left out: that of the current context."""
    context: str | None = None
    """A context of the kube-config; left out: the current one."""
    runtime: str = "torch-distributed"
    """The ClusterTrainingRuntime, or the TrainingRuntime of the namespace."""
    runtime_kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = "ClusterTrainingRuntime"
    """Which of the two it is."""
    resources: Mapping[str, str | int] = {}
    """What each node's pod asks for and is limited to, such as `cpu: 8`, `memory: 64Gi`; GPUs are
    added where device is cuda."""
    env: Mapping[str, str] = {}
    """Variables of the pods' environment."""
    pods: Mapping[str, Any] = {}
    """More of their specification, in the fields of Kubeflow Trainer's PodSpecPatch, such as
    `nodeSelector`, `tolerations`, `serviceAccountName`."""


class KubernetesLauncher(SubmittingLauncher):
    """Makes a TrainJob whose pods start one process for each device by ``torchrun``."""

    options_type = KubernetesOptions

    @property
    def elsewhere(self) -> bool:
        return self.options.backend == "cluster"

    @classmethod
    def availability(cls) -> Availability:
        if importlib.util.find_spec("kubeflow") is None:
            remedy = 'Install it: pip install "unipar[kubernetes]".'
            return Availability(False, "Kubeflow Trainer's SDK is not installed", remedy)
        return Availability(True)

    def check(self, devices: int, num_nodes: int, device_type: str) -> None:
        options = self.options
        if options.backend == "local":
            if num_nodes > 1:
                raise ConfigError(
                    f"num_nodes={num_nodes}, and launcher 'kubernetes:backend=local' starts "
                    "processes on this machine alone."
                )
            return
        missing = [name for name in ("claim", "mount") if getattr(options, name) is None]
        if missing:
            raise ConfigError(
                "launcher 'kubernetes' needs a volume that all pods can write to, for what they "
                f"run, checkpoints and results: set {' and '.join(missing)}, such as launcher="
                "{'name': 'kubernetes', 'claim': 'shared', 'mount': '/mnt/shared'}, and output_dir "
                "below that."
            )
        unknown = sorted(set(options.pods) & {"volumes", "containers"})
        if unknown:
            raise ConfigError(
                f"launcher 'kubernetes': pods.{unknown[0]} is set by unipar. Set what else a pod "
                "needs in a TrainingRuntime of your own, and name it by runtime."
            )

    def rendered(self, task: Task) -> str:
        if self.options.backend == "local":
            return ""
        import yaml

        self._check_reach(task)
        return yaml.safe_dump(self.manifest(task), sort_keys=False)

    def manifest(self, task: Task) -> dict[str, Any]:
        """The TrainJob of a task, as the SDK's typed models have it.

        Raises:
            ConfigError: these refuse it.
        """
        from kubeflow_trainer_api import models
        from pydantic import ValidationError

        options = self.options
        try:
            job = models.TrainerV1alpha1TrainJob.from_dict(
                {
                    "apiVersion": "trainer.kubeflow.org/v1alpha1",
                    "kind": "TrainJob",
                    "metadata": {"name": _label(task)},
                    "spec": {
                        "runtimeRef": {"name": options.runtime, "kind": options.runtime_kind},
                        "trainer": self._trainer(task),
                        "runtimePatches": [self._patch()],
                    },
                }
            )
        except ValidationError as error:
            raise ConfigError(
                f"launcher 'kubernetes': the TrainJob is not one that Kubeflow Trainer takes: "
                f"{error}"
            ) from error
        assert job is not None
        return job.to_dict()

    def _trainer(self, task: Task) -> dict[str, Any]:
        resources = {name: str(amount) for name, amount in self.options.resources.items()}
        if task.device_type == "cuda":
            resources.setdefault("nvidia.com/gpu", str(task.devices))
        trainer: dict[str, Any] = {
            "numNodes": task.num_nodes,
            "numProcPerNode": task.devices,
            # The runtime says by variables where nodes meet, which torchrun reads.
            "command": ["torchrun", "--no-python", "python", "-u", "-m", _MODULE],
            "args": [str(task.directory)],
            "env": [{"name": name, "value": text} for name, text in self.options.env.items()],
        }
        if self.options.image is not None:
            trainer["image"] = self.options.image
        if resources:
            trainer["resourcesPerNode"] = {"requests": resources, "limits": resources}
        return trainer

    def _patch(self) -> dict[str, Any]:
        options = self.options
        claim = {"claimName": options.claim}
        mount = {"name": _VOLUME, "mountPath": str(options.mount)}
        pod = {
            **options.pods,
            "volumes": [{"name": _VOLUME, "persistentVolumeClaim": claim}],
            "containers": [{"name": "node", "volumeMounts": [mount]}],
        }
        job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
        return {
            "manager": "unipar/launcher",
            "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
        }

    def start(self, task: Task) -> Handle:
        if self.options.backend == "local":
            return LocalJob(task)
        self._check_reach(task)
        return TrainJob(task, self.manifest(task), self._client())

    def _check_reach(self, task: Task) -> None:
        """Refuse a directory that pods could not reach."""
        mount = self.options.mount
        if not task.directory.is_relative_to(mount):
            raise ConfigError(
                f"launcher 'kubernetes': output_dir is not below mount='{mount}', so pods could "
                f"not reach {task.directory}. Set output_dir='{mount}/…'."
            )

    def _client(self) -> Any:
        """The SDK's client of the cluster.

        Raises:
            ConfigError: there is no cluster, or it cannot be reached.
        """
        from kubeflow.trainer import KubernetesBackendConfig, TrainerClient
        from kubernetes.config import ConfigException

        options = self.options
        try:
            with _quiet():
                config = KubernetesBackendConfig(
                    namespace=options.namespace, context=options.context
                )
                client = TrainerClient(config)
                client.get_runtime(options.runtime)
                return client
        except ConfigException as error:
            raise ConfigError(
                f"launcher 'kubernetes': no cluster is configured here: {error}. `kubectl config "
                "get-contexts` lists those that are; choose one by context."
            ) from error
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise ConfigError(
                f"launcher 'kubernetes': the runtime '{options.runtime}' cannot be had from the "
                f"cluster: {error}: {_root(error)}. `kubectl get clustertrainingruntimes` lists "
                "those that are there."
            ) from error


class TrainJob(SharedHandle):
    """A TrainJob of a cluster.

    Args:
        task: what it runs.
        manifest: of the TrainJob.
        client: the SDK's.

    Raises:
        ConfigError: the cluster refuses it.
    """

    outlives: ClassVar[bool] = True
    poll: ClassVar[float] = 2.0

    def __init__(self, task: Task, manifest: dict[str, Any], client: Any) -> None:
        from kubernetes.client import ApiException

        self._run, self._client = SharedRun(task), client
        self._job = manifest["metadata"]["name"]
        self._canceled, self._last = False, Status.WAITING
        self._answered = time.monotonic()
        backend = client.backend
        self.name = f"TrainJob {backend.namespace}/{self._job}"
        group, version = manifest["apiVersion"].split("/")
        try:
            backend.custom_api.create_namespaced_custom_object(
                group, version, backend.namespace, "trainjobs", manifest
            )
        except ApiException as error:
            raise ConfigError(
                f"launcher 'kubernetes': the cluster refuses the TrainJob: {_reason(error)}"
            ) from error
        logging.getLogger("unipar").info("%s was made", self.name)

    def status(self) -> Status:
        if self._canceled:
            return Status.CANCELED
        try:
            self._last = _status(self._client.get_job(self._job).status)
        except (RuntimeError, TimeoutError) as error:
            if _missing(error):
                self._canceled = True
                return Status.CANCELED
            if time.monotonic() - self._answered > _PATIENCE:
                raise UniparError(
                    f"The cluster has not answered for {_PATIENCE:.0f} s: {_root(error)}. "
                    f"{self.name} goes on, if the cluster does; resume='auto' continues from its "
                    "newest checkpoint when it has ended."
                ) from error
        else:
            self._answered = time.monotonic()
        return self._last

    def cancel(self) -> None:
        self._client.delete_job(self._job)
        deadline = time.monotonic() + _DELETED
        while not self._canceled and time.monotonic() < deadline:
            self.status()
            time.sleep(self.poll)
        self._canceled = True

    def result(self) -> Any:
        if self._canceled:
            return self._run.result(f"{self.name} was deleted.")
        lines: list[str] = []
        with contextlib.suppress(RuntimeError, TimeoutError):
            lines = list(self._client.get_job_logs(self._job, follow=False))
        last = "\n".join(["", *lines[-LAST_LINES:]]) if lines else ""
        return self._run.result(f"{self.name} {self._last.value}.{last}")


class LocalJob(SharedHandle):
    """A job of the SDK's local processes: one that starts ``torchrun`` with this interpreter.

    Args:
        task: what it runs.

    Raises:
        ConfigError: it cannot be started.
    """

    def __init__(self, task: Task) -> None:
        from kubeflow.trainer import (
            CustomTrainer,
            LocalProcessBackendConfig,
            Runtime,
            RuntimeKind,
            RuntimeTrainer,
            TrainerClient,
            TrainerType,
        )

        self._run = SharedRun(task)
        self._canceled = False
        start = ["-m", "torch.distributed.run", "--standalone", "--no-python"]
        # Otherwise it leaves a directory in the system's place for temporary files.
        start += ["--log-dir", str(task.directory / "torchrun")]
        command = [sys.executable, *start, f"--nproc-per-node={task.devices}", *self._run.command]
        # Its standard input ends with this process.
        parameters = {"command": held(command), "caller": os.getpid()}
        self._client = TrainerClient(LocalProcessBackendConfig())
        # Not torch's: for that one the SDK installs PyTorch into an environment of its own.
        trainer = RuntimeTrainer(TrainerType.CUSTOM_TRAINER, framework="python", image="local")
        runtime = Runtime("torch-distributed", trainer, RuntimeKind.TRAINING_RUNTIME)
        self._job = self._client.train(
            runtime=runtime,
            trainer=CustomTrainer(_call, parameters, env=dict(os.environ)),
        )
        self.name = f"local TrainJob {self._job}"

    def status(self) -> Status:
        if self._canceled:
            return Status.CANCELED
        return _status(self._client.get_job(self._job).status)

    def cancel(self) -> None:
        # The SDK ends the shell that it has started, and nothing that this has started.
        family = [one for one in psutil.Process().children(recursive=True) if self._owns(one)]
        self._client.delete_job(self._job)
        self._canceled = True
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, _DELETED)

    def _owns(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return str(self._run.task.directory) in process.cmdline()
        return False

    def result(self) -> Any:
        if self._canceled:
            return self._run.result(f"{self.name} was ended.")
        text = "\n".join(self._client.get_job_logs(self._job, follow=False)).strip()
        last = "\n".join(text.splitlines()[-LAST_LINES:])
        return self._run.result(last)


def _call(parameters: dict) -> None:
    # The SDK sends the text of this function, and nothing around it. It ends nothing of what the
    # function has started, and removes its environment only where that seems to have succeeded.
    import os
    import subprocess
    import time

    process = subprocess.Popen(parameters["command"], stdin=subprocess.PIPE)
    while process.poll() is None:
        time.sleep(0.2)
        try:
            os.kill(parameters["caller"], 0)
        except ProcessLookupError:
            assert process.stdin is not None
            process.stdin.close()
    print(f"torchrun exited with status {process.returncode}.")


def _status(word: str) -> Status:
    words = {"Created": Status.WAITING, "Complete": Status.SUCCEEDED, "Failed": Status.FAILED}
    return words.get(word, Status.RUNNING)


def _label(task: Task) -> str:
    """A name for the cluster: a label that no other job has."""
    label = re.sub(r"[^a-z0-9]+", "-", task.name.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    label = label if label[:1].isalpha() else f"unipar-{label}".strip("-")
    unique = uuid.uuid5(uuid.NAMESPACE_URL, str(task.directory)).hex[:6]
    return f"{label}-{unique}-{task.restart}"


def _reason(error: Any) -> str:
    """What a cluster's answer says, without its headers."""
    with contextlib.suppress(TypeError, ValueError):
        return json.loads(error.body)["message"]
    return str(error.reason)


def _missing(error: BaseException) -> bool:
    """Whether the cluster says that there is no such object."""
    cause = error.__cause__
    return getattr(cause, "status", None) == 404


def _root(error: BaseException) -> str:
    """The error that brought another about."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".splitlines()[0]


@contextlib.contextmanager
def _quiet() -> Any:
    """Keep the SDK's warnings on versions from the terminal, and retries of a lost cluster too."""
    names = ("kubeflow", "urllib3")
    loggers = [logging.getLogger(name) for name in names]
    before = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)
