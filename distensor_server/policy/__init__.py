"""What the owner may set: one table of keys, and the values that were set. Pure; imports nothing of the supervisor."""
