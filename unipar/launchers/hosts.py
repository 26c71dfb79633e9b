"""Machines that a launcher is given by name."""

from __future__ import annotations

from collections.abc import Sequence

from unipar import launch
from unipar.errors import ConfigError


def check_hosts(
    name: str, hosts: Sequence[str], devices: int, num_nodes: int, device_type: str
) -> None:
    """Refuse another number of machines than were named, or devices that this one has not.

    Args:
        name: of the launcher.
        hosts: the machines; none: this one alone.
        devices: processes on each node.
        num_nodes: number of machines.
        device_type: ``"cpu"``, ``"cuda"``, …

    Raises:
        ConfigError: with what to write.
    """
    count = len(hosts) or 1
    if num_nodes != count:
        raise ConfigError(
            f"num_nodes={num_nodes}, and launcher '{name}' has {count} "
            f"host{'s' if count > 1 else ''} ({', '.join(hosts) or 'this one'}). Name "
            f"as many: launcher={{'name': '{name}', 'hosts': [{num_nodes} names]}}."
        )
    if len(set(hosts)) < len(hosts):
        raise ConfigError(
            f"launcher '{name}' has hosts {', '.join(hosts)}: one of them twice. Name each once; "
            "devices says how many processes it gets."
        )
    if not hosts:
        launch.check(devices, 1, device_type)
