"""Starting the processes of a run, and finding those that something else has started."""

from unipar.launch.detection import detect
from unipar.launch.local import check, run
from unipar.utils.progress_marks import mark

__all__ = ["check", "detect", "mark", "run"]
