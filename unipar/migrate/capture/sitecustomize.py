"""Records the losses of a run that does not know of it: on the path of each of its processes.

Python imports a module of this name when it starts. It waits for torch to be imported, seeds the
generators, and notes the value of every tensor on which ``backward()`` is called, without the
factor by which fp16 scales it, until a number of them is reached, with steps of the optimizer among
them, and the process ends. Frameworks
average over ranks what they compute, and unipar's engines sum it, so a rank's part of such a sum is
noted as what it would be in an average. Only the standard library is used before torch is there.
"""

import atexit
import fcntl
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import threading
import time


class _Finder(importlib.abc.MetaPathFinder):
    """Lets some modules be imported as always, and acts once they are."""

    def find_spec(self, name, path=None, target=None):
        act = _ACTS.pop(name, None)
        if act is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                act(module)

            spec.loader.exec_module = exec_module  # pyright: ignore[reportAttributeAccessIssue]
        return spec


def _compile_nothing(ops):
    # DeepSpeed compiles this on CPUs when it is first used, for minutes; sums are the same without.
    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _record(torch):
    import random

    threading.Thread(target=_end_with_the_proof, daemon=True).start()
    seed, wanted = int(os.environ["UNIPAR_CAPTURE_SEED"]), int(os.environ["UNIPAR_CAPTURE_STEPS"])
    random.seed(seed)
    torch.manual_seed(seed)
    backward = torch.Tensor.backward
    losses, facts, weights = [], {"drawn": False, "stepped": 0}, _Weights(torch)

    def recording(self, *args, **kwargs):
        enough = facts["stepped"] >= _STEPS or len(losses) >= wanted + _MORE
        if len(losses) >= wanted and enough:
            # Every rank comes here after as many steps, so none waits for another.
            raise SystemExit(0)
        facts.update(weights.seen(self))
        if not losses:
            facts.update(_circumstances(torch, self))
        facts["drawn"] = facts["drawn"] or _drawn(torch)
        value = self.item() if self.numel() == 1 else self.sum().item()
        losses.append(value / _scale_of(self.grad_fn) * _SUMS.factor(len(losses)))
        _write(torch, losses, facts)
        return backward(self, *args, **kwargs)

    _SUMS.counted = lambda: _write(torch, losses, facts)
    _SUMS.losses = losses
    torch.Tensor.backward = recording
    _note_scale(torch.amp.GradScaler, "scale", lambda scaler: scaler.get_scale())
    # Seen with torch 2.13: a gloo thread that lets go of a tensor while the interpreter ends aborts
    # the process. Scripts whose last act is a collective end so now and then; with a moment
    # without the GIL the thread is done before.
    atexit.register(time.sleep, _MOMENT)
    if torch.distributed.is_available():
        destroy = torch.distributed.destroy_process_group

        def destroying(group=None):
            # And of a group that is destroyed, DDP holds the last reference: it waits with the GIL
            # for that thread, which waits for the GIL, if the script drops its model thereafter.
            time.sleep(_MOMENT)
            destroy(group)

        torch.distributed.destroy_process_group = destroying


def _circumstances(torch, loss):
    """What a loss is computed on, and in which formats; and with which versions."""
    device = loss.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name(loss.device)
    formats = {loss.dtype}
    for node in _graph(loss):
        formats |= {one.dtype for one in getattr(node, "_input_metadata", ())}
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in _FRAMEWORKS}
    return {
        "device": device,
        "alone": _alone(),
        "formats": sorted(str(one).removeprefix("torch.") for one in formats),
        "versions": {
            "Python": ".".join(map(str, sys.version_info[:3])),
            **{name: str(found) for name, found in loaded.items() if found is not None},
        },
    }


def _alone():
    """Whether Accelerate lets this process, one of several, train by itself."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    processes = getattr(state, "_shared_state", {}).get("num_processes")
    return processes == 1 < int(os.environ.get("WORLD_SIZE", "1"))


def _graph(loss):
    """Every node of the graph that a loss was computed by."""
    seen, near = set(), [loss.grad_fn]
    for node in near:
        for following, _ in getattr(node, "next_functions", ()):
            if following is not None and following not in seen:
                seen.add(following)
                near.append(following)
    return near


class _Weights:
    """The weights that losses are computed from, and the steps that change them."""

    def __init__(self, torch):
        self._torch, self._stepped, self._steps = torch, False, -1
        self._first, self._last = {}, {}
        optimizers = importlib.import_module("torch.optim.optimizer")
        optimizers.register_optimizer_step_post_hook(self._note)

    def _note(self, *_):
        self._stepped = True

    def seen(self, loss):
        """After how many steps a loss comes, and how far norms of weights are from the first."""
        now = dict(self._norms(loss))
        changed = any(now[one] != self._last.get(one, now[one]) for one in now)
        if self._stepped or changed or self._steps < 0:
            # Steps before the first loss are none that it could show.
            self._steps += 1
        self._stepped, self._last = False, {**self._last, **now}
        self._first = {**now, **self._first}
        moved = [abs(self._last[one] / was - 1) for one, was in self._first.items() if was]
        return {"stepped": self._steps, "moved": max(moved) if moved else None}

    def _norms(self, loss):
        for node in _graph(loss):
            one = getattr(node, "variable", None)
            # What strategies divide is not there, or of a class of its own.
            if one is None or type(one) is not self._torch.nn.Parameter or not _is_there(one):
                continue
            wide = self._torch.float32 if one.device.type == "mps" else self._torch.float64
            yield one, self._torch.linalg.vector_norm(one.detach(), dtype=wide).item()


def _is_there(weight):
    held = weight.untyped_storage().size()
    return held >= weight.numel() * weight.element_size() > 0


def _seed_numpy(numpy):
    importlib.import_module("numpy.random").seed(int(os.environ["UNIPAR_CAPTURE_SEED"]))


def _drawn(torch):
    """Return whether a GPU has drawn random numbers since it was seeded."""
    # The state is the seed and how much was drawn, of eight bytes each.
    states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return any(bool(state[8:].any()) for state in states)


def _note_scale(owner, name, factor):
    """Let the method of a scaler note by what it has multiplied the losses that it gives back."""
    scale = getattr(owner, name)

    def noting(self, given):
        # One framework may hand another a loss that it has scaled.
        before = _scale_of(getattr(given, "grad_fn", None))
        found = scale(self, given)
        for one in found if isinstance(found, (list, tuple)) else (found,):
            if getattr(one, "grad_fn", None) is not None and one is not given:
                one.grad_fn.metadata[_SCALE] = factor(self) * before
        return found

    setattr(owner, name, noting)


class _Sums:
    """What makes a rank's part of an engine's sum its part of an average.

    How many items the sum is over is known when the step ends: until then it is as many as in the
    step before, and what was noted so is put right.
    """

    def __init__(self):
        self.losses, self.counted = [], lambda: None
        self._next, self._counts, self._open = None, {}, []

    def note(self, average):
        add, finish = average.add, average.finish

        def adding(own, *args):
            # The backward pass of what is added comes next.
            self._next = own
            return add(own, *args)

        def finishing(own):
            found = finish(own)
            count = found[1]
            if count:
                for one, index, assumed in self._open:
                    if one is own:
                        self.losses[index] *= assumed / count
                self._counts[own] = count
                self.counted()
            self._open = [one for one in self._open if one[0] is not own]
            return found

        average.add, average.finish = adding, finishing

    def factor(self, index):
        average, self._next = self._next, None
        if average is None:
            return 1
        count = self._counts.get(average) or average.normalizer
        self._open.append((average, index, count))
        return average.world.data_size * average.normalizer / count


def _scale_of(node):
    """What the loss of an autograd node, or what it was made of, was scaled by."""
    # Behind the scaling stand at most the sums and divisions of a script, not a model.
    near = [node]
    for one in near:
        noted = getattr(one, "metadata", {})
        if _SCALE in noted:
            return noted[_SCALE]
        if one is not None and len(near) < _NEAR:
            near += [following for following, _ in one.next_functions]
    return 1.0


def _end_with_the_proof():
    # Whoever waits for the losses holds a lock on this directory until it ends, however it does.
    while _held(os.environ["UNIPAR_CAPTURE_LOCK"]):
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def _held(directory):
    try:
        lock = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _write(torch, losses, facts):
    rank = os.environ.get("HOROVOD_RANK", "0")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
    path = os.path.join(os.environ["UNIPAR_CAPTURE_DIR"], f"{rank}.json")
    with open(path, "w") as file:
        json.dump({"losses": losses, **facts}, file)


_SCALE, _NEAR = "unipar-scale", 64
_STEPS, _MORE = 3, 400
"""Steps that losses are to come after, and losses that are waited for them."""
_MOMENT = 0.2
"""Seconds in which a gloo thread lets go of the tensors of collectives that are done."""
_FRAMEWORKS = ("torch", "accelerate", "colossalai", "deepspeed", "horovod", "lightning",
               "lightning_fabric", "transformers")  # fmt: skip
_SUMS = _Sums()
_ACTS = {
    "numpy": _seed_numpy,
    "torch": _record,
    "unipar.engine.average": lambda module: _SUMS.note(module.LossAverage),
    "torch.distributed.fsdp.sharded_grad_scaler": lambda module: _note_scale(
        module.ShardedGradScaler, "scale", lambda scaler: scaler.get_scale()
    ),
    "deepspeed.ops": _compile_nothing,
    "deepspeed.runtime.fp16.loss_scaler": lambda module: _note_scale(
        module.LossScalerBase, "scale_loss", lambda scaler: scaler.loss_scale
    ),
}

if "UNIPAR_CAPTURE_DIR" in os.environ:
    sys.meta_path.insert(0, _Finder())
    # What an interpreter has that did not start with this.
    for _name in [name for name in _ACTS if name in sys.modules]:
        _ACTS.pop(_name)(sys.modules[_name])
    # This one stands before another of its name, which the script would have run with.
    _here = os.path.dirname(os.path.abspath(__file__))
    _others = [entry for entry in sys.path if os.path.abspath(entry) != _here]
    _hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
    if _hidden is not None and _hidden.loader is not None:
        _hidden.loader.exec_module(importlib.util.module_from_spec(_hidden))
