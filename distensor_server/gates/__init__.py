"""The gates between this machine and work: what is read, what the owner set, and what follows."""
