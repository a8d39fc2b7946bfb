"""read -- tests readers of specs and configs."""
