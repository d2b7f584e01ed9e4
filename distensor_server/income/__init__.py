"""What this node earned and used: its own account, compared with the hub's, and the energy of its work."""
