"""What the face of PyTorch has in the place of PyTorch's own functions and classes."""
