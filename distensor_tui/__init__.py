"""The dashboard and the command line of providers. Knows the supervisor only by its local socket."""
