"""The supervisor of a node: devices, workers, the hub link and the local socket."""
