"""Commands of `distensor` that come with this wheel: `main(arguments) -> exit code`, found by their entry points."""
