"""The ports of workers, and asking the home's router to let others in by them."""
