"""The HTTP API of a hub. It runs in the hub's own process and asks the same authorization table as gRPC does."""
