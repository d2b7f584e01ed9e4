"""Pure drawing: from the model to lines of text."""
