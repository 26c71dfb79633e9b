"""The face of the package ``lightning``, of which that of Fabric is a part."""

from __future__ import annotations

from unipar.compat import fabric
from unipar.compat.fabric import Fabric, __version__, seed_everything
from unipar.compat.fabric_names import LIGHTNING

__all__ = ["Fabric", "__version__", "fabric", "seed_everything"]

__getattr__ = LIGHTNING.refusing(__name__)
