"""The systems that start a run's processes, on this machine or elsewhere: one field names one."""

from unipar.launchers.base import Launcher, LauncherOptions, SubmittingLauncher
from unipar.launchers.handle import Handle, Status
from unipar.launchers.registry import resolve
from unipar.launchers.task import Task

__all__ = [
    "Handle",
    "Launcher",
    "LauncherOptions",
    "Status",
    "SubmittingLauncher",
    "Task",
    "resolve",
]
