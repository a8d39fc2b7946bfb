"""fuzz -- runs fuzzers of readers."""
