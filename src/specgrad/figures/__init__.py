"""One module per figure, each with its claim, runs, check and drawing; found by scanning this folder."""
