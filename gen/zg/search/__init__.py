"""search -- finds a plan that fits."""
