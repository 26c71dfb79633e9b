"""What every strategy does on this machine: parity, memory, checkpoints, versions of torch."""
