"""The supervisor as a service of the machine: systemd's units, launchd's agent, and what was installed."""
