"""Files edited on purpose, for every reader of files."""
