"""reference -- references from PyTorch and transformers."""
