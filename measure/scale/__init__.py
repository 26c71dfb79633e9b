"""What rank 0 of a large run does at its start and at a save, with the other ranks simulated."""
