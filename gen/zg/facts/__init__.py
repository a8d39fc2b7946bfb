"""facts -- tables: ops, kernels' grids, optimizers, reserves."""
