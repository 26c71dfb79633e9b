"""``unipar train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from unipar.errors import ConfigError
from unipar.utils.garbage_collection import no_collection

if TYPE_CHECKING:
    from unipar.config.settings import Settings

Switch = Parameter(negative="")


def train(
    run: Path,
    *,
    strategy: str | None = None,
    launcher: str | None = None,
    devices: str | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    precision: str | None = None,
    resume: str | None = None,
    output_dir: Path | None = None,
    set_: Annotated[tuple[str, ...], Parameter(name="--set", negative="")] = (),
    dry_run: Annotated[bool, Switch] = False,
    quiet: Annotated[bool, Switch] = False,
    verbose: Annotated[bool, Switch] = False,
) -> None:
    """Train what a run file describes.

    Settings come from the file, then the environment (UNIPAR_STEPS=10,
    UNIPAR_CHECKPOINT__KEEP_LAST=3), then flags; later ones win.

    Args:
        run: the run file, YAML or TOML.
        strategy: which framework runs it, such as ddp or fsdp:sharding=hybrid.
        launcher: what starts the processes, such as slurm:partition=gpu.
        devices: processes on each machine, or auto.
        steps: optimizer steps in all.
        epochs: passes over the data.
        precision: fp32, bf16, fp16 or fp8.
        resume: auto, or the path or the URL of a checkpoint.
        output_dir: where the run's files go.
        set_: any key of the run file, as key.sub=value; may be repeated.
        dry_run: print the resolved run and start nothing. What the run file names is imported all
            the same, which runs that code.
        quiet: show warnings and errors only.
        verbose: show debug messages, and tracebacks of errors.
    """
    if quiet and verbose:
        raise ConfigError("--quiet and --verbose were both given; give one of them.")
    with no_collection():
        from unipar.config.settings import load_settings
        from unipar.train.fit import fit
        from unipar.utils.documents import parse_value

    flags: dict[str, Any] = {
        "strategy": strategy,
        "launcher": launcher,
        "devices": None if devices is None else parse_value(devices),
        "steps": steps,
        "epochs": epochs,
        "precision": precision,
        "resume": resume,
        "output_dir": output_dir,
    }
    if quiet:
        flags |= {"progress": False, "log_level": "warning"}
    if verbose:
        flags |= {"log_level": "debug"}
    settings = load_settings(run, flags=flags, sets=set_)
    if dry_run:
        print(_resolved(settings), end="")
        return
    fit(**settings.run.arguments(settings.where))


def _resolved(settings: Settings) -> str:
    """The run as YAML that is itself a run file, with what follows from it in comments."""
    import yaml

    from unipar.train.dry_run import resolve_run

    plan = resolve_run(settings)
    known = "".join(f"# {key}: {value}\n" for key, value in [*plan.facts.items(), *plan.placements])
    written = yaml.safe_dump(plan.values, sort_keys=False, allow_unicode=True)
    if not plan.rendered:
        return known + written
    given = "".join(f"# {line}".rstrip() + "\n" for line in plan.rendered.splitlines())
    name = plan.values["launcher"]
    name = name if isinstance(name, str) else name["name"]
    return f"{known}{written}\n# What launcher '{name}' is to give to its system:\n#\n{given}"
