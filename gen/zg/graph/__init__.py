"""graph -- a Spec's units as calls of kernels."""
