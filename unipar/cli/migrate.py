"""``unipar migrate``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from unipar.errors import ConfigError
from unipar.utils.console import open_console

if TYPE_CHECKING:
    from unipar.migrate.notes import Migration
    from unipar.migrate.verify import Proof
    from unipar.migrate.writing import Program

Switch = Parameter(negative="")
Framework = Literal[
    "auto", "torch", "ddp", "fsdp", "horovod", "deepspeed", "accelerate", "colossalai", "fabric"
]
REFUSED, REMAINS, DIFFERS = 2, 1, 1
STEPS = 20


def migrate(
    paths: Annotated[tuple[Path, ...], Parameter(name="PATH", negative="")],
    /,
    *,
    output: Path | None = None,
    in_place: Annotated[bool, Switch] = False,
    force: Annotated[bool, Switch] = False,
    diff: Annotated[bool, Switch] = False,
    check: Annotated[bool, Switch] = False,
    report: Path | None = None,
    from_: Annotated[Framework, Parameter(name="--from")] = "auto",
    verify: Annotated[bool, Switch] = False,
    record: Path | None = None,
    against: Path | None = None,
    args: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    script: str | None = None,
    steps: int | None = None,
    processes: int | None = None,
) -> int:
    """Turn a training script into a unipar script, and show that it trains the same.

    The result goes beside the original (train.py: train_unipar.py; a directory: its name with
    _unipar, with its other files), with its settings in unipar.yaml. Exit code 2 means that
    something cannot be migrated safely: everything is left alone, and the reasons are listed.

    Args:
        paths: scripts, notebooks, or directories of a program's files, which are migrated together.
        output: directory for the result.
        in_place: write over the originals; wants a clean git tree, and keeps *.orig.
        force: write over what is there, and what --verify says differs.
        diff: print the changes, and write nothing.
        check: list the files that would change, and write nothing; exit code 1 where there are any.
        report: file for a report in Markdown.
        from_: what the script is written for.
        verify: run the original and the migrated script, and compare their losses; where they
            differ, nothing is written and the exit code is 1. The code of a notebook is run as a
            script, without its magics.
        record: run the original alone, and write its losses into this file, for --against on
            another machine. Nothing else is written.
        against: run the migrated script alone, as --verify, and compare its losses with those of
            this file.
        args: the script's command line, for these three.
        script: which of several files is run, where imports do not tell, likewise.
        steps: backward passes to compare, 20 unless given, and more until an optimizer has stepped
            three times; those of the record with --against.
        processes: processes of a script that a launcher starts, 2 unless given; likewise. With
            --verify of a script that runs as one process, how many the migrated one has. Refused
            for a script that starts its own.
    """
    given = [name for name, one in (("--in-place", in_place), ("--output", output)) if one]
    proofs = [name for name, one in (("--verify", verify), ("--record", record),
                                     ("--against", against)) if one]  # fmt: skip
    for names in (given, proofs, [*given[:1], "--record"] if record else []):
        if len(names) > 1:
            raise ConfigError(f"{' and '.join(names)} were both given; give one of them.")
    if not paths:
        raise ConfigError("name a script or a directory: unipar migrate train.py")
    _check_installed()
    from unipar.migrate import migrate_files
    from unipar.migrate.report import all_notes
    from unipar.migrate.report import diff as diff_of
    from unipar.migrate.writing import plan_output, read, write

    program = read(paths)
    migrations = migrate_files(
        program.files, dialect=from_, settings=program.settings, beside=program.beside
    )
    for note in all_notes(migrations):
        print(note)
    refused = any(one.refused for one in migrations.values())
    changed = any(one.changed for one in migrations.values())
    if refused:
        print("Left alone: what is refused above cannot be migrated safely.")
    elif not changed:
        print("Nothing is to be migrated.")
    if record is not None and changed:
        if record.exists() and not force:
            raise ConfigError(f"{record} is there already. Pass --force to write over it.")
        _record(program, migrations, record, script, args, steps, processes)
    elif record is not None:
        print("Nothing was recorded.")
    found = None
    if changed and record is None and not (diff or check):
        found = plan_output(
            program, migrations, output=output, in_place=in_place, force=force, script=script
        )
    proof = None
    if check:
        for name in (name for name, one in migrations.items() if one.changed):
            print(f"would change {name}")
    if diff and changed:
        print(diff_of(program.files, migrations), end="")
    if (verify or against) and changed:
        proof = _prove(program, migrations, against, script, args, steps, processes)
    differs = proof is not None and not proof.agrees
    if found is not None and (force or not differs):
        for path in write(found):
            print(f"wrote {path}")
        if found.copied:
            print(f"copied {', '.join(found.others.copied)}")
        for name, why in found.others.left_out.items():
            print(f"left out {name}: {why}")
    elif found is not None:
        print("Nothing was written. --diff shows the changes, and --force writes them anyway.")
    if report is not None:
        _write_report(report, program, migrations, proof)
    if refused:
        return REFUSED
    if differs:
        return DIFFERS
    return REMAINS if check and changed else 0


def _check_installed() -> None:
    import importlib.util

    if importlib.util.find_spec("libcst") is None:
        raise ConfigError("unipar migrate needs LibCST: pip install 'unipar[migrate]'")


def _main_file(
    program: Program, migrations: Mapping[str, Migration], script: str | None,
    processes: int | None, *, recorded: bool,
) -> tuple[str, Migration]:  # fmt: skip
    """The file that is run, and a migration that says how.

    Args:
        program: that is migrated.
        migrations: of its files.
        script: the file, if it is given.
        processes: likewise.
        recorded: whether losses of the script as it is are read from a file, or written to one.
    """
    from unipar.migrate.writing import runnable

    names = [script] if script else runnable(program) or [*migrations]
    if len(names) != 1:
        raise ConfigError(
            "several files may be what is run: say which one it is, as in --script train.py. "
            f"There are: {', '.join(names)}."
        )
    (name,) = names
    if name not in migrations:
        raise ConfigError(f"there is no {name} in {program.root}: {', '.join(migrations)}.")
    main = next(one for one in migrations.values() if one.changed)
    if recorded and processes is not None and main.launcher == "python":
        raise ConfigError(
            f"--processes has no effect on {name}: no launcher starts it, so it alone says how "
            "many processes it has. Leave --processes out, and give what the script reads: "
            "--args '...'."
        )
    return name, main


def _record(
    program: Program, migrations: Mapping[str, Migration], path: Path, script: str | None,
    args: str | None, steps: int | None, processes: int | None,
) -> None:  # fmt: skip
    from unipar.migrate import records
    from unipar.migrate.verify import PROCESSES

    name, main = _main_file(program, migrations, script, processes, recorded=True)
    with _shown(f"running {name}"):
        found = records.record(
            program.root,
            name,
            records.digests(program.files, program.settings),
            launcher=main.launcher,
            arguments=shlex.split(args or ""),
            steps=STEPS if steps is None else steps,
            processes=PROCESSES if processes is None else processes,
            launched=main.launched,
        )
    records.write(found, path)
    print(f"wrote {path}: losses of {records.ranks(found.losses)} on {found.device}")


def _shown(what: str) -> AbstractContextManager[object]:
    """Show on a terminal that a run goes on."""
    from rich.text import Text

    return open_console(stderr=True).status(Text(f"{what} …"))


def _prove(
    program: Program, migrations: Mapping[str, Migration], against: Path | None,
    script: str | None, args: str | None, steps: int | None, processes: int | None,
) -> Proof:  # fmt: skip
    from unipar.migrate import records
    from unipar.migrate.report import losses
    from unipar.migrate.verify import verify
    from unipar.migrate.writing import config_text

    name, main = _main_file(program, migrations, script, processes, recorded=against is not None)
    arguments = None if args is None else shlex.split(args)
    migrated = {path: one.code for path, one in migrations.items()}
    config = config_text(main)
    if against is not None:
        found = records.read(against)
        records.check(
            found, program.root, name, arguments=arguments, steps=steps, processes=processes
        )
        with _shown(f"running the migrated {name}"):
            proof = records.prove(found, program.root, migrated, config, launcher=main.launcher)
    else:
        with _shown(f"running {name}, as it is and migrated"):
            proof = verify(
                program.root,
                name,
                migrated,
                config,
                launcher=main.launcher,
                arguments=arguments or (),
                steps=STEPS if steps is None else steps,
                processes=processes,
                launched=main.launched,
            )
    print(losses(proof))
    return proof


def _write_report(
    path: Path, program: Program, migrations: Mapping[str, Migration], proof: Proof | None
) -> None:
    from unipar.migrate.report import markdown

    path.write_text(markdown(program.files, migrations, proof))
    print(f"wrote {path}")
