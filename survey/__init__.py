"""What every framework's strategies do on this machine: the tables of the docs, by real runs."""
