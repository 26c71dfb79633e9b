"""Numbers as people read them."""

from __future__ import annotations


def count(value: float) -> str:
    """``950``, ``12.3k``, ``1.2M``: about three figures."""
    if abs(value) < 10:
        return f"{value:.3g}"
    for limit, divisor, suffix in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if abs(value) < 0.9995 * limit:
            return f"{value / divisor:.{1 if suffix else 0}f}{suffix}"
    return f"{value / 1e9:.1f}G"


def memory(num_bytes: float) -> str:
    """Bytes in binary units: ``512 MiB``, ``1.2 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB" if num_bytes < 1000 else f"{num_bytes / 1024:.1f} TiB"


def duration(seconds: float) -> str:
    """``0:07``, ``12:30``, ``1:02:03``, ``3d 04:05:06``."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}:{minutes:02}:{secs:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"
