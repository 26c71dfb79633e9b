"""What a single GPU can prove: tests, and speed beside loops written by hand."""
