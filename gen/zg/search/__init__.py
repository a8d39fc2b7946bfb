"""search -- which plan fits."""
