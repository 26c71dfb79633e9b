"""Imports what starting workers and being one need, in a process that is to fork them."""

import unipar.launch.agent
import unipar.launch.entry  # noqa: F401
