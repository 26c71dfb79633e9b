"""A benchmark's result as people read it: in a terminal, in a document, in a browser."""
