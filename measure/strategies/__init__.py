"""Every strategy on this machine: parity, memory, checkpoints, versions of torch."""
