"""plan -- tests graph, passes and plans."""
