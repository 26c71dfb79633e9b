"""moto's server in a process of its own: prints its address, and ends with its standard input."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from moto.server import ThreadedMotoServer  # pyright: ignore[reportMissingImports]

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(*server.get_host_and_port(), flush=True)
    sys.stdin.read()
    server.stop()
