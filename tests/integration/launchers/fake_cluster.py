"""As much of a Kubernetes cluster with Kubeflow Trainer as a client sees, on this machine.

Its objects go through the typed models of Kubeflow's SDK, so that what these do not know is
refused, as a cluster does. A TrainJob of one node is a process of this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kubeflow_trainer_api import models

API = "/apis/trainer.kubeflow.org/v1alpha1"
NAMESPACE = "team"
RUNTIME = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "ClusterTrainingRuntime",
    "metadata": {
        "name": "torch-distributed",
        "labels": {"trainer.kubeflow.org/framework": "torch"},
    },
    "spec": {
        "mlPolicy": {"numNodes": 1, "torch": {}},
        "template": {
            "spec": {
                "replicatedJobs": [
                    {
                        "name": "node",
                        "template": {
                            "metadata": {
                                "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
                            },
                            "spec": {
                                "template": {
                                    "spec": {"containers": [{"name": "node", "image": "torch"}]}
                                }
                            },
                        },
                    }
                ]
            }
        },
    },
}


class FakeCluster:
    """An API server, and what runs its jobs."""

    def __init__(self, directory: Path) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.processes: dict[str, subprocess.Popen] = {}
        self.refuses = ""
        self.directory = directory
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def _say(self, code: int, body: Any) -> None:
                data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self._say(*cluster.get(self.path.split("?")[0]))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._say(*cluster.create(body))

            def do_DELETE(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                self.rfile.read(length)
                self._say(*cluster.delete(self.path.rsplit("/", 1)[1]))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.config = directory / "kube-config"
        user = {"name": "me", "user": {}}
        server = f"http://127.0.0.1:{self.server.server_port}"
        self.config.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "here",
                    "contexts": [
                        {
                            "name": "here",
                            "context": {"cluster": "c", "user": "me", "namespace": NAMESPACE},
                        }
                    ],
                    "clusters": [{"name": "c", "cluster": {"server": server}}],
                    "users": [user],
                }
            )
        )

    def close(self) -> None:
        for name in list(self.processes):
            self._end(name)
        self.server.shutdown()
        self.server.server_close()

    # -- what a client asks ----------------------------------------------------------------------

    def get(self, path: str) -> tuple[int, Any]:
        if path == f"{API}/clustertrainingruntimes/torch-distributed":
            return 200, RUNTIME
        if path.startswith(f"{API}/namespaces/{NAMESPACE}/trainjobs/"):
            name = path.rsplit("/", 1)[1]
            return (200, self._job(name)) if name in self.jobs else self._absent()
        if path == f"/api/v1/namespaces/{NAMESPACE}/pods":
            return 200, {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": []}
        return self._absent()

    def create(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.refuses:
            return 403, {"kind": "Status", "message": self.refuses, "code": 403}
        job = models.TrainerV1alpha1TrainJob.from_dict(body)
        assert job is not None
        assert job.to_dict() == body
        name = body["metadata"]["name"]
        body["metadata"] |= {
            "namespace": NAMESPACE,
            "creationTimestamp": datetime.now(timezone.utc).isoformat(),
        }
        self.jobs[name] = body
        self._start(name, body["spec"]["trainer"])
        return 201, body

    def delete(self, name: str) -> tuple[int, Any]:
        self._end(name)
        return 200, self.jobs.pop(name)

    def _absent(self) -> tuple[int, Any]:
        return 404, {"kind": "Status", "message": "not found", "code": 404}

    # -- what a node does ------------------------------------------------------------------------

    def _start(self, name: str, trainer: dict[str, Any]) -> None:
        torchrun, *command = trainer["command"]
        assert torchrun == "torchrun"
        assert trainer["numNodes"] == 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        python = [sys.executable if word == "python" else word for word in command]
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *python, *trainer["args"]],
            # As Trainer tells torchrun about its nodes.
            env=os.environ
            | {
                "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
                "PET_NNODES": "1",
                "PET_NODE_RANK": "0",
                "PET_MASTER_ADDR": "127.0.0.1",
                "PET_MASTER_PORT": str(port),
                **{one["name"]: one["value"] for one in trainer["env"]},
            },
            cwd=self.directory,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _end(self, name: str) -> None:
        process = self.processes.pop(name)
        if process.poll() is None:
            # By which torchrun ends its workers, that are in groups of their own.
            process.terminate()
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def _job(self, name: str) -> dict[str, Any]:
        job = dict(self.jobs[name])
        code = self.processes[name].poll()
        if code is not None:
            kind = "Failed" if code else "Complete"
            now = datetime.now(timezone.utc).isoformat()
            condition = {
                "type": kind,
                "status": "True",
                "reason": "x",
                "message": "",
                "lastTransitionTime": now,
            }
            job["status"] = {"conditions": [condition]}
        return job
