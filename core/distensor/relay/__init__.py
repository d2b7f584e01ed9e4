"""The relay: forwards encrypted bytes between two members of a job who cannot reach each other."""
