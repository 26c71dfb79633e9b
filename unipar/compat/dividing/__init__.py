"""Models of scripts that know nothing of ranks: each rank computes a part of every batch."""
