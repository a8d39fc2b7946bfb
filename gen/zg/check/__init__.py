"""check -- proves a Plan; knows no pass."""
