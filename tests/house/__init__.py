"""house -- tests sources, docs, builds and run."""
