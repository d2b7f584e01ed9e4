"""`distensor doctor`: what about this machine's set-up works, what does not, and how to repair it."""
