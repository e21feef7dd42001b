"""Tasks that come with the library: their problems, prompt text and columns."""
