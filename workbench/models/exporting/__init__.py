"""Files that other programs load: a run's adapter or whole model, a module for each kind of file or program."""
