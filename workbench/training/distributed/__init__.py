"""Several processes that train one model, each on a device of its own."""
