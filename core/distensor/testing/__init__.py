"""Fakes that ship with the product: import them from their modules. Never imported by production code."""
