"""read -- files to a Spec; every error of a user."""
