"""Who uses this machine, its power, its network, its disk: what the gates need and no device tells."""
