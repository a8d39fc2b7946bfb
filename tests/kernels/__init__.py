"""kernels -- tests kernels."""
