"""What measures the docs: every number and table of theirs comes from a program in here."""
