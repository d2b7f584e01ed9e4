"""What this machine can offer. Nothing is imported here: the probe child starts through this package."""
