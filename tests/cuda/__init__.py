"""cuda -- tests the CUDA target under its emulation."""
