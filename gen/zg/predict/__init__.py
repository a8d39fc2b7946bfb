"""predict -- a plan's cost: bytes and flops from the plan alone, time on a device."""
