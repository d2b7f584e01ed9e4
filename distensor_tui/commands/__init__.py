"""One module a command of this wheel: `options(parser)` and `run(options, path)`. The rows are in `table.py`."""
