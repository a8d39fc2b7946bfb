"""check -- proves a Plan without knowing any pass."""
