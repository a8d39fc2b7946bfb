"""passes -- from a graph to the parts of a Plan."""
